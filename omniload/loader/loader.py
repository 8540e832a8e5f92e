"""The data loader: this rank's part of the plan, read by workers, with a state that resumes it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

from omniload._checks import check_count
from omniload._torch_arguments import refuse_torch_arguments
from omniload._workers import WorkerOptions, check_picklable
from omniload.batch import PackedBatch
from omniload.costs import CostModel
from omniload.grouping import DEFAULT_GROUPING
from omniload.loader.bad_samples import BadSampleOptions, BadSamples
from omniload.loader.checks import choose_transform, compare_over_ranks
from omniload.loader.course import Course
from omniload.loader.exclude import Exclude, excluded_rows
from omniload.loader.iterator import BatchIterator
from omniload.loader.reads import dataset_for
from omniload.loader.reports import Metrics, Reporter
from omniload.loader.run import Run
from omniload.loader.settings import LoaderSettings
from omniload.loader.sources import open_source
from omniload.loader.tally import Tally
from omniload.loader.tasks import Walk
from omniload.loader.transform import check_filler
from omniload.loader.view import LoaderView
from omniload.loader.worker import PackDataset
from omniload.loader.workers import Workers
from omniload.padding import Padding
from omniload.plan import Balance
from omniload.rng import derive
from omniload.shards import Cache, Storage
from omniload.source import RowSource
from omniload.transforms import Transform
from omniload.types import Budget
from omniload.world import World

__all__ = ["DataLoader"]


class DataLoader(LoaderView):
    """Packed, balanced batches of image-text samples for one data-parallel rank.

    Every rank computes the same plan by itself. All ranks get the same number of micro-batches, and
    each row of the data set comes exactly once an epoch. Slots at the end of an epoch for which no
    rows are left are fillers: runnable batches that give no loss.

    `iter()` starts at a loaded state until a batch has been taken from it; otherwise at the
    beginning of the current epoch, also when that epoch was left halfway. The epoch advances when
    it is exhausted. Only the newest iterator lives: `next()` on an older one raises StateError.
    After an error in a batch the iterator is closed, and the state still stands before that batch.

    A worker process that dies (out of memory or shared memory, a crash in native code) is named in
    the log with its signal, row and memory; new ones go on with the batch that is missing, and none
    is lost or comes twice. A second death in the same iteration is WorkerError. A batch that
    doesn't come for a minute is told of in the log, with the row that each worker is at.

    Where torch.distributed is initialised with as many processes as the world has, the first
    `iter()` is a collective, and so is the first after each `load_state_dict` or `set_epoch`: it
    compares the plans and places of all ranks. So all ranks have to call these alike.

    A transform must draw from the generator it is given. Then its result depends on (seed, epoch,
    row) only, and not on the number of workers.

    Args:
        source: folder that `omniload preprocess` wrote, or one of tars after `omniload index`, or
            the URL of either; or any opened `omniload.source.RowSource`.
        budget: upper bounds of one micro-batch on one rank.
        num_workers: workers; 0: the work is done in this thread, for debugging, and
            prefetch_factor, persistent_workers, timeout, multiprocessing_context and worker_type
            have no effect.
        seed: seeds order and transform; 0 to 2**63 - 1.
        world: who this process is; None: `World.from_env()`.
        accumulation: micro-batches of one optimizer step on one rank.
        grouping: name of the way in which rows are grouped; see `omniload.grouping.GROUPINGS`.
        shuffle: False: rows in index order, each group the next rows that fit.
        tail: "filler": all ranks get the same number of batches. "empty": no fillers, so a rank may
            get fewer batches than others and the loop must hold no collective; for evaluation.
        oversize: a sample over budget is an "error", or left out ("drop"; see `dropped`).
        pad_to: rows get a multiple of so many tokens; "full": the whole token budget; or a
            `Padding`. None: no padding. The padding lies within the budget; see `Padding`.
        transform: from stored record to sample; None: the one that the shards were made for.
        pin_memory: copy batches to page-locked memory, which makes `.to(device)` asynchronous.
        prefetch_factor: batches that each worker prepares ahead.
        persistent_workers: keep worker processes from one epoch to the next.
        timeout: seconds to wait for a batch before WorkerError, which says where each worker is;
            0: no limit.
        multiprocessing_context: "fork", "spawn", "forkserver", a context, or None for the default.
        worker_type: "process", "thread", or "auto", which means processes. Both give the same
            batches to the last bit. Threads start at once, and need no shared memory and no index
            or code of their own; a transform must then bear to be called by several at once.
        window_rows: rows that are planned together; None: the planner's default, and with a
            `Cache.max_bytes` at most so many that their shards fit half of the cache.
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
        balance: rearranges each step instead of what `sync` and `cost` ask for, for example an
            `omniload.pipeline.order.PipelineOrder`. A state saved inside a step belongs to it.
        on_bad_sample: a sample that can't be used (damaged image or row, failing transform, other
            length than planned) is an error ("raise"), or a blank one of the same size, without
            labels, has its place ("skip"; see `PackedBatch.skipped`), so that no other rank
            notices. The denominators of the loss stay as planned on all ranks; for what that leaves
            out see `omniload.loss.exact_factor`. A shard that is missing is an error always.
        max_bad_samples: with "skip", how many a rank may have in an epoch, counted from where the
            loader started: a count; or a float, a share of the rows of a rank (but at least one).
        quarantine: with "skip", a file that gets one JSON line for each skipped sample: source,
            shard, key, row, reason. Lines are added; ranks of a machine can share it.
        exclude: rows to leave out: the quarantine file of an earlier run over the same data, a list
            of rows, or a list of keys (for these all rows are read once). A state belongs to what
            was excluded when it was saved.
        cache: for a URL: the folder of this machine that holds copies; `omniload.Cache`. All ranks
            must have the same `max_bytes`, because the plan follows from it.
        storage: for a URL: how to fetch from there; `omniload.Storage`.
        metrics: files that get the figures of `stats()` while the loader runs, and whether the log
            gets them; `omniload.Metrics`. None: none.

    Raises:
        ConfigError: an argument is wrong, or doesn't fit the data; a sample over budget.
        ShardError: the shards are missing or damaged.
    """

    @refuse_torch_arguments
    def __init__(
        self,
        source: str | os.PathLike[str] | RowSource,
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
        worker_type: str = "auto",
        window_rows: int | None = None,
        sync: str | None = "step",
        cost: CostModel | None = None,
        uniform_modality: bool = False,
        balance: Balance | None = None,
        on_bad_sample: str = "raise",
        max_bad_samples: int | float = 0.01,
        quarantine: str | os.PathLike[str] | None = None,
        exclude: Exclude = None,
        cache: Cache | None = None,
        storage: Storage | None = None,
        metrics: Metrics | None = None,
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
            balance=balance,
        )
        options = WorkerOptions(
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
            worker_type=worker_type,
        )
        self._timeout_s = options.timeout
        bad = BadSampleOptions(
            on_bad_sample=on_bad_sample,
            max_bad_samples=max_bad_samples,
            quarantine=quarantine,
            exclude=exclude,
        )
        self._source = open_source(source, cache=cache, storage=storage)
        self._settings = self._settings.with_source(self._source)
        self._transform = choose_transform(self._source, transform)
        check = partial(check_filler, budget=budget, padding=self._settings.padding)
        if uniform_modality and self._source.index.num_tiles.any():
            check(self._transform, self._source, with_image=True)  # it becomes the dummy document
            self._settings = self._settings.with_dummy(self._transform.filler(with_image=True))
        self._course = Course(
            self._source,
            self._settings,
            transform=self._transform.fingerprint,
            exclude=excluded_rows(exclude, self._source),
        )
        if tail == "filler" or bad.skips:
            check(self._transform, self._source, with_image=self._course.has_images)
        if options.uses_processes:
            name = type(self._transform).__name__
            check_picklable(f"the transform {name}", self._transform, multiprocessing_context)
        self._bad = BadSamples(bad, world=self.world, data=self._source.fingerprint)
        self._compared = False
        self._world_is_given = world is not None
        self._live: weakref.ref[BatchIterator] | None = None
        self._dataset = PackDataset(
            self._source, self._transform, settings=self._settings, skip_bad_samples=bad.skips
        )
        self._workers = Workers(self._dataset, options)
        self._tally = Tally(
            self._settings,
            self._source,
            notes=self._workers.notes,
            num_workers=num_workers,
            worker_type=options.kind,
        )
        self._reporter = Reporter(metrics, world=self.world, stats=self._tally.stats)

    def __iter__(self) -> BatchIterator:
        self._retire("this iterator was replaced by a newer one of the same loader.")
        walk = self._course.begin()
        self._bad.start_epoch()
        if not self._compared:
            facts = self._course.facts
            compare_over_ranks(facts, self.world, world_is_given=self._world_is_given)
            self._compared = True
        self._tally.begin(self.epoch, self.source)
        batches = BatchIterator(
            self._start(walk),
            restart=self._start_again,
            on_ask=self._tally.asked,
            on_batch=self._hand_out,
            on_end=self._end,
            on_error=self._workers.forget,
            timeout_s=self._timeout_s,
        )
        self._tally.started()
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
        check_count("epoch", epoch, most=2**53)
        self._compared = False  # whether this rank moves or not: others may
        if self._course.go_to_epoch(int(epoch)):
            self._retire(f"this iterator was ended by set_epoch({epoch}).")

    def set_reads(self, reads: str) -> None:
        """Say what this rank needs of its batches: for the stages of a pipeline.

        Ranks that share a `dp_rank` get the same batches, but few need all of them. Plan, place and
        state stay as they are whatever is read. A live iterator is closed.
        `omniload.adapters.deepspeed.pipeline_batches` calls this.

        Args:
            reads: "all". "labels": no image is decoded, and shards give no byte of one, but whole
                files are fetched from a URL; the tiles of a batch have one black pixel, and
                `transform.model_inputs` is of no use. "nothing": no worker starts and no row is
                read; batches have no token. With on_bad_sample="skip" "labels" reads all, in order
                to skip what other ranks skip; with a transform of one's own too, unless it has a
                method `labels_only(record, rng) -> Sample`.

        Raises:
            ConfigError: another word.
        """
        dataset = dataset_for(reads, self._dataset)
        self._retire(f"this iterator was ended by set_reads({reads!r}).")
        self._workers.use(dataset)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: plain JSON, below 1 kB, the same on all ranks; see `LoaderState`.

        It stands behind the last batch that was handed out, whatever workers have prefetched. After
        the last batch of an epoch, on all ranks, it is the beginning of the next.
        """
        return self._course.state().to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go to a saved place; the next `iter()` hands out the batches that were still to come.

        With the same ranks, accumulation, sync and cost this is exact at every micro-step, for any
        number of workers. With others, the groups not yet used are dealt out anew; that needs a
        state saved after a batch with `is_last_micro_step`. A live iterator is closed. Nothing is
        read or planned again, but the window at hand: some 0.2 s.

        Args:
            state_dict: what `state_dict()` returned; it is not changed.
            strict: refuse a state of other data, budget, transform or seed. False: take its place
                all the same, with a warning; unless only the transform differs, rows of this epoch
                may then come twice or not at all.

        Raises:
            StateError: not a state; saved with other settings; inside a step of another number of
                ranks; a place that this data doesn't have.
        """
        self._course.load(state_dict, strict=strict)
        self._retire("this iterator was ended by load_state_dict().")
        self._compared = False

    def _start(self, walk: Walk) -> Run:
        seed = derive(self._settings.seed, walk.epoch) >> 1
        return self._workers.start(self._tally.watch(walk), seed=seed)

    def _start_again(self) -> Run:
        walk = self._course.begin_again()
        self._tally.forget_pending()
        return self._start(walk)

    def _end(self) -> None:
        self._tally.ended()
        self._reporter.ended()
        self._course.end()

    def _retire(self, because: str) -> None:
        if self._live is not None and (live := self._live()) is not None:
            live.close(because)

    def _hand_out(self, batch: PackedBatch) -> None:
        try:
            self._bad.add(
                batch.skipped_samples, epoch=self.epoch, num_rows=self._course.plan.num_rows
            )
            self._course.hand_out(batch)
            self._tally.given(batch)
            self._reporter.given()
        except Exception:
            self._retire("this iterator was closed by an error in one of its batches.")
            raise
