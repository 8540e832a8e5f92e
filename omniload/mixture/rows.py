"""The rows of one epoch of a mixture: numbered set after set, each a row of one set."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.mixture.agree import source_name
from omniload.mixture.part import RowPart, choose_rows
from omniload.rng import derive
from omniload.source import RowSource, key_of, read_tokens, shard_starts
from omniload.types import Record

__all__ = ["MixtureRows", "OpenSet"]

Int64Array = npt.NDArray[np.int64]

_COLUMNS = ("num_tokens", "num_tiles", "num_loss_tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSet:
    """A set of a mixture, open.

    Args:
        name: in the mixture; no other set has it.
        source: its rows.
        seed: of the order in which epochs walk through it.
    """

    name: str
    source: RowSource
    seed: int


class MixtureRows:
    """The rows of one epoch of a mixture; a `RowSource`.

    The rows of a set follow one another: all of them, as often as whole times fit, then those of
    the part that is left, rising. What mixes the sets is the plan, which deals the rows of each set
    evenly to its windows; see `set_starts`.

    Args:
        sets: the sets.
        spans: for each, places of its walk that this epoch takes; see `Pace.span`.
        facts: settings, fingerprint and location of the mixture.
    """

    def __init__(
        self,
        sets: Sequence[OpenSet],
        spans: Sequence[tuple[int, int]],
        *,
        settings: Mapping[str, Any],
        fingerprint: str,
        location: str,
    ) -> None:
        self._sets = tuple(sets)
        self._settings, self._fingerprint, self._location = settings, fingerprint, location
        self._sizes = [len(one.source) for one in sets]
        self._copies: list[int] = []
        self._parts: list[RowPart | None] = []
        self._starts = [0]
        for one, size, (begin, end) in zip(sets, self._sizes, spans, strict=True):
            copies, rest = divmod(end - begin, size)
            part = None
            if rest:
                first = begin % size
                part = RowPart(choose_rows(size, first, first + rest, seed=one.seed))
            self._copies.append(copies)
            self._parts.append(part)
            self._starts.append(self._starts[-1] + end - begin)
        counts = [len(one.source.shard_names) for one in sets]
        self._first_shards = [0, *itertools.accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def index(self) -> LengthIndex:
        """Lengths of all rows of this epoch."""
        return LengthIndex(**{name: self._column(name) for name in _COLUMNS})

    @property
    def settings(self) -> Mapping[str, Any]:
        """Encoder, tiling and limits of the sets; plain JSON."""
        return self._settings

    @property
    def fingerprint(self) -> str:
        """That of the mixture, the same in all epochs."""
        return self._fingerprint

    @cached_property
    def sources(self) -> dict[str, int]:
        """Name of each data set -> rows that are stored; for those of an epoch see `figures`."""
        return {
            source_name(one.name, one.source, inner): rows
            for one in self._sets
            for inner, rows in (dict(one.source.sources) or {"": len(one.source)}).items()
        }

    @property
    def location(self) -> str:
        """Path of the YAML file, or the names of the sets, for messages."""
        return self._location

    @cached_property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, `set/shard`, set after set."""
        return tuple(f"{one.name}/{name}" for one in self._sets for name in one.source.shard_names)

    @property
    def set_names(self) -> tuple[str, ...]:
        """Names of the sets."""
        return tuple(one.name for one in self._sets)

    @property
    def set_starts(self) -> Int64Array:
        """First row of each set, then the number of rows: int64 (num_sets + 1,)."""
        return np.array(self._starts, np.int64)

    @cached_property
    def shard_starts(self) -> Int64Array:
        """First rows of runs that lie in one shard each, then the number of rows: int64 (n,)."""
        found = [np.array([len(self)], np.int64)]
        for one, first, size, copies, part in zip(
            self._sets, self._starts, self._sizes, self._copies, self._parts, strict=False
        ):
            starts = shard_starts(one.source)[:-1]
            for copy in range(copies):
                found.append(first + copy * size + starts)
            if part is not None:
                found.append(first + copies * size + part.below(starts))
        return np.unique(np.concatenate(found))

    @property
    def wants_prefetch(self) -> bool:
        """Whether one of the sets is far away."""
        return any("://" in one.source.location for one in self._sets)

    def source_of(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Say which sets rows are of.

        Args:
            rows: integers (n,), rows of this epoch.

        Returns:
            int64 (n,), places in `set_names`.
        """
        return np.searchsorted(self._starts, np.asarray(rows, np.int64), side="right") - 1

    def origin(self, row: int) -> tuple[int, int]:
        """Find a row: number of its set, and the row there.

        Raises:
            ConfigError: no such row.
        """
        if not 0 <= row < len(self):
            raise ConfigError(
                f"row must be between 0 and {len(self) - 1}, got {row} ({self.location})."
            )
        number = bisect.bisect_right(self._starts, row) - 1
        place, size = int(row) - self._starts[number], self._sizes[number]
        part, whole = self._parts[number], self._copies[number] * size
        if part is not None and place >= whole:
            return number, part.row(place - whole)
        return number, place % size

    def locate(self, row: int) -> tuple[int, int]:
        """Find a row: number of its shard in `shard_names`, and row inside that shard.

        Raises:
            ConfigError: no such row.
        """
        number, inner = self.origin(row)
        shard, local = self._sets[number].source.locate(inner)
        return self._first_shards[number] + shard, local

    def read(self, row: int) -> Record:
        """Read one row; `record.source` is the name of its set, and so begins `record.shard`.

        Raises:
            ConfigError: no such row.
            ShardError: as of the set.
            SampleError: as of the set.
        """
        one, inner = self._set_of(row)
        return _as_of(one, one.source.read(inner), row)

    def read_tokens(self, row: int) -> Record:
        """Read one row as `read` does, without image files where the set can."""
        one, inner = self._set_of(row)
        return _as_of(one, read_tokens(one.source, inner), row)

    def key_of(self, row: int) -> str | None:
        """Say the key that a row has in its set; None: it would have to be read."""
        one, inner = self._set_of(row)
        return key_of(one.source, inner)

    def _set_of(self, row: int) -> tuple[OpenSet, int]:
        number, inner = self.origin(row)
        return self._sets[number], inner

    def lengths_of(self, row: int) -> tuple[int, int, int]:
        """Say how long a row is: (num_tokens, num_tiles, num_loss_tokens); makes no index."""
        number, inner = self.origin(row)
        index = self._sets[number].source.index
        return (
            int(index.num_tokens[inner]),
            int(index.num_tiles[inner]),
            int(index.num_loss_tokens[inner]),
        )

    def at_epoch(self, epoch: int) -> MixtureRows:
        """Give the rows of this epoch: they are."""
        del epoch
        return self

    def prefetch(self, shards: Sequence[int]) -> None:
        """Hint that these shards are read next, in this order; returns at once."""
        by_set: dict[int, list[int]] = {}
        for shard in shards:
            number = bisect.bisect_right(self._first_shards, shard) - 1
            by_set.setdefault(number, []).append(shard - self._first_shards[number])
        for number, inner in by_set.items():
            self._sets[number].source.prefetch(inner)

    def _column(self, name: str) -> npt.NDArray[np.int32]:
        pieces = []
        for one, copies, part in zip(self._sets, self._copies, self._parts, strict=True):
            column = getattr(one.source.index, name)
            pieces += [column] * copies
            if part is not None:
                pieces.append(column[part.mask()])
        if len(pieces) == 1:
            return np.asarray(pieces[0])
        return np.concatenate([np.zeros(0, np.int32), *pieces])


def _as_of(one: OpenSet, record: Record, row: int) -> Record:
    """Name a record of a set as the mixture does."""
    return replace(
        record,
        row=int(row),
        source=source_name(one.name, one.source, record.source),
        shard=f"{one.name}/{record.shard}",
    )


def set_seed(seed: int, number: int) -> int:
    """Derive the seed of a set's walk."""
    return derive(seed, number)
