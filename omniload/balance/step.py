"""The balance of a step as a value that a plan calls: `StepBalance`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from omniload.balance.assign import arrange
from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.types import Budget, Groups

__all__ = ["StepBalance", "dummy_slots"]

Int64Array = npt.NDArray[np.int64]

_VERSION = 1  # raised when the same step is arranged in another way
_SYNC = ("step", "micro-step")


@dataclass(frozen=True, kw_only=True)
class StepBalance:
    """Evens out the loads of the ranks in a step; `make_plan(balance=)` takes it.

    Samples are swapped between the groups of the step, within the budget, and groups are assigned
    to micro-steps and ranks. No sample enters or leaves the step. Filler slots stay where they are.

    Args:
        sync: when ranks wait for each other. "step": once a step, at the optimizer (DDP, ZeRO-1 and
            ZeRO-2), so the sum over the micro-steps of a rank counts. "micro-step": at each one
            (FSDP, ZeRO-3, pipelines), so each counts by itself. In a pipeline the order of
            micro-batches counts too: `omniload.pipeline.PipelineOrder(before=StepBalance(...))`.
        cost: estimated time as the only load; None: tiles and tokens, each by itself, which suits
            engines that wait between vision encoder and language model too.
        uniform_modality: try to have tiles on all ranks or on none in every micro-step, because
            FSDP and ZeRO-3 hang otherwise; `dummy_slots` says where that remains open.
        dummy_tokens: tokens of the dummy document that is appended there. A group without tiles
            isn't filled further than that it fits.

    Raises:
        ConfigError: an unknown `sync`, no CostModel, or a negative number of tokens.
    """

    sync: str = "step"
    cost: CostModel | None = None
    uniform_modality: bool = False
    dummy_tokens: int = 0

    def __post_init__(self) -> None:
        if self.sync not in _SYNC:
            raise ConfigError(f"sync must be one of {', '.join(_SYNC)}, got {self.sync!r}.")
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise ConfigError(f"cost must be an omniload.CostModel or None, got {self.cost!r}.")
        tokens = self.dummy_tokens
        if isinstance(tokens, bool) or not isinstance(tokens, (int, np.integer)) or tokens < 0:
            raise ConfigError(f"dummy_tokens must be an integer of at least 0, got {tokens!r}.")

    @property
    def fingerprint(self) -> str:
        """Name, version and settings."""
        return f"step-balance-{_VERSION} {json.dumps(asdict(self), sort_keys=True)}"

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
        """Arrange one step; a pure function of its arguments.

        Args:
            step: accumulation * dp_world_size groups in emission order, the slot of micro-step m
                and rank r is m * dp_world_size + r; empty: a filler slot.
            num_tokens: int32 (len(step.rows),), tokens of each entry of `step.rows`.
            num_tiles: int32 (len(step.rows),), tiles of each entry of `step.rows`.
            budget: no group may pass it.
            dp_world_size: data-parallel ranks.
            accumulation: micro-steps of the step.

        Returns:
            As many groups, in slots as above, over the same rows.

        Raises:
            ConfigError: arguments that don't fit together.

        Cost: time in proportion to the samples of the step.
        """
        if len(step) != dp_world_size * accumulation:
            raise ConfigError(
                "a step must have a group for each rank and micro-step: expected "
                f"{dp_world_size * accumulation}, got {len(step)}."
            )
        sizes = np.stack([num_tokens, num_tiles], axis=1).astype(np.int64)
        if len(sizes) != len(step.rows):
            raise ConfigError(
                f"num_tokens must have one entry a row of the step: expected {len(step.rows)}, "
                f"got {len(sizes)}."
            )
        order, offsets = arrange(
            sizes,
            step.offsets,
            loads=_loads(sizes, self.cost),
            budget=budget,
            dp_world_size=dp_world_size,
            by_micro_step=self.sync == "micro-step",
            uniform=self.uniform_modality,
            dummy_tokens=int(self.dummy_tokens),
        )
        return Groups(rows=step.rows[order], offsets=offsets)


def dummy_slots(
    step: Groups, num_tiles: npt.ArrayLike, *, dp_world_size: int
) -> npt.NDArray[np.bool_]:
    """Find the slots that need a dummy image, for tiles on all ranks of a micro-step or on none.

    Args:
        step: groups in slots, as a balance returns them; empty: a filler slot, which is never
            among the result, since a filler has an image wherever one is due.
        num_tiles: integers (len(step.rows),), tiles of each entry of `step.rows`.
        dp_world_size: data-parallel ranks.

    Returns:
        bool (accumulation, dp_world_size): groups without tiles, in micro-steps where another
        rank has some.
    """
    running = np.concatenate([[0], np.cumsum(np.asarray(num_tiles, np.int64))])
    tiles = np.diff(running[step.offsets]).reshape(-1, dp_world_size)
    filled = np.diff(step.offsets).reshape(-1, dp_world_size) > 0
    needed: npt.NDArray[np.bool_] = filled & (tiles == 0) & (tiles > 0).any(axis=1, keepdims=True)
    return needed


def _loads(sizes: Int64Array, cost: CostModel | None) -> Int64Array:
    """Return the loads of each entry: tiles and tokens, or the quantised cost and nothing."""
    if cost is None:
        return np.ascontiguousarray(sizes[:, ::-1])
    tokens = sizes[:, 0].astype(np.float64)
    times = cost.cost(sizes[:, 1], tokens, tokens * tokens)
    times = times - cost.fixed  # a group has it once, whatever it holds
    largest = float(times.max(initial=0.0))
    unit = largest / 2**30 if largest > 0 else 1.0
    quantised = np.rint(times / unit).astype(np.int64)
    return np.stack([quantised, np.zeros_like(quantised)], axis=1)
