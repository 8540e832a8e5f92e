"""Simulates plans near the best one by formula, and looks for the quickest around them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omniload.pipeline._clock import run_steps
from omniload.pipeline.predict import StepModel
from omniload.pipeline.schedules import make_program
from omniload.pipeline.stage_costs import StageCosts

__all__ = ["StepTimer"]

Int64Array = npt.NDArray[np.int64]
Parts = tuple[int, ...]

_STARTS = 4  # plans around which others are simulated
_MOST_SIMULATED = 4000  # plans; some seconds with 16 stages


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTimer:
    """Simulated step times of cuts, each with as little recomputed as fits.

    What is known of a stage is kept, since plans that are tried share most of theirs.

    Args:
        costs: costs of all stages.
        limits: int64 (num_stages,), bytes that each stage may hold.
        possible: bool (num_stages, num_layers + 1, num_layers + 1), the stages that may be.
        model: times of the micro-batches.
        places: int64 (num_steps, num_ranks, num_micro_batches), steps to simulate.
    """

    costs: StageCosts
    limits: Int64Array
    possible: npt.NDArray[np.bool_]
    model: StepModel
    places: Int64Array

    def quickest(self, plans: Iterable[Parts]) -> tuple[float, Parts]:
        """Simulate plans and those around the quickest of them, and return the quickest of all.

        Args:
            plans: bounds of the stages, which are possible.

        Returns:
            Mean time of a step, nanoseconds, and the bounds.
        """
        known: dict[Parts, float] = {}
        starts = sorted((self._once(parts, known), parts) for parts in plans)[:_STARTS]
        return min(self._climb(start, known) for start in starts)

    def step_ns(self, parts: Sequence[int]) -> float:
        """Simulate the steps, and return their mean time in nanoseconds."""
        steps, ranks, micro_batches = self.places.shape
        stages = [self._stage(at, *pair) for at, pair in enumerate(itertools.pairwise(parts))]
        cuts = [self._cut(bound) for bound in parts[1:-1]]
        between = np.stack(cuts, axis=1) if cuts else np.zeros((steps * ranks, 0, 0), np.int64)
        program = make_program("deepspeed", len(stages), micro_batches)
        done = run_steps(
            program.kinds,
            program.micro_batches,
            np.stack([forward for forward, _ in stages], axis=1),
            np.stack([backward for _, backward in stages], axis=1),
            between,
            between,
        )
        return float(done.reshape(steps, ranks).max(axis=1).mean())

    def _climb(self, best: tuple[float, Parts], known: dict[Parts, float]) -> tuple[float, Parts]:
        """Take the first move that helps, time and again, until none does."""
        moves = _moves(self.costs.num_stages)
        at = since = 0
        while since < len(moves) and len(known) < _MOST_SIMULATED:
            low, high, move = moves[at]
            at, since = (at + 1) % len(moves), since + 1
            moved = list(best[1])
            for bound in range(low, high + 1):
                moved[bound] += move
            parts = tuple(moved)
            if self._may_be(parts):
                found = self._once(parts, known)
                if found < best[0]:
                    best, since = (found, parts), 0
        return best

    def _once(self, parts: Parts, known: dict[Parts, float]) -> float:
        if parts not in known:
            known[parts] = self.step_ns(parts)
        return known[parts]

    def _may_be(self, parts: Parts) -> bool:
        pairs = itertools.pairwise(parts)
        return all(low < high for low, high in itertools.pairwise(parts)) and all(
            self.possible[stage, low, high] for stage, (low, high) in enumerate(pairs)
        )

    @cached_property
    def _known_stages(self) -> dict[tuple[int, int, int], tuple[Int64Array, Int64Array]]:
        return {}

    @cached_property
    def _known_cuts(self) -> dict[int, Int64Array]:
        return {}

    def _stage(self, stage: int, low: int, high: int) -> tuple[Int64Array, Int64Array]:
        key = (stage, low, high)
        if key not in self._known_stages:
            chosen = self.costs.best_recompute(low, high, stage, int(self.limits[stage]))
            assert chosen is not None  # only stages that fit are possible
            forward, backward = self.model.stage(low, high, chosen)
            self._known_stages[key] = self._dealt(forward), self._dealt(backward)
        return self._known_stages[key]

    def _cut(self, bound: int) -> Int64Array:
        if bound not in self._known_cuts:
            self._known_cuts[bound] = self._dealt(self.model.transfer[bound - 1])
        return self._known_cuts[bound]

    def _dealt(self, values: Int64Array) -> Int64Array:
        """Put one value a micro-batch into pipelines, (num_steps * num_ranks, micro-batches)."""
        return values[self.places.reshape(-1, self.places.shape[2])]


def _moves(num_stages: int) -> list[tuple[int, int, int]]:
    """List moves: the bounds from one to another by so many layers; single ones first."""
    inner = range(1, num_stages)
    single = [(at, at, move) for at in inner for move in (-1, 1, -2, 2)]
    runs = [(low, high, move) for low in inner for high in inner[low:] for move in (-1, 1)]
    return single + runs
