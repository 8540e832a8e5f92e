"""Predicts what a plan does: times of its stages, time of a step, memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline._clock import run_steps
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.layer_bytes import static_bytes, working_bytes
from omniload.pipeline.plan import PipelinePlan, StagePlan
from omniload.pipeline.schedules import make_program
from omniload.pipeline.stage_costs import NO_LIMIT, StageCosts, memory_limits, transfer_ns
from omniload.pipeline.table import CostTable, Recompute
from omniload.pipeline.times import StageTimes, nanoseconds

__all__ = [
    "StepModel",
    "predict",
    "simulated_steps",
    "stage_bytes",
    "stage_times",
    "step_places",
]

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_GB = 1e9
_PIPELINES = 32  # simulated for each plan


def stage_times(table: CostTable, shapes: Shapes, plan: PipelinePlan) -> StageTimes:
    """Predict the times of micro-batches on the stages of a plan.

    Args:
        table: what layers cost.
        shapes: the micro-batches.
        plan: where to cut, and what to recompute.

    Returns:
        Times of (num_stages, num_micro_batches), for `simulate`.

    Raises:
        ConfigError: the plan is for another number of layers.
    """
    _check_layers(table, plan)
    return StepModel(table=table, shapes=shapes).times(plan.parts, plan.recompute)


def stage_bytes(
    table: CostTable, shapes: Shapes, plan: PipelinePlan
) -> tuple[Float64Array, Float64Array, Float64Array]:
    """Predict the memory that a plan takes, for `Simulation.memory`.

    Args:
        table: what layers cost.
        shapes: the micro-batches.
        plan: where to cut, and what to recompute.

    Returns:
        Bytes that each micro-batch keeps, (num_stages, num_micro_batches); that each stage always
        holds, the reserve included, (num_stages,); and that are formed anew while the backward pass
        runs, (num_stages, num_micro_batches).

    Raises:
        ConfigError: the plan is for another number of layers.
    """
    _check_layers(table, plan)
    low = np.asarray(plan.parts[:-1])
    kept, anew = table.kept(shapes, plan.recompute), working_bytes(table, shapes, plan.recompute)
    static = [static_bytes(table)[pair] for pair in itertools.pairwise(plan.parts)]
    return (
        np.add.reduceat(kept, low, axis=0),
        np.array(static, np.float64),
        np.maximum.reduceat(anew, low, axis=0),
    )


def simulated_steps(data_parallel: int) -> int:
    """Say how many steps stand for all others: the more ranks there are, the fewer."""
    return max(1, _PIPELINES // data_parallel)


def step_places(
    num_shapes: int, num_micro_batches: int, data_parallel: int, *, most_steps: int | None = None
) -> Int64Array:
    """Deal micro-batches to steps and ranks as a plan of the loader does.

    Micro-step m of rank r is number m * data_parallel + r of its step. Too few for one step are
    used again from the first. At most as many steps as `simulated_steps` says, or `most_steps`.

    Returns:
        int64 (num_steps, data_parallel, num_micro_batches), numbers of micro-batches.
    """
    size = num_micro_batches * data_parallel
    most = simulated_steps(data_parallel) if most_steps is None else most_steps
    steps = max(1, min(num_shapes // size, most))
    numbers = np.arange(steps * size) % num_shapes
    return numbers.reshape(steps, num_micro_batches, data_parallel).transpose(0, 2, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepModel:
    """Times of some micro-batches on any stages, quickly for one plan after the other.

    Args:
        table: what layers cost.
        shapes: the micro-batches.
    """

    table: CostTable
    shapes: Shapes

    def times(self, parts: Sequence[int], recompute: Sequence[Recompute]) -> StageTimes:
        """Add up the layers of each stage.

        Args:
            parts: bounds of the stages.
            recompute: the choice of each layer.
        """
        stages = [
            self.stage(low, high, recompute[low:high]) for low, high in itertools.pairwise(parts)
        ]
        sent = self.transfer[np.asarray(parts[1:-1], np.int64) - 1]
        return StageTimes(
            forward=np.stack([forward for forward, _ in stages]),
            backward=np.stack([backward for _, backward in stages]),
            transfer=sent,
            gradient_transfer=sent,
        )

    def stage(
        self, low: int, high: int, recompute: Sequence[Recompute]
    ) -> tuple[Int64Array, Int64Array]:
        """Add up the layers [low, high).

        Args:
            low: the first layer.
            high: the layer after the last.
            recompute: the choice of each of them.

        Returns:
            Nanoseconds of forward and of backward passes, int64 (num_micro_batches,) each.
        """
        backward = self._backward[high] - self._backward[low]
        for layer, choice in enumerate(recompute, start=low):
            if choice != 0 and self.table.has_backward[layer]:
                backward = backward + self._recompute(layer, choice)
        return self._forward[high] - self._forward[low], backward

    def steps_ns(
        self, parts: Sequence[int], recompute: Sequence[Recompute], places: Int64Array
    ) -> Int64Array:
        """Simulate steps; ranks meet at the end of each.

        Args:
            parts: bounds of the stages.
            recompute: the choice of each layer.
            places: int64 (num_steps, num_ranks, num_micro_batches), as `step_places` makes them.

        Returns:
            int64 (num_steps,), nanoseconds.
        """
        steps, ranks, micro_batches = places.shape
        times = self.times(parts, recompute)
        program = make_program("deepspeed", len(parts) - 1, micro_batches)
        flat = places.reshape(-1)

        def dealt(values: Int64Array) -> Int64Array:
            split = values[:, flat].reshape(len(values), steps * ranks, micro_batches)
            return np.ascontiguousarray(split.transpose(1, 0, 2))

        done = run_steps(
            program.kinds,
            program.micro_batches,
            dealt(times.forward),
            dealt(times.backward),
            dealt(times.transfer),
            dealt(times.gradient_transfer),
        )
        longest: Int64Array = done.reshape(steps, ranks).max(axis=1)
        return longest

    @cached_property
    def _forward(self) -> Int64Array:
        return _running(nanoseconds(self.table.forward(self.shapes)))

    @cached_property
    def _backward(self) -> Int64Array:
        return _running(nanoseconds(self.table.backward(self.shapes)))

    @cached_property
    def transfer(self) -> Int64Array:
        """int64 (num_layers, num_micro_batches): sending over a cut after each layer, one way."""
        return transfer_ns(self.table, self.shapes)

    @cached_property
    def _recomputed(self) -> dict[tuple[str, Recompute], Int64Array]:
        return {}

    def _recompute(self, layer: int, choice: Recompute) -> Int64Array:
        key = (self.table.layers[layer], choice)
        if key not in self._recomputed:
            self._recomputed[key] = nanoseconds(self.table.recompute(self.shapes, choice)[layer])
        return self._recomputed[key]


def predict(
    costs: StageCosts,
    parts: Sequence[int],
    recompute: Sequence[Recompute],
    *,
    memory_gb: float | Sequence[float] | None = None,
    model: StepModel | None = None,
    places: Int64Array | None = None,
) -> PipelinePlan:
    """Make a plan of bounds and choices, with what it will do.

    Args:
        costs: costs of stages.
        parts: bounds of the stages.
        recompute: the choice of each layer.
        memory_gb: the limit, to say what is left; a plan over it is made all the same, with less
            than nothing left.
        model: times of the micro-batches; None: made of `costs`.
        places: steps to simulate; None: those of `step_places`.

    Returns:
        The plan. `step_ms` is the mean over the simulated steps.
    """
    limits = memory_limits(memory_gb, costs.num_stages)
    model = model or StepModel(table=costs.table, shapes=costs.shapes)
    if places is None:
        ranks = costs.table.data_parallel
        places = step_places(len(model.shapes), costs.num_micro_batches, ranks)
    step_ns = float(model.steps_ns(parts, recompute, places).mean())
    times = model.times(parts, recompute)
    held = costs.memory(parts, recompute)
    stages = [
        StagePlan(
            layers=int(high - low),
            forward_ms=float(times.forward[stage].mean() / 1e6),
            backward_ms=float(times.backward[stage].mean() / 1e6),
            memory_gb=float(held[stage] / _GB),
            headroom_gb=(
                None if limits[stage] == NO_LIMIT else float((limits[stage] - held[stage]) / _GB)
            ),
        )
        for stage, (low, high) in enumerate(itertools.pairwise(parts))
    ]
    limit = None if memory_gb is None else float(np.max(memory_gb))
    return PipelinePlan(
        parts=tuple(int(bound) for bound in parts),
        recompute=tuple(recompute),
        stages=tuple(stages),
        step_ms=step_ns / 1e6,
        memory_limit_gb=limit,
        table_fingerprint=costs.table.fingerprint,
    )


def _check_layers(table: CostTable, plan: PipelinePlan) -> None:
    if plan.num_layers != table.num_layers:
        raise ConfigError(
            f"the plan must be for the layers of the table: expected {table.num_layers}, got "
            f"{plan.num_layers}."
        )


def _running(values: Int64Array) -> Int64Array:
    start = np.zeros((1, values.shape[1]), np.int64)
    return np.concatenate([start, np.cumsum(values, axis=0)])
