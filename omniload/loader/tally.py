"""The running sums behind `DataLoader.stats`: a few additions for each batch, and no communication.

All sums only grow. The figures of a span are the difference of two readings.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from omniload.batch import PackedBatch
from omniload.costs import REFERENCE_COST
from omniload.loader.loads import PlannedLoads
from omniload.loader.notes import Count, WorkerNotes
from omniload.loader.settings import LoaderSettings
from omniload.loader.sources import cache_figures
from omniload.loader.spans import SUMS, Reading, Wanted, make_span
from omniload.loader.stats import SlowRow, Span, Stats
from omniload.loader.tasks import Slot, Walk
from omniload.loader.waiting import WaitWatch
from omniload.source import RowSource

__all__ = ["Tally"]

Int64Array = npt.NDArray[np.int64]

#: How often it is looked for long waits.
_LOOK_NS = 5_000_000_000


class Tally:
    """Sums up what a loader hands out, and how long it was waited for.

    Args:
        settings: budget, cost, sync and world.
        source: the rows, whatever the epoch.
        notes: of the workers.
        num_workers: workers; 0: batches are made in this thread.
        worker_type: "process", "thread" or "none".
        clock: nanoseconds.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        source: RowSource,
        *,
        notes: WorkerNotes,
        num_workers: int,
        worker_type: str,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._settings = settings
        self._source = source
        self._notes = notes
        self._num_workers = num_workers
        self._worker_type = worker_type
        self._clock = clock
        self._names = tuple(getattr(source, "set_names", ())) or _only_source(source)
        self._sums = dict.fromkeys(SUMS, 0.0)
        self._skipped = Counter[str]()
        self._by_source = np.zeros((len(self._names), 3), np.int64)
        self._loads = PlannedLoads(
            settings.cost or REFERENCE_COST,
            meet_every=1 if settings.sync == "micro-step" else settings.accumulation,
        )
        self._pending: deque[Slot] = deque()
        self._rows: RowSource | None = None  # of the epoch
        self._epoch, self._at = 0, (-1, 0)
        self._want: tuple[int, dict[str, Wanted]] | None = None
        self._since: int | None = None  # when the loop last began to wait or to work
        self._was_ready = False
        self._lost = 0  # batches that were made and never handed out
        self._start = self.read()
        self._begun = self._start
        self._watch = WaitWatch()
        self._warm: Reading | None = None  # when this epoch was warm
        self._look_at = 0

    # -- what happens ----------------------------------------------------------------------------

    def begin(self, epoch: int, rows: RowSource) -> None:
        """Begin an epoch; `started` comes when its workers have been started."""
        self._epoch, self._rows, self._at = epoch, rows, (-1, 0)
        self._notes.forget_slowest()
        self.forget_pending()
        self._loads.begin(rows.index)
        self._begun = self.read()
        self._watch.begin()
        self._warm = None
        self._since = self._clock()
        self._look_at = self._since + _LOOK_NS

    def forget_pending(self) -> None:
        """Forget batches that are being made: they will be made again, or never asked for."""
        self._pending.clear()
        self._lost = self._notes.num_made() - int(self._sums["batches"])

    def started(self) -> None:
        """Note that the workers of an epoch were started: waiting was until here."""
        now = self._clock()
        self._sums["wait_ns"] += now - (now if self._since is None else self._since)
        self._since = now

    def watch(self, walk: Walk) -> Walk:
        """Return a walk that also tells this of each micro-batch that is about to be made."""
        told, pending = walk.on_slot, self._pending

        def on_slot(slot: Slot) -> None:
            if told is not None:
                told(slot)
            pending.append(slot)

        return replace(walk, on_slot=on_slot)

    def asked(self) -> None:
        """Note that the training loop asks for a batch."""
        now = self._clock()
        if self._since is not None:
            self._sums["loop_ns"] += now - self._since
        self._since = now
        self._was_ready = self._num_workers > 0 and self.ready > 0

    def given(self, batch: PackedBatch) -> None:
        """Note that a batch is handed out."""
        slot = self._take(batch)
        self._add(batch, slot)
        self._waited()
        if self._since is not None and self._since > self._look_at:
            self._look_at = self._since + _LOOK_NS
            self._look()

    def ended(self) -> None:
        """Note that the epoch ended."""
        self._waited()
        self._since = None

    @property
    def ready(self) -> int:
        """Batches that are made and were not handed out."""
        if self._num_workers == 0:
            return 0
        made = self._notes.num_made() - self._lost - int(self._sums["batches"])
        return min(max(made, 0), len(self._pending))

    def _waited(self) -> None:
        now = self._clock()
        if self._since is not None:
            self._sums["wait_ns"] += now - self._since
            self._sums["ready_ns"] += (now - self._since) * self._was_ready
        self._since = now

    def _look(self) -> None:
        """Warn where the loop waits for long, past the first batches of an epoch."""
        if self._warm is not None:
            self._watch.look(
                self.span(self._warm),
                worker_type=self._worker_type,
                slowest=self.slowest,
                num_shards=len(self._source.shard_names),
            )
        elif self._watch.is_warm(self.span()):
            self._warm = self.read()
            self._notes.forget_slowest()

    def _take(self, batch: PackedBatch) -> Slot | None:
        """Find the slot of a batch; slots before it had no batch for this rank."""
        place = (batch.step, batch.micro_step)
        while self._pending:
            slot = self._pending.popleft()
            self._loads.add(slot)
            if (slot.step, slot.micro_step) == place:
                return slot
        return None

    def _add(self, batch: PackedBatch, slot: Slot | None) -> None:
        sums, budget = self._sums, self._settings.budget
        lengths = batch.sample_lengths
        tokens = sum(lengths)
        rows = np.zeros(0, np.int64) if slot is None else slot.rows
        self._at = (batch.step, batch.micro_step)
        sums["batches"] += 1
        sums["fillers"] += batch.is_filler
        sums["steps"] += batch.is_last_micro_step
        sums["samples"] += len(rows) - len(batch.skipped_samples)
        sums["tokens"] += tokens
        sums["padding_tokens"] += batch.num_tokens - tokens
        sums["loss_tokens"] += batch.num_loss_tokens
        sums["tiles"] += batch.num_tiles
        if not batch.is_filler and tokens:
            sums["filled"] += 1
            sums["fill_tokens"] += tokens / budget.tokens
            sums["fill_tiles"] += batch.num_tiles / (budget.tiles or 1)
            sums["pad_unpacked"] += 1 - tokens / (max(lengths) * len(lengths))
        for sample in batch.skipped_samples:
            self._skipped[sample.kind] += 1
        if len(self._names) and len(rows):
            self._add_sources(rows)

    def _add_sources(self, rows: Int64Array) -> None:
        assert self._rows is not None
        index = self._rows.index
        of = getattr(self._rows, "source_of", None)
        tokens, tiles = index.num_tokens[rows], index.num_tiles[rows]
        if of is None:
            self._by_source[0] += len(rows), int(tokens.sum()), int(tiles.sum())
            return
        numbers, count = of(rows), len(self._names)
        for column, weights in enumerate((None, tokens, tiles)):
            # as floats, which are exact for whole numbers of this size
            self._by_source[:, column] += np.bincount(numbers, weights, count).astype(np.int64)

    # -- what is read ----------------------------------------------------------------------------

    def read(self) -> Reading:
        """Read all sums."""
        return Reading(
            sums={**self._sums, **self._loads.sums()},
            skipped=self._skipped.copy(),
            counts=self._notes.counts(),
            cache=cache_figures(self._source),
            sources=self._by_source.copy(),
        )

    def span(self, since: Reading | None = None) -> Span:
        """Return the figures since a reading; None: since the beginning of the epoch."""
        return make_span(
            self._begun if since is None else since,
            self.read(),
            has_tile_budget=bool(self._settings.budget.tiles),
            sources=self._wanted(),
        )

    def stats(self) -> Stats:
        """Return all figures of this rank."""
        return Stats(
            rank=self._settings.world.dp_rank,
            dp_world_size=self._settings.world.dp_world_size,
            epoch=self._epoch,
            step=self._at[0],
            micro_step=self._at[1],
            num_workers=self._num_workers,
            worker_type=self._worker_type,
            ready=self.ready,
            this_epoch=self.span(),
            since_start=self.span(self._start),
            slowest=self.slowest,
        )

    @property
    def slowest(self) -> SlowRow | None:
        """The row that took a worker longest in this epoch."""
        counts = self._notes.counts()
        line = counts[int(np.argmax(counts[:, Count.SLOWEST]))].tolist()
        if line[Count.SLOWEST] == 0 or line[Count.SLOWEST_ROW] < 0:
            return None
        return SlowRow(row=line[Count.SLOWEST_ROW], seconds=line[Count.SLOWEST] / 1e9)

    def _wanted(self) -> dict[str, Wanted]:
        """Return the shares that each set has in the epoch, over all ranks."""
        of_epoch = getattr(self._source, "figures", None)
        if not callable(of_epoch):
            return dict.fromkeys(self._names, (None, None, None))
        if self._want is None or self._want[0] != self._epoch:
            shares: dict[str, Wanted] = {
                one.name: (one.share_of_rows, one.share_of_tokens, one.share_of_tiles)
                for one in of_epoch(self._epoch)
            }
            self._want = (self._epoch, shares)
        return self._want[1]


def _only_source(source: RowSource) -> tuple[str, ...]:
    names = tuple(source.sources)
    return names if len(names) == 1 else ()
