"""Checksums of indexed tars: which files are not as they were, and which rows that costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from omniload.errors import ShardError
from omniload.shards import ShardInfo, fault_of_file
from omniload.tars.archive import Archive
from omniload.tars.files import tar_root
from omniload.tars.manifest import TarEntry, read_tar_manifest
from omniload.tars.members import FILE
from omniload.tars.side_file import SUFFIX, open_side

__all__ = ["damaged_rows", "verify_tars"]


def verify_tars(
    folder: str | Path,
    *,
    root: str | Path | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> dict[str, str]:
    """Compare every tar, every side file and the lengths with the checksums of the index.

    Args:
        folder: the index folder.
        root: folder of the tars, if they have moved; None: as the index says.
        tick: called with (bytes done, bytes in all), several times a file.

    Returns:
        Name of each damaged file -> what is wrong; empty if all are as they were.

    Raises:
        ShardError: no index, or a damaged description.

    Cost: that of reading all bytes once.
    """
    folder = Path(folder).absolute()
    manifest = read_tar_manifest(folder)
    base = tar_root(folder, manifest, None if root is None else Path(root))
    files = [(folder, manifest.lengths)]
    for entry in manifest.tars:
        files.append((base, _info(entry.name, entry.num_bytes, entry.xxh3_128)))
        files.append((folder, _info(entry.name + SUFFIX, entry.side_bytes, entry.side_xxh3_128)))
    total = sum(info.num_bytes for _, info in files)
    faults: dict[str, str] = {}
    done = 0
    for place, info in files:

        def step(num_bytes: int, before: int = done) -> None:
            if tick is not None:
                tick(before + num_bytes, total)

        fault = fault_of_file(place, info, step)
        if fault:
            faults[info.name] = fault
        done += info.num_bytes
        step(0, done)
    return faults


def damaged_rows(
    folder: str | Path, tar: str, *, root: str | Path | None = None
) -> list[tuple[int, str]]:
    """Say which rows of one tar have bytes that are not those that were indexed.

    Args:
        folder: the index folder.
        tar: name of the tar in the index.
        root: folder of the tars, if they have moved; None: as the index says.

    Returns:
        (row number in the set, key) of each such row.

    Raises:
        ShardError: no such tar in the index, or one that can't be read at all.
    """
    folder = Path(folder).absolute()
    manifest = read_tar_manifest(folder)
    names = [entry.name for entry in manifest.tars]
    if tar not in names:
        raise ShardError(f"{folder} has no tar {tar!r}; it has {names[:8]}.")
    number = names.index(tar)
    first = sum(entry.num_rows for entry in manifest.tars[:number])
    base = tar_root(folder, manifest, None if root is None else Path(root))
    return _hit(folder, base, manifest.tars[number], first)


def _hit(folder: Path, base: Path, entry: TarEntry, first: int) -> list[tuple[int, str]]:
    side = open_side(folder / (entry.name + SUFFIX))
    found = []
    with Archive(base / entry.name) as archive:
        for row, line in enumerate(np.asarray(side.rows).tolist()):
            group, checksums = side.group(line)
            if any(
                member.start + member.num_bytes > archive.size or archive.digest(member) != expected
                for member, expected in zip(group, checksums, strict=True)
                if member.kind == FILE
            ):
                found.append((first + row, side.key(line)))
    return found


def _info(name: str, num_bytes: int, xxh3_128: str) -> ShardInfo:
    return ShardInfo(name=name, num_rows=0, num_bytes=num_bytes, xxh3_128=xxh3_128)
