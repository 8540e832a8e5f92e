"""Plans a pipeline for `omniload plan-pipeline`: ours, the others beside it, and what they do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.pipeline.baselines import Comparison
    from omniload.pipeline.plan import PipelinePlan
    from omniload.pipeline.simulate import Bubbles, Simulation
    from omniload.pipeline.table import CostTable
    from omniload.tools.pipeline_inputs import DataShapes, Parallel

__all__ = ["RECOMPUTE", "Planned", "Request", "plan_all"]

#: Values of --recompute.
RECOMPUTE = ("auto", "selective", "full", "none")


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """One pipeline, planned.

    Args:
        table: what layers cost.
        data: the micro-batches.
        parallel: how GPUs are used.
        micro_batches: micro-batches of a step on each rank.
        plan: the plan.
        others: other ways to plan it, by name.
        bubbles: mean shares of the time of devices.
        step: the first simulated step.
        ordered_ms: mean step time with micro-batches in their best order.
        frozen_stages: stages without a trainable parameter may be.
    """

    table: CostTable
    data: DataShapes
    parallel: Parallel
    micro_batches: int
    plan: PipelinePlan
    others: Mapping[str, Comparison]
    bubbles: Bubbles
    step: Simulation
    ordered_ms: float
    frozen_stages: bool

    @property
    def step_ms(self) -> float:
        """Mean time of a step, milliseconds."""
        assert self.plan.step_ms is not None  # plans are made with predictions
        return self.plan.step_ms

    def gpu_days(self, step_ms: float) -> float:
        """GPU days of an epoch of the data."""
        from omniload.pipeline.simulate import gpu_days

        return gpu_days(
            step_ms / 1e3,
            num_samples=self.data.num_samples,
            samples_per_step=self.data.samples_per_step,
            num_gpus=self.parallel.gpus,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """What is to be planned.

    Args:
        table: what layers cost.
        data: the micro-batches.
        parallel: how GPUs are used.
        micro_batches: micro-batches of a step on each rank.
        memory_gb: of one GPU; None: no limit.
        recompute: one of `RECOMPUTE`: as few whole layers as fit; parts of layers too; all; none.
        frozen_stages: stages without a trainable parameter may be.
    """

    table: CostTable
    data: DataShapes
    parallel: Parallel
    micro_batches: int
    memory_gb: float | None = None
    recompute: str = "auto"
    frozen_stages: bool = True

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise ConfigError(
                f"--recompute must be one of {', '.join(RECOMPUTE)}, got {self.recompute!r}."
            )


def plan_all(request: Request, *, progress: Callable[[str], None] = lambda _what: None) -> Planned:
    """Plan a pipeline in all ways, and simulate it.

    Args:
        request: what is to be planned.
        progress: told what is done next.

    Raises:
        ConfigError: nothing fits; the message says what would be needed.
    """
    progress("plan")
    others = _compare(request)
    plan = others.pop("ours").plan
    progress("simulate")
    steps = _simulated(request, plan, ordered=False)
    progress("order")
    ordered = _simulated(request, plan, ordered=True)
    return Planned(
        table=request.table,
        data=request.data,
        parallel=request.parallel,
        micro_batches=request.micro_batches,
        plan=plan,
        others=others,
        bubbles=_mean_bubbles(steps),
        step=steps[0],
        ordered_ms=float(np.mean([step.step_ns for step in ordered])) / 1e6,
        frozen_stages=request.frozen_stages,
    )


def _compare(request: Request) -> dict[str, Comparison]:
    from omniload.pipeline.baselines import compare

    searched = _fixed(request.table, request.data, request.recompute)
    found = compare(
        searched,
        request.data.shapes,
        num_stages=request.parallel.stages,
        num_micro_batches=request.micro_batches,
        memory_gb=request.memory_gb,
        worst=request.data.worst,
        selective=request.recompute == "selective",
        frozen_stages=request.frozen_stages,
    )
    if "ours" not in found:
        _refuse(request, searched)
    if request.recompute == "full":
        return {name: _recomputed(request, each) for name, each in found.items()}
    return dict(found)


def _fixed(table: CostTable, data: DataShapes, recompute: str) -> CostTable:
    """Leave no choice: every layer is recomputed, or none is."""
    from omniload.pipeline.kinds import LayerKind

    def whole(kind: LayerKind) -> LayerKind:
        recomputed = recompute == "full" and kind.recomputable
        if not recomputed:
            return replace(kind, recomputable=False, selective=())
        frozen = kind.backward_s.scaled(0.5)
        if kind.backward_frozen_s is not None:
            frozen = kind.backward_frozen_s
        return replace(
            kind,
            backward_s=kind.backward_s + kind.recompute_s,
            backward_frozen_s=frozen + kind.recompute_s,
            kept_bytes=kind.kept_bytes_recompute,
            kept_frozen_bytes=None,
            recomputable=False,
            selective=(),
        )

    if recompute in ("auto", "selective"):
        return table
    found = replace(table, kinds=tuple(whole(kind) for kind in table.kinds))
    if recompute == "full":
        # while its backward pass runs, one layer is there in full
        offered = [kind.recomputable for kind in map(table.kind, range(table.num_layers))]
        anew = float(np.where(offered, table.kept(data.worst)[:, 0], 0.0).max(initial=0.0))
        found = replace(found, reserve_bytes=table.reserve_bytes + anew)
    return found


def _recomputed(request: Request, found: Comparison) -> Comparison:
    """Predict bounds with everything recomputed."""
    from omniload.pipeline.predict import predict
    from omniload.pipeline.stage_costs import StageCosts

    costs = StageCosts(
        table=request.table,
        shapes=request.data.shapes,
        worst=request.data.worst,
        num_stages=request.parallel.stages,
        num_micro_batches=request.micro_batches,
    )
    everything = request.table.choices(1)
    plan = predict(costs, found.plan.parts, everything, memory_gb=request.memory_gb)
    fits = all(stage.headroom_gb is None or stage.headroom_gb >= 0 for stage in plan.stages)
    return replace(found, plan=plan, fits=fits)


def _refuse(request: Request, searched: CostTable) -> None:
    """Say why there is no plan."""
    from omniload.pipeline.partition import plan_pipeline

    try:
        plan_pipeline(
            searched,
            request.data.shapes,
            num_stages=request.parallel.stages,
            num_micro_batches=request.micro_batches,
            memory_gb=request.memory_gb,
            worst=request.data.worst,
            selective=request.recompute == "selective",
            frozen_stages=request.frozen_stages,
        )
    except ConfigError as error:
        if request.recompute != "none":
            raise
        text = str(error).replace("with everything recomputed", "with nothing recomputed")
        raise ConfigError(f"{text} --recompute auto needs less.") from None


def _simulated(request: Request, plan: PipelinePlan, *, ordered: bool) -> list[Simulation]:
    from omniload.pipeline.order import arrange_micro_batches
    from omniload.pipeline.predict import stage_times, step_places
    from omniload.pipeline.simulate import simulate

    shapes, ranks = request.data.shapes, request.parallel.data
    times = stage_times(request.table, shapes, plan)
    places = step_places(len(shapes), request.micro_batches, ranks)
    found = []
    for step in places:
        if ordered:
            mine = times.take(step.T.reshape(-1))
            rows = arrange_micro_batches(mine, data_parallel=ranks)
            found.append(simulate([mine.take(row) for row in rows]))
        else:
            found.append(simulate([times.take(row) for row in step]))
    return found


def _mean_bubbles(steps: list[Simulation]) -> Bubbles:
    from omniload.pipeline.simulate import Bubbles

    weights = np.array([step.step_ns for step in steps], np.float64)
    weights /= weights.sum()
    shares = {
        entry.name: float(
            sum(w * getattr(s.bubbles, entry.name) for w, s in zip(weights, steps, strict=True))
        )
        for entry in fields(Bubbles)
    }
    return Bubbles(**shares)
