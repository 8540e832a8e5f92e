"""What a loader saves: its place in the epoch, and the facts that give that place its meaning.

The state is a flat dict of numbers, strings, booleans and None, the same on every rank and below
one kilobyte. It counts the batches that were handed to the user, not those prefetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from omniload._checksum import CHECKSUM, fields_checksum
from omniload.errors import StateError
from omniload.plan import StepPlan

__all__ = ["SCHEMA", "LoaderState", "Place"]

#: Version of the state; it changes when a field gets another meaning.
SCHEMA = 1

_COUNTS = ("epoch", "step", "micro_step", "window", "groups")
_SHARE = ("dp_world_size", "accumulation")
#: facts of a state that may change between two optimizer steps
_STEP = (*_SHARE, "balance")
#: fields that may be None: no limit, or the planner's default
_OPTIONAL = ("budget_tiles", "budget_samples", "window_rows")
#: fields that states of older versions lack, and what they mean there
_LATER = {"excluded": "none"}
#: no number of a state is larger: seeds reach it
_LARGEST = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a loader is: a plan, named by its start, and the micro-batches of it handed out.

    Args:
        epoch: the epoch.
        first_step: optimizer steps of the epoch before the plan starts.
        start: window and groups where the plan starts; None: the beginning of the epoch.
        done: micro-batches of the plan handed out, empty slots included.
    """

    epoch: int = 0
    first_step: int = 0
    start: tuple[int, int] | None = None
    done: int = 0


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """Where a loader is.

    Args:
        epoch: the epoch it is in.
        step: optimizer steps of this epoch that are complete.
        micro_step: micro-batches handed out since then, on each rank.
        window: the window of rows that holds the first group of the step at hand.
        groups: groups of that window that complete steps have used, in emission order.
        dp_world_size: data-parallel ranks.
        accumulation: micro-batches of an optimizer step on one rank.
        seed: seed of the order and of the transform.
        order: name and version of the grouping.
        oversize: what happens to samples over budget.
        excluded: number and hash of the rows that are left out, or "none".
        window_rows: rows that are planned together; None: the planner's default.
        balance: name and settings of what arranges a step, or "none".
        budget_tokens: tokens a group may hold.
        budget_tiles: tiles a group may hold; None: no limit.
        budget_samples: samples a group may hold; None: no limit.
        num_rows: rows of the data set.
        plan: 32 hexadecimal digits over all that decides the order of the epoch.
        data: 32 hexadecimal digits over the shards' checksums and settings.
        transform: fingerprint of the transform.
    """

    epoch: int
    step: int
    micro_step: int
    window: int
    groups: int
    dp_world_size: int
    accumulation: int
    seed: int
    order: str
    oversize: str
    excluded: str
    window_rows: int | None
    balance: str
    budget_tokens: int
    budget_tiles: int | None
    budget_samples: int | None
    num_rows: int
    data: str
    plan: str
    transform: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        state = {"schema": SCHEMA, **asdict(self)}
        return {**state, CHECKSUM: fields_checksum(state)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderState:
        """Read what `to_dict` wrote; the dict is not changed.

        Raises:
            StateError: not a mapping, another schema, a field that is missing, unknown or wrong, or
                one that was changed since.
        """
        if not isinstance(state, Mapping):
            raise StateError(
                "a loader state must be the dict that state_dict() returned, got "
                f"{type(state).__name__}."
            )
        if state.get("schema") != SCHEMA:
            raise StateError(
                f"the loader state must have schema {SCHEMA}, which this omniload reads, got "
                f"{state.get('schema')!r}. Is it the state of another loader or another version?"
            )
        names = [field.name for field in fields(cls)]
        required = [name for name in names if name not in _LATER]
        missing = [name for name in (*required, CHECKSUM) if name not in state]
        unknown = [name for name in state if name not in (*names, "schema", CHECKSUM)]
        if missing or unknown:
            raise StateError(
                f"the loader state must have the fields of schema {SCHEMA}: missing "
                f"{missing or 'none'}, unknown {unknown or 'none'}."
            )
        for field in fields(cls):
            given = state.get(field.name, _LATER.get(field.name))
            _check_field(field.name, given, str(field.type))
        checksum = fields_checksum(state)
        if state[CHECKSUM] != checksum:
            raise StateError(
                "the loader state was changed since state_dict() returned it: its fields give the "
                f"checksum {checksum!r}, got {state[CHECKSUM]!r}. Load a state as it was saved."
            )
        return cls(**{**_LATER, **{name: state[name] for name in names if name in state}})

    @property
    def place(self) -> Place:
        """The place it names, for a loader that `check_settings` accepts."""
        start = (self.window, self.groups)
        return Place(
            epoch=self.epoch,
            first_step=self.step,
            start=None if start == (0, 0) else start,
            done=self.micro_step,
        )

    def check_settings(self, own: LoaderState, *, strict: bool) -> tuple[str, ...]:
        """Check the saved settings against the loader's own.

        Args:
            own: any state of the loader that is to take this one up.
            strict: raise where a setting differs.

        Returns:
            The settings that differ, each with both values, in words.

        Raises:
            StateError: a setting differs; or, strict or not, another world size, accumulation or
                balance inside an optimizer step.
        """
        self._check_step(own)
        differences = tuple(
            f"{field.name}: {getattr(self, field.name)!r} in the state, "
            f"{getattr(own, field.name)!r} in this loader"
            for field in fields(self)
            # the hash of the plan belongs to one epoch: see check_plan
            if field.name not in (*_COUNTS, *_STEP, "plan")
            and getattr(self, field.name) != getattr(own, field.name)
        )
        if strict and differences:
            raise StateError(
                f"the loader state belongs to other data or settings: {'; '.join(differences)}. "
                "Make the loader as it was when the state was saved, or pass strict=False."
            )
        return differences

    def check_plan(self, plan: StepPlan, *, strict: bool) -> None:
        """Check the plan that starts at the saved place.

        Raises:
            StateError: it gives rows in another order, where `strict`; or nothing is left in it.
        """
        if strict and plan.order_fingerprint != self.plan:
            raise StateError(
                "the loader state belongs to another order of samples, though data and settings "
                "are the same: another version of omniload saved it. Use that one until the end of "
                "the epoch, or pass strict=False."
            )
        if not plan.has_step(0):
            raise StateError(
                f"the loader state names no place in this data: group {self.groups} of window "
                f"{self.window} is not before the end of epoch {self.epoch}."
            )

    def _check_step(self, own: LoaderState) -> None:
        # inside a step only the same ranks, accumulation and balance go on: with others, the rows
        # that some ranks have already used would come again
        changed = [
            f"{name} {getattr(self, name)} -> {getattr(own, name)}"
            for name in _STEP
            if getattr(self, name) != getattr(own, name)
        ]
        if changed and self.micro_step:
            raise StateError(
                f"other ranks, accumulation, sync or cost ({', '.join(changed)}) can be "
                "taken up at an optimizer-step boundary only, but this state lies inside a step "
                f"(epoch {self.epoch}, step {self.step}, {self.micro_step} of {self.accumulation} "
                "micro-batches done). Save after a batch with is_last_micro_step, or continue as "
                "before."
            )
        if self.micro_step >= self.accumulation:
            raise StateError(
                f"micro_step of the loader state must be below its accumulation: got "
                f"{self.micro_step} of {self.accumulation}."
            )


def _check_field(name: str, value: Any, kind: str) -> None:
    if value is None and name in _OPTIONAL:
        return
    if kind == "str":
        fits = isinstance(value, str)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
        fits = fits and (1 if name in _SHARE else 0) <= value <= _LARGEST
    if not fits:
        raise StateError(
            f"the loader state is damaged: {name} must be "
            f"{'a count' if kind.startswith('int') else kind}, got {_shown(value)}."
        )


def _shown(value: Any) -> str:
    # Python refuses to print integers of thousands of digits
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)
