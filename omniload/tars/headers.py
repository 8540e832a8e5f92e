"""One block of a tar: the header of a member, read quickly and with its checksum."""

from __future__ import annotations

import tarfile
import zlib
from typing import NamedTuple

__all__ = ["BLOCK", "CONTENTLESS", "REGULAR", "ZEROS", "Header", "parse_header", "read_meta"]

BLOCK = 512
ZEROS = bytes(BLOCK)
REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
#: Types without content, whatever size their header states.
CONTENTLESS = (
    tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE,
    tarfile.FIFOTYPE,
)  # fmt: skip

_ADLER = 65521  # the lower half of adler32 is 1 + the sum of the bytes, modulo this
_MOST_SUM = 255 * BLOCK


class Header(NamedTuple):
    """What a header block says.

    Args:
        name: path inside the archive.
        size: bytes of content.
        type: one byte, as `tarfile` names them.
    """

    name: str
    size: int
    type: bytes


def parse_header(block: bytes) -> Header | None:
    """Read a header block; None if it is not one, or its checksum is not right.

    Args:
        block: 512 bytes.
    """
    size, stated = _octal(block[124:136]), _octal(block[148:156])
    if size is None or stated is None or stated > _MOST_SUM:
        return _parse_slowly(block)
    # in the sum, the bytes of the checksum itself count as spaces
    total = stated + sum(block[148:156]) - 8 * 32
    if (1 + total) % _ADLER != zlib.adler32(block) & 0xFFFF:
        return _parse_slowly(block)  # old writers took bytes as signed
    name = block[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
    kind = block[156:157]
    # in the GNU format, other fields stand where this one has the front part of the name
    if block[345] and block[257:263] == b"ustar\0":
        prefix = block[345:500].partition(b"\0")[0].decode("utf-8", "surrogateescape")
        name = f"{prefix}/{name}"
    if kind == tarfile.AREGTYPE and name.endswith("/"):
        kind = tarfile.DIRTYPE
    return Header(name, size, kind)


def read_meta(kind: bytes, data: bytes) -> dict[str, str]:
    """Read what stands in front of a header because it does not fit into it.

    Args:
        kind: type of its own header: a long name of GNU tar, or PAX records.
        data: its content.

    Returns:
        "path" and "size" as they are to be used; "sparse" where the file has holes.
    """
    if kind == tarfile.GNUTYPE_LONGNAME:
        return {"path": data.partition(b"\0")[0].decode("utf-8", "surrogateescape")}
    found = {}
    while data:  # records "<length> <name>=<value>\n"
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or len(length) > 8 or not 0 < int(length) <= len(data):
            break
        record, data = data[: int(length)], data[int(length) :]
        name, _, value = record[len(length) + 1 :].rstrip(b"\n").partition(b"=")
        if name in (b"path", b"size"):
            found[name.decode()] = value.decode("utf-8", "surrogateescape")
        elif name.startswith(b"GNU.sparse."):
            found["sparse"] = "1"
    return found


def _octal(field: bytes) -> int | None:
    digits = field.partition(b"\0")[0].strip()
    if not digits:
        return 0
    # int() alone would take signs and underscores too
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def _parse_slowly(block: bytes) -> Header | None:
    """Let tarfile decide: sizes in base 256, signed checksums."""
    try:
        found = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None
    return Header(found.name, found.size, found.type) if found.size >= 0 else None
