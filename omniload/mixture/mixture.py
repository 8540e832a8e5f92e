"""Several data sets as one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.mixture.agree import mixed_settings
from omniload.mixture.figures import SetFigures, measure_sets
from omniload.mixture.rows import MixtureRows, OpenSet, set_seed
from omniload.mixture.sets import MixtureSet, Pace, open_set, paces
from omniload.shards import rows_per_window
from omniload.source import RowSource
from omniload.types import Record

__all__ = ["Mixture"]

_VERSION = 1  # raised when the same sets and settings give other rows
_EPOCHS_KEPT = 2  # the one at hand, and the next, which is planned ahead


class Mixture:
    """Several data sets as one; a `RowSource` for `omniload.DataLoader`.

    Every window of rows that is planned together has each set's share of the epoch to within one
    row (see `omniload.plan.windows`); inside it rows are shuffled as those of one set are.

    With `repeat`, an epoch goes through each set so many times. With `weight`, an epoch has
    `epoch_rows` rows, of each set its share to within one row; without `epoch_rows` it ends where
    the first set would run out, so that no row comes twice. What an epoch leaves out of a set comes
    in the next ones: each set is walked through in an order of its own, epoch after epoch, and no
    row comes again before all others came.

    It pickles and forks as its sets do. The rows of an epoch need no list: a bit for each row of a
    set of which only a part is used, and a copy of the lengths in the process that plans.

    Args:
        sets: the sets.
        seed: of the orders in which epochs walk through sets.
        epoch_rows: with weights, rows of an epoch.
        location: what it is called in messages; None: the names of the sets.

    Raises:
        ConfigError: a wrong setting; sets whose tokens or tiles can't lie in one batch; a set
            without rows.
        ShardError: a set is missing or damaged.
    """

    def __init__(
        self,
        sets: Sequence[MixtureSet],
        *,
        seed: int = 0,
        epoch_rows: int | None = None,
        location: str | None = None,
    ) -> None:
        entries = _checked_sets(sets)
        for name, value, least in (("seed", seed, 0), ("epoch_rows", epoch_rows, 1)):
            if value is None and name == "epoch_rows":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
                raise ConfigError(
                    f"{name} of a mixture must be an integer of at least {least}, got {value!r}."
                )
        sources = [open_set(entry) for entry in entries]
        for entry, source in zip(entries, sources, strict=True):
            if len(source) == 0:
                raise ConfigError(
                    f"a set of a mixture must have rows: {entry.title} ({source.location}) has "
                    "none. Leave it out."
                )
        sizes = [len(source) for source in sources]
        self._setup(
            names=_names(entries),
            sources=sources,
            walks=paces(entries, sizes, epoch_rows=epoch_rows),
            seed=int(seed),
            location=location,
        )

    def _setup(
        self,
        *,
        names: Sequence[str],
        sources: Sequence[RowSource],
        walks: Sequence[Pace],
        seed: int,
        location: str | None,
    ) -> None:
        self._names, self._walks, self._seed = tuple(names), tuple(walks), seed
        self._given_location = location
        self._sets = tuple(
            OpenSet(name=name, source=source, seed=set_seed(seed, number))
            for number, (name, source) in enumerate(zip(names, sources, strict=True))
        )
        self._settings = mixed_settings(self._names, sources)
        self._is_fixed = all(walk.is_fixed for walk in walks)
        self._kept: dict[int, MixtureRows] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        sources = tuple(one.source for one in self._sets)
        return (_again, (self._names, sources, self._walks, self._seed, self._given_location))

    def __len__(self) -> int:
        spans = [walk.span(0) for walk in self._walks]
        return sum(end - begin for begin, end in spans)

    @property
    def index(self) -> LengthIndex:
        """Lengths of all rows of epoch 0."""
        return self._first.index

    @property
    def settings(self) -> Mapping[str, Any]:
        """Encoder, tiling and limits of the sets; plain JSON."""
        return self._settings

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over the sets, their repeats or weights, and the seed.

        Names, and where the sets lie, are no matter.
        """
        digest = hashlib.blake2b(f"mixture {_VERSION} {self._seed}\n".encode(), digest_size=16)
        for one, walk in zip(self._sets, self._walks, strict=True):
            digest.update(f"{one.source.fingerprint} {walk.rate} {walk.most}\n".encode())
        return digest.hexdigest()

    @property
    def sources(self) -> Mapping[str, int]:
        """Name of each data set -> rows that are stored; for those of an epoch see `figures`."""
        return self._first.sources

    @property
    def location(self) -> str:
        """Path of the YAML file, or the names of the sets, for messages."""
        return self._given_location or f"mixture of {', '.join(self._names)}"

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the shards, `set/shard`, set after set."""
        return self._first.shard_names

    @property
    def set_names(self) -> tuple[str, ...]:
        """Names of the sets."""
        return self._names

    @property
    def sets(self) -> Mapping[str, RowSource]:
        """The sets, by name."""
        return {one.name: one.source for one in self._sets}

    @property
    def set_starts(self) -> npt.NDArray[np.int64]:
        """First row of each set in epoch 0, then the number of rows: int64 (num_sets + 1,)."""
        return self._first.set_starts

    @property
    def shard_starts(self) -> npt.NDArray[np.int64]:
        """First rows of runs that lie in one shard each, then the number of rows: int64 (n,)."""
        return self._first.shard_starts

    @property
    def wants_prefetch(self) -> bool:
        """Whether one of the sets is far away."""
        return self._first.wants_prefetch

    def source_of(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Say which sets rows of epoch 0 are of: int64 (n,), places in `set_names`.

        For another epoch ask `at_epoch(epoch)`, which has the same method.
        """
        return self._first.source_of(rows)

    def figures(self, epoch: int = 0) -> tuple[SetFigures, ...]:
        """Say what each set gives to an epoch: rows, tokens, tiles, shares, passes."""
        return measure_sets(self._rows(epoch), self._sets, self._walks, epoch=epoch)

    def at_epoch(self, epoch: int) -> RowSource:
        """Give the rows of an epoch; the mixture itself where all epochs have the same.

        Raises:
            ConfigError: no set has rows left (`MixtureSet.epochs`).
        """
        return self if self._is_fixed else self._rows(epoch)

    def origin(self, row: int) -> tuple[int, int]:
        """Find a row of epoch 0: number of its set, and the row there.

        Raises:
            ConfigError: no such row.
        """
        return self._first.origin(row)

    def locate(self, row: int) -> tuple[int, int]:
        """Find a row of epoch 0: number of its shard, and row inside that shard.

        Raises:
            ConfigError: no such row.
        """
        return self._first.locate(row)

    def read(self, row: int) -> Record:
        """Read one row of epoch 0; `record.source` is the name of its set.

        Raises:
            ConfigError: no such row.
            ShardError: as of the set.
            SampleError: as of the set.
        """
        return self._first.read(row)

    def read_tokens(self, row: int) -> Record:
        """Read one row of epoch 0 as `read` does, without image files where the set can."""
        return self._first.read_tokens(row)

    def key_of(self, row: int) -> str | None:
        """Say the key of a row of epoch 0 in its set; None: it would have to be read."""
        return self._first.key_of(row)

    def lengths_of(self, row: int) -> tuple[int, int, int]:
        """Say how long a row of epoch 0 is: (num_tokens, num_tiles, num_loss_tokens)."""
        return self._first.lengths_of(row)

    def prefetch(self, shards: Sequence[int]) -> None:
        """Hint that these shards are read next, in this order; returns at once."""
        self._first.prefetch(shards)

    def rows_per_window(self, default: int) -> int:
        """Choose how many rows to plan together, so that their shards fit the caches.

        Args:
            default: the planner's choice, and the most that is returned.
        """
        total = sum(walk.rate for walk in self._walks)
        # sets may share one cache: what a window takes of each adds up
        used = sum(
            float(walk.rate / total) / fits
            for one, walk in zip(self._sets, self._walks, strict=True)
            if (fits := rows_per_window(one.source, default)) < default
        )
        return min(default, max(1, int(1 / used))) if used else default

    @property
    def _first(self) -> MixtureRows:
        return self._rows(0)

    def _rows(self, epoch: int) -> MixtureRows:
        found = self._kept.get(0 if self._is_fixed else epoch)
        if found is not None:
            return found
        spans = [walk.span(epoch) for walk in self._walks]
        if not any(begin < end for begin, end in spans):
            raise ConfigError(
                f"epoch {epoch} of {self.location} has no rows: all sets were gone through as "
                "often as their epochs say. Train for fewer epochs, or leave epochs out."
            )
        found = MixtureRows(
            self._sets,
            spans,
            settings=self._settings,
            fingerprint=self.fingerprint,
            location=self.location,
        )
        # another thread may plan the next epoch: one step each, and no lock that a fork could hold
        kept = dict(list(self._kept.items())[1 - _EPOCHS_KEPT :])
        self._kept = {**kept, 0 if self._is_fixed else epoch: found}
        return found


def _again(
    names: Sequence[str],
    sources: Sequence[RowSource],
    walks: Sequence[Pace],
    seed: int,
    location: str | None,
) -> Mixture:
    made = Mixture.__new__(Mixture)
    made._setup(names=names, sources=sources, walks=walks, seed=seed, location=location)
    return made


def _checked_sets(sets: Sequence[MixtureSet]) -> list[MixtureSet]:
    try:
        entries = list(sets)
    except TypeError:
        entries = []
    if not entries or not all(isinstance(entry, MixtureSet) for entry in entries):
        raise ConfigError(
            f"sets must be a list of one or more omniload.mixture.MixtureSet, got {sets!r:.200}."
        )
    return entries


def _names(entries: Sequence[MixtureSet]) -> list[str]:
    """Name the sets: as the user says, else by their paths, with a number where those are equal."""
    given = [entry.name for entry in entries if entry.name is not None]
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        raise ConfigError(f"names of sets must differ, got {twice} more than once.")
    used, names = set(given), []
    for entry in entries:
        name = title = entry.title
        number = 2
        while entry.name is None and name in used:
            name, number = f"{title}-{number}", number + 1
        used.add(name)
        names.append(name)
    return names
