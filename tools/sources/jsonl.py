"""JSON lines: one record a line; empty lines are passed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from omniload.conversations import RefusedError, parse_json
from omniload.errors import ConfigError
from omniload.tools.sources.base import SPAN_RECORDS, InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader
from omniload.tools.sources.records import read_record, reject

__all__ = ["read", "scan"]

_BLOCK = 1 << 22
_MAX_LINE = 1 << 30


def scan(file: InputFile) -> Iterator[Span | Rejection]:
    """Find the spans of a file by its line ends, in a stream.

    Raises:
        ConfigError: a line of more than 1 GiB.
    """
    start = offset = line = 0
    first, ended = 0, True
    with Path(file.path).open("rb") as stream:
        while block := stream.read(_BLOCK):
            for end in np.flatnonzero(np.frombuffer(block, np.uint8) == 10).tolist():
                line += 1
                if line - first == SPAN_RECORDS:
                    stop = offset + end + 1
                    yield _span(start, stop, first, line - first)
                    start, first = stop, line
            offset += len(block)
            ended = block.endswith(b"\n")
            if offset - start > SPAN_RECORDS * _MAX_LINE:
                raise ConfigError(
                    f"{file.path}: a line must have at most {_MAX_LINE >> 30} GiB; after line "
                    f"{first} more than {SPAN_RECORDS} GiB follow without {SPAN_RECORDS} line "
                    "ends. Is this a file of JSON lines?"
                )
    if offset > start:
        yield _span(start, offset, first, line - first + (not ended))


def _span(start: int, stop: int, first: int, count: int) -> Span:
    return Span(start=start, stop=stop, first=first, count=count, num_bytes=stop - start)


def read(file: InputFile, span: Span, loader: ImageLoader) -> Iterator[RawSample | Rejection]:
    """Read the records of a span."""
    with Path(file.path).open("rb") as stream:
        stream.seek(span.start)
        left = span.stop - span.start
        for number in range(span.first, span.first + span.count):
            line = stream.readline(left)
            left -= len(line)
            if not line.strip() or not span.wants(number):
                continue
            where = f"{file.label} line {number + 1}"
            try:
                record = parse_json(line, "the line")
            except RefusedError as error:
                yield reject(error, file=file, number=number, where=where)
                continue
            yield read_record(record, file=file, number=number, where=where, loader=loader)
