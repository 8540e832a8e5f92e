"""What SRC is: a file, a folder or a glob, of which kind by its content."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from omniload.errors import ConfigError
from omniload.shards.manifest import MANIFEST_NAME
from omniload.tars.manifest import ENCODER_NAME, REJECTED_NAME, SET_NAME
from omniload.tools.sources.base import InputFile
from omniload.tools.sources.internvl_meta import is_meta, meta_files

__all__ = ["FORMATS", "find_input"]

#: `--format` -> kinds of file that it reads.
FORMATS: dict[str, tuple[str, ...]] = {
    "llava": ("json", "jsonl"),
    "sharegpt": ("json", "jsonl"),
    "internvl-meta": ("meta",),
    "webdataset": ("tar",),
    "parquet": ("parquet",),
    "shards": ("shards",),
}

_NAMES = {
    "json": "a JSON array",
    "jsonl": "JSON lines",
    "meta": "an InternVL meta file",
    "tar": "a tar",
    "parquet": "Parquet",
    "shards": "a folder of omniload's own shards",
}
_ENDS = (".json", ".jsonl", ".ndjson", ".tar", ".parquet")
# written by the datasets library beside the data
_NOT_DATA = (
    "dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json",
    SET_NAME, ENCODER_NAME, REJECTED_NAME,
)  # fmt: skip
_MAX_META = 1 << 26
_HEAD = 1 << 16
_TAR_MAGIC = slice(257, 262)
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


def find_input(
    src: str | Path, *, format_name: str | None = None, image_root: str | Path | None = None
) -> list[InputFile]:
    """Find the files of SRC and what they are.

    Args:
        src: a file, a folder (searched to any depth, hidden names left out), or a glob.
        format_name: one of `FORMATS`; None: decided by the content of each file.
        image_root: folder that image paths are relative to; None: the folder of each file.

    Returns:
        The files, in a fixed order.

    Raises:
        ConfigError: nothing there, an unknown format, a kind that can't be read, or kinds mixed.
    """
    if format_name is not None and format_name not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {format_name!r}.")
    if image_root is not None and not Path(image_root).is_dir():
        raise ConfigError(f"--image-root must be a folder, got {image_root}.")
    src = Path(src)
    paths = list(_paths(src))
    wanted = FORMATS.get(format_name or "")
    found = [(path, _kind(path, wanted)) for path in paths]
    if wanted is not None and src.is_dir() and not (src / MANIFEST_NAME).is_file():
        found = [(path, kind) for path, kind in found if kind in wanted]
    for path, kind in found:
        if wanted is not None and kind not in wanted:
            raise ConfigError(
                f"{path} is not what --format {format_name} says: by its content it is "
                f"{_NAMES[kind]}. Leave --format out, or choose the right one."
            )
    if not found:
        raise ConfigError(_nothing(src, format_name))
    kinds = sorted({kind for _, kind in found})
    if len(kinds) > 1 and set(kinds) != {"json", "jsonl"}:
        count = ", ".join(f"{sum(k == kind for _, k in found)} of kind {kind}" for kind in kinds)
        raise ConfigError(
            f"{src} holds files of several kinds ({count}), which may be the same data twice. "
            "Choose with --format, or give a glob such as 'folder/*.parquet'."
        )
    root = None if image_root is None else os.fspath(Path(image_root).absolute())
    if kinds == ["meta"]:
        return [file for path, _ in found for file in meta_files(path, root, _kind_of_annotation)]
    style = format_name if format_name in ("llava", "sharegpt") else ""
    files = [replace(_input_file(path, kind, src), style=style) for path, kind in found]
    return files if root is None else [replace(file, image_root=root) for file in files]


def _nothing(src: Path, format_name: str | None) -> str:
    kind = f" of format {format_name}" if format_name else ""
    return (
        f"no data{kind} found: {src} must be a file, a folder or a glob of {', '.join(_ENDS)}, "
        "or a folder of omniload's own shards."
    )


def _paths(src: Path) -> Iterator[Path]:
    if (src / MANIFEST_NAME).is_file() or src.is_file():
        yield src
    elif src.is_dir():
        yield from _walk(src)
    elif src.exists():
        raise ConfigError(f"SRC must be a regular file or a folder, got {src}.")
    else:
        for name in sorted(glob.glob(os.fspath(src), recursive=True)):  # noqa: PTH207
            if Path(name).is_file():
                yield Path(name)


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent) / name
            if name.startswith(".") or name in _NOT_DATA:
                continue
            if name.lower().endswith(_ENDS) and path.is_file():
                yield path


def _kind(path: Path, wanted: Sequence[str] | None) -> str:
    if path.is_dir():
        return "shards"
    try:
        kind = _sniff(path)
    except ConfigError:
        if wanted not in (("tar",), ("parquet",)):
            raise
        return wanted[0]  # as told; its reader says what is wrong
    if wanted is not None and kind == "meta" and "meta" not in wanted:
        kind = "jsonl"  # one record on several lines is refused there, line by line
    return kind


def _sniff(path: Path) -> str:
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    if head[:4] == b"PAR1":
        return "parquet"
    if head[_TAR_MAGIC] == b"ustar" or path.suffix.lower() in (".tar", ".tgz"):
        return "tar"
    if ".tar" in path.suffixes and head.startswith(_PACKED):
        return "tar"
    if head.startswith(_PACKED):
        raise ConfigError(f"{path} is compressed. Unpack it first; only plain files are read.")
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"["):
        return "json"
    if text.startswith(b"{"):
        return _kind_of_object(path, text)
    if not text and path.suffix.lower() in (".json", ".jsonl", ".ndjson"):
        raise ConfigError(f"{path} is empty: no record to preprocess.")
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        return "jsonl"  # its first line is broken; the others may be fine
    raise ConfigError(
        f"{path} is of no kind that omniload reads: it is neither JSON in UTF-8, nor a tar, nor "
        "Parquet, nor a folder of shards."
    )


def _kind_of_object(path: Path, head: bytes) -> str:
    """JSON lines, or one object over the whole file: then it must be a meta file."""
    line, newline, _ = head.partition(b"\n")
    try:
        first = json.loads(line)
    except (ValueError, RecursionError):
        first = None
    if first is None and not newline:
        return "jsonl"  # a first line of more than 64 KiB
    if first is not None and not is_meta(first):
        return "jsonl"
    if path.suffix.lower() in (".jsonl", ".ndjson") or path.stat().st_size > _MAX_META:
        return "jsonl"
    try:
        whole = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return "jsonl"
    if is_meta(whole):
        return "meta"
    raise ConfigError(
        f"{path} is one JSON object, but a data set must be an array of records or JSON lines, and "
        "a meta file must map names to objects with 'annotation' and 'root'."
    )


def _kind_of_annotation(path: Path) -> str:
    kind = "shards" if (path / MANIFEST_NAME).is_file() else _sniff(path)
    if kind == "meta":
        raise ConfigError(f"{path} is a meta file itself; a set of a meta file can't be one.")
    return kind


def _input_file(path: Path, kind: str, src: Path) -> InputFile:
    path = path.absolute()
    base = src.absolute() if src.is_dir() and kind != "shards" else path.parent
    if kind in ("json", "jsonl"):
        source = path.stem
    elif path == src.absolute():
        source = path.stem
    else:
        source = base.name
    return InputFile(
        kind=kind,
        path=os.fspath(path),
        label=_text(path.relative_to(base).as_posix()),
        source=_text(source),
        image_root=os.fspath(path.parent),
    )


def _text(name: str) -> str:
    """A file name as text that can be stored; names need not be UTF-8."""
    return name.encode("utf-8", "replace").decode()
