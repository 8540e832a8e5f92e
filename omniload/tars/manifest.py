"""The description of a set of indexed tars: plain JSON, written last.

An index folder holds

    omniload-tars.json            the tars in order, settings, counts
    omniload-tars.lengths.arrow   lengths of all rows: what planning needs, one memory map
    omniload-tars.encoder.json    tokenizer and template, to tokenise in the same way
    omniload-tars.rejected.jsonl  samples that were refused and parts that are damaged, and why
    <tar>.omniload-index          one for each tar, beside it or in a folder of its own
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from omniload.errors import ShardError
from omniload.shards import ShardInfo
from omniload.shards.manifest import parse_shard, settings_fingerprint, write_atomic
from omniload.tars.facts import check_counts, check_tables, check_texts

__all__ = [
    "ENCODER_NAME",
    "LENGTHS_NAME",
    "REJECTED_NAME",
    "SET_NAME",
    "TarEntry",
    "TarManifest",
    "is_tar_set",
    "parse_tar_manifest",
    "read_tar_manifest",
    "write_tar_manifest",
]

SET_NAME = "omniload-tars.json"
LENGTHS_NAME = "omniload-tars.lengths.arrow"
ENCODER_NAME = "omniload-tars.encoder.json"
REJECTED_NAME = "omniload-tars.rejected.jsonl"
_FORMAT = "omniload-tars"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TarEntry:
    """One tar of the set.

    Args:
        name: path below the root, with "/".
        num_bytes: its size.
        xxh3_128: its checksum, 32 hexadecimal digits.
        num_rows: samples of it that are used.
        digest: of what its side file says.
        side_bytes: size of its side file.
        side_xxh3_128: checksum of its side file.
        source: name of its data set.

    Raises:
        ValueError: a value is no count, or no text.
    """

    name: str
    num_bytes: int
    xxh3_128: str
    num_rows: int
    digest: str
    side_bytes: int
    side_xxh3_128: str
    source: str

    def __post_init__(self) -> None:
        check_counts(self, "num_bytes", "num_rows", "side_bytes")
        check_texts(self, "name", "xxh3_128", "digest", "side_xxh3_128", "source")


@dataclass(frozen=True, kw_only=True)
class TarManifest:
    """What an index folder holds.

    Args:
        root: folder of the tars; "." is the index folder itself.
        tars: in row order.
        num_rows: rows of all tars.
        lengths: the file of the length columns.
        settings: how lengths were measured; plain JSON.
        fingerprint: 32 hexadecimal digits over `settings`.
        sources: name of each data set -> rows.
        counts: totals: samples, written, rejected, tokens, tiles, ...
    """

    root: str
    tars: tuple[TarEntry, ...]
    num_rows: int
    lengths: ShardInfo
    settings: Mapping[str, Any]
    fingerprint: str
    sources: Mapping[str, int]
    counts: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write it as JSON: the same text for the same content."""
        facts = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return json.dumps(facts, indent=1, sort_keys=True) + "\n"


def is_tar_set(path: str | Path) -> bool:
    """Tell whether a folder is one that `omniload index` wrote its set to."""
    return (Path(path) / SET_NAME).is_file()


def write_tar_manifest(folder: Path, manifest: TarManifest) -> None:
    """Write the description, atomically; do it last."""
    write_atomic(folder / SET_NAME, manifest.to_json().encode())


def read_tar_manifest(folder: str | Path) -> TarManifest:
    """Read and check the description of a set in a folder.

    Args:
        folder: the index folder.

    Raises:
        ShardError: none there, a broken one, or one of another version.
    """
    path = Path(folder) / SET_NAME
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ShardError(
            f"{folder} has no {SET_NAME}, so it is no folder of indexed tars. Make the index with "
            "`omniload index TARS`."
        ) from None
    except OSError as error:
        raise ShardError(f"{path} can't be read: {error.strerror}.") from None
    return parse_tar_manifest(data, str(path))


def parse_tar_manifest(text: str | bytes, where: str) -> TarManifest:
    """Read and check the description of a set.

    Args:
        text: the JSON.
        where: its path or URL, for messages.

    Raises:
        ShardError: a broken one, or one of another version.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(
            f"{where} must be JSON, but it can't be read: {error}. Run `omniload index` again."
        ) from None
    if not isinstance(data, dict) or data.pop("format", None) != _FORMAT:
        raise ShardError(f"{where} is not of omniload: its format must be {_FORMAT!r}.")
    version = data.pop("version", None)
    if version != _VERSION:
        raise ShardError(
            f"{where}: version must be {_VERSION}, which this omniload reads, got {version!r}. Run "
            "`omniload index` again."
        )
    try:
        return _parse(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShardError(
            f"{where} is damaged: {type(error).__name__}: {error}. Run `omniload index` again."
        ) from None


def _parse(data: dict[str, Any]) -> TarManifest:
    tars = tuple(TarEntry(**entry) for entry in data.pop("tars"))
    manifest = TarManifest(tars=tars, lengths=parse_shard(data.pop("lengths")), **data)
    check_texts(manifest, "root", "fingerprint")
    check_tables(manifest, "sources", "counts")
    if not isinstance(manifest.settings, dict):
        raise ValueError(f"settings must be a table, got {manifest.settings!r:.80}")
    for entry in tars:
        _check_name(entry.name)
    if manifest.lengths.name != LENGTHS_NAME:
        raise ValueError(f"the file of the lengths must be {LENGTHS_NAME}")
    rows = sum(entry.num_rows for entry in tars)
    if (rows, rows) != (manifest.num_rows, manifest.lengths.num_rows):
        raise ValueError("the rows of the tars do not sum to num_rows")
    if settings_fingerprint(manifest.settings) != manifest.fingerprint:
        raise ValueError("settings and fingerprint disagree")
    return manifest


def _check_name(name: str) -> None:
    # a description may come from elsewhere: it must not make us read outside its root
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(f"the name of a tar must be a path below the root, got {name!r:.80}")
