"""An S3 server on loopback: moto's, in a process of its own, as a real one is."""

import contextlib
import socket
import subprocess
import sys
import threading
import urllib.request

KEYS = {"key": "testing", "secret": "testing"}

_CODE = """
import sys
import threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the parent goes
"""


@contextlib.contextmanager
def s3_server():
    """Yields the storage options of fsspec for it."""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        port = int(child.stdout.readline())
        yield {**KEYS, "endpoint_url": f"http://127.0.0.1:{port}"}
    finally:
        child.stdin.close()
        child.kill()
        child.wait()
        child.stdout.close()


def put(url, data, options):
    """Write one object, or make a bucket."""
    where = options["endpoint_url"] + "/" + url.removeprefix("s3://")
    headers = {
        "Authorization": "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request",
        "Content-Type": "application/octet-stream",
    }
    asked = urllib.request.Request(where, data=data, headers=headers, method="PUT")
    urllib.request.urlopen(asked).close()


def upload(folder, bucket, options):
    """Copy a folder of files into a bucket; returns its URL."""
    # without s3fs: this process must have no thread of it before it forks
    put(f"s3://{bucket}", b"", options)
    for path in folder.iterdir():
        put(f"s3://{bucket}/{folder.name}/{path.name}", path.read_bytes(), options)
    return f"s3://{bucket}/{folder.name}"


class Between:
    """Passes requests on to a server, and does something else with the answers on demand.

    Use it as a context manager. `faults` is a list of functions fault(client, head, body), with the
    socket of the client and the answer; each GET of a file whose name ends with `only` takes the
    first one away. `requests` lists what was asked.

    Args:
        options: of the server, as from `s3_server`.
    """

    def __init__(self, options, *, only=".arrow"):
        self.faults = []
        self.requests = []
        self.released = threading.Event()
        self._only = only
        self._port = int(options["endpoint_url"].rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        self.options = {**options, "endpoint_url": f"http://127.0.0.1:{port}"}

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.released.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client):
        with contextlib.suppress(OSError), client:
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += client.recv(1 << 16) or b"\r\n\r\n"
            line = asked.partition(b"\r\n")[0].decode()
            self.requests.append(asked.decode())
            with socket.create_connection(("127.0.0.1", self._port)) as server:
                server.sendall(asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
                answer = b""
                while data := server.recv(1 << 16):
                    answer += data
            head, mark, body = answer.partition(b"\r\n\r\n")
            is_meant = line.startswith("GET") and line.split()[1].endswith(self._only)
            fault = self.faults.pop(0) if self.faults and is_meant else _send
            fault(client, head + mark, body)


def _send(client, head, body):
    client.sendall(head + body)


def drip_bytes(between, *, of_head=False):
    """Send the headers, or all but them, a byte at a time."""

    def fault(client, head, body):
        if not of_head:
            client.sendall(head)
        for byte in head + body if of_head else body:
            client.sendall(bytes([byte]))
            if between.released.wait(0.05):
                return

    return fault


def refuse(status, code):
    """Answer with an error of S3."""

    def fault(client, _head, _body):
        text = f"<Error><Code>{code}</Code><Message>because</Message></Error>".encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        client.sendall(head.encode() + text)

    return fault


def endless(client, _head, _body):
    """Send zeros without end."""
    client.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while True:
        client.sendall(bytes(1 << 20))
