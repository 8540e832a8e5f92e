"""The last step of an epoch, where rows are left for some of the ranks only."""

from __future__ import annotations

import numpy as np

from omniload.index import LengthIndex
from omniload.plan import StepPlan

__all__ = ["TAILS", "any_batch", "filler_row", "has_batch", "is_full"]

#: what a batch sampler may do with the slots of the last step that have no rows
TAILS = ("repeat", "drop", "empty")


def is_full(plan: StepPlan, step: int) -> bool:
    """Say if a step has no filler slot; only the last one can have any."""
    return plan.has_step(step + 1) or bool((np.diff(plan.step_groups(step).offsets) > 0).all())


def has_batch(plan: StepPlan, step: int, micro_step: int, *, dp_rank: int, tail: str) -> bool:
    """Say if a rank gets a batch in a micro-step; False after the end of the epoch."""
    if not plan.has_step(step):
        return False
    if tail == "drop":
        return is_full(plan, step)
    if tail == "empty":
        return len(plan.micro_batch(step, micro_step, dp_rank)) > 0
    return True


def any_batch(plan: StepPlan, step: int, micro_step: int, *, tail: str) -> bool:
    """Say if a rank gets a batch in a micro-step or a later one; False after the end."""
    if tail != "empty":
        return has_batch(plan, step, micro_step, dp_rank=0, tail=tail)
    if not plan.has_step(step):
        return False
    rest = plan.step_groups(step).offsets[micro_step * plan.dp_world_size :]
    return plan.has_step(step + 1) or bool(rest[-1] > rest[0])


def filler_row(plan: StepPlan, index: LengthIndex, step: int, micro_step: int) -> int:
    """Choose the row that a rank without rows repeats: the shortest, with an image if there is one.

    It is one of the same micro-step, so that all ranks run the vision encoder or none does. In a
    micro-step of fillers only, all take the same row of the step.
    """
    groups = plan.step_groups(step)
    begin = micro_step * plan.dp_world_size
    rows = groups.rows[groups.offsets[begin] : groups.offsets[begin + plan.dp_world_size]]
    rows = rows if len(rows) else groups.rows
    with_image = rows[index.num_tiles[rows] > 0]
    rows = with_image if len(with_image) else rows
    return int(rows[index.num_tokens[rows].argmin()])
