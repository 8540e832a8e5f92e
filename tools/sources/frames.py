"""Videos as frames: a folder of image files, or a list of them, becomes images of the sample.

    {"video": "clips/7", "conversations": [{"from": "human", "value": "<video>What happens?"}, ...]}
    {"video": ["7/1.jpg", "7/2.jpg"], ...}

Each mark `<video>`, or `<image>` where the record has no other images, becomes as many image marks
as the video has frames. A folder named as an image is taken the same way. Frames come in the order
of the numbers in their names. A video file itself is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from omniload.conversations import RefusedError
from omniload.images.video import VIDEO_SUFFIXES, video_message
from omniload.transforms.pieces import IMAGE_MARK

__all__ = ["expand_frames", "in_order"]

VIDEO_MARK = "<video>"
_VIDEO_FIELDS = ("video", "videos")
_IMAGE_FIELDS = ("image", "images", "image_path", "image_paths")
_TURN_FIELDS = ("conversations", "conversation", "messages")

ListFrames = Callable[[str], Sequence[str] | None]


def expand_frames(record: Any, list_frames: ListFrames) -> Any:
    """Replace the videos of a record by their frames.

    Args:
        record: as it was parsed.
        list_frames: path -> its frames, in order; None: it is no folder.

    Returns:
        The record with its frames as `images`, or as it is where it has no videos.

    Raises:
        RefusedError: a video container, a video without frames, images beside videos, or marks that
            don't fit the videos.
    """
    if not isinstance(record, dict):
        return record
    field = next((name for name in _VIDEO_FIELDS if record.get(name)), None)
    others = [name for name in _IMAGE_FIELDS if record.get(name)]
    if field is None:
        return _with_folders(record, others[0], list_frames) if others else record
    if others:
        raise RefusedError(
            "other media",
            f"a record may have images or videos, not both: got {others[0]!r} and {field!r}",
        )
    videos = _videos(record[field], list_frames)
    return _with_frames(record, field, videos, VIDEO_MARK)


def in_order(names: Sequence[str]) -> list[str]:
    """Sort file names by the numbers in them: frame2 before frame10."""
    return sorted(names, key=lambda name: (_numbers(name), name))


def _numbers(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [
        (int(part), "") if index % 2 else (-1, part.lower()) for index, part in enumerate(parts)
    ]


def _videos(value: Any, list_frames: ListFrames) -> list[list[Any]]:
    """The frames of each video: of one given as a folder or a list of files, or of several."""
    if isinstance(value, (list, tuple)) and value:
        if all(isinstance(entry, (list, tuple)) for entry in value):
            return [list(entry) for entry in value]
        folders = [_frames(entry, list_frames) for entry in value]
        if all(folder is not None for folder in folders):
            return [list(folder or ()) for folder in folders]
        return [list(value)]  # files of one video
    frames = _frames(value, list_frames)
    if frames is None:
        raise RefusedError(
            "not an image value",
            "a video must be a folder of image files or a list of them, got "
            f"{value if isinstance(value, str) else type(value).__name__!r:.200}",
        )
    return [list(frames)]


def _frames(value: Any, list_frames: ListFrames) -> Sequence[str] | None:
    if not isinstance(value, str):
        return None
    if value.lower().endswith(VIDEO_SUFFIXES):
        raise RefusedError("video container", video_message(f"{value!r:.200}"))
    return list_frames(value)


def _with_folders(record: dict[str, Any], field: str, list_frames: ListFrames) -> dict[str, Any]:
    """Expand image values that are folders."""
    value = record[field]
    values = value if isinstance(value, (list, tuple)) else [value]
    found = [_frames(entry, list_frames) for entry in values]
    if all(frames is None for frames in found):
        return record
    videos = [
        [entry] if frames is None else list(frames)
        for entry, frames in zip(values, found, strict=True)
    ]
    return _with_frames(record, field, videos, IMAGE_MARK)


def _with_frames(
    record: dict[str, Any], field: str, videos: list[list[Any]], mark: str
) -> dict[str, Any]:
    changed = {name: value for name, value in record.items() if name != field}
    changed["images"] = [frame for video in videos for frame in video]
    if not all(videos):
        raise RefusedError("image is missing", "a video has no frame")
    name = next((name for name in _TURN_FIELDS if isinstance(record.get(name), list)), None)
    turns = record[name] if name else []
    texts = [text for turn in turns for text in _texts(turn)]
    if not any(mark in text for text in texts):
        mark = IMAGE_MARK
    total = sum(text.count(mark) for text in texts)
    if total not in (0, len(videos)):
        if total == len(changed["images"]):  # one mark a frame already
            return changed
        raise RefusedError(
            "marks and images",
            f"each video needs one mark {mark}: expected {len(videos)} marks, got {total}",
        )
    if name and total:
        left = iter(videos)
        changed[name] = [_marked(turn, mark, left) for turn in turns]
    return changed


def _texts(turn: Any) -> list[str]:
    fields = ("value", "content") if isinstance(turn, dict) else ()
    return [turn[field] for field in fields if isinstance(turn.get(field), str)]


def _marked(turn: Any, mark: str, left: Any) -> Any:
    if not isinstance(turn, dict):
        return turn
    changed = dict(turn)
    for field in ("value", "content"):
        if isinstance(turn.get(field), str):
            head, *rest = turn[field].split(mark)
            changed[field] = head + "".join(IMAGE_MARK * len(next(left)) + part for part in rest)
    return changed
