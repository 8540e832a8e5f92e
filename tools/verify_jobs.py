"""Checking one stored file, in any process: against its checksum, row by row, by decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError, ShardError
from omniload.rng import sample_generator
from omniload.shards import ShardInfo, fault_of_file, faults_of_rows
from omniload.source import RowSource
from omniload.tars import damaged_rows, open_tars
from omniload.transforms import transform_from_settings
from omniload.types import IGNORE_INDEX, Record

__all__ = ["LENGTHS", "Fault", "Job", "Verified", "run_job"]

LENGTHS = ("num_tokens", "num_tiles", "num_loss_tokens")
#: faults that are listed of one shard; the others are counted
_LISTED = 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that is damaged.

    Args:
        set_name: set of a mixture; "" where there is one only.
        file: path or URL of the file.
        row: number in the set; -1: the file as a whole.
        key: of the sample; "" where it isn't known.
        kind: "file", "shard", "row", "length", "sample", or "settings".
        reason: what is wrong, in a sentence.
    """

    set_name: str
    file: str
    row: int = -1
    key: str = ""
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Job:
    """One shard, tar or other file to check, in any process.

    Args:
        set_name: set of a mixture, or "".
        kind: "file", "shard", "tar" or "remote".
        folder: of the set, or of the index of tars.
        root: where the file lies, if that is another folder.
        info: the file.
        settings: of the set, as JSON.
        number: of the shard in the set.
        first_row: of the shard.
        lengths: of its rows, int32 (3, num_rows), as in the index; None: not known.
        decode: rows of it to decode, rising.
        rows: whether all rows are read.
        source: the set, where it is at a URL.
    """

    set_name: str
    kind: str
    folder: Path
    root: Path | None = None
    info: ShardInfo
    settings: str = "{}"
    number: int = 0
    first_row: int = 0
    lengths: npt.NDArray[np.int32] | None = None
    decode: tuple[int, ...] = ()
    rows: bool = True
    source: RowSource | None = None


@dataclass(kw_only=True)
class Verified:
    """What was checked, and what was found.

    Args:
        files: files that were compared with their checksums.
        num_bytes: their sizes.
        rows: rows that were read.
        decoded: rows whose images were decoded.
        num_faults: all faults.
        faults: those that are listed, at most 20 a shard.
    """

    files: int = 0
    num_bytes: int = 0
    rows: int = 0
    decoded: int = 0
    num_faults: int = 0
    faults: list[Fault] = field(default_factory=list)

    def add(self, other: Verified) -> None:
        """Add what another job found."""
        for name in ("files", "num_bytes", "rows", "decoded", "num_faults"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults

    def fault(self, fault: Fault) -> None:
        """Note a fault."""
        self.num_faults += 1
        if len(self.faults) < _LISTED:
            self.faults.append(fault)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def run_job(job: Job) -> Verified:
    """Check one file, and the rows in it."""
    found = Verified(files=1, num_bytes=job.info.num_bytes)
    if job.kind == "remote":
        _read_rows(job, found, job.source, range(job.first_row, job.first_row + job.info.num_rows))
        return found
    root = job.root or job.folder
    fault = fault_of_file(root, job.info)
    if fault:
        found.fault(_fault(job, root, kind="file", reason=fault))
    if job.kind == "shard" and (job.rows or job.decode):
        _check_shard(job, found)
    elif job.kind == "tar":
        _check_tar(job, found, root, is_damaged=bool(fault))
    return found


def _check_shard(job: Job, found: Verified) -> None:
    wanted, transform = set(job.decode), _transform(job.settings)

    def check(record: Record) -> tuple[int, int, int]:
        found.rows += 1
        if record.row in wanted and transform is not None:
            found.decoded += 1
            _decode(transform, record)
        return _lengths(transform, record)

    for fault in faults_of_rows(
        job.folder,
        job.info,
        first_row=job.first_row,
        lengths=None if job.lengths is None else list(job.lengths),
        check=check,
    ):
        found.fault(
            _fault(
                job,
                job.folder,
                row=fault.row,
                key=fault.key,
                kind=fault.kind,
                reason=fault.reason,
            )
        )


def _check_tar(job: Job, found: Verified, root: Path, *, is_damaged: bool) -> None:
    if is_damaged:
        try:
            for row, key in damaged_rows(job.folder, job.info.name):
                reason = "its bytes are not those that were indexed"
                found.fault(_fault(job, root, row=row, key=key, kind="row", reason=reason))
        except (ShardError, SampleError) as error:
            found.fault(_fault(job, root, kind="shard", reason=str(error)))
    if not job.decode:
        return
    try:
        source = open_tars(job.folder)
    except ShardError as error:
        reason = f"its samples can't be read while the set can't be opened: {error}"
        found.fault(_fault(job, root, kind="shard", reason=reason))
        return
    _read_rows(job, found, source, job.decode)


def _read_rows(job: Job, found: Verified, source: Any, rows: Sequence[int]) -> None:
    wanted, transform = set(job.decode), _transform(json.dumps(dict(source.settings)))
    index = source.index
    for row in rows:
        key = ""
        try:
            record = source.read(row)
            found.rows += 1
            key = record.key
            if row in wanted and transform is not None:
                found.decoded += 1
                _decode(transform, record)
            planned = tuple(int(getattr(index, column)[row]) for column in LENGTHS)
            if (got := _lengths(transform, record)) != planned:
                reason = f"(tokens, tiles, loss tokens) must be {planned}, got {got}"
                found.fault(
                    _fault(job, source.location, row=row, key=key, kind="length", reason=reason)
                )
        except (ShardError, SampleError) as error:
            kind = "sample" if key else "row"
            found.fault(
                _fault(job, source.location, row=row, key=key, kind=kind, reason=str(error))
            )


def _fault(job: Job, root: Path | str, *, kind: str, reason: str, **where: Any) -> Fault:
    return Fault(
        set_name=job.set_name, file=f"{root}/{job.info.name}", kind=kind, reason=reason, **where
    )


def _decode(transform: Any, record: Record) -> None:
    try:
        transform(record, sample_generator(0, 0, record.row))
    except SampleError:
        raise
    except Exception as error:  # whatever a damaged record makes of it
        raise SampleError(f"{type(error).__name__}: {error}") from error


def _lengths(transform: Any, record: Record) -> tuple[int, int, int]:
    if transform is not None:
        found: tuple[int, int, int] = transform.lengths(record)
        return found
    loss = int(np.count_nonzero(record.labels[1:] != IGNORE_INDEX))
    return len(record.input_ids), int(record.image_num_tiles.sum()), loss


@lru_cache(8)
def _transform(settings: str) -> Any:
    """Make the transform of a set; None where its settings are for another."""
    try:
        return transform_from_settings(json.loads(settings))
    except ConfigError:
        return None
