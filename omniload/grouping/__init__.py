"""Which rows share one packed row of the batch: pure functions of lengths, budget and a key.

A grouping is called as

    fn(num_tokens, num_tiles, *, budget: Budget, key: tuple[int, ...]) -> Groups

with int32 columns over local rows 0 .. n-1; all its randomness comes from `key` by `omniload.rng`.
Every row is in exactly one group, no group passes the budget, and the groups come in the order in
which they are fed. The caller sees to it that each row alone fits the budget.

`GROUPINGS` knows them by name; importing this package doesn't import Numba.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.types import Budget, Groups

__all__ = ["DEFAULT_GROUPING", "GROUPINGS", "Grouping", "get_grouping"]

#: The grouping that `make_plan` and the loader take unless told otherwise.
DEFAULT_GROUPING = "isf"


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A grouping function by name; its module is imported when it is first called.

    Args:
        name: what the user writes.
        home: where the function lives, as "module:function".
        version: raised whenever the same input gives other groups or another order; part of the
            fingerprint of a plan, so that a state from before is told apart.
    """

    name: str
    home: str
    version: int = 1

    def __call__(
        self,
        num_tokens: npt.NDArray[np.int32],
        num_tiles: npt.NDArray[np.int32],
        *,
        budget: Budget,
        key: tuple[int, ...],
    ) -> Groups:
        """Group rows.

        Args:
            num_tokens: int32 (n,), tokens per row, none above `budget.tokens`.
            num_tiles: int32 (n,), tiles per row, none above `budget.tiles`.
            budget: upper bounds of a group.
            key: integers that seed all randomness, for example (seed, epoch, window).

        Returns:
            Groups of the rows 0 .. n-1, none empty, in the order in which they are fed.
        """
        module, _, function = self.home.partition(":")
        groups: Groups = getattr(importlib.import_module(module), function)(
            num_tokens, num_tiles, budget=budget, key=key
        )
        return groups


GROUPINGS: dict[str, Grouping] = {
    entry.name: entry
    for entry in (
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
