"""What happens to samples that can't be used: how many are borne, and where they are listed."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniload._checks import MAX_INT63, check_count
from omniload.errors import ConfigError, SampleError
from omniload.loader.exclude import Exclude
from omniload.types import SkippedSample
from omniload.world import World

__all__ = ["BadSampleOptions", "BadSamples"]

_log = logging.getLogger(__name__)

#: Bad samples that the error lists, and that are logged one by one.
_LISTED = 5


@dataclass(frozen=True, kw_only=True)
class BadSampleOptions:
    """The arguments of `omniload.DataLoader` of the same names.

    Raises:
        ConfigError: a value is wrong.
    """

    on_bad_sample: str = "raise"
    max_bad_samples: int | float = 0.01
    quarantine: str | os.PathLike[str] | None = None
    exclude: Exclude = None

    def __post_init__(self) -> None:
        if not isinstance(self.on_bad_sample, str) or self.on_bad_sample not in ("raise", "skip"):
            raise ConfigError(
                f"on_bad_sample must be 'raise' or 'skip', got {self.on_bad_sample!r}."
            )
        most = self.max_bad_samples
        if isinstance(most, float):
            if not 0 <= most <= 1:
                raise ConfigError(
                    f"max_bad_samples must be a count or a share from 0.0 to 1.0, got {most!r}."
                )
        else:
            check_count("max_bad_samples", most, most=MAX_INT63)
        if self.quarantine is None:
            return
        if not isinstance(self.quarantine, (str, os.PathLike)):
            raise ConfigError(
                f"quarantine must be the path of a file, got {type(self.quarantine).__name__}."
            )
        if not self.skips:
            raise ConfigError(
                "quarantine lists the samples that were skipped: expected on_bad_sample='skip', "
                "got 'raise'."
            )
        exclude = self.exclude if isinstance(self.exclude, (str, os.PathLike)) else None
        if exclude is not None and Path(exclude).absolute() == Path(self.quarantine).absolute():
            raise ConfigError(
                "exclude must be another file than quarantine, which grows during the run so that "
                f"no state would fit it any more: got {str(self.quarantine)!r} for both."
            )

    @property
    def skips(self) -> bool:
        """Whether bad samples are skipped."""
        return self.on_bad_sample == "skip"

    def limit(self, *, num_rows: int, dp_world_size: int) -> int:
        """Say how many bad samples a rank may have in an epoch.

        Args:
            num_rows: rows of the epoch, for all ranks.
            dp_world_size: data-parallel ranks.
        """
        if isinstance(self.max_bad_samples, float):
            return max(1, int(self.max_bad_samples * num_rows / dp_world_size))
        return int(self.max_bad_samples)


class BadSamples:
    """Counts the bad samples of this rank in an epoch, and lists them in the quarantine file.

    Args:
        options: what is borne.
        world: who this rank is.
        data: fingerprint of the data, so that a later run knows the rows again.

    Raises:
        ConfigError: the quarantine file can't be written.
    """

    def __init__(self, options: BadSampleOptions, *, world: World, data: str) -> None:
        self._options = options
        self._world = world
        self._data = data
        self._count = 0
        self._last: deque[SkippedSample] = deque(maxlen=_LISTED)
        self._path: Path | None = None
        # ranks that share a batch would list each of its samples several times
        if options.quarantine is not None and world.replica_rank == 0:
            self._path = Path(options.quarantine).absolute()
            _append(self._path, b"")

    def start_epoch(self) -> None:
        """Count from 0 again."""
        self._count = 0
        self._last.clear()

    def add(self, samples: Sequence[SkippedSample], *, epoch: int, num_rows: int) -> None:
        """Note the samples that a batch leaves out.

        Args:
            samples: what was skipped.
            epoch: the epoch.
            num_rows: rows of the epoch, for all ranks.

        Raises:
            SampleError: there are more than `max_bad_samples`.
        """
        if not samples:
            return
        lines = b"".join(self._line(sample, epoch) for sample in samples)
        if self._path is not None:
            _append(self._path, lines)
        for sample in samples:
            self._count += 1
            self._last.append(sample)
            if self._count <= _LISTED:
                more = "; more are not logged" if self._count == _LISTED else ""
                _log.warning("a sample is skipped: %s%s", _shown(sample), more)
        limit = self._options.limit(num_rows=num_rows, dp_world_size=self._world.dp_world_size)
        if self._count > limit:
            listed = "; ".join(_shown(sample) for sample in self._last)
            raise SampleError(
                f"at most {limit} samples may be bad in an epoch on one rank (max_bad_samples="
                f"{self._options.max_bad_samples!r}), got {self._count} on rank "
                f"{self._world.dp_rank} in epoch {epoch}; the last: {listed}. Mend the data, leave "
                "these rows out with exclude=, or raise max_bad_samples."
            )

    def _line(self, sample: SkippedSample, epoch: int) -> bytes:
        facts: dict[str, Any] = {
            "source": sample.source,
            "shard": sample.shard,
            "shard_row": sample.shard_row,
            "key": sample.key,
            "kind": sample.kind,
            "reason": sample.reason,
            "row": sample.row,
            "epoch": epoch,
            "rank": self._world.dp_rank,
            "data": self._data,
        }
        return json.dumps(facts).encode() + b"\n"


def _append(path: Path, lines: bytes) -> None:
    """Add whole lines: one write to a file opened for appending, so ranks don't mix them.

    A line that was cut off when a run was killed is ended first.
    """
    # a pipe that nobody reads is an error, and not waited for
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if not lines and size and os.pread(descriptor, 1, size - 1) != b"\n":
                lines = b"\n"
            while lines:  # on a disk that is full a part may be written, and then an error comes
                lines = lines[os.write(descriptor, lines) :]
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: no path at all
        raise ConfigError(
            f"the quarantine file {path} can't be written: "
            f"{getattr(error, 'strerror', None) or error}."
        ) from None


def _shown(sample: SkippedSample) -> str:
    return f"row {sample.row} ({sample.kind}): {sample.reason}"
