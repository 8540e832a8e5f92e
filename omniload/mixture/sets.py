"""What a user says of each set of a mixture, and how many of its rows an epoch has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import PurePosixPath
from typing import Any

from omniload.cache import Cache, Storage
from omniload.errors import ConfigError
from omniload.source import RowSource
from omniload.tars import open_folder

__all__ = ["MixtureSet", "Pace", "open_set", "paces"]

#: a number as 0.3333333333333333 is taken for the fraction 1/3
_LARGEST_DENOMINATOR = 1_000_000
_LARGEST = 1_000_000
_LONGEST_NAME = 100

Number = int | float | str | Fraction


@dataclass(frozen=True, kw_only=True, eq=False)
class MixtureSet:
    """One set of a mixture, and how much of it there is.

    Give `repeat` or `weight`; without both, `repeat` is 1. In one mixture all sets have weights, or
    none has.

    Args:
        source: folder of shards or of indexed tars, URL of shards, or an opened set of rows.
        name: what it is called in figures, messages and `Record.source`; None: the last part of its
            path. Names of a mixture must differ.
        repeat: times that an epoch goes through it. 2: each row comes twice, as two rows of the
            mixture, so a random transform draws twice. 0.5: half of the rows in one epoch, the
            other half in the next. "1/3" is exact.
        weight: share of the rows of an epoch, against the weights of the other sets. Rows, not
            tokens: `Mixture.figures` shows both.
        epochs: times that it is gone through in all, over as many epochs of the mixture as that
            takes; then it has no rows any more. Only with `repeat`. None: without end.
        cache: for a URL, see `omniload.shards.open_shards`.
        storage: likewise.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    source: str | os.PathLike[str] | RowSource
    name: str | None = None
    repeat: Number | None = None
    weight: Number | None = None
    epochs: Number | None = None
    cache: Cache | None = None
    storage: Storage | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.source, (str, os.PathLike, RowSource)):
            raise ConfigError(
                "source of a set must be a path, a URL or an opened set of rows, got "
                f"{type(self.source).__name__}."
            )
        name = self.name
        if name is not None and not (isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME):
            raise ConfigError(
                f"name of a set must be a str of 1 to {_LONGEST_NAME} characters, got {name!r:.80}."
            )
        if self.repeat is not None and self.weight is not None:
            raise ConfigError(
                f"a set has either repeat or weight: got repeat={self.repeat!r} and "
                f"weight={self.weight!r} ({self.title})."
            )
        if self.epochs is not None and self.weight is not None:
            raise ConfigError(
                f"epochs goes with repeat: got weight={self.weight!r} and epochs={self.epochs!r} "
                f"({self.title})."
            )
        for field in ("repeat", "weight", "epochs"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, _fraction(field, value, self.title))
        if (self.cache, self.storage) != (None, None) and not isinstance(self.source, str):
            raise ConfigError(
                f"cache and storage of a set are for its URL, got source={self.source!r:.80}."
            )

    @property
    def title(self) -> str:
        """Its name, or what serves as one."""
        if self.name is not None:
            return self.name
        source = self.source
        path = os.fspath(source) if isinstance(source, (str, os.PathLike)) else source.location
        return PurePosixPath(path.partition("?")[0].replace("\\", "/")).name or "set"


def _fraction(name: str, value: Any, title: str) -> Fraction:
    try:
        if isinstance(value, bool):
            raise TypeError
        found = Fraction(value)
    except (TypeError, ValueError, ZeroDivisionError, OverflowError):
        raise ConfigError(
            f"{name} of a set must be a number, got {value!r:.80} ({title})."
        ) from None
    found = found.limit_denominator(_LARGEST_DENOMINATOR)
    if not 0 < found <= _LARGEST:
        raise ConfigError(
            f"{name} of a set must be above 0 and at most {_LARGEST}, got {value!r:.80} ({title}). "
            "Leave a set out that gives no rows."
        )
    return found


def open_set(entry: MixtureSet) -> RowSource:
    """Open the data of a set.

    Raises:
        ConfigError: it is a mixture whose rows differ from epoch to epoch; a URL without a cache.
        ShardError: no data there.
    """
    source = entry.source
    if not isinstance(source, (str, os.PathLike)):
        if source.at_epoch(0) is not source:
            raise ConfigError(
                f"a set must have the same rows in all epochs ({entry.title}): list the sets of "
                "the inner mixture in the outer one."
            )
        return source
    if os.fspath(source).endswith((".yaml", ".yml")):
        raise ConfigError(
            f"source of a set must be a folder or URL, got the mixture {os.fspath(source)!r:.200}: "
            "list its sets in this one."
        )
    return open_folder(source, cache=entry.cache, storage=entry.storage)


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How epochs walk through a set.

    Args:
        num_rows: rows of the set.
        rate: rows that each epoch takes; not always a whole number.
        most: rows that all epochs together take; None: no end.
    """

    num_rows: int
    rate: Fraction
    most: int | None = None

    def span(self, epoch: int) -> tuple[int, int]:
        """Say what an epoch takes: from where to where, counted from the beginning of epoch 0."""
        begin, end = (int(number * self.rate) for number in (epoch, epoch + 1))
        return (begin, end) if self.most is None else (min(begin, self.most), min(end, self.most))

    @property
    def is_fixed(self) -> bool:
        """Whether all epochs have the same rows."""
        return self.most is None and self.rate % self.num_rows == 0


def paces(
    entries: Sequence[MixtureSet], sizes: Sequence[int], *, epoch_rows: int | None
) -> list[Pace]:
    """Say how epochs walk through each set.

    Args:
        entries: the sets.
        sizes: rows of each.
        epoch_rows: with weights, rows of an epoch; None: as many as there are until the first set
            would run out.

    Raises:
        ConfigError: weights of some sets only, `epoch_rows` without weights, a set that would get
            no row.
    """
    weights = [Fraction(entry.weight) for entry in entries if entry.weight is not None]
    if not weights:
        if epoch_rows is not None:
            raise ConfigError(
                f"epoch_rows goes with weights: got epoch_rows={epoch_rows} and no weight. With "
                "repeat, an epoch has as many rows as that gives."
            )
        return [_repeated(entry, size) for entry, size in zip(entries, sizes, strict=True)]
    if len(weights) < len(entries):
        without = [entry.title for entry in entries if entry.weight is None]
        raise ConfigError(
            f"all sets of a mixture must have a weight, or none: {without} have none, "
            f"{len(weights)} have one."
        )
    shares = [weight / sum(weights) for weight in weights]
    if epoch_rows is None:
        epoch_rows = int(min(size / share for size, share in zip(sizes, shares, strict=True)))
    counts = _apportion(epoch_rows, shares)
    for entry, count in zip(entries, counts, strict=True):
        if count == 0:
            raise ConfigError(
                f"each set must get a row in an epoch: {entry.title} gets none of {epoch_rows} "
                f"rows with weight {entry.weight}. Raise epoch_rows or the weight."
            )
    return [
        Pace(num_rows=size, rate=Fraction(count)) for size, count in zip(sizes, counts, strict=True)
    ]


def _repeated(entry: MixtureSet, size: int) -> Pace:
    repeat = Fraction(1 if entry.repeat is None else entry.repeat)
    most = None if entry.epochs is None else int(Fraction(entry.epochs) * size)
    return Pace(num_rows=size, rate=repeat * size, most=most)


def _apportion(total: int, shares: Sequence[Fraction]) -> list[int]:
    """Divide rows by largest remainder: each set within one row of its share."""
    exact = [total * share for share in shares]
    counts = [int(rows) for rows in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts
