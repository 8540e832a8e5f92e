"""Checking stored data: which files there are to check, in one process or in several."""

from __future__ import annotations

import bisect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.cache import Cache, is_url
from omniload.errors import ConfigError, ShardError
from omniload.mixture import Mixture, MixtureSet, read_mixture_file
from omniload.mixture.sets import open_set
from omniload.shards import ShardInfo, read_manifest
from omniload.shards.index_file import read_index
from omniload.shards.views import map_file
from omniload.source import shard_starts
from omniload.tars import is_tar_set, read_tar_manifest
from omniload.tars.files import tar_root
from omniload.tars.side_file import SUFFIX
from omniload.tools.data import is_mixture_file
from omniload.tools.parallel import choose_workers, run_parallel
from omniload.tools.verify_jobs import LENGTHS, Fault, Job, Verified, run_job

__all__ = ["plan_jobs", "verify"]


def verify(
    path: str,
    *,
    decode: int | None = 0,
    rows: bool = True,
    workers: int | None = None,
    cache: Cache | None = None,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Verified:
    """Check shards, indexed tars, or all sets of a mixture. Damage in one file stops no other.

    Args:
        path: a folder, the URL of shards, or the YAML file of a mixture.
        decode: rows to decode, spread evenly over each set; None: all.
        rows: read all rows of shards, besides comparing checksums.
        workers: processes; None: one a core, at most 16, or this one where there is little to do.
        cache: for a URL.
        tick: called with (bytes done, bytes in all) after each file.

    Raises:
        ConfigError: a mixture file that can't be used.
        ShardError: no data there.
    """
    found = Verified()
    jobs = plan_jobs(path, decode=decode, rows=rows, cache=cache, found=found)
    total = sum(job.info.num_bytes for job in jobs)
    workers = choose_workers(workers, total)
    done = 0
    for job, result in run_parallel(run_job, jobs, workers=workers):
        found.add(result)
        done += job.info.num_bytes
        tick(done, total)
    found.faults.sort(key=lambda fault: (fault.set_name, fault.file, fault.row))
    return found


def plan_jobs(
    path: str, *, decode: int | None, rows: bool, cache: Cache | None, found: Verified
) -> list[Job]:
    """List what is to be checked; what can't even be listed is noted in `found`.

    Raises:
        ConfigError: a mixture file that can't be used.
        ShardError: no data there.
    """
    if not is_mixture_file(path):
        entry = MixtureSet(source=path, cache=cache)
        return _jobs_of(entry, "", decode=decode, rows=rows, found=found)
    described = read_mixture_file(path, cache=cache)
    jobs, seen = [], set()
    for entry in described.sets:
        if str(entry.source) in seen:
            continue
        seen.add(str(entry.source))
        try:
            jobs += _jobs_of(entry, entry.title, decode=decode, rows=rows, found=found)
        except ShardError as error:
            found.fault(_set_fault(entry.title, entry.source, error))
    try:
        Mixture(described.sets, seed=described.seed, epoch_rows=described.epoch_rows)
    except ConfigError as error:
        found.fault(Fault(set_name="", file=path, kind="settings", reason=str(error)))
    except ShardError:
        pass  # a set that is damaged: its own jobs say where
    return jobs


def _set_fault(name: str, source: Any, error: Exception) -> Fault:
    return Fault(set_name=name, file=str(source), kind="file", reason=str(error))


def _jobs_of(
    entry: MixtureSet, name: str, *, decode: int | None, rows: bool, found: Verified
) -> list[Job]:
    path = os.fspath(entry.source)  # type: ignore[arg-type]  # of a file: no opened set
    if is_url(path):
        return _remote_jobs(entry, name, decode=decode)
    folder = Path(path).absolute()
    if is_tar_set(folder):
        return _tar_jobs(folder, name, decode=decode)
    return _shard_jobs(folder, name, decode=decode, rows=rows, found=found)


def _shard_jobs(
    folder: Path, name: str, *, decode: int | None, rows: bool, found: Verified
) -> list[Job]:
    manifest = read_manifest(folder, check_files=False)
    info = manifest.index
    index: npt.NDArray[np.int32] | None = None
    found.files += 1
    found.num_bytes += info.num_bytes
    try:
        read = read_index(folder / info.name, info, map_file(folder / info.name, info))
        index = np.stack([getattr(read, column) for column in LENGTHS])
    except ShardError as error:
        found.fault(_set_fault(name, folder / info.name, error))
    settings = json.dumps(manifest.settings)
    chosen, first, jobs = _spread(manifest.num_rows, decode), 0, []
    for number, shard in enumerate(manifest.shards):
        end = first + shard.num_rows
        jobs.append(
            Job(
                set_name=name,
                kind="shard",
                folder=folder,
                info=shard,
                settings=settings,
                number=number,
                first_row=first,
                lengths=None if index is None else index[:, first:end],
                decode=_between(chosen, first, end),
                rows=rows,
            )
        )
        first = end
    return jobs


def _tar_jobs(folder: Path, name: str, *, decode: int | None) -> list[Job]:
    manifest = read_tar_manifest(folder)
    root = tar_root(folder, manifest, None)
    jobs = [Job(set_name=name, kind="file", folder=folder, info=manifest.lengths)]
    chosen, first = _spread(manifest.num_rows, decode), 0
    for number, tar in enumerate(manifest.tars):
        side = _file(tar.name + SUFFIX, tar.side_bytes, tar.side_xxh3_128)
        jobs.append(Job(set_name=name, kind="file", folder=folder, info=side))
        end = first + tar.num_rows
        info = _file(tar.name, tar.num_bytes, tar.xxh3_128)
        jobs.append(
            Job(
                set_name=name,
                kind="tar",
                folder=folder,
                root=root,
                info=info,
                number=number,
                first_row=first,
                decode=_between(chosen, first, end),
            )
        )
        first = end
    return jobs


def _remote_jobs(entry: MixtureSet, name: str, *, decode: int | None) -> list[Job]:
    source: Any = open_set(entry)
    chosen, starts, jobs = _spread(len(source), decode), shard_starts(source).tolist(), []
    files = getattr(source.manifest, "shards", None) or source.manifest.tars
    for number, file in enumerate(files):
        first, end = starts[number], starts[number + 1]
        info = ShardInfo(
            name=file.name,
            num_rows=file.num_rows,
            num_bytes=file.num_bytes,
            xxh3_128=file.xxh3_128,
        )
        jobs.append(
            Job(
                set_name=name,
                kind="remote",
                folder=Path(),
                info=info,
                settings=json.dumps(dict(source.settings)),
                number=number,
                first_row=first,
                decode=_between(chosen, first, end),
                source=source,
            )
        )
    return jobs


def _file(name: str, num_bytes: int, xxh3_128: str) -> ShardInfo:
    return ShardInfo(name=name, num_rows=0, num_bytes=num_bytes, xxh3_128=xxh3_128)


def _spread(num_rows: int, count: int | None) -> list[int]:
    count = num_rows if count is None else min(count, num_rows)
    return [place * num_rows // count for place in range(count)]


def _between(rows: Sequence[int], first: int, end: int) -> tuple[int, ...]:
    return tuple(rows[bisect.bisect_left(rows, first) : bisect.bisect_left(rows, end)])
