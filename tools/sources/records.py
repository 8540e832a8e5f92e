"""What the readers share: one raw record to a sample, or to a rejection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from omniload.tools.sources.base import InputFile, RawSample, RefusedError, Rejection
from omniload.tools.sources.conversation import normalise, record_key
from omniload.tools.sources.frames import expand_frames
from omniload.tools.sources.media import ImageLoader
from omniload.types import Message

__all__ = ["parse_json", "read_record", "reject"]


def parse_json(data: bytes, what: str) -> Any:
    """Parse JSON in UTF-8, and in nothing else: json itself guesses the encoding of bytes.

    Args:
        data: the text.
        what: what it is, for people.

    Raises:
        RefusedError: not UTF-8, or not JSON.
    """
    try:
        text = data.removeprefix(b"\xef\xbb\xbf").decode("utf-8")
    except UnicodeDecodeError as error:
        guess = " (looks like UTF-16)" if b"\0" in data else ""
        raise RefusedError("broken JSON", f"{what} is not UTF-8{guess}: {error}") from None
    if "\0" in text:
        raise RefusedError(
            "broken JSON", f"{what} is damaged or not UTF-8 (looks like UTF-16): it holds NUL bytes"
        )
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError("broken JSON", f"{what} is not JSON: {error}") from None


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
    try:
        if members is None:
            record = expand_frames(record, lambda path: loader.frames(path, file.image_root))
        conversation = normalise(record, style=file.style)
        _check_text(conversation.messages)
        images = []
        for value in conversation.images:
            found = members(value) if members is not None else None
            images.append(loader.load(value, file.image_root) if found is None else found)
    except RefusedError as error:
        return reject(error, file=file, number=number, where=where, key=key)
    return RawSample(
        number=number,
        key=key,
        where=where,
        source=file.source,
        messages=conversation.messages,
        images=tuple(images),
    )


def _check_text(messages: Iterable[Message]) -> None:
    for message in messages:
        try:
            message.content.encode()
        except UnicodeEncodeError:
            raise RefusedError(
                "not a record", "a text must be valid Unicode, got half of a surrogate pair"
            ) from None


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
