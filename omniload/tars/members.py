"""Members of a plain tar file by their headers, without being stopped by damage.

Python's tarfile takes a damaged header as the end of the archive, so all that follows is lost
without a word. Here the walk goes on at the next block that is a valid header, and says so.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from typing import NamedTuple

from omniload.tars.headers import (
    BLOCK,
    CONTENTLESS,
    REGULAR,
    ZEROS,
    Header,
    parse_header,
    read_meta,
)

__all__ = ["FILE", "LINK", "SPARSE", "Damage", "Member", "Window", "members"]

#: Kinds of a member: a whole file; a link, which is never followed; a file with holes, not read.
FILE, LINK, SPARSE = 0, 1, 2

_MAX_META = 1 << 20
_META = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_OCTAL_LIMIT = 8**11  # larger sizes don't fit into the header itself
_RECORDS = (10_240, 65_536)  # archives are filled up with zeros to a multiple
_MOST_ZEROS = (1 << 20) + 2 * BLOCK


class Member(NamedTuple):
    """A file in the archive, or a link in its place.

    Args:
        name: path inside the archive.
        header: byte where its first header begins.
        start: byte where its content begins.
        num_bytes: size of its content; 0 for a link.
        kind: FILE, LINK or SPARSE.
    """

    name: str
    header: int
    start: int
    num_bytes: int
    kind: int = FILE

    @property
    def stop(self) -> int:
        """Byte where the next header begins."""
        return self.start + -(-self.num_bytes // BLOCK) * BLOCK


class Damage(NamedTuple):
    """A part of the archive that can't be read.

    Args:
        start: byte where it begins.
        stop: byte where the walk goes on.
        reason: what is wrong.
    """

    start: int
    stop: int
    reason: str


class Window:
    """Reads a file, mostly forwards, through one buffer.

    Args:
        descriptor: of the open file; its position is neither used nor moved.
        capacity: bytes read at once.
    """

    def __init__(self, descriptor: int, capacity: int = 1 << 22) -> None:
        self._descriptor = descriptor
        self._buffer = memoryview(bytearray(capacity))
        self._start = self._stop = 0

    @property
    def capacity(self) -> int:
        """Most bytes of a view."""
        return len(self._buffer)

    def view(self, start: int, count: int) -> memoryview:
        """Give bytes of the file without a copy; they are valid until the next call.

        Args:
            start: the first.
            count: how many, at most `capacity`; fewer at the end of the file.
        """
        if start < self._start or start + count > self._stop:
            filled = 0
            while filled < len(self._buffer):
                got = os.preadv(self._descriptor, [self._buffer[filled:]], start + filled)
                if got == 0:
                    break
                filled += got
            self._start, self._stop = start, start + filled
        first = start - self._start
        return self._buffer[first : min(first + count, self._stop - self._start)]


def members(
    window: Window, start: int, stop: int, *, whole: bool = False
) -> Iterator[Member | Damage]:
    """Walk the headers between two bytes.

    Args:
        window: of the archive.
        start: where a header begins.
        stop: where to end: size of the archive, or where another header begins.
        whole: whether this is the whole archive, which must end with zeros.

    Yields:
        Files and links in archive order, and what is damaged between them.
    """
    walk = _Walk(window, stop, start)
    while walk.position + BLOCK <= stop:
        block = bytes(window.view(walk.position, BLOCK))
        if block == ZEROS:  # the end, or the seam of two archives in one file
            walk.zeros()
            continue
        yield from walk.end_of_zeros()
        header = parse_header(block)
        found = walk.damaged_header() if header is None else walk.take(header, block)
        if found is not None:
            yield found
        if walk.is_cut:
            return
    yield from walk.end(whole)


class _Walk:
    """Where the walk through an archive stands."""

    def __init__(self, window: Window, stop: int, start: int) -> None:
        self.position = start
        self.is_cut = False
        self._window = window
        self._stop = stop
        self._first = start  # of the headers that belong to the next member
        self._longer: dict[str, str] = {}  # from headers that come before it
        self._archive = start  # where this one of several archives begins
        self._zeros = -1  # where a run of zeros began

    def zeros(self) -> None:
        if self._zeros < 0:
            self._zeros = self.position
        self.position += BLOCK
        self._first, self._longer = self.position, {}

    def end_of_zeros(self) -> Iterator[Damage]:
        """Tell zeros between two archives from members that were overwritten with zeros."""
        if self._zeros < 0:
            return
        begin, self._zeros = self._zeros, -1
        whole = self.position - self._archive
        is_seam = self.position - begin == 2 * BLOCK or any(whole % r == 0 for r in _RECORDS)
        if not is_seam or self.position - begin > _MOST_ZEROS:
            yield Damage(begin, self.position, "zeros in place of members")
        self._archive = self.position

    def damaged_header(self) -> Damage:
        begin = self._first
        self.position = _resync(self._window, self.position + BLOCK, self._stop)
        self._first, self._longer = self.position, {}
        return Damage(begin, self.position, "damaged header")

    def take(self, header: Header, block: bytes) -> Member | Damage | None:
        """Pass over a member, or over a header in front of one."""
        content = self.position + BLOCK
        more = header.type == tarfile.GNUTYPE_SPARSE and block[482]
        while more and content + BLOCK <= self._stop:  # the map of its holes goes on
            more = self._window.view(content, BLOCK)[504]
            content += BLOCK
        size = self._size(header)
        if size is None:
            return self.damaged_header()
        self.position = content + -(-size // BLOCK) * BLOCK
        if content + size > self._stop:
            self.is_cut = True
            return Damage(self._first, self._stop, "cut short")
        if header.type in _META:
            if size > _MAX_META:
                self._longer = {"refused": f"a header of {size} bytes"}
            elif "refused" not in self._longer:
                data = bytes(self._window.view(content, size))
                self._longer |= read_meta(header.type, data)
            return None
        found: Member | Damage | None = None
        if header.type in REGULAR or header.type in _KINDS:
            if "refused" in self._longer:
                found = Damage(self._first, self.position, self._longer["refused"])
            else:
                kind = SPARSE if "sparse" in self._longer else _KINDS.get(header.type, FILE)
                name = self._longer.get("path", header.name)
                found = Member(name, self._first, content, size, kind)
        if header.type not in (tarfile.XGLTYPE, tarfile.GNUTYPE_LONGLINK):
            self._longer = {}
            self._first = self.position
        return found

    def _size(self, header: Header) -> int | None:
        """Bytes of content; None where two headers contradict each other."""
        if header.type in CONTENTLESS:
            return 0
        text = self._longer.get("size", "")
        if header.type not in REGULAR or not text:
            return header.size
        if not text.isascii() or not text.isdigit() or len(text) > 20:
            return None
        # where the header can state the size, a record that states another is damaged
        size = int(text)
        return size if header.size in (0, size) or size >= _OCTAL_LIMIT else None

    def end(self, whole: bool) -> Iterator[Damage]:
        """Say what is wrong with the end, if this is the end of the archive."""
        if self.position < self._stop:
            yield Damage(self.position, self._stop, "cut short")
        elif whole and self._zeros < 0:
            yield Damage(self._stop, self._stop, "cut short: the zeros that end a tar are missing")
        elif whole and self._stop - self._zeros > _MOST_ZEROS:
            yield Damage(self._zeros, self._stop, "zeros in place of members")


_KINDS = {tarfile.SYMTYPE: LINK, tarfile.LNKTYPE: LINK, tarfile.GNUTYPE_SPARSE: SPARSE}


def _resync(window: Window, position: int, stop: int) -> int:
    """Find the next block that is a header with magic and checksum."""
    while position + BLOCK <= stop:
        count = min(stop - position, window.capacity) // BLOCK * BLOCK
        data = bytes(window.view(position, count))
        at = data.find(b"ustar")
        while at >= 0:
            begin = at - 257
            if begin >= 0 and begin % BLOCK == 0:
                block = data[begin : begin + BLOCK]
                if len(block) == BLOCK and parse_header(block) is not None:
                    return position + begin
            at = data.find(b"ustar", at + 1)
        if len(data) < BLOCK:
            break
        position += len(data) // BLOCK * BLOCK
    return stop
