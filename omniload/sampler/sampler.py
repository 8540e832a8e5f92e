"""The planner alone, as a batch sampler for torch's DataLoader over a data set of your own."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from omniload.costs import CostModel
from omniload.errors import ConfigError, StateError
from omniload.grouping import DEFAULT_GROUPING
from omniload.index import LengthIndex
from omniload.plan import Balance, StepPlan, make_plan
from omniload.plan.order import check_integer
from omniload.sampler.state import read_state, write_state
from omniload.sampler.tail import TAILS, any_batch, filler_row, has_batch, is_full
from omniload.types import Budget
from omniload.world import World

__all__ = ["PlanBatchSampler"]

_LOG = logging.getLogger(__name__)


class PlanBatchSampler(Sampler[list[int]]):
    """Yield the rows of this rank's micro-batches, step by step, as `omniload.DataLoader` has them.

        sampler = PlanBatchSampler(num_tokens=tokens, num_tiles=tiles, budget=Budget(tokens=4096))
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    Row i is `dataset[i]`, whose lengths are `num_tokens[i]` and `num_tiles[i]`. Every rank plans by
    itself, without communication, and with tail="repeat" or "drop" all have the same number of
    batches, so no rank waits for ever. Each row comes once an epoch, but for what `tail` says of
    the last step.

    Batches of an epoch are numbered from 0; number b is micro-step b % accumulation of step
    b // accumulation. An epoch advances when its last batch was drawn; `set_epoch` works too.
    `iter()` starts at a loaded state until a batch was drawn, else at the beginning of the epoch.

    Don't let a framework deal the batches out once more (Accelerate's `prepare` of the loader;
    Lightning's `use_distributed_sampler`): each rank would get a part of its part.

    Args:
        index: lengths of all rows; or give them as arrays.
        num_tokens: integers (num_rows,), tokens of each row, each at least 1.
        num_tiles: integers (num_rows,), image tiles of each row; None: there are none.
        num_loss_tokens: integers (num_rows,), tokens that give loss; None: all but one a row.
        budget: upper bounds of a micro-batch.
        world: who this process is; None: `World.from_env()`.
        accumulation: micro-batches of an optimizer step on one rank.
        grouping: a name in `omniload.grouping.GROUPINGS`.
        seed: seeds the order, alike on all ranks.
        shuffle: False: rows in index order.
        tail: the last step may lack rows for some ranks. "repeat": such a rank gets one row that
            another rank has in the same micro-step, the shortest, with an image if there is one;
            see `is_filler`. "drop": that step is left out, with a warning; see `dropped`. "empty":
            such a rank gets fewer batches, so the loop must hold no collective; for evaluation.
        oversize: a row over the budget is an "error", or left out ("drop"; see `dropped`).
        window_rows: rows that are planned together; None: the planner's default.
        sync: "step", "micro-step" or None, when ranks wait for each other; see `make_plan`.
        cost: what is to be even, as estimated time; None: tiles and tokens.
        balance: rearranges steps instead of the balance that `sync` and `cost` ask for.

    Raises:
        ConfigError: an argument is wrong, or doesn't fit the lengths; a row over the budget; with
            tail="drop", too few rows for one step.
    """

    def __init__(
        self,
        index: LengthIndex | None = None,
        *,
        num_tokens: npt.ArrayLike | None = None,
        num_tiles: npt.ArrayLike | None = None,
        num_loss_tokens: npt.ArrayLike | None = None,
        budget: Budget,
        world: World | None = None,
        accumulation: int = 1,
        grouping: str = DEFAULT_GROUPING,
        seed: int = 0,
        shuffle: bool = True,
        tail: str = "repeat",
        oversize: str = "error",
        window_rows: int | None = None,
        sync: str | None = "step",
        cost: CostModel | None = None,
        balance: Balance | None = None,
    ) -> None:
        if not isinstance(tail, str) or tail not in TAILS:
            raise ConfigError(f"tail must be one of {', '.join(TAILS)}, got {tail!r}.")
        if not isinstance(world, (World, type(None))):
            raise ConfigError(f"world must be an omniload.World, got {type(world).__name__}.")
        self.world = World.from_env() if world is None else world
        self.tail = tail
        self._index = _as_index(index, num_tokens, num_tiles, num_loss_tokens)
        self._settings: dict[str, Any] = {
            "budget": budget,
            "dp_world_size": self.world.dp_world_size,
            "accumulation": accumulation,
            "grouping": grouping,
            "seed": seed,
            "shuffle": shuffle,
            "oversize": oversize,
            "window_rows": window_rows,
            "sync": sync,
            "cost": cost,
            "balance": balance,
        }
        self._newest: object = None  # marks the iterator whose batches count
        self._go(self._make_plan(0, None), epoch=0, first_step=0)

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that the first `iter()` starts."""
        return self._epoch

    @property
    def plan(self) -> StepPlan:
        """The plan of this epoch, or of its rest where a state was loaded."""
        return self._plan

    @property
    def start(self) -> int:
        """Number of the first batch that `iter()` yields; above 0 where a state was loaded."""
        return self._start

    @property
    def dropped(self) -> npt.NDArray[np.int64]:
        """int64 (n,), rows that this epoch leaves out: over the budget, or in a dropped tail.

        With tail="drop" it plans the whole epoch.
        """
        rows = [self._plan.dropped]
        last = self._plan.num_steps - 1 if self.tail == "drop" else -1
        if last >= 0 and not is_full(self._plan, last):
            rows.append(self._plan.step_groups(last).rows)
        return np.concatenate(rows)

    def __len__(self) -> int:
        """Batches of this rank in the epoch, those before a loaded state too.

        Epochs differ a little, because each makes its groups anew. Plans the whole epoch: about a
        second for a million rows.
        """
        last = self._plan.num_steps - 1
        accumulation = self._plan.accumulation
        count = sum(self._has_batch(self._plan, last, micro) for micro in range(accumulation))
        return (self._first_step + max(last, 0)) * accumulation + count

    def __iter__(self) -> Iterator[list[int]]:
        if self._finished:
            self._go(self._make_plan(self._epoch + 1, None), epoch=self._epoch + 1, first_step=0)
        elif self._drawn > self._start:
            self._go(self._make_plan(self._epoch, None), epoch=self._epoch, first_step=0)
        self._newest = object()
        walk = enumerate(self._walk(self._plan, self._epoch), start=self._start)
        return self._batches(self._newest, walk)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; not needed, because epochs advance by themselves.

        It does nothing when that epoch is running or its state was loaded. Another epoch begins at
        its beginning. After the last batch of an epoch the state is in the next: so resume with
        `set_epoch(sampler.epoch)`, and not with an epoch that was saved beside the state.

        Raises:
            ConfigError: not a count.
        """
        if check_integer("epoch", epoch) < 0:
            raise ConfigError(f"epoch must be an integer of at least 0, got {epoch!r}.")
        if epoch != self._epoch or self._finished:
            self._go(self._make_plan(int(epoch), None), epoch=int(epoch), first_step=0)

    def is_filler(self, batch: int) -> bool:
        """Say if a batch of this rank only repeats a row, so that its loss should count 0.

        Args:
            batch: its number in this epoch, from `start` on.

        Raises:
            ConfigError: this epoch has no such batch.
        """
        step, micro_step = self._locate(check_integer("batch", batch))
        return len(self._plan.micro_batch(step, micro_step, self.world.dp_rank)) == 0

    def num_loss_tokens(self, step: int) -> int:
        """Count the tokens that give loss in a step over all ranks and micro-steps, fillers not.

        Args:
            step: its number in this epoch, from `start // accumulation` on.

        Raises:
            ConfigError: this epoch has no such step.
        """
        return self._plan.num_loss_tokens(check_integer("step", step) - self._first_step)

    def state_dict(self, num_batches: int | None = None) -> dict[str, Any]:
        """Return where this epoch is: plain JSON, the same on all ranks.

        Args:
            num_batches: batches of this epoch that were trained on, those before `start` included.
                None: as many as were drawn from the sampler. Worker processes draw ahead, so with
                num_workers > 0 give the number.

        Raises:
            ConfigError: this epoch hasn't so many batches.
        """
        done = self._drawn if num_batches is None else check_integer("num_batches", num_batches)
        if done > self._start:
            self._locate(done - 1)
        elif done < self._start:
            raise ConfigError(f"num_batches must be at least {self._start}, got {done}.")
        epoch, first_step, plan = self._epoch, self._first_step, self._plan
        step, micro_step = divmod(done - first_step * plan.accumulation, plan.accumulation)
        if done > self._start and not any_batch(plan, step, micro_step, tail=self.tail):
            epoch, first_step, step, micro_step = epoch + 1, 0, 0, 0
            plan = self._make_plan(epoch, None)
        return write_state(plan, epoch=epoch, first_step=first_step, at=(step, micro_step))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved place: the next `iter()` yields what was still to come.

        Other ranks, another accumulation, sync or cost can be taken up between two steps.

        Raises:
            StateError: not a state; of other lengths or settings; inside a step of other ranks,
                accumulation, sync or cost.
        """
        found = read_state(state_dict)
        if self._make_plan(found["epoch"], None).order_fingerprint != found["order"]:
            raise StateError(
                "the sampler state belongs to another order of rows: lengths, budget, grouping, "
                "seed, shuffle, oversize and window_rows have to be those it was saved with."
            )
        plan = self._make_plan(found["epoch"], found["position"])
        self._go(plan, epoch=found["epoch"], first_step=found["step"])

    def _make_plan(self, epoch: int, start: Mapping[str, Any] | None) -> StepPlan:
        return make_plan(self._index, epoch=epoch, start=start, **self._settings)

    def _go(self, plan: StepPlan, *, epoch: int, first_step: int) -> None:
        self._plan, self._epoch, self._first_step = plan, epoch, first_step
        if self.tail == "drop" and first_step == 0 and len(self._index) and not is_full(plan, 0):
            raise ConfigError(
                f"tail='drop' needs rows for one full step: expected {plan.dp_world_size} ranks x "
                f"{plan.accumulation} groups, got {len(self._index)} rows that make fewer. Use "
                "tail='repeat', or a smaller budget."
            )
        self._start = first_step * plan.accumulation + plan.first_micro_step
        self._drawn = self._start
        self._finished = False
        self._newest = None

    def _batches(self, mark: object, walk: Iterator[tuple[int, list[int]]]) -> Iterator[list[int]]:
        item = next(walk, None)
        while True:
            # one ahead, so that the last batch is known to be the last when it is drawn
            following = next(walk, None)
            if mark is self._newest:
                self._drawn = self._drawn if item is None else item[0] + 1
                self._finished = following is None
            if item is None:
                return
            yield item[1]
            item = following

    def _walk(self, plan: StepPlan, epoch: int) -> Iterator[list[int]]:
        step, micro_step = 0, plan.first_micro_step
        while self._has_batch(plan, step, micro_step):
            rows = plan.micro_batch(step, micro_step, self.world.dp_rank)
            yield rows.tolist() if len(rows) else [filler_row(plan, self._index, step, micro_step)]
            step, micro_step = divmod(step * plan.accumulation + micro_step + 1, plan.accumulation)
        if self.tail == "drop" and plan.has_step(step):
            count = len(plan.step_groups(step).rows)
            _LOG.warning(
                "tail='drop' leaves out %d rows of the last step of epoch %d", count, epoch
            )

    def _has_batch(self, plan: StepPlan, step: int, micro_step: int) -> bool:
        return has_batch(plan, step, micro_step, dp_rank=self.world.dp_rank, tail=self.tail)

    def _locate(self, batch: int) -> tuple[int, int]:
        """Find step and micro-step in the plan of the batch with this number in the epoch."""
        accumulation = self._plan.accumulation
        step, micro_step = divmod(batch - self._first_step * accumulation, accumulation)
        if batch < self._start or not self._has_batch(self._plan, step, micro_step):
            raise ConfigError(
                f"epoch {self._epoch} must have the batch: expected a number from {self._start} to "
                f"{len(self) - 1}, got {batch}."
            )
        return step, micro_step


def _as_index(
    index: LengthIndex | None,
    num_tokens: npt.ArrayLike | None,
    num_tiles: npt.ArrayLike | None,
    num_loss_tokens: npt.ArrayLike | None,
) -> LengthIndex:
    given = [array for array in (num_tokens, num_tiles, num_loss_tokens) if array is not None]
    if index is not None and not given:
        if not isinstance(index, LengthIndex):
            raise ConfigError(
                f"index must be an omniload.LengthIndex, got {type(index).__name__}. Give arrays "
                "as num_tokens= and num_tiles=."
            )
        return index
    if index is not None or num_tokens is None:
        raise ConfigError(
            "PlanBatchSampler needs the lengths once: expected an index, or num_tokens with "
            f"num_tiles, got {'both' if index is not None else 'no num_tokens'}."
        )
    if num_tiles is None:
        num_tiles = np.zeros(np.shape(num_tokens), np.int32)
    return LengthIndex.from_arrays(
        num_tokens=num_tokens, num_tiles=num_tiles, num_loss_tokens=num_loss_tokens
    )
