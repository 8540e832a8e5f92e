"""The manifest: what a folder of shards holds, and with which settings it was made.

It is plain JSON, written last, so a folder with a manifest is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from omniload.errors import ShardError

__all__ = [
    "INDEX_NAME",
    "MANIFEST_NAME",
    "SCHEMA_VERSION",
    "Manifest",
    "ShardInfo",
    "parse_manifest",
    "parse_shard",
    "partial_name",
    "read_manifest",
    "settings_fingerprint",
    "sync_folder",
    "write_atomic",
    "write_manifest",
]

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
INDEX_NAME = "index.arrow"
_FORMAT = "omniload-shards"


@dataclass(frozen=True, kw_only=True)
class ShardInfo:
    """One file of the set.

    Args:
        name: file name in the folder of the manifest.
        num_rows: rows in it.
        num_bytes: its size.
        xxh3_128: checksum of the whole file, 32 hexadecimal digits.
    """

    name: str
    num_rows: int
    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of shards holds.

    Args:
        num_rows: rows in all shards; row numbers run through the shards in order.
        shards: the files, in row order.
        index: the file of the length columns.
        settings: how the rows were made: encoder, tiling, limits. Plain JSON.
        fingerprint: 32 hexadecimal digits over `settings`.
        sources: name of each source data set -> rows it gave.
        counts: totals of the run: read, written, rejected, tokens, tiles, ...
        schema_version: version of the file layout.
    """

    num_rows: int
    shards: tuple[ShardInfo, ...]
    index: ShardInfo
    settings: Mapping[str, Any]
    fingerprint: str
    sources: Mapping[str, int]
    counts: Mapping[str, int] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def data_fingerprint(self) -> str:
        """32 hexadecimal digits over what the shards hold and how they were made.

        Built on the checksums of the files, so it reads no data; where they lie is no matter.
        """
        digest = hashlib.blake2b(digest_size=16)
        for info in (*self.shards, self.index):
            digest.update(f"{info.num_rows} {info.num_bytes} {info.xxh3_128}\n".encode())
        digest.update(self.fingerprint.encode())
        return digest.hexdigest()

    def to_json(self) -> str:
        """Write it as JSON: the same text for the same content."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"


def settings_fingerprint(settings: Mapping[str, Any]) -> str:
    """Hash settings, whatever the order of their keys, to 32 hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def partial_name(path: Path) -> Path:
    """Name the file that becomes `path`: another one in each process, so that two can't mix."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that it is there in full or not at all, even after a power cut."""
    partial = partial_name(path)
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(folder: str | Path, manifest: Manifest) -> None:
    """Write `folder/manifest.json`, atomically; do it last."""
    write_atomic(Path(folder) / MANIFEST_NAME, manifest.to_json().encode())


def read_manifest(folder: str | Path, *, check_files: bool = True) -> Manifest:
    """Read and check `folder/manifest.json` and the sizes of the files that it names.

    Args:
        folder: the folder that `omniload preprocess` wrote.
        check_files: False: don't look at the files.

    Returns:
        The manifest.

    Raises:
        ShardError: no manifest, another schema version, a broken one, or files that are missing
            or not of the size it says.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    try:
        text = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ShardError(_no_manifest(folder)) from None
    except OSError as error:
        raise ShardError(f"{path} can't be read: {error.strerror}.") from None
    manifest = parse_manifest(text, path)
    if check_files:
        _check_files(folder, manifest)
    return manifest


def parse_manifest(text: bytes | str, path: Path | str) -> Manifest:
    """Read and check the text of a manifest.

    Args:
        text: the JSON.
        path: where it was found, for messages.

    Raises:
        ShardError: another schema version, or a broken one.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(
            f"{path} must be JSON, but it can't be read: {error}. Copy it again from where the "
            "shards were made, or preprocess again."
        ) from None
    return _parse(path, data)


