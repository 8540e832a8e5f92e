"""Less recomputation where a micro-batch is small: what it needs less of memory, it may keep."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from omniload.errors import ConfigError
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.stage_costs import StageCosts, memory_limits, worst_shape
from omniload.pipeline.table import CostTable, Recompute

__all__ = ["RecomputeBySize", "recompute_by_size"]

_SHARES = (0.25, 0.5, 0.625, 0.75, 0.875)  # of the largest micro-batch


@dataclass(frozen=True, kw_only=True)
class RecomputeBySize:
    """What each layer recomputes, by the size of the micro-batch.

    Args:
        most_tiles: tiles that a micro-batch of each size has at most, rising.
        most_tokens: the same of tokens.
        choices: for each size the choice of each layer.
    """

    most_tiles: tuple[float, ...]
    most_tokens: tuple[float, ...]
    choices: tuple[tuple[Recompute, ...], ...]

    def choose(self, *, num_tiles: float, num_tokens: float) -> tuple[Recompute, ...] | None:
        """Choose for one micro-batch: those of the least size that it has room in.

        Returns:
            The choice of each layer of the model; None: those of the plan.
        """
        sizes = zip(self.most_tiles, self.most_tokens, self.choices, strict=True)
        return next(
            (
                found
                for tiles, tokens, found in sizes
                if num_tiles <= tiles and num_tokens <= tokens
            ),
            None,
        )


def recompute_by_size(
    table: CostTable,
    shapes: Shapes,
    plan: PipelinePlan,
    *,
    num_micro_batches: int,
    memory_gb: float | Sequence[float],
    worst: Shapes | None = None,
) -> RecomputeBySize:
    """Choose what smaller micro-batches recompute under the bounds of a plan.

    Micro-batches of all sizes may be in flight together: each keeps its share of the memory and no
    more, and none forms more anew than a full one. So the limit holds for every mixture of them.
    For `BalancedPipelineModule(recompute_by_batch=)`. Deterministic.

    Args:
        table: what layers cost.
        shapes: micro-batches as they come; as for `plan_pipeline`.
        plan: a plan that fits.
        num_micro_batches: micro-batches of a step on each rank.
        memory_gb: what a GPU may hold, as for `plan_pipeline`.
        worst: one micro-batch that none passes; None: the most of everything in `shapes`.

    Raises:
        ConfigError: a plan for another table, or one that doesn't fit the memory.
    """
    full = StageCosts(
        table=table,
        shapes=shapes,
        worst=worst_shape(shapes) if worst is None else worst,
        num_stages=plan.num_stages,
        num_micro_batches=num_micro_batches,
        selective=any(isinstance(choice, str) for choice in plan.recompute),
    )
    limits = memory_limits(memory_gb, plan.num_stages)
    held = full.memory(plan.parts, table.choices(plan.recompute))
    for stage, (needed, limit) in enumerate(zip(held.tolist(), limits.tolist(), strict=True)):
        if needed > limit:
            raise ConfigError(
                f"the plan must fit into the memory: stage {stage} needs {needed / 1e9:.2f} GB of "
                f"{limit / 1e9:.2f} GB. Plan with plan_pipeline(memory_gb=) first."
            )
    smaller = [_scaled(full.worst, share) for share in _SHARES]
    return RecomputeBySize(
        most_tiles=tuple(float(size.num_tiles[0]) for size in smaller),
        most_tokens=tuple(float(size.num_tokens[0]) for size in smaller),
        choices=tuple(_choices(full, size, plan, limits.tolist()) for size in smaller),
    )


def _scaled(shape: Shapes, share: float) -> Shapes:
    return Shapes(
        num_tiles=shape.num_tiles * share,
        num_tokens=shape.num_tokens * share,
        sum_squares=shape.sum_squares * share,
    )


def _choices(
    full: StageCosts, size: Shapes, plan: PipelinePlan, limits: Sequence[int]
) -> tuple[Recompute, ...]:
    costs = StageCosts(
        table=full.table,
        shapes=size,
        worst=size,
        num_stages=full.num_stages,
        num_micro_batches=full.num_micro_batches,
        selective=full.selective,
    )
    anew = full.working_bytes(plan.recompute)
    chosen: list[Recompute] = []
    for stage, (low, high) in enumerate(itertools.pairwise(plan.parts)):
        # what a full micro-batch forms anew stays free, whichever one has its backward pass
        most = int(anew[low:high].max(initial=0))
        planned = list(plan.recompute[low:high])
        found = costs.best_recompute(low, high, stage, limits[stage] - most)
        if found is None or not _is_better(costs, found, planned, low, most):
            found = planned
        chosen += found
    return tuple(chosen)


def _is_better(
    costs: StageCosts,
    part: Sequence[Recompute],
    planned: Sequence[Recompute],
    low: int,
    most: int,
) -> bool:
    """Say whether choices of the layers from `low` on take less time, and form no more anew."""
    rest = costs.table.num_layers - low - len(part)
    whole, before = ([*[0] * low, *each, *[0] * rest] for each in (part, planned))
    formed = int(costs.working_bytes(whole).max(initial=0))
    return formed <= most and costs.recompute_ns(whole).sum() < costs.recompute_ns(before).sum()
