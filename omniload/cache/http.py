"""Files from http(s)://, with the standard library.

fsspec's own HTTP hides the status and takes no condition, and needs a thread; here a range is asked
for on the condition that the file is still the same (RFC 9110, If-Range).
"""

from __future__ import annotations

import http.client
import io
import re
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from omniload.cache.config import Storage
from omniload.cache.transport import Interrupted, MissingFileError, Reply
from omniload.cache.url import shown_text, shown_url
from omniload.errors import ConfigError, ShardError

__all__ = ["HttpTransport"]

_CHUNK = 1 << 20
#: they may pass: too many requests, too slow, or a server that is ill
_MAY_PASS = {408, 425, 429}
_MISSING = {401, 403, 404, 410}
_FAILURES = (urllib.error.URLError, http.client.HTTPException, OSError)
_COUNT = r"[0-9]{1,18}"


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
        for name, value in self._headers.items():
            if not re.fullmatch(r"[!-9;-~]+", name) or not re.fullmatch(
                r"[\t -~\xa0-\xff]*", value
            ):
                raise ConfigError(
                    f"a header must be a name and one line of Latin-1 text, which that of "
                    f"{shown_text(name)!r} in Storage.options is not."
                )
        self._timeout_s = storage.timeout_s
        # neither files nor ftp, to which a server could else send us
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler,
            _Http,
            _Https,
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
            # each response, that of a redirect too, has so long to send all its headers
            response = self._opener.open(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with closing(error):
                if start and error.code == 416:  # shorter than what is here: another file
                    response = None
                else:
                    raise _refusal(url, error) from None
        except http.client.InvalidURL as error:
            raise _no_url(url, error) from None
        except _FAILURES as error:
            raise _lost(url, error) from None
        except ValueError as error:  # of a redirect: a host or port that is none
            raise _no_url(url, error) from None
        if response is None:
            with self.open(url, start=0, version="") as reply:
                yield reply
            return
        with closing(response):
            yield _reply(url, response)


def _reply(url: str, response: Any) -> Reply:
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ShardError(
            f"{shown_url(url)} is sent with Content-Encoding {shown_text(coding)!r}, although it "
            "was asked for as it is. Switch compression off at the server for these files."
        )
    length = response.headers.get("Content-Length", "").strip()
    start, size = 0, int(length) if re.fullmatch(_COUNT, length) else None
    if response.status == 206:
        given = response.headers.get("Content-Range", "")
        match = re.fullmatch(rf"bytes ({_COUNT})-{_COUNT}/({_COUNT}|\*)", given.strip())
        if match is None:
            raise Interrupted(f"the server sent a part with Content-Range {shown_text(given)!r}")
        start = int(match[1])
        size = None if match[2] == "*" else int(match[2])
    version = response.headers.get("ETag", "")
    if not version or version.startswith("W/"):  # a weak one can't be a condition
        version = response.headers.get("Last-Modified", "")
    return Reply(start=start, size=size, version=version, chunks=_chunks(response))


def _chunks(response: Any) -> Iterator[bytes]:
    while True:
        try:
            response.renew()
            chunk = response.read1(_CHUNK)
        except _FAILURES as error:
            raise Interrupted(_reason(error)) from None
        if not chunk:
            return
        yield chunk


def _refusal(url: str, error: urllib.error.HTTPError) -> Exception:
    code = error.code
    said = f"{code} {shown_text(error.reason).rstrip('.')}"
    if code >= 500 or code in _MAY_PASS:
        after = str(error.headers.get("Retry-After", "")).strip()
        wait_s = float(after) if re.fullmatch(r"[0-9]{1,9}", after) else 0.0
        return Interrupted(f"the server answered {said}", wait_s=wait_s)
    remedy = {
        401: "Give a key in Storage(options={'headers': {...}}).",
        403: "Give a key in Storage(options={'headers': {...}}), or ask for access.",
        404: "Check the URL; are the files complete there?",
        410: "Check the URL.",
    }.get(code, "Check the URL and Storage(options=...).")
    said = f"{shown_url(url)} can't be had: {said}. {remedy}"
    return MissingFileError(said, url=url) if code in _MISSING else ShardError(said)


def _no_url(url: str, error: Exception) -> ShardError:
    return ShardError(
        f"{shown_url(url)} can't be had: it, or where the server sends us, is no URL: "
        f"{shown_text(error)}. Check the URL."
    )


def _lost(url: str, error: Exception) -> Exception:
    inner = getattr(error, "reason", error)
    if isinstance(inner, ssl.SSLCertVerificationError):
        return ShardError(
            f"{shown_url(url)} can't be had: its server is not trusted: "
            f"{shown_text(inner.verify_message)}. Check the URL; for a certificate of your own set "
            "SSL_CERT_FILE."
        )
    return Interrupted(_reason(error))


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    if isinstance(error, TimeoutError) or isinstance(inner, TimeoutError):
        return str(error) if isinstance(error, _TooSlowError) else "no byte came in time"
    return f"{type(error).__name__}: {shown_text(inner or error)}"


class _TooSlowError(TimeoutError):
    """Bytes came, but not what was to be had by then."""


class _Deadline(io.RawIOBase):
    """What a socket receives, up to a point in time.

    The time limit of a socket begins anew with each byte: headers could drip in for days.
    """

    def __init__(self, raw: Any, sock: socket.socket) -> None:
        self._raw = raw  # keeps the socket open after the connection lets go of it
        self._sock = sock
        self._limit_s = sock.gettimeout()
        self.renew()

    def renew(self) -> None:
        """Begin the time again."""
        self._begin_s = time.monotonic()
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        if self._limit_s is not None:
            left_s = self._begin_s + self._limit_s - time.monotonic()
            try:
                if left_s <= 0:
                    raise TimeoutError
                self._sock.settimeout(left_s)
                count = self._raw.readinto(buffer)
            except TimeoutError:
                if not self._num_bytes:
                    raise
                raise _TooSlowError(
                    f"only {self._num_bytes} bytes, of headers or the like, came in "
                    f"{self._limit_s:g} s"
                ) from None
        else:
            count = self._raw.readinto(buffer)
        self._num_bytes += count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response whose headers, and each of whose pieces, come within the time limit."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self._deadline = _Deadline(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._deadline)

    def renew(self) -> None:
        """Begin the time again, for the next piece."""
        self._deadline.renew()


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_SecureConnection, req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; a key is not handed to another host, nor from https to http."""

    def http_error_302(self, req: Any, fp: Any, code: int, msg: str, headers: Any) -> Any:
        with closing(fp):  # what else it sends is not read: it could be endless
            return super().http_error_302(req, io.BytesIO(), code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            kept = {"range", "if-range", "user-agent", "accept-encoding"}
            for name in [name for name in request.headers if name.lower() not in kept]:
                request.remove_header(name)
        return request
