"""Checksums of whole files, and all rows of a shard: what reading row by row doesn't look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from omniload.errors import SampleError, ShardError
from omniload.shards.manifest import ShardInfo, read_manifest
from omniload.shards.views import OpenedShard, map_file
from omniload.types import Record

__all__ = ["RowFault", "fault_of_file", "faults_of_rows", "verify_shards"]

_CHUNK = 1 << 22


def verify_shards(
    folder: str | Path, *, tick: Callable[[int, int], None] | None = None
) -> dict[str, str]:
    """Compare every file of a set with the checksum in its manifest.

    Args:
        folder: the folder that `omniload preprocess` wrote.
        tick: called with (bytes done, bytes in all), several times a file.

    Returns:
        Name of each damaged file -> what is wrong; empty if all are as they were written.

    Raises:
        ShardError: no manifest, or a damaged one.

    Cost: that of reading all bytes once.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, check_files=False)
    infos = (*manifest.shards, manifest.index)
    total = sum(info.num_bytes for info in infos)
    faults: dict[str, str] = {}
    done = 0
    for info in infos:

        def step(num_bytes: int, before: int = done) -> None:
            if tick is not None:
                tick(before + num_bytes, total)

        fault = fault_of_file(folder, info, step)
        if fault:
            faults[info.name] = fault
        done += info.num_bytes
        step(0, done)
    return faults


def fault_of_file(folder: Path, info: ShardInfo, step: Callable[[int], None] | None = None) -> str:
    """Say what is wrong with a file; "" if it is as it was written.

    Args:
        folder: where it lies.
        info: what it must be.
        step: called with the bytes that were read so far.
    """
    digest = xxhash.xxh3_128()
    read = 0
    try:
        with (folder / info.name).open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                read += len(chunk)
                if read > info.num_bytes:
                    break
                if step is not None:
                    step(read)
    except OSError as error:
        return f"it can't be read: {error.strerror}"
    if read != info.num_bytes:
        size = (folder / info.name).stat().st_size
        return f"it must have {info.num_bytes} bytes, got {size}"
    if digest.hexdigest() != info.xxh3_128:
        return f"its xxh3_128 must be {info.xxh3_128}, got {digest.hexdigest()}"
    return ""


@dataclass(frozen=True, kw_only=True)
class RowFault:
    """What is wrong with a row, or with a shard as a whole.

    Args:
        row: number in the set; -1: the shard as a whole.
        key: of the sample; "" where it can't be read.
        kind: "shard", "row", "length" or "sample".
        reason: what is wrong, in a sentence.
    """

    row: int
    key: str
    kind: str
    reason: str


def faults_of_rows(
    folder: Path,
    info: ShardInfo,
    *,
    first_row: int,
    lengths: Sequence[npt.NDArray[np.int32]] | None,
    check: Callable[[Record], tuple[int, int, int]],
) -> Iterator[RowFault]:
    """Read all rows of a shard, and hold their lengths against the index.

    Unlike `ShardSet.read` this needs no other file of the set, and goes on behind damage.

    Args:
        folder: where the shard lies.
        info: its line in the manifest.
        first_row: number of its first row in the set.
        lengths: tokens, tiles and loss tokens of its rows as the index has them, int32 (num_rows,)
            each; None: the index can't be read.
        check: gives the same three of a record; a SampleError says that the record is damaged.

    Yields:
        What is wrong.
    """
    try:
        shard = OpenedShard(folder / info.name, info, map_file(folder / info.name, info))
    except ShardError as error:
        yield RowFault(row=-1, key="", kind="shard", reason=str(error))
        return
    for local in range(info.num_rows):
        row = first_row + local
        try:
            record = shard.record(local, row=row)
        except ShardError as error:
            yield RowFault(row=row, key="", kind="row", reason=str(error))
            continue
        try:
            found = check(record)
        except SampleError as error:
            yield RowFault(row=row, key=record.key, kind="sample", reason=str(error))
            continue
        if lengths is None:
            continue
        planned = tuple(int(column[local]) for column in lengths)
        if planned != found:
            reason = f"(tokens, tiles, loss tokens) must be {planned} as in the index, got {found}"
            yield RowFault(row=row, key=record.key, kind="length", reason=reason)
