"""Image values that carry their own bytes, and JSON texts: bounded, and checked before use."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from typing import Any

from omniload.conversations.normalise import normalise
from omniload.conversations.refused import RefusedError
from omniload.images.video import video_container, video_message
from omniload.types import Message

__all__ = ["MAX_IMAGE_BYTES", "bounded", "data_uri", "parse_json", "read_conversation"]

#: A larger file is not an image that anyone trains on.
MAX_IMAGE_BYTES = 256 << 20


def bounded(data: bytes, what: str) -> bytes:
    """Give the bytes of an image file back.

    Raises:
        RefusedError: none, too many, or those of a video.
    """
    if not data:
        raise RefusedError("damaged image", f"{what} is empty")
    container = video_container(data)
    if container is not None:
        raise RefusedError("video container", video_message(f"{what} in {container}"))
    if len(data) > MAX_IMAGE_BYTES:
        raise RefusedError("damaged image", f"{what} has more than {MAX_IMAGE_BYTES >> 20} MiB")
    return data


def data_uri(value: str) -> bytes:
    """Decode a `data:` URI.

    Raises:
        RefusedError: it is not base64.
    """
    head, comma, body = value.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise RefusedError("damaged image", f"a data: URI must be base64, got {head!r:.60}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RefusedError("damaged image", f"a data: URI must be base64: {error}") from None


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


def read_conversation(
    record: Any, *, load: Callable[[Any], bytes], style: str = ""
) -> tuple[tuple[Message, ...], tuple[bytes, ...]]:
    """Bring a record to turns, and read its images.

    Args:
        record: a JSON object, or a row as a dict.
        load: reads an image value of the record.
        style: see `normalise`.

    Returns:
        The turns, one mark `<image>` for each image; and the encoded image files.

    Raises:
        RefusedError: see `normalise`; or an image that `load` refuses, or text that is no Unicode.
    """
    conversation = normalise(record, style=style)
    _check_text(conversation.messages)
    return conversation.messages, tuple(load(value) for value in conversation.images)


def _check_text(messages: Iterable[Message]) -> None:
    for message in messages:
        try:
            message.content.encode()
        except UnicodeEncodeError:
            raise RefusedError(
                "not a record", "a text must be valid Unicode, got half of a surrogate pair"
            ) from None
