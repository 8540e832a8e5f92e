"""An epoch from some position on: its groups counted through all windows, and taken in runs."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

import numpy as np

from omniload.errors import StateError
from omniload.plan.balance import Balance, balance_name
from omniload.plan.order import EpochOrder
from omniload.types import Groups

__all__ = ["GroupStream", "read_position"]


class GroupStream:
    """The groups of an epoch in emission order, from a position on, as one sequence.

    Args:
        order: the windows of the epoch.
        first: window, and group in it, that is number 0 of the sequence.
    """

    def __init__(self, order: EpochOrder, first: tuple[int, int]) -> None:
        self.first = first
        self._order = order
        # number of the group after the last one of each window, as far as windows are planned
        self._ends: list[int] = []

    def known(self, wanted: int | None = None) -> int:
        """Count groups, planning windows until `wanted` of them are known; None: all.

        Returns:
            Groups known so far; below `wanted` only if there are no more.
        """
        while wanted is None or not self._ends or self._ends[-1] < wanted:
            window = self.first[0] + len(self._ends)
            if window >= self._order.num_windows:
                break
            self._ends.append(self._begin(len(self._ends)) + self._order.count(window))
        return self._ends[-1] if self._ends else 0

    def locate(self, group: int) -> tuple[int, int]:
        """Find the window of a group, and its number there; the end of the epoch for any later."""
        group = min(group, self.known(group + 1))
        if not self._ends:
            return self.first
        place = min(bisect_right(self._ends, group), len(self._ends) - 1)
        return self.first[0] + place, group - self._begin(place)

    def take(self, begin: int, end: int) -> Groups:
        """Take the groups from `begin` to below `end`, fewer where the epoch ends.

        A run may begin in one window and end in another. The window after it is begun to be planned
        in a thread.
        """
        end = min(end, self.known(end))
        rows, sizes = [np.zeros(0, np.int64)], [np.zeros(1, np.int64)]
        while begin < end:
            place = bisect_right(self._ends, begin)
            stop = min(end, self._ends[place])
            window = self._order.groups(self.first[0] + place)
            self._order.plan_ahead(self.first[0] + place + 1)
            before = self._begin(place)
            offsets = window.offsets[begin - before : stop - before + 1]
            rows.append(window.rows[offsets[0] : offsets[-1]])
            sizes.append(np.diff(offsets))
            begin = stop
        return Groups(rows=np.concatenate(rows), offsets=np.cumsum(np.concatenate(sizes)))

    def _begin(self, place: int) -> int:
        return self._ends[place - 1] if place else -self.first[1]


def read_position(
    start: Mapping[str, Any] | None,
    order: EpochOrder,
    *,
    dp_world_size: int,
    accumulation: int,
    balance: Balance | None,
) -> tuple[int, int, int]:
    """Check a position that `StepPlan.position` gave.

    Returns:
        Window, and group in it, where the first step begins, and the micro-step it goes on at.

    Raises:
        StateError: it is none, or lies inside a step of other ranks, accumulation or balance.
    """
    if start is None:
        return 0, 0, 0
    names = {"window", "groups", "micro_step", "dp_world_size", "accumulation"}
    found = dict(start) if isinstance(start, Mapping) else {}
    arranged = found.pop("balance", None)
    values = {name: found.get(name, 0) for name in names}
    wrong = [v for v in values.values() if isinstance(v, bool) or not isinstance(v, int) or v < 0]
    if wrong or not {"window", "groups"} <= found.keys() <= names:
        raise StateError(
            'start must be a position that StepPlan.position gave, {"window": int, "groups": int}, '
            f"got {start!r}."
        )
    window, groups, micro_step = values["window"], values["groups"], values["micro_step"]
    saved = (values["dp_world_size"], values["accumulation"])
    if micro_step and saved != (dp_world_size, accumulation):
        raise StateError(
            f"a position inside a step fits the same ranks and accumulation only: saved at "
            f"micro-step {micro_step} of {saved[1]} on {saved[0]} ranks, now accumulation "
            f"{accumulation} on {dp_world_size} ranks. Start from a state that was saved "
            "between two steps, or go on as before."
        )
    if micro_step and arranged != balance_name(balance):
        raise StateError(
            "a position inside a step fits the same balance only: saved with "
            f"{arranged}, now {balance_name(balance)}. Start from a state that was saved between "
            "two steps, or go on with the same sync, cost and uniform_modality."
        )
    begin = groups - micro_step * dp_world_size
    count = order.count(window) if begin > 0 and window < order.num_windows else 0
    if window > max(order.num_windows - 1, 0) or not 0 <= begin <= count:
        raise StateError(
            f"start must lie in this epoch of {order.num_windows} windows: got window {window}, "
            f"group {begin} of {count}. Data, budget, grouping, seed, epoch and window_rows have "
            "to be those it was saved with."
        )
    return window, begin, micro_step
