"""An S3 server on loopback: moto's, in a process of its own, as a real one is."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

KEYS = {"key": "testing", "secret": "testing"}

_CODE = """
import sys
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


_UPLOAD = """
import json, sys, s3fs
from pathlib import Path
folder, bucket, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
system = s3fs.S3FileSystem(**options)
if not system.exists(bucket):
    system.mkdir(bucket)
for path in folder.iterdir():
    system.put_file(str(path), f"{bucket}/{folder.name}/{path.name}")
"""


def upload(folder, bucket, options):
    """Copy a folder of files into a bucket; returns its URL."""
    # in another process: this one must have no thread of s3fs before it forks
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _UPLOAD, str(folder), bucket, json.dumps(options)],
        check=True,
        capture_output=True,
    )
    return f"s3://{bucket}/{Path(folder).name}"
