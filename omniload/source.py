"""What the loader reads from: rows in any order, with their lengths known beforehand."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from omniload.index import LengthIndex
from omniload.types import Record

__all__ = ["RowSource", "key_of", "lengths_of", "read_tokens", "shard_starts"]


@runtime_checkable
class RowSource(Protocol):
    """Rows that can be read in any order: shards, indexed tars, a mixture of sets.

    It can be pickled and forked: what travels is where the data lies, and files are opened on first
    use in each process. Threads may share it.
    """

    @property
    def index(self) -> LengthIndex:
        """Lengths of all rows."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """How the rows were made: encoder, tiling, limits; plain JSON."""

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all bytes and settings; where the data lies is no matter."""

    @property
    def sources(self) -> Mapping[str, int]:
        """Name of each data set -> rows it has here."""

    @property
    def location(self) -> str:
        """Path or URL, for messages."""

    @property
    def shard_names(self) -> Sequence[str]:
        """Names of the shards, in row order."""

    def __len__(self) -> int:
        """Rows."""

    def locate(self, row: int) -> tuple[int, int]:
        """Find a row: number of its shard, and row inside that shard.

        Raises:
            ConfigError: no such row.
        """

    def read(self, row: int) -> Record:
        """Read one row; `record.row` is that number.

        Raises:
            ConfigError: no such row.
            ShardError: the shard can't be had, or is damaged.
            SampleError: this row alone can't be used.
        """

    def at_epoch(self, epoch: int) -> RowSource:
        """Give the rows of an epoch; the source itself where all epochs have the same rows."""

    def prefetch(self, shards: Sequence[int]) -> None:
        """Hint that these shards are read next, in this order; returns at once."""


def lengths_of(source: RowSource, row: int) -> tuple[int, int, int]:
    """Say how long a row is: (num_tokens, num_tiles, num_loss_tokens).

    Workers ask this, one row at a time: a mixture then needs no index of its own in them.

    Args:
        source: any; one with a method `lengths_of` is asked by that.
        row: a row of it.
    """
    own = getattr(source, "lengths_of", None)
    if own is not None:
        found: tuple[int, int, int] = own(row)
        return found
    index = source.index
    return int(index.num_tokens[row]), int(index.num_tiles[row]), int(index.num_loss_tokens[row])


def key_of(source: RowSource, row: int) -> str | None:
    """Say the key of a row, where that takes no image, no text and no download.

    Args:
        source: any; one with a method `key_of` is asked by that.
        row: a row of it.

    Returns:
        `Record.key`; None: the row would have to be read.

    Raises:
        ConfigError: no such row.
        ShardError: what would say it is missing or damaged.
    """
    own = getattr(source, "key_of", None)
    found: str | None = None if own is None else own(row)
    return found


def read_tokens(source: RowSource, row: int) -> Record:
    """Read a row for its tokens and labels; what else it has may be left out.

    Args:
        source: any; one with a method `read_tokens` reads no image file and no messages, others the
            whole row.
        row: a row of it.

    Raises:
        as `RowSource.read`.
    """
    own = getattr(source, "read_tokens", source.read)
    record: Record = own(row)
    return record


def shard_starts(source: RowSource) -> npt.NDArray[np.int64]:
    """Say where shards begin: int64 (n,), first row of each, then the rows in all.

    Args:
        source: one whose rows lie in the order of its shards; or one with an attribute
            `shard_starts`, like a mixture, which is what this returns.

    Cost: 10 us a shard.
    """
    own = getattr(source, "shard_starts", None)
    if own is not None:
        return np.asarray(own, np.int64)
    rows, starts = range(len(source)), [0]
    for shard in range(1, len(source.shard_names)):
        starts.append(
            bisect.bisect_left(rows, shard, lo=starts[-1], key=lambda row: source.locate(row)[0])
        )
    return np.array([*starts, len(rows)], np.int64)
