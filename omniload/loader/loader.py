"""The data loader: this rank's part of the plan, read by workers, with a state that resumes it."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload._checksum import CHECKSUM
from omniload.batch import PackedBatch
from omniload.costs import CostModel
from omniload.grouping import DEFAULT_GROUPING
from omniload.index import LengthIndex
from omniload.loader.checks import (
    choose_transform,
    compare_over_ranks,
    data_fingerprint,
    has_images,
)
from omniload.loader.iterator import BatchIterator
from omniload.loader.settings import LoaderSettings, WorkerOptions, check_count, open_source
from omniload.loader.state import LoaderState, Place
from omniload.loader.transform import check_filler, check_picklable
from omniload.loader.worker import PackDataset, Walk
from omniload.loader.workers import Workers
from omniload.padding import Padding
from omniload.plan import StepPlan
from omniload.plan.balance import balance_name
from omniload.rng import derive
from omniload.shards import Manifest, ShardSet
from omniload.transforms import Transform
from omniload.types import Budget
from omniload.world import World

__all__ = ["DataLoader"]

_log = logging.getLogger(__name__)


class DataLoader:
    """Packed, balanced batches of image-text samples for one data-parallel rank.

    Every rank computes the same plan by itself. All ranks get the same number of micro-batches, and
    each row of the data set comes exactly once an epoch. Slots at the end of an epoch for which no
    rows are left are fillers: runnable batches that give no loss.

    `iter()` starts at a loaded state until a batch has been taken from it; otherwise at the
    beginning of the current epoch, also when that epoch was left halfway. The epoch advances when
    it is exhausted. Only the newest iterator lives: `next()` on an older one raises StateError.
    After an error in a batch the iterator is closed, and the state still stands before that batch.

    Where torch.distributed is initialised with as many processes as the world has, the first
    `iter()` is a collective, and so is the first after each `load_state_dict` or `set_epoch`: it
    compares the plans and places of all ranks. So all ranks have to call these alike.

    A transform must draw from the generator it is given. Then its result depends on (seed, epoch,
    row) only, and not on the number of workers.

    Args:
        source: folder that `omniload preprocess` wrote, or an opened `ShardSet`.
        budget: upper bounds of one micro-batch on one rank.
        num_workers: worker processes; 0: the work is done in this process, for debugging, and
            prefetch_factor, persistent_workers, timeout and multiprocessing_context have no effect.
        seed: seeds order and transform; 0 to 2**63 - 1.
        world: who this process is; None: `World.from_env()`.
        accumulation: micro-batches of one optimizer step on one rank.
        grouping: name of the way in which rows are grouped; see `omniload.grouping.GROUPINGS`.
        shuffle: False: rows in index order, each group the next rows that fit.
        tail: "filler": all ranks get the same number of batches. "empty": no fillers, so a rank may
            get fewer batches than others and the loop must hold no collective; for evaluation. The
            states of ranks differ near the end of an epoch, where some are in the next one already:
            save between epochs there.
        oversize: a sample over budget is an "error", or left out ("drop"; see `dropped`).
        pad_to: rows get a multiple of so many tokens; "full": the whole token budget; or a
            `Padding`. None: no padding. The padding lies within the budget; see `Padding`.
        transform: from stored record to sample; None: the one that the shards were made for.
        pin_memory: copy batches to page-locked memory, which makes `.to(device)` asynchronous.
        prefetch_factor: batches that each worker prepares ahead.
        persistent_workers: keep workers from one epoch to the next.
        timeout: seconds to wait for a batch before WorkerError; 0: no limit.
        multiprocessing_context: "fork", "spawn", "forkserver", a context, or None for the default.
        window_rows: rows that are planned together; None: the planner's default.
        sync: when ranks wait for each other; the samples of a step are dealt to them so that they
            wait least. "step": at the optimizer (DDP, ZeRO-1 and 2). "micro-step": at each
            micro-batch (FSDP, ZeRO-3, pipelines). None: as the groups come. A step has the same
            samples either way. No effect with shuffle=False.
        cost: what is to be even over ranks, as estimated time; None: tiles, and tokens.
        uniform_modality: give every micro-batch of a micro-step images or none, because FSDP and
            ZeRO-3 hang where some ranks run the vision encoder and others don't. Samples are
            swapped inside the step; a text-only batch that is left beside others with images gets
            the transform's filler as its last document, which gives no loss and is not in
            `sample_ids`. Room for it is kept within the budget, so a text-only sample that leaves
            none counts as over the budget.

    Raises:
        ConfigError: an argument is wrong, or doesn't fit the data; a sample over budget.
        ShardError: the shards are missing or damaged.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | ShardSet,
        *,
        budget: Budget,
        num_workers: int = 0,
        seed: int = 0,
        world: World | None = None,
        accumulation: int = 1,
        grouping: str = DEFAULT_GROUPING,
        shuffle: bool = True,
        tail: str = "filler",
        oversize: str = "error",
        pad_to: int | str | Padding | None = None,
        transform: Transform | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        persistent_workers: bool = False,
        timeout: float = 0,
        multiprocessing_context: str | BaseContext | None = None,
        window_rows: int | None = None,
        sync: str | None = "step",
        cost: CostModel | None = None,
        uniform_modality: bool = False,
    ) -> None:
        self._settings = LoaderSettings(
            budget=budget,
            world=World.from_env() if world is None else world,
            seed=seed,
            accumulation=accumulation,
            grouping=grouping,
            shuffle=shuffle,
            tail=tail,
            oversize=oversize,
            window_rows=window_rows,
            pad_to=pad_to,
            sync=sync,
            cost=cost,
            uniform_modality=uniform_modality,
        )
        options = WorkerOptions(
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
        )
        self._shards = open_source(source)
        self._data = data_fingerprint(self._shards)
        self._transform = choose_transform(self._shards, transform)
        if uniform_modality and self.index.num_tiles.any():
            self._check_filler(with_image=True)  # it becomes the dummy document
            self._settings = self._settings.with_dummy(self._transform.filler(with_image=True))
        self._place = Place()
        self._taken = False  # whether a batch was handed out since the place was set
        self._loaded = False  # whether the place was loaded and no batch was taken from it
        self._compared = False
        self._world_is_given = world is not None
        self._plan = self._make_plan(self._place)
        self._live: weakref.ref[BatchIterator] | None = None
        # where rows have images, ranks wait for each other in the vision encoder too
        with_image = has_images(self.index, left_out=self.dropped)
        if tail == "filler":
            self._check_filler(with_image=with_image)
        if num_workers:
            check_picklable(self._transform, multiprocessing_context)
        dataset = PackDataset(
            self._shards, self._transform, settings=self._settings, with_image=with_image
        )
        self._workers = Workers(dataset, options)

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that `iter()` would start."""
        return self._place.epoch

    @property
    def plan(self) -> StepPlan:
        """The plan of this epoch, or of its rest where a state was loaded."""
        return self._plan

    @property
    def dropped(self) -> npt.NDArray[np.int64]:
        """int64 (n,), rows over budget that are left out; empty unless oversize="drop"."""
        return self._plan.dropped

    @property
    def index(self) -> LengthIndex:
        """Lengths of all rows."""
        return self._shards.index

    @property
    def manifest(self) -> Manifest:
        """What the shards hold and how they were made."""
        return self._shards.manifest

    @property
    def world(self) -> World:
        """Who this process is among all."""
        return self._settings.world

    def __len__(self) -> int:
        """Micro-batches of this rank in the current epoch; exact.

        Epochs differ a little, because each makes its groups anew. Where a state was loaded, the
        steps before it count too. Plans the whole epoch: about a second for a million rows.
        """
        before = self._place.first_step * self._settings.accumulation
        return before + self._walk(done=0).count()

    def __iter__(self) -> Iterator[PackedBatch]:
        self._retire("this iterator was replaced by a newer one of the same loader.")
        if self._is_finished():
            self._move(Place(epoch=self._place.epoch + 1))
        elif self._taken:
            self._move(Place(epoch=self._place.epoch))
        if not self._compared:
            self._compare()
        seed = derive(self._settings.seed, self._place.epoch) >> 1
        batches = BatchIterator(
            self._workers.start(self._walk(done=self._place.done), seed=seed),
            on_batch=self._hand_out,
            on_end=self._finish,
            on_error=self._workers.forget,
            has_workers=self._workers.are_processes,
        )
        self._live = weakref.ref(batches)
        return batches

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; not needed, because epochs advance by themselves.

        It does nothing when that epoch is running or its state was loaded. Another epoch begins at
        its beginning, and a loaded place is lost, with a warning. After the last batch of an epoch
        the state is in the next: so resume with `range(loader.epoch, num_epochs)`, or
        `set_epoch(loader.epoch)`, and not with an epoch that was saved beside the state.

        Args:
            epoch: from 0.

        Raises:
            ConfigError: not a count.
        """
        check_count("epoch", epoch, least=0, most=2**53)
        self._compared = False  # whether this rank moves or not: others may
        if epoch != self._place.epoch or self._is_finished():
            if self._loaded and self._place != Place():
                _log.warning(
                    "set_epoch(%d) leaves the loaded place (epoch %d, step %d) before a batch was "
                    "taken from it; to go on from a loaded state, call set_epoch(loader.epoch) or "
                    "leave set_epoch out",
                    epoch,
                    self._place.epoch,
                    self._place.first_step,
                )
            self._retire(f"this iterator was ended by set_epoch({epoch}).")
            self._move(Place(epoch=int(epoch)))

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain JSON, below 1 kB, the same on all ranks; see `LoaderState`.

        With tail="empty" alone, ranks that have had their last batch are in the next epoch already.

        It stands behind the last batch that was handed out, whatever workers have prefetched. After
        the last batch of an epoch it is the beginning of the next.
        """
        return self._state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go to a saved place; the next `iter()` hands out the batches that were still to come.

        With the same ranks, accumulation, sync and cost this is exact at every micro-step, for any
        number of workers. With others, the groups not yet used are dealt out anew; that needs a
        state saved after a batch with `is_last_micro_step`. A live iterator is closed.

        Args:
            state_dict: what `state_dict()` returned; it is not changed.
            strict: refuse a state of other data, budget, transform or seed. False: take its place
                all the same, with a warning; unless only the transform differs, rows of this epoch
                may then come twice or not at all.

        Raises:
            StateError: not a state; saved with other settings; inside a step of another number of
                ranks; a place that this data doesn't have.
        """
        state = LoaderState.from_dict(state_dict)
        differences = state.check_settings(self._state(), strict=strict)
        plan = self._make_plan(state.place)
        state.check_plan(plan, strict=strict)
        if differences:
            _log.warning("loader state taken up although it differs: %s", "; ".join(differences))
        self._retire("this iterator was ended by load_state_dict().")
        self._move(state.place, plan)
        self._loaded = True
        self._compared = False

    def _state(self) -> LoaderState:
        place, plan = self._place, self._plan
        if self._is_finished():
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
            num_rows=self.manifest.num_rows,
            data=self._data,
            plan=plan.order_fingerprint,
            transform=self._transform.fingerprint,
        )

    def _check_filler(self, *, with_image: bool) -> None:
        check_filler(
            self._transform,
            self._shards,
            with_image=with_image,
            budget=self._settings.budget,
            padding=self._settings.padding,
        )

    def _compare(self) -> None:
        facts = {
            **self.state_dict(),
            "tail": self._settings.tail,
            "pad_to": str(self._settings.padding),
            "plan": self._plan.fingerprint,
        }
        del facts[CHECKSUM]  # it differs whenever anything does
        compare_over_ranks(facts, self.world, world_is_given=self._world_is_given)
        self._compared = True

    def _is_finished(self) -> bool:
        # 0: a rank without any batch in an epoch still has to go through it
        return self._place.done > 0 and self._walk(done=self._place.done).is_done()

    def _move(self, place: Place, plan: StepPlan | None = None) -> None:
        if plan is not None:
            self._plan = plan
        elif (place.epoch, place.start) != (self._place.epoch, self._place.start):
            self._plan = self._make_plan(place)
        self._place = place
        self._taken = self._loaded = False

    def _retire(self, because: str) -> None:
        if self._live is not None and (live := self._live()) is not None:
            live.close(because)

    def _make_plan(self, place: Place) -> StepPlan:
        return self._settings.make_plan(self.index, epoch=place.epoch, start=place.start)

    def _walk(self, *, done: int) -> Walk:
        return Walk(
            plan=self._plan,
            index=self.index,
            epoch=self._place.epoch,
            dp_rank=self.world.dp_rank,
            first_step=self._place.first_step,
            start=done,
            skip_empty=self._settings.tail == "empty",
        )

    def _hand_out(self, batch: PackedBatch) -> None:
        steps = batch.step - self._place.first_step
        done = steps * self._settings.accumulation + batch.micro_step + 1
        self._place = replace(self._place, done=done)
        self._taken, self._loaded = True, False

    def _finish(self) -> None:
        self._move(Place(epoch=self._place.epoch + 1))
