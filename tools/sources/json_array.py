"""A JSON file that is one array of records, streamed: never in memory as a whole.

The file is decoded as Latin-1 while it is scanned, so that a position in the text is a position in
the file; structure is ASCII, so this can't move a boundary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from omniload.conversations import RefusedError
from omniload.errors import ConfigError
from omniload.tools.sources.base import SPAN_RECORDS, InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader
from omniload.tools.sources.records import read_record, reject

__all__ = ["read", "scan"]

_BLOCK = 1 << 22
_MAX_RECORD = 1 << 28
_BOM = "\xef\xbb\xbf"
_SPACE = re.compile(r"[ \t\r\n]*")


def scan(file: InputFile) -> Iterator[Span | Rejection]:
    """Find the spans of a file, in a stream.

    A syntax error ends the run before it has begun: what follows the place can't be told apart.

    Raises:
        ConfigError: not a JSON array; says at which line and column.
    """
    with Path(file.path).open("rb") as stream:
        yield from _spans(_Elements(file.path, stream))


def _spans(elements: Iterable[tuple[int, int]]) -> Iterator[Span]:
    first = count = start = stop = 0
    for begin, end in elements:
        if count == 0:
            start = begin
        stop = end
        count += 1
        if count == SPAN_RECORDS:
            yield Span(start=start, stop=stop, first=first, count=count, num_bytes=stop - start)
            first += count
            count = 0
    if count:
        yield Span(start=start, stop=stop, first=first, count=count, num_bytes=stop - start)


class _Elements:
    """Iterates over (start, stop) bytes of the elements of a top-level array."""

    def __init__(self, path: str, stream: BinaryIO) -> None:
        self._path = path
        self._stream = stream
        self._text = ""
        self._base = 0  # file position of self._text[0]
        self._lines = 0  # line ends before self._base
        self._column = 0  # characters since the last of them
        self._at_end = False

    def __iter__(self) -> Iterator[tuple[int, int]]:
        position = self._skip(len(_BOM) if self._starts_with_bom() else 0)
        if self._text[position : position + 1] != "[":
            raise self._error(position, "the file must be an array of records, starting with '['")
        position = self._skip(position + 1)
        if self._text[position : position + 1] == "]":
            self._end(position + 1)
            return
        decode = json.JSONDecoder().raw_decode
        while True:
            position = self._drop(position)
            end = self._element(decode, position)
            yield self._base + position, self._base + end
            position = self._skip(end)
            mark = self._text[position : position + 1]
            if mark == "]":
                self._end(position + 1)
                return
            if mark != ",":
                raise self._error(position, "',' or ']' must follow a record")
            position = self._skip(position + 1)

    def _end(self, position: int) -> None:
        """Refuse what follows the array: its records would be lost."""
        position = self._skip(position)
        if position < len(self._text):
            raise self._error(
                position,
                f"nothing may follow the ']' that ends the array, got "
                f"{self._text[position : position + 20]!r} at byte {self._base + position}",
            )

    def _starts_with_bom(self) -> bool:
        self._more()
        return self._text.startswith(_BOM)

    def _more(self) -> bool:
        # in growing steps, so that a large record is not parsed again too often
        block = self._stream.read(max(_BLOCK, len(self._text)))
        self._at_end = not block
        self._text += block.decode("latin-1")
        return bool(block)

    def _skip(self, position: int) -> int:
        while True:
            match = _SPACE.match(self._text, position)
            position = match.end() if match else position
            if position < len(self._text) or not self._more():
                return position

    def _drop(self, position: int) -> int:
        """Forget what was read, from time to time."""
        if position < _BLOCK:
            return position
        gone = self._text[:position]
        lines = gone.count("\n")
        self._column = len(gone) - gone.rfind("\n") - 1 if lines else self._column + len(gone)
        self._lines += lines
        self._base += position
        self._text = self._text[position:]
        return 0

    def _element(self, decode: object, position: int) -> int:
        while True:
            try:
                _, end = decode(self._text, position)  # type: ignore[operator]
            except json.JSONDecodeError as error:
                # a record cut off by the end of the text fails there, or in an open string
                cut = error.pos + 16 > len(self._text) or error.msg.startswith("Unterminated")
                too_long = len(self._text) - position > _MAX_RECORD
                if not cut or too_long or not self._more():
                    raise self._error(error.pos, error.msg) from None
            except RecursionError:
                raise self._error(position, "a record is nested too deeply") from None
            else:
                # a number at the end of the text may go on in the next block
                if end < len(self._text) or not self._more():
                    return int(end)

    def _error(self, position: int, reason: str) -> ConfigError:
        gone = self._text[:position]
        lines = gone.count("\n")
        column = len(gone) - gone.rfind("\n") - 1 if lines else self._column + len(gone)
        return ConfigError(
            f"{self._path} is not a JSON array of records: {reason}, at line "
            f"{self._lines + lines + 1}, column {column + 1}. Repair the file, or write it as JSON "
            "lines, where a broken record costs one line only."
        )


def read(file: InputFile, span: Span, loader: ImageLoader) -> Iterator[RawSample | Rejection]:
    """Read the records of a span."""
    with Path(file.path).open("rb") as stream:
        stream.seek(span.start)
        data = stream.read(span.stop - span.start)
    records = _parse(data)
    for number in range(span.first, span.first + span.count):
        where = f"{file.label} record {number}"
        record = next(records)
        if not span.wants(number):
            continue
        if isinstance(record, RefusedError):
            yield reject(record, file=file, number=number, where=where)
        else:
            yield read_record(record, file=file, number=number, where=where, loader=loader)


def _parse(data: bytes) -> Iterator[object]:
    try:
        yield from json.loads((b"[" + data + b"]").decode("utf-8"))
        return
    except (ValueError, RecursionError):
        pass
    # the scan saw valid structure, so some text is not UTF-8: find out which record it is in
    text = data.decode("latin-1")
    decode = json.JSONDecoder().raw_decode
    position = 0
    while position < len(text):
        _, end = decode(text, position)
        try:
            yield json.loads(data[position:end].decode("utf-8"))
        except (ValueError, RecursionError) as error:
            yield RefusedError("broken JSON", f"the record is not JSON in UTF-8: {error}")
        match = re.compile(r"[ \t\r\n,]*").match(text, end)
        position = match.end() if match else end
