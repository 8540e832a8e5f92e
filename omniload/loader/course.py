"""Where the loader is: its epoch, the plan, the place in that, and the account of its rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.batch import PackedBatch
from omniload.index import LengthIndex
from omniload.loader.account import Account
from omniload.loader.checks import has_images
from omniload.loader.exclude import exclusion_name
from omniload.loader.settings import LoaderSettings
from omniload.loader.sources import row_layout, wants_prefetch
from omniload.loader.state import LoaderState, Place
from omniload.loader.tasks import Walk
from omniload.plan import StepPlan
from omniload.plan.ahead import Ahead
from omniload.plan.balance import balance_name
from omniload.source import RowSource

__all__ = ["Course"]

_log = logging.getLogger(__name__)

#: Below it the next epoch is planned so quickly that nothing is gained by beginning earlier.
_LEAST_ROWS_AHEAD = 100_000


class Course:
    """The way of one rank through epochs.

    Args:
        source: the rows.
        settings: what decides the order.
        transform: fingerprint of the transform.
        exclude: int64 (n,), rows to leave out.

    Attributes:
        plan: the plan of this epoch, or of its rest where a state was loaded.
        place: where in it.
        account: what became of its rows; that of the last epoch until a batch of a new one.
        taken: whether a batch was handed out since the place was set.
    """

    def __init__(
        self,
        source: RowSource,
        settings: LoaderSettings,
        *,
        transform: str,
        exclude: npt.NDArray[np.int64],
    ) -> None:
        self._source = source
        self._settings = settings
        self._transform = transform
        self._exclude = exclude
        self._is_fixed = source.at_epoch(0) is source
        self._layout = row_layout(source) if self._is_fixed else None
        self._of_epoch: tuple[int, RowSource, LengthIndex] | None = None
        self._next: tuple[int, Ahead[StepPlan]] | None = None
        self.place = Place()
        self.taken = False
        self._loaded = False  # whether the place was loaded and no batch was taken from it
        self.plan = self._make_plan(self.place)
        self._resumed_from: tuple[int, int] | None = None
        self.account = self._new_account()

    @property
    def source(self) -> RowSource:
        """The rows of this epoch."""
        return self._at(self.place.epoch)[1]

    @property
    def has_images(self) -> bool:
        """Whether a row of this epoch has an image."""
        return has_images(self.source.index, left_out=self.plan.dropped)

    @property
    def num_batches(self) -> int:
        """Micro-batches of this rank in the epoch, those before a loaded state too."""
        return self.place.first_step * self._settings.accumulation + self.walk(done=0).count()

    @property
    def facts(self) -> dict[str, Any]:
        """What has to be the same on all ranks."""
        return {
            **self.state().to_dict(),
            "tail": self._settings.tail,
            "pad_to": str(self._settings.padding),
            "plan": self.plan.fingerprint,
        }

    def begin(self) -> Walk:
        """Begin an iteration: at a loaded place, or at the beginning of this or the next epoch."""
        if self.taken:
            self.move(Place(epoch=self.place.epoch + self.is_finished()))
        self.account = self._new_account()
        return self.walk(done=self.place.done, counted=True)

    def begin_again(self) -> Walk:
        """Go on with the batch after the last that was handed out; those made since are lost."""
        self.account.pending.clear()
        return self.walk(done=self.place.done, counted=True)

    def walk(self, *, done: int, counted: bool = False) -> Walk:
        """Walk through the plan.

        Args:
            done: micro-batches to leave out.
            counted: whether the account is told of each micro-batch.
        """
        source = self.source
        return Walk(
            plan=self.plan,
            index=source.index,
            epoch=self.place.epoch,
            dp_rank=self._settings.world.dp_rank,
            first_step=self.place.first_step,
            start=done,
            skip_empty=self._settings.tail == "empty",
            has_images=self.has_images if counted else True,
            on_slot=self.account.expect if counted else None,
            shard_of=_shard_of(source) if counted and wants_prefetch(source) else None,
        )

    def is_finished(self) -> bool:
        """Say if this rank had all batches of the epoch."""
        # 0: a rank without any batch in an epoch still has to go through it
        return self.place.done > 0 and self.walk(done=self.place.done).is_done()

    def hand_out(self, batch: PackedBatch) -> None:
        """Go past a batch.

        Raises:
            LedgerError: it is not what the plan has there.
        """
        self.account.hand_out(batch)
        step = batch.step - self.place.first_step
        done = step * self._settings.accumulation + batch.micro_step + 1
        self.place = replace(self.place, done=done)
        self.taken, self._loaded = True, False
        if len(self.source.index) >= _LEAST_ROWS_AHEAD:
            self._plan_next(step)

    def end(self) -> None:
        """Go to the next epoch, after the last batch.

        Raises:
            LedgerError: rows of this epoch are missing.
        """
        self.account.close()
        self.finish()

    def finish(self) -> None:
        """Go to the beginning of the next epoch."""
        self.move(Place(epoch=self.place.epoch + 1))

    def move(self, place: Place, plan: StepPlan | None = None) -> None:
        """Go to a place.

        Args:
            place: the place.
            plan: the plan that it is in; None: to be made where it isn't this one.
        """
        if plan is not None:
            self.plan = plan
        elif (place.epoch, place.start) != (self.place.epoch, self.place.start):
            self.plan = self._make_plan(place)
        self.place = place
        self.taken = self._loaded = False
        self._resumed_from = None

    def go_to_epoch(self, epoch: int) -> bool:
        """Go to the beginning of an epoch, unless it is running or was loaded.

        Returns:
            Whether the place changed.
        """
        place = self.place
        if epoch == place.epoch and not self.is_finished():
            return False
        if self._loaded and place != Place():
            _log.warning(
                "set_epoch(%d) leaves the loaded place (epoch %d, step %d) before a batch was "
                "taken from it; to go on from a loaded state, call set_epoch(loader.epoch) or "
                "leave set_epoch out",
                epoch,
                place.epoch,
                place.first_step,
            )
        self.move(Place(epoch=epoch))
        return True

    def state(self) -> LoaderState:
        """Say where this is: the same on all ranks that were handed the same batches."""
        place, plan = self.place, self.plan
        if place.done > 0 and self.walk(done=place.done).is_done(on_all_ranks=True):
            place = Place(epoch=place.epoch + 1)
            plan = self._make_plan(place)
        step, micro_step = divmod(place.done, self._settings.accumulation)
        window, groups = place.start or (0, 0)
        if step:  # else no window has to be planned to know the place
            position = plan.position(step)
            window, groups = position["window"], position["groups"]
        return LoaderState(
            epoch=place.epoch,
            step=place.first_step + step,
            micro_step=micro_step,
            window=window,
            groups=groups,
            balance=balance_name(plan.balance),
            **self._settings.facts,
            excluded=exclusion_name(self._exclude),
            num_rows=len(self._source),
            data=self._source.fingerprint,
            plan=plan.order_fingerprint,
            transform=self._transform,
        )

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        """Go to a saved place.

        Raises:
            StateError: as `DataLoader.load_state_dict`.
        """
        state = LoaderState.from_dict(state_dict)
        differences = state.check_settings(self.state(), strict=strict)
        plan = self._make_plan(state.place)
        state.check_plan(plan, strict=strict)
        if differences:
            _log.warning("loader state taken up although it differs: %s", "; ".join(differences))
        self.move(state.place, plan)
        self._loaded = True
        if state.place != Place(epoch=state.epoch):
            self._resumed_from = (state.step, state.micro_step)
        self.account = self._new_account()

    def _new_account(self) -> Account:
        return Account(
            epoch=self.place.epoch,
            num_rows=len(self.source.index),
            plan=self.plan,
            start=self.place.done,
            resumed_from=self._resumed_from,
        )

    def _at(self, epoch: int) -> tuple[int, RowSource, LengthIndex]:
        """Give the rows of an epoch, and the lengths to plan with."""
        found = self._of_epoch
        if found is None or (found[0] != epoch and not self._is_fixed):
            source = self._source.at_epoch(epoch)
            found = self._of_epoch = (epoch, source, self._settings.padded(source.index))
        return found

    def _make_plan(self, place: Place) -> StepPlan:
        if self._next is not None and place.start is None and self._next[0] == place.epoch:
            return self._next[1].result()
        return self._plan_of(place.epoch, place.start, *self._at(place.epoch)[1:])

    def plans_apart(self) -> tuple[StepPlan, StepPlan]:
        """Make the plan at hand once more, and without balance, so that this one is left alone."""
        epoch, start = self.place.epoch, self.place.start
        _, source, index = self._at(epoch)
        bare = replace(self._settings, sync=None, balance=None)
        return (
            self._plan_of(epoch, start, source, index),
            self._plan_of(epoch, start, source, index, settings=bare),
        )

    def _plan_of(
        self,
        epoch: int,
        start: tuple[int, int] | None,
        source: RowSource,
        index: LengthIndex,
        *,
        settings: LoaderSettings | None = None,
    ) -> StepPlan:
        shards, sets = self._layout or row_layout(source)
        return (settings or self._settings).make_plan(
            index,
            epoch=epoch,
            start=start,
            exclude=self._exclude,
            shard_starts=shards,
            set_starts=sets,
        )

    def _plan_next(self, step: int) -> None:
        """Begin to plan the next epoch in a thread, once the last window of this one is used."""
        epoch = self.place.epoch + 1
        is_begun = self._next is not None and self._next[0] == epoch
        if is_begun or not self.plan.is_near_end(step):
            return

        def plan_next() -> StepPlan:
            source = self._source.at_epoch(epoch)
            plan = self._plan_of(epoch, None, source, self._settings.padded(source.index))
            plan.has_step(0)
            return plan

        self._next = (epoch, Ahead(plan_next))


def _shard_of(source: RowSource) -> Any:
    return lambda row: source.locate(row)[0]
