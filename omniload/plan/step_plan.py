"""Groups to steps: which rows each rank trains on, computed by every rank without communication."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.costs import REFERENCE_COST, CostModel
from omniload.errors import ConfigError
from omniload.grouping import DEFAULT_GROUPING
from omniload.index import LengthIndex
from omniload.plan.balance import Balance, balance_name, balanced, check_balance, choose_balance
from omniload.plan.figures import PlanFigures, measure_plan
from omniload.plan.order import EpochOrder, OrderSettings, check_integer
from omniload.plan.stream import GroupStream, read_position
from omniload.types import Budget, Groups

__all__ = ["Balance", "StepPlan", "make_plan"]

#: Ranks, and micro-steps of a step: beyond it a step would not fit in memory.
_LARGEST_SIZE = 2**20


def make_plan(
    index: LengthIndex,
    *,
    budget: Budget,
    dp_world_size: int = 1,
    accumulation: int = 1,
    grouping: str = DEFAULT_GROUPING,
    seed: int = 0,
    epoch: int = 0,
    start: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    oversize: str = "error",
    window_rows: int | None = None,
    sync: str | None = "step",
    cost: CostModel | None = None,
    uniform_modality: bool = False,
    dummy_tokens: int = 0,
    balance: Balance | None = None,
    exclude: npt.ArrayLike | None = None,
    shard_starts: npt.ArrayLike | None = None,
    set_starts: npt.ArrayLike | None = None,
) -> StepPlan:
    """Plan an epoch: which rows each rank trains on, micro-step by micro-step.

    Every row is fed once, and every rank has the same number of steps. A pure function of the
    arguments: all ranks that call it alike have the same plan, without communication.

    Args:
        index: lengths of all rows.
        budget: upper bounds of a group, that is, of what one rank has in one micro-step.
        dp_world_size: data-parallel ranks.
        accumulation: micro-steps of an optimizer step.
        grouping: a name in `omniload.grouping.GROUPINGS`.
        seed: any integer; its low 64 bits count.
        epoch: at least 0; every epoch has other groups.
        start: a `StepPlan.position` of the same epoch to go on from; steps count from 0 again. With
            another `dp_world_size`, `accumulation` or balance it has to lie between two steps.
        shuffle: False: next fit in index order, whatever the grouping; steps are not rearranged.
        oversize: rows that don't fit the budget even alone: "error", or "drop" to leave them out,
            list them in `dropped` and log a warning.
        window_rows: rows that are planned together; memory and the time to the first step grow with
            this and not with the data. None: all rows, or a quarter of a million at most.
        sync: when ranks wait for each other; the samples of a step are dealt to them so that they
            wait least. "step": at the optimizer (DDP, ZeRO-1 and 2). "micro-step": at each
            micro-batch (FSDP, ZeRO-3, pipelines). None: emission order.
        cost: what is to be even, as estimated time; None: tiles and tokens.
        uniform_modality: see that all ranks have tiles in a micro-step or none, as far as swaps
            inside the step can do it; `omniload.balance.dummy_slots` says where they can't.
        dummy_tokens: with `uniform_modality`, room for a dummy document that each group without
            tiles keeps; a row that leaves less is over the budget.
        balance: rearranges steps instead of the balance that `sync` and `cost` ask for.
        exclude: integers (n,), rows to leave out, for example bad ones; listed in `dropped` too.
        shard_starts: integers (num_shards + 1,), first row of each shard, then the number of rows:
            where there are several windows, each reads from few shards. None: not known.
        set_starts: integers (num_sets + 1,), first row of each set of a mixture, then the number of
            rows: every window has its share of each set to within one row. None: one set.

    Returns:
        The plan; windows are planned when steps are asked for.

    Raises:
        ConfigError: a bad setting, or rows over the budget.
        StateError: `start` is no position of this epoch.
    """
    if not isinstance(index, LengthIndex):
        raise ConfigError(
            "make_plan needs a LengthIndex: expected LengthIndex.from_arrays(num_tokens=, "
            f"num_tiles=), got {type(index).__name__}."
        )
    sizes = []
    for name, size in (("dp_world_size", dp_world_size), ("accumulation", accumulation)):
        if not 1 <= check_integer(name, size) <= _LARGEST_SIZE:
            raise ConfigError(f"{name} must be at least 1 and at most {_LARGEST_SIZE}, got {size}.")
        sizes.append(int(size))
    check_balance(balance)
    settings = OrderSettings(
        budget=budget,
        grouping=grouping,
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        oversize=oversize,
        window_rows=window_rows,
        dummy_tokens=dummy_tokens if uniform_modality else 0,
    )
    chosen = choose_balance(
        sync=sync, cost=cost, uniform_modality=uniform_modality, dummy_tokens=dummy_tokens
    )
    if balance is None and shuffle:
        balance = chosen
    order = EpochOrder(
        index, settings, shard_starts=shard_starts, set_starts=set_starts, exclude=exclude
    )
    window, groups, micro_step = read_position(
        start, order, dp_world_size=sizes[0], accumulation=sizes[1], balance=balance
    )
    return StepPlan(
        order=order,
        dp_world_size=sizes[0],
        accumulation=sizes[1],
        first=(window, groups),
        first_micro_step=micro_step,
        balance=balance,
    )


class StepPlan:
    """Which rows each rank trains on, for the rest of one epoch; made by `make_plan`.

    Step s holds the groups [s * N * A, (s + 1) * N * A) of the emission order, N ranks and A
    micro-steps: micro-step m of rank r gets the group s * N * A + m * N + r, unless a `balance`
    rearranges the step: its rows stay the same. Only the last step may have filler slots, and no
    rank has more than one filler more than another.

    Attributes:
        dp_world_size: data-parallel ranks N.
        accumulation: micro-steps of a step A.
        first_micro_step: where step 0 goes on; above 0 only when `start` lay inside a step.
        balance: rearranges each step when it is asked for; None: emission order.
        dropped: int64 (n,), rising, rows left out: over the budget with `oversize="drop"`, or
            excluded.
        excluded: int64 (n,), rising, those of them that the caller excluded.
    """

    def __init__(
        self,
        *,
        order: EpochOrder,
        dp_world_size: int,
        accumulation: int,
        first: tuple[int, int],
        first_micro_step: int,
        balance: Balance | None,
    ) -> None:
        self.dp_world_size = dp_world_size
        self.accumulation = accumulation
        self.first_micro_step = first_micro_step
        self.dropped = order.left_out
        self.excluded = order.excluded
        self._order = order
        self._stream = GroupStream(order, first)
        self.balance = balance
        self._recent: tuple[int, Groups] | None = None

    @property
    def order_fingerprint(self) -> str:
        """32 hexadecimal digits over index, settings, seed and epoch.

        The same on every number of ranks: a saved position fits wherever it is the same.
        """
        return self._order.fingerprint

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits over all that decides this plan; plans no window.

        For a comparison of the ranks at the start.
        """
        facts = [
            self.order_fingerprint,
            self.dp_world_size,
            self.accumulation,
            *self._stream.first,
            self.first_micro_step,
            balance_name(self.balance),
        ]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()

    @property
    def num_steps(self) -> int:
        """Steps of this plan, the same on every rank.

        Cost: plans every window that hasn't been planned yet, about a second for a million rows,
        and only counts are kept. With many windows, `has_step` is enough to loop.
        """
        return -(-self._stream.known() // self._slots)

    @property
    def _slots(self) -> int:
        return self.dp_world_size * self.accumulation

    def has_step(self, step: int) -> bool:
        """Say if there is such a step, planning no more windows than that needs."""
        step = check_integer("step", step)
        return step >= 0 and self._stream.known(step * self._slots + 1) > step * self._slots

    def micro_batch(self, step: int, micro_step: int, dp_rank: int) -> npt.NDArray[np.int64]:
        """Look up what a rank trains on.

        Args:
            step: at least 0, below `num_steps`.
            micro_step: at least 0, below `accumulation`.
            dp_rank: at least 0, below `dp_world_size`.

        Returns:
            int64 (num_samples,), rows of the index; empty: a filler slot.

        Raises:
            ConfigError: there is no such step, micro-step or rank.
        """
        for name, value, size in (
            ("micro_step", micro_step, self.accumulation),
            ("dp_rank", dp_rank, self.dp_world_size),
        ):
            if not 0 <= check_integer(name, value) < size:
                raise ConfigError(f"{name} must be at least 0 and below {size}, got {value}.")
        return self.step_groups(step)[micro_step * self.dp_world_size + dp_rank]

    def step_groups(self, step: int) -> Groups:
        """Look up a whole step.

        Returns:
            accumulation * dp_world_size groups, that of micro-step m and rank r at m *
            dp_world_size + r; empty: a filler slot.

        Raises:
            ConfigError: there is no such step.
        """
        step = check_integer("step", step)
        if self._recent is None or self._recent[0] != step:
            groups = self._emitted(step)
            if self.balance is not None:
                groups = balanced(
                    self.balance,
                    groups,
                    self._order.index,
                    budget=self._order.settings.budget,
                    dp_world_size=self.dp_world_size,
                    accumulation=self.accumulation,
                )
            self._recent = (step, groups)
        return self._recent[1]

    def num_loss_tokens(self, step: int) -> int:
        """Count the tokens that give loss in a step, over all ranks and micro-steps.

        Raises:
            ConfigError: there is no such step.
        """
        rows = self.step_groups(step).rows
        return int(self._order.index.num_loss_tokens[rows].sum(dtype=np.int64))

    def figures(
        self,
        *,
        cost: CostModel = REFERENCE_COST,
        lp_bound: bool | int = False,
        max_steps: int | None = None,
    ) -> PlanFigures:
        """Measure this plan: groups against their bound, balance over ranks, randomness.

        Args:
            cost: estimates the time of a micro-batch.
            lp_bound: compute the sharper, linear-programme bound of the groups too, which takes
                some seconds; a number: it is known, from another plan of the same rows.
            max_steps: steps whose loads are measured, spread evenly; None: all.

        Raises:
            ConfigError: `max_steps` is below 1.

        Cost: 0.2 s for a million rows, besides planning and balancing; 200 bytes a step are kept.
        """
        if max_steps is not None and check_integer("max_steps", max_steps) < 1:
            raise ConfigError(f"max_steps must be at least 1, got {max_steps}.")
        return measure_plan(
            self._order,
            self._stream,
            dp_world_size=self.dp_world_size,
            accumulation=self.accumulation,
            balanced=None if self.balance is None else self.step_groups,
            cost=cost,
            lp_bound=lp_bound,
            max_steps=max_steps,
        )

    def position(self, step: int, micro_step: int = 0) -> dict[str, Any]:
        """Say how far the epoch is consumed before a micro-step, for `make_plan(start=)`.

        Args:
            step: at least 0, at most `num_steps`.
            micro_step: at least 0, at most `accumulation`.

        Returns:
            `window`, and `groups` consumed in it in emission order. Inside a step also
            `micro_step`, `dp_world_size`, `accumulation` and `balance`, and both count from the
            window in which the step begins. Plain JSON.

        Raises:
            ConfigError: there is no such step or micro-step.
        """
        step, micro_step = check_integer("step", step), check_integer("micro_step", micro_step)
        if not 0 <= micro_step <= self.accumulation:
            raise ConfigError(
                f"micro_step must be between 0 and {self.accumulation}, got {micro_step}."
            )
        if micro_step == self.accumulation:
            step, micro_step = step + 1, 0
        last = step if micro_step else step - 1
        if step < 0 or (last >= 0 and not self.has_step(last)):
            raise ConfigError(f"step must be between 0 and {self.num_steps}, got {step}.")
        window, groups = self._stream.locate(step * self._slots)
        position: dict[str, Any] = {
            "window": window,
            "groups": groups + micro_step * self.dp_world_size,
        }
        if micro_step:
            position["micro_step"] = micro_step
            position["dp_world_size"] = self.dp_world_size
            position["accumulation"] = self.accumulation
            position["balance"] = balance_name(self.balance)
        return position

    @property
    def num_rows(self) -> int:
        """Rows of the whole epoch that are planned, those before this plan's start too."""
        return len(self._order.index) - len(self.dropped)

    @property
    def num_windows(self) -> int:
        """Windows of rows in the epoch, each planned when a step in it is asked for."""
        return self._order.num_windows

    def is_near_end(self, step: int) -> bool:
        """Say if a step begins in the last window of the epoch, or behind it."""
        return self._stream.locate(step * self._slots)[0] >= self._order.num_windows - 1

    def rows_before(self) -> Iterator[npt.NDArray[np.int64]]:
        """Give the rows of the epoch before step 0 of this plan, in some parts: int64 (n,) each.

        Plans no window but the one in which the plan begins.
        """
        window, groups = self._stream.first
        for earlier in range(window):
            yield self._order.windows.rows(earlier)
        if groups:
            begun = self._order.groups(window)
            yield begun.rows[: begun.offsets[groups]]

    def plan_ahead(self) -> None:
        """Begin to plan the first window in a thread, where it isn't planned yet."""
        self._order.plan_ahead(self._stream.first[0])

    def _emitted(self, step: int) -> Groups:
        if not self.has_step(step):
            raise ConfigError(f"step must be at least 0 and below {self.num_steps}, got {step}.")
        groups = self._stream.take(step * self._slots, (step + 1) * self._slots)
        fillers = np.full(self._slots - len(groups), len(groups.rows), np.int64)
        return Groups(rows=groups.rows, offsets=np.concatenate([groups.offsets, fillers]))
