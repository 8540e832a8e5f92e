"""The seam between the plan and what balances a step."""

from __future__ import annotations

import hashlib
from typing import Protocol

import numpy as np
import numpy.typing as npt

from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.types import Budget, Groups

__all__ = ["Balance", "balance_name", "balanced", "check_balance", "choose_balance"]

#: characters of a fingerprint that stand in a state as they are
_LONGEST_NAME = 256


class Balance(Protocol):
    """Rearranges the groups of one step: swaps samples between them, assigns them to ranks.

    A plan calls it lazily, for each step that is asked for, on every rank alike; so it must be a
    pure function of its arguments. The rows of the step stay the same.
    """

    @property
    def fingerprint(self) -> str:
        """Name, version and settings; part of the fingerprint of the plan."""
        ...

    def __call__(
        self,
        step: Groups,
        *,
        num_tokens: npt.NDArray[np.int32],
        num_tiles: npt.NDArray[np.int32],
        budget: Budget,
        dp_world_size: int,
        accumulation: int,
    ) -> Groups:
        """Rearrange one step.

        Args:
            step: accumulation * dp_world_size groups of index rows in emission order, slot
                m * dp_world_size + r for micro-step m and rank r; empty: a filler slot.
            num_tokens: int32 (len(step.rows),), tokens of each entry of `step.rows`.
            num_tiles: int32 (len(step.rows),), tiles of each entry of `step.rows`.
            budget: no group may pass it.
            dp_world_size: data-parallel ranks.
            accumulation: micro-steps of the step.

        Returns:
            As many groups, in slots as above, over the same rows.
        """
        ...


def balanced(
    balance: Balance,
    step: Groups,
    index: LengthIndex,
    *,
    budget: Budget,
    dp_world_size: int,
    accumulation: int,
) -> Groups:
    """Rearrange a step, and check that its rows and the number of its groups stay the same.

    Raises:
        ConfigError: they don't.
    """
    groups = balance(
        step,
        num_tokens=index.num_tokens[step.rows],
        num_tiles=index.num_tiles[step.rows],
        budget=budget,
        dp_world_size=dp_world_size,
        accumulation=accumulation,
    )
    same = len(groups) == len(step) and np.array_equal(np.sort(groups.rows), np.sort(step.rows))
    if not same:
        raise ConfigError(
            f"balance {balance.fingerprint} must keep the rows of a step and its {len(step)} "
            f"groups, got {len(groups.rows)} rows in {len(groups)} groups."
        )
    return groups


def balance_name(balance: Balance | None) -> str:
    """Name what arranges steps, for states and fingerprints; "none": emission order.

    A long fingerprint is hashed, because a state is to stay small.
    """
    if balance is None:
        return "none"
    name = balance.fingerprint
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:32]}... {hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


def check_balance(balance: Balance | None) -> None:
    """Check what a user gave as the balance.

    Raises:
        ConfigError: it is no `Balance`.
    """
    named = isinstance(getattr(balance, "fingerprint", None), str)
    if balance is not None and not (callable(balance) and named):
        raise ConfigError(
            "balance must be callable and have a fingerprint, a str, as omniload.balance."
            f"StepBalance has: got {type(balance).__name__}."
        )


def choose_balance(
    *,
    sync: str | None,
    cost: CostModel | None,
    uniform_modality: bool,
    dummy_tokens: int,
) -> Balance | None:
    """Make the balance of the arguments of `make_plan`.

    Returns:
        None where `sync` is: emission order.

    Raises:
        ConfigError: an argument is wrong.
    """
    from omniload.balance import StepBalance  # Numba, only where a plan is made

    if sync is not None and not (isinstance(sync, str) and sync in ("step", "micro-step")):
        raise ConfigError(f"sync must be 'step', 'micro-step' or None, got {sync!r}.")
    if not isinstance(uniform_modality, bool):
        raise ConfigError(f"uniform_modality must be True or False, got {uniform_modality!r}.")
    balance = StepBalance(
        sync=sync or "step",
        cost=cost,
        uniform_modality=uniform_modality,
        dummy_tokens=dummy_tokens if uniform_modality else 0,
    )
    return None if sync is None else balance
