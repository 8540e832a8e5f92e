"""What the readers of all formats give: parts of files, samples, and reasons why not."""

from __future__ import annotations

from dataclasses import dataclass

from omniload.types import Message

__all__ = ["SPAN_RECORDS", "InputFile", "RawSample", "Rejection", "Span"]

#: Records of a span: rows that lie together in the input and stay together until the last shuffle.
SPAN_RECORDS = 16


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file of the input (for shards: one folder).

    Args:
        kind: "json", "jsonl", "tar", "parquet" or "shards".
        path: absolute.
        label: its name for people: relative to SRC.
        source: name of the data set that it belongs to.
        image_root: folder that image paths are relative to, absolute.
        style: turns to look for first: "llava", "sharegpt" or "" for either.
        repeat: times that each record is used; a fraction takes a seeded subset.
        max_tiles: most tiles of an image that a meta file asks for; None: it doesn't say.
        min_tiles: least tiles, likewise.
        notes: what people should know about it.
    """

    kind: str
    path: str
    label: str
    source: str
    image_root: str
    style: str = ""
    repeat: float = 1.0
    max_tiles: int | None = None
    min_tiles: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a file that is read by itself.

    Args:
        start: where it begins: a byte, or a row or row group.
        stop: where it ends, likewise.
        first: number of its first record in the file (for JSON lines: line number from 0).
        count: records in it.
        num_bytes: rough size of what they hold.
        keep: numbers of the records to use; None: all.
    """

    start: int
    stop: int
    first: int
    count: int
    num_bytes: int
    keep: frozenset[int] | None = None

    def wants(self, number: int) -> bool:
        """Tell whether a record of it is to be used."""
        return self.keep is None or number in self.keep


@dataclass(frozen=True, kw_only=True)
class RawSample:
    """A sample as it was read: roles normalised, images as files in memory.

    Args:
        number: number of the record in its file.
        key: its name in the data set.
        where: file and place, for people.
        source: name of its data set.
        messages: the conversation, one `<image>` mark for each image.
        images: encoded image files.
    """

    number: int
    key: str
    where: str
    source: str
    messages: tuple[Message, ...]
    images: tuple[bytes, ...]


@dataclass(frozen=True, kw_only=True)
class Rejection:
    """A record that is not written, and why.

    Args:
        number: number of the record in its file; -1 where a part of a file is lost.
        key: its name, or "" where it has none.
        where: file and place, for people.
        source: name of its data set.
        reason: what must hold and what was found.
        category: short name of the reason, for counting.
    """

    number: int
    key: str
    where: str
    source: str
    reason: str
    category: str
