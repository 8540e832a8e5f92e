"""What a batch sampler saves: its epoch, and its place in the order of groups. Plain JSON."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from omniload._checksum import CHECKSUM, fields_checksum
from omniload.errors import StateError
from omniload.plan import StepPlan

__all__ = ["read_state", "write_state"]

_SCHEMA = 1  # changes when a field gets another meaning
_NAMES = ("schema", "order", "epoch", "step", "position", CHECKSUM)


def write_state(
    plan: StepPlan, *, epoch: int, first_step: int, at: tuple[int, int]
) -> dict[str, Any]:
    """Describe a place.

    Args:
        plan: the plan that it is in.
        epoch: the epoch of the plan.
        first_step: steps of the epoch before the plan begins.
        at: step and micro-step of the plan that come next.
    """
    state = {
        "schema": _SCHEMA,
        "order": plan.order_fingerprint,
        "epoch": epoch,
        "step": first_step + at[0],
        "position": plan.position(*at),
    }
    return {**state, CHECKSUM: fields_checksum(state)}


def read_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Check what `write_state` wrote; a position is checked by the plan that starts there.

    Raises:
        StateError: something else, another schema, or a field that was changed since.
    """
    found = dict(state) if isinstance(state, Mapping) else {}
    counts = [found.get(name) for name in ("schema", "epoch", "step")]
    whole = all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**63 for v in counts)
    if sorted(found) != sorted(_NAMES) or not whole or found["schema"] != _SCHEMA:
        raise StateError(
            f"a sampler state must be what state_dict() returned, with schema {_SCHEMA}, got "
            f"{reprlib.repr(state)}."
        )
    try:
        checksum = fields_checksum(found)
    except (TypeError, ValueError):  # not JSON: write_state didn't make it
        checksum = ""
    if found[CHECKSUM] != checksum:
        raise StateError(
            "the sampler state was changed since state_dict() returned it: its fields give the "
            f"checksum {checksum!r}, got {found[CHECKSUM]!r}. Load a state as it was saved."
        )
    return found