def _no_manifest(folder: Path) -> str:
    if not folder.is_dir():
        return (
            f"shards must be a folder that `omniload preprocess` wrote; {folder} is not a folder."
        )
    if any(folder.glob("shard-*.arrow")):
        return (
            f"{folder} has shards but no {MANIFEST_NAME}: the run that wrote it did not end. Run "
            "the same `omniload preprocess` again; it goes on where it was."
        )
    return (
        f"{folder} has no {MANIFEST_NAME}, so it is not a folder of shards. Make one with "
        "`omniload preprocess SRC OUT`."
    )


def _parse(path: Path | str, data: Any) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ShardError(f"{path} is not a manifest of omniload: its format must be {_FORMAT!r}.")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ShardError(
            f"{path}: schema_version must be {SCHEMA_VERSION}, which this omniload reads, got "
            f"{data.get('schema_version')!r}. Use the omniload that wrote the shards, or "
            "preprocess again with this one."
        )
    try:
        manifest = Manifest(
            num_rows=_count(data, "num_rows"),
            shards=tuple(parse_shard(entry) for entry in _typed(data, "shards", list)),
            index=parse_shard(_typed(data, "index", dict)),
            settings=_typed(data, "settings", dict),
            fingerprint=_typed(data, "fingerprint", str),
            sources={name: int(rows) for name, rows in _typed(data, "sources", dict).items()},
            counts={name: int(count) for name, count in _typed(data, "counts", dict).items()},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ShardError(f"{path} is damaged: {error}. Preprocess again.") from None
    rows = sum(shard.num_rows for shard in manifest.shards)
    if rows != manifest.num_rows or manifest.index.num_rows != manifest.num_rows:
        raise ShardError(
            f"{path}: the rows of the shards must sum to num_rows: expected {manifest.num_rows}, "
            f"got {rows} (index: {manifest.index.num_rows}). Preprocess again."
        )
    expected = settings_fingerprint(manifest.settings)
    if manifest.fingerprint != expected:
        raise ShardError(
            f"{path}: settings and fingerprint disagree (expected {expected}, got "
            f"{manifest.fingerprint}), so the file was edited. Preprocess again to change settings."
        )
    return manifest


def _typed(data: dict[str, Any], name: str, kind: type) -> Any:
    value = data.get(name)
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")
    if isinstance(value, str):
        value.encode()  # a ValueError for half a character of UTF-16
    return value


def _count(data: dict[str, Any], name: str) -> int:
    value = _typed(data, name, int)
    if value < 0 or isinstance(value, bool):
        raise ValueError(f"{name} must be a count, got {value!r}")
    return int(value)


def parse_shard(entry: Any) -> ShardInfo:
    """Check one file of a description.

    Raises:
        TypeError, ValueError: it is none.
    """
    if not isinstance(entry, dict):
        raise TypeError(f"a shard must be an object, got {entry!r:.80}")
    name = _typed(entry, "name", str)
    # a manifest may come from elsewhere: it must not make us read outside its folder
    if not name.endswith(".arrow") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"a shard's name must be a plain file name *.arrow, got {name!r:.80}")
    return ShardInfo(
        name=name,
        num_rows=_count(entry, "num_rows"),
        num_bytes=_count(entry, "num_bytes"),
        xxh3_128=_typed(entry, "xxh3_128", str),
    )


def _check_files(folder: Path, manifest: Manifest) -> None:
    missing: list[str] = []
    for shard in (*manifest.shards, manifest.index):
        try:
            found = (folder / shard.name).stat().st_size
        except OSError:
            missing.append(shard.name)
            continue
        if found != shard.num_bytes:
            raise ShardError(
                f"{folder / shard.name} must have {shard.num_bytes} bytes, got {found}: it was cut "
                "short or changed. Copy it again, or preprocess again."
            )
    if missing:
        raise ShardError(
            f"{folder} must hold the {len(manifest.shards) + 1} files that its manifest names, but "
            f"{len(missing)} are missing, for example {missing[0]}. Copy them again, or preprocess "
            "again."
        )
