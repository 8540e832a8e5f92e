"""Files from s3://, streamed: through s3fs, which knows keys, regions and the like.

fsspec's own way to read a part of a file waits until all of it is there, however slowly it comes,
and keeps what came, however much. Here each step has the time limit, and a piece of memory.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from omniload.cache.config import Storage
from omniload.cache.filesystem import make_file_system, translated
from omniload.cache.transport import Interrupted, Reply

__all__ = ["S3Transport"]

_CHUNK = 1 << 20
#: a client is made of some thousand lines of JSON, and may have to find its key
_LONGEST_START_S = 60.0
#: what the server says when the file is another one now, or shorter than what is here
_CHANGED = {"PreconditionFailed", "412", "InvalidRange", "416"}


class S3Transport:
    """Reads s3; see `Transport`.

    The file system is made on first use, and never shared with another process: it has a thread,
    which a fork would leave behind.

    Args:
        storage: for its time limit and options.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._made: Any = None

    @contextmanager
    def open(self, url: str, *, start: int, version: str) -> Iterator[Reply]:
        """Ask for a file from a byte on; see `Transport`."""
        with translated(url):
            try:
                response = self._ask(url, start, version)
            except OSError as error:
                if not start or _code(error) not in _CHANGED:
                    raise
                response = self._ask(url, 0, "")
        body = response["Body"]
        try:
            yield self._reply(url, response)
        finally:
            self._system().loop.call_soon_threadsafe(body.close)

    def _ask(self, url: str, start: int, version: str) -> Any:
        system = self._system()
        bucket, key, _ = system.split_path(url)
        wanted: dict[str, str] = {}
        if start:
            wanted = {"Range": f"bytes={start}-"}
            if version:
                wanted["IfMatch"] = version
        # the call behind all methods of s3fs, which also finds the region of the bucket
        return self._wait(system._call_s3("get_object", Bucket=bucket, Key=key, **wanted))

    def _reply(self, url: str, response: Any) -> Reply:
        start, size = 0, response.get("ContentLength")
        if given := response.get("ContentRange"):
            match = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18})", given)
            if match is None:
                raise Interrupted("the server sent a part without its place")
            start, size = int(match[1]), int(match[2])
        return Reply(
            start=start,
            size=size,
            version=str(response.get("ETag", "")),
            chunks=self._chunks(url, response["Body"]),
        )

    def _chunks(self, url: str, body: Any) -> Iterator[bytes]:
        while True:
            with translated(url):
                chunk: bytes = self._wait(body.read(_CHUNK))
            if not chunk:
                return
            yield chunk

    def _wait(self, step: Coroutine[Any, Any, Any]) -> Any:
        return _wait(self._system(), step, self._storage.timeout_s)

    def _system(self) -> Any:
        with self._lock:
            if self._made is None:
                storage = self._storage
                # botocore's own limits; what is given in the options goes first
                limits = {"connect_timeout": storage.timeout_s, "read_timeout": storage.timeout_s}
                made = make_file_system("s3", storage, limits=limits)
                made.retries = 1  # it is tried again by whoever asks, and botocore does too
                _wait(made, made.set_session(), max(storage.timeout_s, _LONGEST_START_S))
                self._made = made
            return self._made


def _wait(system: Any, step: Coroutine[Any, Any, Any], limit_s: float) -> Any:
    """Run a step in the thread of the file system, no longer than so many seconds."""
    running = asyncio.run_coroutine_threadsafe(step, system.loop)
    try:
        return running.result(limit_s)
    except BaseException:  # Ctrl-C too: nothing may go on behind our back
        running.cancel()
        raise


def _code(error: BaseException) -> str:
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
