"""InternVL meta files: several sets in one JSON object.

    {"ai2d": {"root": "images/ai2d", "annotation": "ai2d.jsonl", "repeat_time": 1}, ...}

`repeat_time` above 1 repeats a set, below 1 takes a part of it, the same part for the same seed.
`max_dynamic_patch` and `min_dynamic_patch` limit the tiles of this set, in place of the limits of
the run. Other keys are not used; a note says so.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omniload.errors import ConfigError
from omniload.tools.sources.base import InputFile

__all__ = ["is_meta", "meta_files"]

_MAX_REPEAT = 1000
_USED = ("root", "annotation", "repeat_time", "length", "max_dynamic_patch", "min_dynamic_patch")


def is_meta(value: Any) -> bool:
    """Tell whether a JSON value is a meta file: an object of objects that name an annotation."""
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(entry, dict) and "annotation" in entry for entry in value.values())
    )


def meta_files(
    path: Path, image_root: str | None, kind_of: Callable[[Path], str]
) -> list[InputFile]:
    """Read the sets of a meta file.

    Args:
        path: the meta file. Relative paths in it are relative to its folder, or, where that has no
            such file, to the working directory, as InternVL takes them.
        image_root: folder that relative roots are relative to instead.
        kind_of: tells the kind of an annotation file.

    Returns:
        One file a set, in the order of the meta file.

    Raises:
        ConfigError: not a meta file, a missing annotation or root, or a wrong repeat_time.
    """
    try:
        sets = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from None
    if not is_meta(sets):
        raise ConfigError(f"{path} must map names of sets to objects with an 'annotation'.")
    return [_one_set(path, name, entry, image_root, kind_of) for name, entry in sets.items()]


def _one_set(
    path: Path,
    name: str,
    entry: dict[str, Any],
    image_root: str | None,
    kind_of: Callable[[Path], str],
) -> InputFile:
    bases = [path.absolute().parent, Path.cwd()]
    annotation = _existing(path, name, "annotation", entry.get("annotation"), bases)
    root = entry.get("root") or os.fspath(annotation.parent)
    roots = bases if image_root is None else [Path(image_root)]
    repeat = entry.get("repeat_time", 1)
    if isinstance(repeat, bool) or not isinstance(repeat, (int, float)):
        repeat = math.nan
    if not 0 < repeat <= _MAX_REPEAT:
        raise ConfigError(
            f"{path}: repeat_time of set {name!r} must be a number above 0 and at most "
            f"{_MAX_REPEAT}, got {entry.get('repeat_time')!r}."
        )
    return InputFile(
        kind=kind_of(annotation),
        path=os.fspath(annotation),
        label=annotation.name,
        source=name,
        image_root=os.fspath(_existing(path, name, "root", root, roots)),
        repeat=float(repeat),
        max_tiles=_limit(path, name, "max_dynamic_patch", entry),
        min_tiles=_limit(path, name, "min_dynamic_patch", entry),
        notes=tuple(
            f"set {name!r} of the meta file has {key!r}, which is not used"
            for key, value in entry.items()
            if key not in _USED and value not in (None, False, "")
        ),
    )


def _limit(path: Path, name: str, key: str, entry: dict[str, Any]) -> int | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            f"{path}: {key} of set {name!r} must be an integer of at least 1, got {value!r}."
        )
    return value


def _existing(path: Path, name: str, what: str, value: Any, bases: list[Path]) -> Path:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: {what} of set {name!r} must be a path, got {value!r}.")
    if "://" in value:
        raise ConfigError(
            f"{path}: {what} of set {name!r} must be a local path, got {value!r}. "
            "Download it first."
        )
    for base in bases:
        if (base / value).exists():
            return base / value
    raise ConfigError(
        f"{path}: {what} of set {name!r} does not exist: {value!r}, looked for in "
        f"{' and '.join(map(str, bases))}."
    )
