"""What crosses to the workers: one small `Task` a micro-batch, made from the plan as it is walked.

Nothing here grows with the length of the data set.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.index import LengthIndex
from omniload.loss import LossTotals
from omniload.plan import StepPlan

__all__ = ["Slot", "Task", "Walk"]

#: Micro-batches that are looked ahead for shards to fetch, and most shards that a task names.
_TASKS_AHEAD, _MOST_SHARDS = 32, 32


@dataclass(frozen=True, slots=True)
class Task:
    """One micro-batch to make.

    Args:
        epoch: epoch, for the rows of the source and the randomness of the transform.
        step: optimizer step in the epoch.
        micro_step: micro-batch in the step.
        is_last_micro_step: whether it ends the step.
        loss_totals: denominators of the loss in the whole step, over all ranks.
        rows: int64 (n,), rows of the index; empty: a filler.
        needs_image: whether the rows have no image, but those of other ranks in this micro-step
            have some; likewise for a filler, or if all ranks have one.
        has_images: whether the epoch has images, so that fillers need one.
        upcoming: shards that this rank reads next, in order; empty where the source needs no hint.
    """

    epoch: int
    step: int
    micro_step: int
    is_last_micro_step: bool
    loss_totals: LossTotals
    rows: npt.NDArray[np.int64]
    needs_image: bool
    has_images: bool
    upcoming: tuple[int, ...] = ()

    def __reduce__(self) -> tuple[type[Task], tuple[Any, ...]]:
        # the way of dataclasses asks for their fields each time: it is slower, and leaves CPython
        # up to 2000 free tuples of each size, which looks like a leak for many epochs
        return Task, tuple([getattr(self, name) for name in Task.__slots__])


@dataclass(frozen=True, slots=True)
class Slot:
    """A micro-batch as the plan has it, to hold against what comes out of the workers.

    Args:
        step: optimizer step in the epoch.
        micro_step: micro-batch in the step.
        rows: int64 (n,), rows of this rank; empty: a filler, or no batch.
        all_rows: int64 (n,), rows of all ranks in this micro-step.
        has_batch: whether this rank gets a batch for it.
        ends: int64 (dp_world_size + 1,), where the rows of each rank begin in `all_rows`, then
            their number; None: not known.
    """

    step: int
    micro_step: int
    rows: npt.NDArray[np.int64]
    all_rows: npt.NDArray[np.int64]
    has_batch: bool
    ends: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One rank's way through a plan, lazily: a plan of millions of groups is never listed.

    Args:
        plan: the plan.
        index: the lengths that it was made from; for the loss.
        epoch: its epoch.
        dp_rank: the rank.
        first_step: number of the plan's step 0 in the epoch; not 0 in a plan of the rest.
        start: micro-batches of the plan to leave out.
        skip_empty: leave slots without rows out instead of making them fillers.
        has_images: whether the epoch has images.
        on_slot: told of each slot, before its task is given.
        shard_of: row -> number of its shard; None: no shards are named ahead.
    """

    plan: StepPlan
    index: LengthIndex
    epoch: int
    dp_rank: int
    first_step: int = 0
    start: int = 0
    skip_empty: bool = False
    has_images: bool = True
    on_slot: Callable[[Slot], None] | None = None
    shard_of: Callable[[int], int] | None = None

    def count(self) -> int:
        """Count the tasks that the walk gives; plans the whole epoch."""
        plan = self.plan
        num_slots = plan.num_steps * plan.accumulation
        if self.skip_empty:
            # only the last step may have slots without rows
            last = max(num_slots - plan.accumulation, self.start)
            return last - self.start + sum(self._has_rows(slot) for slot in range(last, num_slots))
        return max(num_slots - self.start, 0)

    def is_done(self, *, on_all_ranks: bool = False) -> bool:
        """Say if no task is left; plans no more than is needed to tell.

        Args:
            on_all_ranks: whether no rank has one left.
        """
        plan = self.plan
        step, micro_step = divmod(self.start, plan.accumulation)
        if not plan.has_step(step):
            return True
        if not self.skip_empty or plan.has_step(step + 1):
            return False
        rest = range(self.start, self.start + plan.accumulation - micro_step)
        if on_all_ranks:
            return not any(len(self._all_rows(*divmod(s, plan.accumulation))) for s in rest)
        return not any(self._has_rows(slot) for slot in rest)

    def __iter__(self) -> Iterator[Task]:
        return self._tasks() if self.shard_of is None else self._with_shards(self.shard_of)

    def _tasks(self) -> Iterator[Task]:
        plan = self.plan
        counted, totals = -1, LossTotals.of([])
        for number in itertools.count(self.start):
            step, micro_step = divmod(number, plan.accumulation)
            if not plan.has_step(step):
                return
            if step != counted:
                counted, totals = step, self._loss_totals(step)
            rows = plan.micro_batch(step, micro_step, self.dp_rank)
            has_batch = len(rows) > 0 or not self.skip_empty
            all_rows = self._all_rows(step, micro_step)
            if self.on_slot is not None:
                place = (self.first_step + step, micro_step)
                ends = self._ends(step, micro_step)
                self.on_slot(Slot(*place, rows, all_rows, has_batch, ends))
            if not has_batch:
                continue
            yield Task(
                epoch=self.epoch,
                step=self.first_step + step,
                micro_step=micro_step,
                is_last_micro_step=micro_step == plan.accumulation - 1,
                loss_totals=totals,
                rows=rows,
                needs_image=self._needs_image(rows, all_rows),
                has_images=self.has_images,
            )

    def _with_shards(self, shard_of: Callable[[int], int]) -> Iterator[Task]:
        """Give the tasks, each with the shards that it and the next ones need."""
        ahead: deque[tuple[Task, tuple[int, ...]]] = deque()
        tasks = self._tasks()
        while True:
            for task in itertools.islice(tasks, _TASKS_AHEAD - len(ahead)):
                ahead.append((task, tuple(dict.fromkeys(map(shard_of, task.rows.tolist())))))
            if not ahead:
                return
            needed = dict.fromkeys(shard for _, shards in ahead for shard in shards)
            task, _ = ahead.popleft()
            yield replace(task, upcoming=tuple(itertools.islice(needed, _MOST_SHARDS)))

    def _needs_image(self, rows: npt.NDArray[np.int64], all_rows: npt.NDArray[np.int64]) -> bool:
        if self.index.num_tiles[rows].any():
            return False
        return len(all_rows) == 0 or bool(self.index.num_tiles[all_rows].any())

    def _loss_totals(self, step: int) -> LossTotals:
        # of all ranks: each has the whole plan and index, so nothing is sent
        return LossTotals.of(self.index.num_loss_tokens[self.plan.step_groups(step).rows])

    def _all_rows(self, step: int, micro_step: int) -> npt.NDArray[np.int64]:
        groups, size = self.plan.step_groups(step), self.plan.dp_world_size
        first, end = groups.offsets[[micro_step * size, (micro_step + 1) * size]]
        return groups.rows[first:end]

    def _ends(self, step: int, micro_step: int) -> npt.NDArray[np.int64]:
        groups, size = self.plan.step_groups(step), self.plan.dp_world_size
        offsets = groups.offsets[micro_step * size : (micro_step + 1) * size + 1]
        ends: npt.NDArray[np.int64] = offsets - offsets[0]
        return ends

    def _has_rows(self, number: int) -> bool:
        step, micro_step = divmod(number, self.plan.accumulation)
        return len(self.plan.micro_batch(step, micro_step, self.dp_rank)) > 0
