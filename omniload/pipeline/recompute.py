"""Chooses what is recomputed in a pipeline whose cuts are given."""

from __future__ import annotations

from collections.abc import Sequence

from omniload.errors import ConfigError
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.partition import Planner
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.stage_costs import StageCosts, worst_shape
from omniload.pipeline.table import CostTable

__all__ = ["plan_recompute"]


def plan_recompute(
    table: CostTable,
    shapes: Shapes,
    parts: Sequence[int],
    *,
    num_micro_batches: int,
    memory_gb: float | Sequence[float] | None = None,
    worst: Shapes | None = None,
    selective: bool = True,
) -> PipelinePlan:
    """Recompute as little as the memory of each stage allows.

    Stage by stage the exact least time: which layers, and in full or in part, where the table has
    choices that recompute a part. Deterministic.

    Args:
        table: what layers cost.
        shapes: micro-batches as they come; as for `plan_pipeline`.
        parts: bounds of the stages.
        num_micro_batches: micro-batches of a step on each rank.
        memory_gb: what a GPU may hold, 1 GB is 1e9 bytes; one number, or one a stage; None: no
            limit, so nothing is recomputed.
        worst: one micro-batch that none passes; None: the most of everything in `shapes`.
        selective: use choices that recompute a part of a layer.

    Returns:
        The plan; `memory_gb` and `headroom_gb` of its stages say what is used and what is left.

    Raises:
        ConfigError: bounds that can't be, or a stage that doesn't fit with everything recomputed;
            the message says what it would need.
    """
    # the plan checks the bounds
    layers = PipelinePlan(parts=tuple(parts), recompute=(0,) * int(parts[-1] if parts else 0))
    if layers.num_layers != table.num_layers:
        raise ConfigError(
            f"parts must end at the number of layers: expected {table.num_layers}, got "
            f"{layers.num_layers}."
        )
    costs = StageCosts(
        table=table,
        shapes=shapes,
        worst=worst_shape(shapes) if worst is None else worst,
        num_stages=layers.num_stages,
        num_micro_batches=num_micro_batches,
        selective=selective,
    )
    planner = Planner(costs=costs, memory_gb=memory_gb)
    chosen = planner.recompute(layers.parts)
    if chosen is None:
        raise ConfigError(_too_much(planner, layers.parts))
    return planner.predict(layers.parts, chosen)


def _too_much(planner: Planner, parts: tuple[int, ...]) -> str:
    lines = []
    for stage, limit in enumerate(planner.limits.tolist()):
        low, high = parts[stage], parts[stage + 1]
        needed = int(planner.costs.least_memory[stage, low, high])
        if needed > limit:
            lines.append(f"stage {stage} {needed / 1e9:.2f} GB of {limit / 1e9:.2f} GB")
    return (
        "each stage must fit into its memory, and with everything recomputed these don't: "
        f"{', '.join(lines)} (parts {list(parts)}). Cut elsewhere, as plan_pipeline does, or use "
        "more stages or smaller micro-batches."
    )
