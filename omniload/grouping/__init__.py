"""Which rows share one packed row of the batch: pure functions of lengths, budget and a key.

A grouping is called as

    fn(num_tokens, num_tiles, *, budget: Budget, key: tuple[int, ...]) -> Groups

with int32 columns over local rows 0 .. n-1; all its randomness comes from `key` by `omniload.rng`.
Every row is in exactly one group, no group passes the budget, and the groups come in the order in
which they are fed. A row that doesn't fit the budget alone has to be kept out before.

`GROUPINGS` knows them by name; importing this package doesn't import Numba.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.grouping.room import keep_room
from omniload.types import Budget, Groups

__all__ = ["DEFAULT_GROUPING", "GROUPINGS", "Grouping", "get_grouping"]

#: The grouping that `make_plan` and the loader take unless told otherwise.
DEFAULT_GROUPING = "buffered"


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A grouping function by name; its module is imported when it is first called.

    Args:
        name: what the user writes.
        home: where the function lives, as "module:function".
        version: raised whenever the same input gives other groups or another order; part of the
            fingerprint of a plan, so that a state from before is told apart.
        keeps_room: whether the function takes `dummy_tokens`; groups of others are split after it.
    """

    name: str
    home: str
    version: int = 1
    keeps_room: bool = False

    def __call__(
        self,
        num_tokens: npt.NDArray[np.int32],
        num_tiles: npt.NDArray[np.int32],
        *,
        budget: Budget,
        key: tuple[int, ...],
        dummy_tokens: int = 0,
    ) -> Groups:
        """Group rows.

        Args:
            num_tokens: int32 (n,), tokens per row, none above `budget.tokens`.
            num_tiles: int32 (n,), tiles per row, none above `budget.tiles`.
            budget: upper bounds of a group.
            key: integers that seed all randomness, for example (seed, epoch, window).
            dummy_tokens: room that a group without tiles keeps for a dummy document, unless it is a
                single row.

        Returns:
            Groups of the rows 0 .. n-1, none empty, in the order in which they are fed.

        Raises:
            ConfigError: a row over the budget, which no group could hold.
        """
        _check_rows_fit("tokens", num_tokens, budget.tokens)
        _check_rows_fit("tiles", num_tiles, budget.tiles)
        module, _, function = self.home.partition(":")
        groups: Groups = getattr(importlib.import_module(module), function)(
            num_tokens,
            num_tiles,
            budget=budget,
            key=key,
            **({"dummy_tokens": dummy_tokens} if self.keeps_room else {}),
        )
        if not dummy_tokens:
            return groups
        room = budget.tokens - dummy_tokens
        return keep_room(groups, num_tokens, num_tiles, most_tokens=room)


#: name -> grouping, in the order in which tables show them
GROUPINGS: dict[str, Grouping] = {
    entry.name: entry
    for entry in (
        Grouping(name="buffered", home="omniload.grouping.buffered:buffered", keeps_room=True),
        Grouping(name="isf", home="omniload.grouping.isf:isf"),
        Grouping(name="sequential", home="omniload.grouping.baselines:sequential"),
        Grouping(name="random", home="omniload.grouping.baselines:random"),
        Grouping(name="length", home="omniload.grouping.baselines:length"),
        Grouping(name="device", home="omniload.grouping.baselines:device"),
    )
}


def get_grouping(name: str) -> Grouping:
    """Look a grouping up.

    Raises:
        ConfigError: there is none of that name; lists those that are.
    """
    if not isinstance(name, str) or name not in GROUPINGS:
        raise ConfigError(f"grouping must be one of {', '.join(GROUPINGS)}, got {name!r}.")
    return GROUPINGS[name]


def _check_rows_fit(name: str, column: npt.NDArray[np.int32], cap: int | None) -> None:
    if cap is None or len(column) == 0 or column.max() <= cap:
        return
    row = int(column.argmax())
    raise ConfigError(
        f"every row must fit the budget: expected at most {cap} {name}, got {int(column[row])} "
        f"(row {row}). Raise Budget.{name} or leave such rows out."
    )
