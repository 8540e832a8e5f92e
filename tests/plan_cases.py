"""Indexes to plan, and the rows of a plan in order."""

import numpy as np

from omniload.index import LengthIndex
from omniload.types import Budget, Groups

__all__ = ["BUDGET", "Reversed", "make_index", "rows_of", "slots"]


BUDGET = Budget(tokens=100, tiles=8)


def make_index(count, *, seed=0, most=60):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(2, most, size=count)
    return LengthIndex.from_arrays(
        num_tokens=tokens,
        num_tiles=generator.integers(0, 6, size=count),
        num_loss_tokens=generator.integers(0, tokens),
    )


def slots(plan, first_step=0, last_step=None):
    """Rows by (step, micro-step, rank), from where the plan begins."""
    return [
        plan.micro_batch(step, micro_step, rank).tolist()
        for step in range(first_step, plan.num_steps if last_step is None else last_step)
        for micro_step in range(plan.first_micro_step if step == 0 else 0, plan.accumulation)
        for rank in range(plan.dp_world_size)
    ]


def rows_of(plan, first_step=0, last_step=None):
    return [row for rows in slots(plan, first_step, last_step) for row in rows]


class Reversed:
    """Gives the groups of a step to the ranks in reverse."""

    fingerprint = "reversed 1"

    def __init__(self):
        self.calls = 0

    def __call__(self, step, *, num_tokens, num_tiles, budget, dp_world_size, accumulation):
        self.calls += 1
        assert budget == BUDGET
        assert len(step) == dp_world_size * accumulation
        assert len(num_tokens) == len(num_tiles) == len(step.rows)
        order = [group.tolist() for group in step][::-1]
        return Groups(
            rows=np.array([row for group in order for row in group], np.int64),
            offsets=np.cumsum([0, *map(len, order)]),
        )
