"""URLs: which are read, how a file below one is named, and what of them may be shown."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, urlsplit, urlunsplit

from omniload.errors import ConfigError

__all__ = [
    "PROTOCOLS",
    "check_path",
    "check_url",
    "is_url",
    "join_url",
    "protocol_of",
    "shown_text",
    "shown_url",
]

#: protocols that are read; http and https by ourselves, all others through fsspec
PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "hf", "file")


def is_url(text: str) -> bool:
    """Say whether this names something elsewhere, rather than a local path."""
    return "://" in text or text.startswith("pipe:")


def protocol_of(url: str) -> str:
    """Return the protocol of a URL, in small letters."""
    return url.partition(":")[0].lower()


def check_path(text: str) -> None:
    """Check that a path is not a URL that has lost a slash, as pathlib.Path makes of one.

    Raises:
        ConfigError: it begins as a URL does, and is not there.
    """
    protocol, mark, rest = text.partition(":/")
    if mark and protocol.lower() in PROTOCOLS and not os.path.lexists(text):
        raise ConfigError(
            f"a URL must have two slashes behind the protocol, got {shown_url(text)[:80]!r}. Give "
            f"'{protocol}://{rest[:80]}', as a str: a pathlib.Path makes one slash of two."
        )


def check_url(url: str) -> None:
    """Check that a URL is one that is read.

    Raises:
        ConfigError: another protocol, or none at all.
    """
    protocol = protocol_of(url)
    if protocol == "pipe":
        raise ConfigError(
            f"pipe: runs a program, which omniload doesn't do: got {url[:80]!r}. Copy the data to "
            "a folder or a bucket, or mount it."
        )
    if protocol not in PROTOCOLS:
        raise ConfigError(
            f"the protocol of a URL must be one of {', '.join(PROTOCOLS)}, got "
            f"{shown_url(url)[:80]!r}."
        )
    try:
        host = urlsplit(url).netloc
        if protocol in ("http", "https"):
            _ = urlsplit(url).port
    except ValueError as error:
        raise ConfigError(f"a URL must be one, got {shown_url(url)[:80]!r}: {error}.") from None
    if protocol != "file" and not host:
        raise ConfigError(f"a URL must name a host or bucket, got {shown_url(url)[:80]!r}.")
    if protocol in ("http", "https") and "@" in host:
        raise ConfigError(
            f"a name and a password must not be in the URL ({shown_url(url)[:80]}). Give them as "
            "Storage(options={'headers': {'Authorization': ...}})."
        )


def join_url(url: str, name: str) -> str:
    """Name a file in a folder at a URL; a query stays at the end."""
    if protocol_of(url) not in ("http", "https"):
        return f"{url.rstrip('/')}/{name}"
    parts = urlsplit(url)
    # of the folder, what is no part of a URL is written as one: spaces, letters beyond ASCII
    folder = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
    path = f"{folder}/{quote(name)}"
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))


def shown_text(text: object) -> str:
    """Return what another machine said for messages: one line, of what can be printed, not long."""
    line = " ".join(str(text).split())
    return "".join(sign if sign.isprintable() else "?" for sign in line[:300])


def shown_url(url: str) -> str:
    """Return a URL for messages: without password, and without a query, which may be a key."""
    head, mark, _ = url.partition("?")
    return re.sub(r"://[^/@]*@", "://", head) + ("?..." if mark else "")
