"""Cuts a model into stages and chooses what they recompute, both at once and exactly.

What a stage takes follows from its layers, its place and its memory alone. So a dynamic programme
over places and bounds finds the plan with the least (M - 1) * longest stage + sum of all stages:
the time of M equal micro-batches through a pipeline. The plans near it are then simulated with the
micro-batches as they come, and the quickest one is taken.

AdaPipe (Sun et al., ASPLOS 2024) plans language models so. Here layers are of several kinds, some
of them frozen, and what they cost follows from the packs of the data.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline._cut_search import best_cuts, least_worst, suffixes
from omniload.pipeline._recompute_search import all_stages
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.predict import StepModel, predict, step_places
from omniload.pipeline.refusal import why_no_plan
from omniload.pipeline.rerank import StepTimer
from omniload.pipeline.stage_costs import StageCosts, memory_limits, worst_shape
from omniload.pipeline.table import CostTable, Recompute

__all__ = ["Planner", "plan_pipeline"]

Int64Array = npt.NDArray[np.int64]

_NEVER = 2**62
_NEAR = 0.05  # plans whose value is so much above the best are worth simulating


def plan_pipeline(
    table: CostTable,
    shapes: Shapes,
    *,
    num_stages: int,
    num_micro_batches: int,
    memory_gb: float | Sequence[float] | None = None,
    worst: Shapes | None = None,
    selective: bool = True,
    frozen_stages: bool = True,
    simulated: int = 64,
) -> PipelinePlan:
    """Plan a pipeline: bounds of the stages, and what each layer recomputes.

    Deterministic.

    Args:
        table: what layers cost, which are tied or pinned, and the machine.
        shapes: micro-batches as they come, in the order of a plan of the loader: those of the first
            micro-step of all ranks, then those of the second. One is enough: all are like it.
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of a step on each rank (gradient accumulation steps).
        memory_gb: what a GPU may hold, 1 GB is 1e9 bytes; one number, or one a stage; None: no
            limit. The reserve of the table counts.
        worst: one micro-batch that none passes, for example the full budget; memory is counted as
            if all micro-batches were like it. None: the most tiles, tokens and squared lengths of
            `shapes`, each by itself.
        selective: use choices that recompute a part of a layer, where the table has them.
        frozen_stages: stages without a trainable parameter may be; DeepSpeed needs a dummy there.
        simulated: plans near the best that each state of the search keeps, to be simulated; 0: the
            exact plan of the formula is taken as it is.

    Returns:
        The plan, with predictions.

    Raises:
        ConfigError: more stages than layers, pins or limits that no plan keeps; the message says
            what would be needed.
    """
    planner = Planner(
        costs=StageCosts(
            table=table,
            shapes=shapes,
            worst=worst_shape(shapes) if worst is None else worst,
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            selective=selective,
        ),
        memory_gb=memory_gb,
        frozen_stages=frozen_stages,
    )
    return planner.plan(simulated=simulated)


@dataclass(frozen=True, kw_only=True, eq=False)
class Planner:
    """Searches and compares plans of one pipeline.

    Args:
        costs: costs of all stages.
        memory_gb: as for `plan_pipeline`.
        frozen_stages: as for `plan_pipeline`.
    """

    costs: StageCosts
    memory_gb: float | Sequence[float] | None = None
    frozen_stages: bool = True

    def plan(self, *, simulated: int = 64) -> PipelinePlan:
        """Find the best plan; as `plan_pipeline`."""
        found = self.cuts(keep=simulated)[1]
        if simulated == 0:
            return self.predict(found[0], self.recompute(found[0]))
        timer = StepTimer(
            costs=self.costs,
            limits=self.limits,
            possible=self.stage_ns >= 0,
            model=self._model,
            places=self._places,
        )
        _, parts = timer.quickest(map(tuple, found.tolist()))
        return self.predict(parts, self.recompute(parts))

    def cuts(self, *, keep: int = 0) -> tuple[Int64Array, Int64Array]:
        """Find the cuts with the least (M - 1) * longest stage + sum.

        Args:
            keep: plans near the best that each state of the search keeps.

        Returns:
            Values int64 (n,), nanoseconds, rising, and bounds int64 (n, num_stages + 1). The first
            is the exact optimum; the others are near it, and not all that are.

        Raises:
            ConfigError: there is no plan.
        """
        times = self.stage_ns
        longest, total = suffixes(times)
        if total[0, 0] == _NEVER:
            raise ConfigError(why_no_plan(self))
        weight = self.costs.num_micro_batches - 1
        bounds = least_worst(times)[1]
        known = times[np.arange(len(times)), bounds[:-1], bounds[1:]]
        bound = weight * int(known.max()) + int(known.sum())
        values, found = best_cuts(times, longest, total, weight, bound, 0)
        if keep:
            bound = int(values[0] * (1 + _NEAR))
            values, found = best_cuts(times, longest, total, weight, bound, keep)
        return values, found

    def recompute(self, parts: Sequence[int]) -> tuple[Recompute, ...] | None:
        """Choose what each layer recomputes, so that each stage fits and takes the least time.

        Returns:
            The choice of each layer; None: a stage doesn't fit whatever it recomputes.
        """
        chosen: list[Recompute] = []
        for stage, (low, high) in enumerate(itertools.pairwise(parts)):
            limit = int(self.limits[stage])
            found = self.costs.best_recompute(int(low), int(high), stage, limit)
            if found is None:
                return None
            chosen += found
        return tuple(chosen)

    def predict(self, parts: Sequence[int], recompute: Sequence[Recompute] | None) -> PipelinePlan:
        """Make a plan of bounds and choices; None: everything is recomputed."""
        chosen = self.costs.table.choices(1) if recompute is None else recompute
        return predict(
            self.costs,
            parts,
            chosen,
            memory_gb=self.memory_gb,
            model=self._model,
            places=self._places,
        )

    @cached_property
    def feasible(self) -> bool:
        """Whether there is a plan at all."""
        return bool(suffixes(self.stage_ns)[1][0, 0] < _NEVER)

    @cached_property
    def limits(self) -> Int64Array:
        """int64 (num_stages,), bytes that each stage may hold."""
        return memory_limits(self.memory_gb, self.costs.num_stages)

    @cached_property
    def stage_ns(self) -> Int64Array:
        """int64 (num_stages, num_layers + 1, num_layers + 1): time of every stage; -1: can't be."""
        costs, trades = self.costs, self.costs.trades
        return all_stages(
            costs.class_ends,
            trades.starts,
            trades.kept,
            trades.ns,
            trades.working,
            costs.work_ns,
            costs.cut_ns,
            costs.static_bytes,
            costs.fixed_kept,
            costs.in_flight,
            self.limits,
            self.possible,
            _NEVER,
        )

    @cached_property
    def possible(self) -> npt.NDArray[np.bool_]:
        """Stages that pins and frozen layers allow, memory left aside.

        bool (num_stages, num_layers + 1, num_layers + 1).
        """
        table, num_stages = self.costs.table, self.costs.num_stages
        layers = np.arange(table.num_layers + 1)
        low, high = layers[:, np.newaxis], layers[np.newaxis, :]
        stages = np.arange(num_stages)[:, np.newaxis, np.newaxis]
        left = num_stages - 1 - stages  # stages behind, each with a layer of its own
        found = (low < high) & (low >= stages) & (high <= table.num_layers - left)
        found &= (stages > 0) | (low == 0)
        found &= (left > 0) | (high == table.num_layers)
        if not self.frozen_stages:
            trained = np.concatenate([[0], np.cumsum(table.trainable)])
            found &= trained[high] > trained[low]
        for layer, stage in table.pinned.items():
            found &= ((low <= layer) & (layer < high)) == (stages == stage)
        return found

    @cached_property
    def _model(self) -> StepModel:
        numbers = np.unique(self._raw_places)
        return StepModel(table=self.costs.table, shapes=self.costs.shapes.take(numbers))

    @cached_property
    def _places(self) -> Int64Array:
        return np.searchsorted(np.unique(self._raw_places), self._raw_places)

    @cached_property
    def _raw_places(self) -> Int64Array:
        costs = self.costs
        ranks = costs.table.data_parallel
        return step_places(len(costs.shapes), costs.num_micro_batches, ranks)
