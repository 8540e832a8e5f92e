"""Checksums of whole files: what reading batch by batch doesn't look at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from omniload.shards.manifest import ShardInfo, read_manifest

__all__ = ["fault_of_file", "verify_shards"]

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
