"""Turns of a conversation, whatever their fields are called."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from omniload.conversations.refused import RefusedError
from omniload.transforms.pieces import IMAGE_MARK
from omniload.types import Message

__all__ = ["read_turns", "refuse_tools"]

_ROLES = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def read_turns(values: Sequence[Any], listed: list[Any]) -> tuple[list[Message], list[Any] | None]:
    """Read the turns of a record.

    Args:
        values: one object a turn: `from` and `value`, or `role` and `content`; the text is a
            string or a list of parts.
        listed: images that the record lists outside its turns.

    Returns:
        The turns, with one mark `<image>` for each image; and all images in the order of their
        marks where content parts hold some, else None.

    Raises:
        RefusedError: not a turn, an unknown role, or an image part without an image.
    """
    waiting = iter(listed)
    images: list[Any] = []
    in_parts = False
    turns = []
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            raise RefusedError(
                "not a record", f"turn {number} must be an object, got {type(value).__name__}"
            )
        role = _role(number, value)
        refuse_tools(value, f"turn {number}")
        content = value.get("value") if "value" in value else value.get("content")
        if isinstance(content, (list, tuple)):
            in_parts = True
            content = _join_parts(number, content, images, waiting)
        elif content is None:
            raise RefusedError("not a record", f"turn {number} has no text: it is null or missing")
        elif not isinstance(content, str):
            raise RefusedError(
                "not a record",
                f"the text of turn {number} must be a string, got {type(content).__name__}",
            )
        else:
            # marks in plain text take listed images too, in case other turns have parts
            images += islice(waiting, content.count(IMAGE_MARK))
        turns.append(Message(role=role, content=content, weight=_weight(number, value)))
    if in_parts and images:
        return turns, images + list(waiting)
    return turns, None


def refuse_tools(fields: dict[str, Any], what: str) -> None:
    """Refuse a record or a turn with tools: their text would be lost.

    Raises:
        RefusedError: it has some.
    """
    for name in ("tools", "tool_calls", "function_call", "functions"):
        if fields.get(name) not in (None, "", "[]", [], {}, ()):
            raise RefusedError(
                "tool calls",
                f"tool calls are not supported, and {what} has {name!r}. Write them into the text "
                "of the turns, as the model is to see them",
            )


def _role(number: int, turn: dict[str, Any]) -> str:
    name = turn.get("from") if "from" in turn else turn.get("role")
    role = _ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise RefusedError(
            "unknown role",
            f"turn {number} must have one of the roles {sorted(_ROLES)}, got {name!r:.60}",
        )
    return role


def _weight(number: int, turn: dict[str, Any]) -> int | None:
    for name in ("weight", "loss", "train"):
        value = turn.get(name)
        if value is None:
            continue
        if value in (0, 1) and isinstance(value, (bool, int, float)):
            return int(value)
        raise RefusedError(
            "not a record", f"{name!r} of turn {number} must be 0 or 1, got {value!r:.60}"
        )
    return None


def _join_parts(
    number: int, parts: Sequence[Any], images: list[Any], waiting: Iterator[Any]
) -> str:
    """Text of a list of content parts; a line break stands between an image and its neighbours."""
    pieces: list[str] = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
            pieces.append(part["text"])
            images += islice(waiting, part["text"].count(IMAGE_MARK))
        elif kind in ("image", "image_url", "input_image"):
            image = _part_image(part)
            image = next(waiting, None) if image is None else image
            if image is None:
                raise RefusedError(
                    "marks and images", f"turn {number} has an image part, but no image is left"
                )
            images.append(image)
            pieces.append(IMAGE_MARK)
        else:
            raise RefusedError(
                "not a record",
                f"a part of turn {number} must be of type text, image or image_url, got "
                f"{kind or part!r:.60}",
            )
    text = ""
    for i, piece in enumerate(pieces):
        if i and IMAGE_MARK in (pieces[i - 1], piece) and not text.endswith("\n"):
            text += "" if piece.startswith("\n") else "\n"
        text += piece
    return text


def _part_image(part: dict[str, Any]) -> Any:
    for name in ("image_url", "image", "url", "path"):
        value = part.get(name)
        if isinstance(value, dict) and "url" in value:
            value = value["url"]
        if value not in (None, ""):
            return value
    return None
