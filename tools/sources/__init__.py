"""Readers of raw data sets: one module a format, all with the same two functions.

`scan(file)` walks a file once, in a stream, and yields `Span`s: parts that can be read alone.
`read(file, span, loader)` yields the samples of a part, or a `Rejection` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from omniload.tools.sources import json_array, jsonl, parquet, shards, webdataset
from omniload.tools.sources.base import InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader

__all__ = ["READERS", "InputFile", "RawSample", "Reader", "Rejection", "Span"]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """The two functions of a format."""

    scan: Callable[[InputFile], Iterator[Span | Rejection]]
    read: Callable[[InputFile, Span, ImageLoader], Iterator[RawSample | Rejection]]


#: `InputFile.kind` -> reader.
READERS: dict[str, Reader] = {
    "json": Reader(scan=json_array.scan, read=json_array.read),
    "jsonl": Reader(scan=jsonl.scan, read=jsonl.read),
    "tar": Reader(scan=webdataset.scan, read=webdataset.read),
    "parquet": Reader(scan=parquet.scan, read=parquet.read),
    "shards": Reader(scan=shards.scan, read=shards.read),
}
