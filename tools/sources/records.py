"""What the readers share: one raw record to a sample, or to a rejection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omniload.conversations import RefusedError, read_conversation, record_key
from omniload.tools.sources.base import InputFile, RawSample, Rejection
from omniload.tools.sources.frames import expand_frames
from omniload.tools.sources.media import ImageLoader

__all__ = ["read_record", "reject"]


def read_record(
    record: Any,
    *,
    file: InputFile,
    number: int,
    where: str,
    loader: ImageLoader,
    key: str = "",
    members: Callable[[Any], bytes | None] | None = None,
) -> RawSample | Rejection:
    """Turn a record as it was parsed into a sample with its images read.

    Args:
        record: a JSON object, or a row as a dict.
        file: where it is from.
        number: its number in the file.
        where: file and place, for people.
        loader: reads image values.
        key: its name, if the format gives one; else its own, else `<source>:<number>`.
        members: finds an image value inside the file itself; None: it is not there.

    Returns:
        The sample, or why it can't be used.
    """
    key = key or record_key(record) or f"{file.source}:{number}"
    key = key.encode("utf-8", "replace").decode()  # a tar's names need not be UTF-8

    def load(value: Any) -> bytes:
        found = members(value) if members is not None else None
        return loader.load(value, file.image_root) if found is None else found

    try:
        if members is None:
            record = expand_frames(record, lambda path: loader.frames(path, file.image_root))
        messages, images = read_conversation(record, load=load, style=file.style)
    except RefusedError as error:
        return reject(error, file=file, number=number, where=where, key=key)
    return RawSample(
        number=number,
        key=key,
        where=where,
        source=file.source,
        messages=messages,
        images=images,
    )


def reject(
    error: RefusedError, *, file: InputFile, number: int, where: str, key: str = ""
) -> Rejection:
    """Say that a record of a file is not used."""
    return Rejection(
        number=number,
        key=key,
        where=where,
        source=file.source,
        reason=error.reason,
        category=error.category,
    )
