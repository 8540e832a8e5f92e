"""Members of a plain tar file by their headers, without being stopped by damage.

Python's tarfile takes a damaged header as the end of the archive, so all that follows is lost
without a word. Here the walk goes on at the next block that is a valid header, and says so.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

__all__ = ["Damage", "Member", "members"]

_BLOCK = 512
_MAX_META = 1 << 20
_ZERO = bytes(_BLOCK)
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


@dataclass(frozen=True, kw_only=True)
class Member:
    """A regular file in the archive, or a link in its place.

    Args:
        name: path inside the archive.
        header: byte where its first header begins.
        start: byte where its content begins.
        num_bytes: size of its content; 0 for a link.
        is_link: whether it is a symbolic or hard link, which is never followed.
    """

    name: str
    header: int
    start: int
    num_bytes: int
    is_link: bool = False


@dataclass(frozen=True, kw_only=True)
class Damage:
    """A part of the archive that can't be read.

    Args:
        start: byte where it begins.
        stop: byte where the walk goes on.
        reason: what is wrong.
    """

    start: int
    stop: int
    reason: str


def members(stream: BinaryIO, start: int, stop: int) -> Iterator[Member | Damage]:
    """Walk the headers between two bytes.

    Args:
        stream: the archive, seekable.
        start: where a header begins.
        stop: where to end: size of the archive, or where another header begins.

    Yields:
        Regular files and links in archive order, and what is damaged between them.
    """
    position = start
    first = start  # of the headers that belong to the next member
    longer: dict[str, str] = {}  # name and size from headers that come before
    while position + _BLOCK <= stop:
        stream.seek(position)
        block = stream.read(_BLOCK)
        if block == _ZERO:  # the end, or the seam of two archives in one file
            position += _BLOCK
            first, longer = position, {}
            continue
        header = _parse(block)
        if header is None:
            resumed = _resync(stream, position + _BLOCK, stop)
            yield Damage(start=position, stop=resumed, reason="damaged header")
            position = first = resumed
            longer = {}
            continue
        content = position + _BLOCK
        num_bytes = _size(header, longer)
        position = content + -(-num_bytes // _BLOCK) * _BLOCK
        if content + num_bytes > stop:
            yield Damage(start=first, stop=stop, reason="cut short")
            return
        if header.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
            if num_bytes <= _MAX_META:
                stream.seek(content)
                longer |= _meta(header.type, stream.read(num_bytes))
            continue
        is_link = header.type in (tarfile.SYMTYPE, tarfile.LNKTYPE)
        if is_link or header.type in _REGULAR:
            yield Member(
                name=longer.get("path", header.name),
                header=first,
                start=content,
                num_bytes=num_bytes,
                is_link=is_link,
            )
        first, longer = position, {}
    if position < stop:
        yield Damage(start=position, stop=stop, reason="cut short")


def _parse(block: bytes) -> tarfile.TarInfo | None:
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return header if header.size >= 0 else None


def _resync(stream: BinaryIO, position: int, stop: int) -> int:
    """Find the next block that is a header with magic and checksum."""
    while position + _BLOCK <= stop:
        stream.seek(position)
        block = stream.read(_BLOCK)
        if block[257:262] == b"ustar" and _parse(block) is not None:
            return position
        position += _BLOCK
    return stop


def _size(header: tarfile.TarInfo, longer: dict[str, str]) -> int:
    if header.type in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
        return 0
    text = longer.get("size", "")
    if header.type in _REGULAR and text.isascii() and text.isdigit():
        return int(text)
    return header.size


def _meta(kind: bytes, data: bytes) -> dict[str, str]:
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    found = {}
    while data:  # records "<length> <name>=<value>\n"
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            break
        record, data = data[: int(length)], data[int(length) :]
        name, _, value = record[len(length) + 1 :].rstrip(b"\n").partition(b"=")
        if name in (b"path", b"size"):
            found[name.decode()] = value.decode("utf-8", "surrogateescape")
    return found
