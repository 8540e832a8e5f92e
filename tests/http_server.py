"""An HTTP server on loopback that serves a folder, and misbehaves on demand."""

import contextlib
import hashlib
import io
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FaultyServer:
    """Serves a folder with ranges, If-Range and strong ETags.

    `faults` is a list of functions fault(handler, body) -> whether it answered; each GET of a file
    whose name ends with `only` takes the first one away. `requests` lists (name, Range, If-Range).
    """

    def __init__(self, folder, *, with_etag=True, with_ranges=True, only=".arrow", tls=None):
        self.folder = folder
        self.with_etag = with_etag
        self.with_ranges = with_ranges
        self.only = only
        self.salt = ""  # part of each ETag: another one says that the files have changed
        self.faults = []
        self.requests = []
        self.released = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        if tls is not None:  # hands shake in the thread of a connection, which may fail alone
            self._server.socket = tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def etag(self, data):
        return f'"{self.salt}{hashlib.sha1(data).hexdigest()}"'

    def names(self, suffix=".arrow"):
        return [name for name, _, _ in self.requests if name.endswith(suffix)]


def status(code):
    """Answer with an error."""

    def fault(handler, _data, _start):
        handler.send_error(code)
        return True

    return fault


def answer(code, headers, body=b""):
    """Answer with anything."""

    def fault(handler, _data, _start):
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = True
        return True

    return fault


def endless_redirect(url, sent):
    """Send to another URL, in an answer that never ends; the bytes of it are added to sent[0]."""

    def fault(handler, _data, _start):
        handler.send_response(302)
        handler.send_header("Location", url)
        handler.end_headers()
        handler.close_connection = True
        while True:
            sent[0] += handler.wfile.write(bytes(1 << 16))

    return fault


def truncate(num_bytes):
    """Promise everything, send so many bytes, and close the connection."""

    def fault(handler, data, start):
        handler.head(data, start)
        handler.wfile.write(data[start : start + num_bytes])
        handler.close_connection = True
        return True

    return fault


def stall(num_bytes, seconds=30.0):
    """Send so many bytes, then nothing."""

    def fault(handler, data, start):
        handler.head(data, start)
        handler.wfile.write(data[start : start + num_bytes])
        handler.wfile.flush()
        handler.server.owner.released.wait(seconds)
        handler.close_connection = True
        return True

    return fault


def reset(num_bytes):
    """Send so many bytes, then reset the connection."""

    def fault(handler, data, start):
        handler.head(data, start)
        handler.wfile.write(data[start : start + num_bytes])
        handler.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        handler.connection.close()
        return True

    return fault


def slow(num_bytes, pause_s):
    """Send everything, so many bytes at a time."""

    def fault(handler, data, start):
        handler.head(data, start)
        for at in range(start, len(data), num_bytes):
            handler.wfile.write(data[at : at + num_bytes])
            handler.wfile.flush()
            time.sleep(pause_s)
        return True

    return fault


def drip(num_bytes, pause_s, *, head_s=0.0, most=None):
    """Send the headers by bytes, `head_s` after each, then `num_bytes` each `pause_s` seconds.

    With `most` the connection ends after so many bytes of the file.
    """

    def fault(handler, data, start):
        wait = handler.server.owner.released.wait
        sent = handler.wfile
        handler.wfile = io.BytesIO()
        handler.head(data, start)
        head, handler.wfile = handler.wfile.getvalue(), sent
        handler.close_connection = True
        pieces = [head] if not head_s else [head[at : at + 1] for at in range(len(head))]
        for piece in pieces:
            sent.write(piece)
            if wait(head_s):
                return True
        end = len(data) if most is None else min(start + most, len(data))
        for at in range(start, end, num_bytes):
            sent.write(data[at : min(at + num_bytes, end)])
            if wait(pause_s):
                return True
        return True

    return fault


def redirect(url):
    """Send to another URL; "": to the same."""

    def fault(handler, _data, _start):
        handler.send_response(302)
        handler.send_header("Location", url or handler.path)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return fault


def flip(place):
    """Send everything, one bit of it wrong."""

    def fault(handler, data, start):
        wrong = bytearray(data)
        wrong[place] ^= 1
        handler.head(data, start)
        handler.wfile.write(wrong[start:])
        return True

    return fault


def change_etag(salt):
    """From now on all files are others, by their ETags; then answer as asked."""

    def fault(handler, _data, _start):
        handler.server.owner.salt = salt
        return False

    return fault


def _handler(owner):
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def setup(self):
            super().setup()
            self.server.owner = owner

        def head(self, data, start):
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(data) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            if owner.with_etag:
                self.send_header("ETag", owner.etag(data))
            self.end_headers()

        def do_GET(self):
            name = unquote(urlsplit(self.path).path).rpartition("/")[2]
            wanted, condition = self.headers.get("Range"), self.headers.get("If-Range")
            owner.requests.append((name, wanted, condition))
            try:
                data = (owner.folder / name).read_bytes()
            except OSError:
                self.send_error(404)
                return
            fault = owner.faults.pop(0) if owner.faults and name.endswith(owner.only) else None
            match = re.fullmatch(r"bytes=(\d+)-", wanted or "")
            start = int(match[1]) if match and owner.with_ranges else 0
            with contextlib.suppress(ConnectionError):
                if fault is not None and fault(self, data, start):
                    return
                if condition is not None and condition != owner.etag(data):
                    start = 0
                if start >= len(data):
                    self.send_error(416)
                    return
                self.head(data, start)
                self.wfile.write(data[start:])

    return Handler
