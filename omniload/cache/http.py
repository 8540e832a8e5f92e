"""Files from http(s)://, with the standard library.

fsspec's own HTTP hides the status and takes no condition, and needs a thread; here a range is asked
for on the condition that the file is still the same (RFC 9110, If-Range).
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from omniload.cache.config import Storage
from omniload.cache.transport import Interrupted, MissingFileError, Reply
from omniload.cache.url import shown_url
from omniload.errors import ConfigError, ShardError

__all__ = ["HttpTransport"]

_CHUNK = 1 << 20
#: they may pass: too many requests, too slow, or a server that is ill
_MAY_PASS = {408, 425, 429}
_MISSING = {401, 403, 404, 410}
_FAILURES = (urllib.error.URLError, http.client.HTTPException, OSError)


class HttpTransport:
    """Reads http(s); see `Transport`.

    Args:
        storage: for its time limit and headers.
    """

    def __init__(self, storage: Storage) -> None:
        unknown = set(storage.options) - {"headers"}
        headers = storage.options.get("headers", {})
        if unknown or not isinstance(headers, Mapping):
            raise ConfigError(
                "Storage.options of http(s) must be {'headers': {name: value}}, got the names "
                f"{sorted(map(str, storage.options))}."
            )
        self._headers = {str(name): str(value) for name, value in headers.items()}
        self._timeout_s = storage.timeout_s
        # neither files nor ftp, to which a server could else send us
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler,
            urllib.request.HTTPHandler,
            urllib.request.HTTPSHandler,
            urllib.request.HTTPDefaultErrorHandler,
            urllib.request.HTTPErrorProcessor,
            _Redirects,
        ):
            self._opener.add_handler(handler())

    @contextmanager
    def open(self, url: str, *, start: int, version: str) -> Iterator[Reply]:
        """Ask for a file from a byte on; see `Transport`."""
        headers = {"User-Agent": "omniload", "Accept-Encoding": "identity", **self._headers}
        if start:
            headers["Range"] = f"bytes={start}-"
            if version:
                headers["If-Range"] = version
        request = urllib.request.Request(url, headers=headers)
        try:
            response = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with closing(error):
                if start and error.code == 416:  # shorter than what is here: another file
                    response = None
                else:
                    raise _refusal(url, error) from None
        except _FAILURES as error:
            raise Interrupted(_reason(error)) from None
        if response is None:
            with self.open(url, start=0, version="") as reply:
                yield reply
            return
        with closing(response):
            yield _reply(response)


def _reply(response: Any) -> Reply:
    length = response.headers.get("Content-Length", "")
    start, size = 0, int(length) if length.isdecimal() else None
    if response.status == 206:
        given = response.headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", given.strip())
        if match is None:
            raise Interrupted(f"the server sent a part with Content-Range {given!r}")
        start = int(match[1])
        size = None if match[2] == "*" else int(match[2])
    version = response.headers.get("ETag", "")
    if not version or version.startswith("W/"):  # a weak one can't be a condition
        version = response.headers.get("Last-Modified", "")
    return Reply(start=start, size=size, version=version, chunks=_chunks(response))


def _chunks(response: Any) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read1(_CHUNK)
        except _FAILURES as error:
            raise Interrupted(_reason(error)) from None
        if not chunk:
            return
        yield chunk


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    code = error.code
    if code >= 500 or code in _MAY_PASS:
        return Interrupted(f"the server answered {code} {error.reason}")
    remedy = {
        401: "Give a key in Storage(options={'headers': {...}}).",
        403: "Give a key in Storage(options={'headers': {...}}), or ask for access.",
        404: "Check the URL; are the files complete there?",
        410: "Check the URL.",
    }.get(code, "Check the URL and Storage(options=...).")
    said = f"{shown_url(url)} can't be had: {code} {error.reason}. {remedy}"
    return MissingFileError(said, url=url) if code in _MISSING else ShardError(said)


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    if isinstance(error, TimeoutError) or isinstance(inner, TimeoutError):
        return "no byte came in time"
    return f"{type(error).__name__}: {inner or error}"


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; a key for one host is not handed to another."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl).netloc != urlsplit(req.full_url).netloc:
            kept = {"range", "if-range", "user-agent", "accept-encoding"}
            for name in [name for name in request.headers if name.lower() not in kept]:
                request.remove_header(name)
        return request
