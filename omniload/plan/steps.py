"""Sizes of the steps of a plan, and how the load of each is spread over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.costs import CostModel
from omniload.index import LengthIndex
from omniload.types import Groups

__all__ = ["Loads", "SlotSums", "StepFigures", "Totals", "join_loads"]

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_COLUMNS = ("num_groups", "num_samples", "num_tokens", "num_tiles", "num_loss_tokens")


@dataclass(frozen=True, kw_only=True, eq=False)
class Loads:
    """How the load of one resource is spread over the ranks, by step.

    Args:
        least: float64 (n,), the smallest load of a rank, summed over the micro-steps.
        mean: float64 (n,), the mean over the ranks.
        most: float64 (n,), the largest load of a rank, summed over the micro-steps.
        most_micro_step: float64 (n,), the largest load of a rank in each micro-step, summed over
            these: what counts when the ranks meet in each of them.
        dist_step: float64 (n,), dist ratio of the sums over the micro-steps.
        dist_micro_step: float64 (n,), mean over the micro-steps of their dist ratios.
    """

    least: Float64Array
    mean: Float64Array
    most: Float64Array
    most_micro_step: Float64Array
    dist_step: Float64Array
    dist_micro_step: Float64Array

    @classmethod
    def of(cls, slots: npt.ArrayLike) -> Loads:
        """Measure loads.

        Args:
            slots: (num_steps, accumulation, dp_world_size).
        """
        array = np.asarray(slots, np.float64)
        ranks, peaks = array.sum(axis=1), array.max(axis=2)
        mean, most = ranks.mean(axis=1), ranks.max(axis=1)
        return cls(
            least=ranks.min(axis=1),
            mean=mean,
            most=most,
            most_micro_step=peaks.sum(axis=1),
            dist_step=_dist(mean, most),
            dist_micro_step=_dist(array.mean(axis=2), peaks).mean(axis=1),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFigures:
    """The figures of a plan by step.

    Args:
        num_groups: int64 (num_steps,), groups; the other slots are fillers.
        num_samples: int64 (num_steps,), samples.
        num_tokens: int64 (num_steps,), tokens.
        num_tiles: int64 (num_steps,), tiles.
        num_loss_tokens: int64 (num_steps,), tokens that give loss.
        measured: int64 (n,), rising, the steps whose loads were measured.
        tiles: loads of the measured steps, tiles.
        tokens: loads of the measured steps, tokens.
        time: loads of the measured steps, estimated time.
    """

    num_groups: Int64Array
    num_samples: Int64Array
    num_tokens: Int64Array
    num_tiles: Int64Array
    num_loss_tokens: Int64Array
    measured: Int64Array
    tiles: Loads
    tokens: Loads
    time: Loads


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotSums:
    """Sizes of each of a run of groups; all 0 in a filler slot.

    Args:
        samples: int64 (num_slots,).
        tokens: int64 (num_slots,).
        tiles: int64 (num_slots,).
        loss_tokens: int64 (num_slots,).
        squares: float64 (num_slots,), sum of the squared lengths of the samples.
        longest: int64 (num_slots,), tokens of the longest sample.
    """

    samples: Int64Array
    tokens: Int64Array
    tiles: Int64Array
    loss_tokens: Int64Array
    squares: Float64Array
    longest: Int64Array

    @classmethod
    def of(cls, groups: Groups, index: LengthIndex) -> SlotSums:
        """Measure groups of rows of the index."""
        lengths = index.num_tokens[groups.rows]
        samples = np.diff(groups.offsets)
        filled = samples > 0
        longest = np.zeros(len(groups), np.int64)
        squares = np.zeros(len(groups), np.float64)
        if filled.any():
            starts = groups.offsets[:-1][filled]
            longest[filled] = np.maximum.reduceat(lengths, starts)
            squares[filled] = np.add.reduceat(np.square(lengths, dtype=np.float64), starts)
        return cls(
            samples=samples,
            tokens=groups.sums(index.num_tokens),
            tiles=groups.sums(index.num_tiles),
            loss_tokens=groups.sums(index.num_loss_tokens),
            squares=squares,
            longest=longest,
        )

    def steps(self, numbers: Int64Array, slots: int) -> SlotSums:
        """Take the slots of some of the steps, with `slots` slots in each."""
        places = (numbers[:, None] * slots + np.arange(slots)).ravel()
        return SlotSums(**{field.name: getattr(self, field.name)[places] for field in fields(self)})

    def loads(self, dp_world_size: int, accumulation: int, cost: CostModel) -> dict[str, Loads]:
        """Measure the loads of the steps that these slots make up.

        Returns:
            Loads of "tiles", "tokens" and "time".
        """
        shape = (-1, accumulation, dp_world_size)
        time = cost.cost(self.tiles, self.tokens, self.squares)
        return {
            name: Loads.of(values.reshape(shape))
            for name, values in (("tiles", self.tiles), ("tokens", self.tokens), ("time", time))
        }


class Totals:
    """Sums over a walk through a plan, from its first step to its last.

    Args:
        slots: slots of a step.

    Attributes:
        squares: sum of the squared lengths of the samples, over full steps.
        squares_of_means: the same with each length replaced by the mean of its group.
        squares_of_sizes: sum of the squared numbers of samples of the groups, over full steps.
        padding: sum over the groups of the pad ratio that each would have as a padded batch.
    """

    def __init__(self, slots: int) -> None:
        self.squares = 0.0
        self.squares_of_means = 0.0
        self.squares_of_sizes = 0.0
        self.padding = 0.0
        self._slots = slots
        self._columns: dict[str, list[Int64Array]] = {
            name: [np.zeros(0, np.int64)] for name in _COLUMNS
        }

    def add(self, sums: SlotSums) -> None:
        """Add a run of whole steps."""
        filled = sums.samples > 0
        full = np.repeat(filled.reshape(-1, self._slots).all(axis=1), self._slots)
        tokens, samples = sums.tokens[full].astype(np.float64), sums.samples[full]
        self.squares += float(sums.squares[full].sum())
        self.squares_of_means += float((tokens**2 / samples).sum())
        self.squares_of_sizes += float((samples.astype(np.float64) ** 2).sum())
        places = (sums.longest * sums.samples)[filled]
        self.padding += float((1 - sums.tokens[filled] / places).sum())
        values = (filled, sums.samples, sums.tokens, sums.tiles, sums.loss_tokens)
        for name, column in zip(_COLUMNS, values, strict=True):
            by_step = column.reshape(-1, self._slots).sum(axis=1, dtype=np.int64)
            self._columns[name].append(by_step)

    def by_step(self) -> dict[str, Any]:
        """Return the columns of `StepFigures` that cover all steps."""
        return {name: np.concatenate(parts) for name, parts in self._columns.items()}


def join_loads(parts: Sequence[Loads]) -> Loads:
    """Put the loads of successive runs of steps together."""
    return Loads(
        **{
            field.name: np.concatenate(
                [np.zeros(0), *(getattr(part, field.name) for part in parts)]
            )
            for field in fields(Loads)
        }
    )


def _dist(mean: Float64Array, most: Float64Array) -> Float64Array:
    # 1 - mean / max is the dist ratio; where there is no load nobody waits
    return np.asarray(1 - np.divide(mean, most, out=np.ones_like(mean), where=most > 0))
