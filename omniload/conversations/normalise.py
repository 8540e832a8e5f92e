"""One record of any known style to turns and images.

| style | turns | images |
|---|---|---|
| LLaVA | `conversations`: `from`, `value` | `image`: a path or a list of them |
| ShareGPT, LLaMA-Factory | `messages`: `role`, `content`; or `conversations`; `system` | `images` |
| OpenAI | `messages`, `content` a list of parts | inside the parts, or `images` |
| question and answer | `question`, `answer` | `image` or `images` |
| the_cauldron | `texts`: `user`, `assistant` | `images` |
| caption | `caption` or `text` alone | `image` or `images` |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omniload.conversations.refused import RefusedError
from omniload.conversations.turns import read_turns, refuse_tools
from omniload.transforms.pieces import IMAGE_MARK
from omniload.types import Message

__all__ = [
    "COLUMNS",
    "IMAGE_FIELDS",
    "Conversation",
    "caption_turns",
    "listed_images",
    "normalise",
    "record_key",
]

#: Names of record fields that mean something here; a column store reads no others.
COLUMNS = (
    "id", "uid", "key", "__key__", "sample_id", "question_id",
    "conversations", "conversation", "messages", "texts", "system",
    "question", "answer", "answers", "query", "response", "caption", "text",
    "image", "images", "image_path", "image_paths",
    "video", "videos", "audio", "audios", "tools", "functions",
)  # fmt: skip

_KEYS = ("id", "uid", "key", "__key__", "sample_id", "question_id")
IMAGE_FIELDS = ("image", "images", "image_path", "image_paths")
_OTHER_MEDIA = ("video", "videos", "audio", "audios")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A record with its turns in order; images not yet read.

    Args:
        key: its name in the data set, "" where it has none.
        messages: one mark `<image>` for each image.
        images: as the data names them: a path, a `data:` URI, bytes, or a dict of bytes and path.
    """

    key: str
    messages: tuple[Message, ...]
    images: tuple[Any, ...]


def normalise(record: Any, *, style: str = "") -> Conversation:
    """Bring a record of any known style to one form.

    Args:
        record: a JSON object, or a row as a dict.
        style: "llava" looks at `conversations` first, "sharegpt" at `messages`; "" takes whichever
            is there.

    Returns:
        The conversation, images in the order of their marks. Images without any mark are put at
        the start of the first user turn.

    Raises:
        RefusedError: not such a record, an unknown role, no turn, or marks that don't fit the
            images.
    """
    if not isinstance(record, dict):
        raise RefusedError(
            "not a record", f"a record must be an object, got {type(record).__name__}"
        )
    for name in _OTHER_MEDIA:
        if record.get(name):
            raise RefusedError("other media", f"only images are supported, got {name!r}")
    refuse_tools(record, "the record")
    listed = listed_images(record)
    turns, inline = _turns(record, style, listed)
    system = record.get("system")
    if isinstance(system, str) and system and turns and turns[0].role != "system":
        turns.insert(0, Message(role="system", content=system))
    if not turns:
        raise RefusedError("no turn", "a conversation must have at least one turn, got none")
    images = inline if inline is not None else listed
    return Conversation(
        key=record_key(record), messages=_place_images(turns, len(images)), images=tuple(images)
    )


def record_key(record: Any) -> str:
    """Read the name that a record gives itself; "" where it has none."""
    if isinstance(record, dict):
        for name in _KEYS:
            value = record.get(name)
            if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
                return str(value)
    return ""


def caption_turns(text: str) -> list[dict[str, str]]:
    """Turn a caption into a conversation: the images, then the text as answer."""
    return [{"role": "user", "content": ""}, {"role": "assistant", "content": text}]


def listed_images(record: dict[str, Any]) -> list[Any]:
    """Give the images that a record lists outside its turns.

    Raises:
        RefusedError: two fields list different images.
    """
    found: dict[str, list[Any]] = {}
    for name in IMAGE_FIELDS:
        value = record.get(name)
        values = value if isinstance(value, (list, tuple)) else [value]
        values = [entry for entry in values if entry is not None and entry != ""]
        if values:
            found[name] = values
    first, *others = found or [""]
    for name in others:
        if found[name] != found[first]:
            raise RefusedError(
                "image fields differ",
                f"{first!r} and {name!r} must be equal where a record has both, and they are not: "
                "it is unknown which images the turns mean",
            )
    return found.get(first, [])


def _turns(
    record: dict[str, Any], style: str, listed: list[Any]
) -> tuple[list[Message], list[Any] | None]:
    """The turns, and the images where content parts hold them."""
    names = ("conversations", "conversation", "messages")
    for name in names[::-1] if style == "sharegpt" else names:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            value = _decoded(name, value)
        if not isinstance(value, (list, tuple)):
            raise RefusedError(
                "not a record", f"{name!r} must be a list of turns, got {type(value).__name__}"
            )
        return read_turns(value, listed)
    return read_turns(list(_plain_turns(record)), listed)


def _decoded(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RefusedError("broken JSON", f"{name!r} is text, but not JSON: {error}") from None


def _plain_turns(record: dict[str, Any]) -> Iterator[Any]:
    texts = record.get("texts")
    if isinstance(texts, list):
        for pair in texts:
            if not isinstance(pair, dict) or "user" not in pair or "assistant" not in pair:
                raise RefusedError(
                    "not a record", "'texts' must hold objects of user and assistant"
                )
            yield {"role": "user", "content": pair["user"]}
            yield {"role": "assistant", "content": pair["assistant"]}
        return
    for question, answer in (
        ("question", "answer"),
        ("question", "answers"),
        ("query", "response"),
    ):
        if record.get(question) is not None and record.get(answer) is not None:
            reply = record[answer]
            if isinstance(reply, (list, tuple)) and reply:
                reply = reply[0]  # several annotators: the first one's answer
            yield {"role": "user", "content": record[question]}
            yield {"role": "assistant", "content": reply}
            return
    for name in ("caption", "text"):
        if isinstance(record.get(name), str):
            yield from caption_turns(record[name])
            return
    raise RefusedError(
        "not a record",
        "a record must have turns in 'conversations' or 'messages', or 'question' and 'answer', "
        f"'texts' or 'caption'; its fields are {sorted(map(str, record))[:12]}",
    )


def _place_images(turns: list[Message], num_images: int) -> tuple[Message, ...]:
    marks = sum(turn.content.count(IMAGE_MARK) for turn in turns)
    if marks == num_images:
        return tuple(turns)
    if marks:
        raise RefusedError(
            "marks and images",
            f"each image needs one mark {IMAGE_MARK}: expected {num_images} "
            f"{'mark' if num_images == 1 else 'marks'}, got {marks}",
        )
    for number, turn in enumerate(turns):
        if turn.role == "user":
            content = (IMAGE_MARK + "\n") * num_images + turn.content
            content = content.rstrip("\n") if not turn.content else content
            turns[number] = Message(role="user", content=content, weight=turn.weight)
            return tuple(turns)
    raise RefusedError(
        "marks and images",
        f"{num_images} images without a mark {IMAGE_MARK}, and no user turn to put them in",
    )
