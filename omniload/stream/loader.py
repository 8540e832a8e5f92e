"""The loader of a stream: as many steps on each rank, and nothing that grows with the stream."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.context import BaseContext
from typing import Any

from omniload._checks import check_count, check_flag
from omniload._torch_arguments import refuse_torch_arguments
from omniload._workers import WorkerOptions, check_picklable, release_frames
from omniload.batch import PackedBatch
from omniload.errors import OmniloadError, StateError
from omniload.packing import pack
from omniload.padding import Padding
from omniload.stream.agree import Agreement
from omniload.stream.failures import explained
from omniload.stream.fillers import Fillers
from omniload.stream.packer import Dropped, Made
from omniload.stream.settings import Samples, StreamPart, StreamSettings, check_samples
from omniload.stream.workers import start_stream
from omniload.transforms import Transform
from omniload.types import Budget, Sample
from omniload.world import World

__all__ = ["StreamCounts", "StreamLoader"]

#: Samples left out of which the reasons are kept; all are counted.
_MOST_LISTED = 100


@dataclass(kw_only=True)
class StreamCounts:
    """What this rank has handed out since the stream was begun.

    Args:
        steps: optimizer steps.
        batches: batches with samples.
        samples: samples in them.
        fillers: batches that stand in because other ranks had data left.
        dropped: "oversize" or "bad" -> samples that were left out.
        listed: the first hundred of those.
    """

    steps: int = 0
    batches: int = 0
    samples: int = 0
    fillers: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    listed: list[Dropped] = field(default_factory=list)


class StreamLoader:
    """Packed batches of a stream whose lengths are not known beforehand.

    Each process reads its own part, keeps `buffer` samples to choose from, and groups them with the
    code that plans an epoch of `omniload.DataLoader`. Before each optimizer step the ranks sum a
    few numbers: whether anybody has data left, and the loss tokens of the step. So all ranks take
    the same number of steps, those that run out first get fillers, and `loss_scale` is exact. If a
    rank fails, all raise an error.

    What is lost against an index: there is no state to resume from; the order depends on ranks and
    workers; ranks are not balanced; the number of steps is not known beforehand.

    `iter()` begins the stream anew, and is a collective where there are several ranks: all of them
    have to iterate alike, and to the same step. Only the newest iterator lives.

    Args:
        samples: a function that opens one `StreamPart`: it must give the samples (or records, for
            the transform) of that part, and no others. Or one iterable: the samples of this rank.
        budget: upper bounds of a micro-batch.
        transform: from record to sample, when its group is due; not used for samples.
        buffer: samples that each process keeps to choose from. Records are small; samples hold
            their tiles.
        num_workers: worker processes; 0: in this process.
        world: who this process is; None: `World.from_env()`.
        accumulation: micro-batches of an optimizer step on one rank.
        pad_to: see `omniload.DataLoader`.
        oversize: a sample over budget is an "error", or left out ("drop").
        on_bad_sample: a record that the transform refuses is an error ("raise"), or left out
            ("skip"). Both are counted in `counts`.
        uniform_modality: give every micro-batch of a micro-step images or none, see
            `omniload.DataLoader`. Nothing is swapped here: a text-only batch beside others with
            images gets the filler as its last document. Needs a transform.
        filler: what stands in where there is no transform to make one: a sample with sample_id -1
            and labels of -100 only.
        seed: seeds the transform.
        pin_memory: copy batches to page-locked memory.
        prefetch_factor: batches that each worker prepares ahead.
        timeout: seconds to wait for a worker; 0: no limit.
        multiprocessing_context: how workers start; None: the default.
        process_group: torch process group to agree over; None: the default.

    Raises:
        ConfigError: an argument is wrong.
    """

    @refuse_torch_arguments
    def __init__(
        self,
        samples: Samples,
        *,
        budget: Budget,
        transform: Transform | None = None,
        buffer: int = 1024,
        num_workers: int = 0,
        world: World | None = None,
        accumulation: int = 1,
        pad_to: int | Padding | None = None,
        oversize: str = "error",
        on_bad_sample: str = "raise",
        uniform_modality: bool = False,
        filler: Sample | None = None,
        seed: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        timeout: float = 0,
        multiprocessing_context: str | BaseContext | None = None,
        process_group: Any = None,
    ) -> None:
        check_count("accumulation", accumulation, least=1, most=1 << 20)
        check_flag("uniform_modality", uniform_modality)
        self._options = WorkerOptions(
            num_workers=num_workers,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            timeout=timeout,
            multiprocessing_context=multiprocessing_context,
        )
        check_samples(samples, num_workers=num_workers)
        self._world = World.from_env() if world is None else world
        self._accumulation = int(accumulation)
        self._fillers = Fillers(transform, filler)
        needs_filler = self._world.dp_world_size * self._accumulation > 1
        self._fillers.check(needed=needs_filler or uniform_modality, with_image=uniform_modality)
        dummy = len(self._fillers.make(with_image=True).input_ids) if uniform_modality else 0
        self._uniform = uniform_modality
        self._settings = StreamSettings(
            budget=budget,
            buffer=buffer,
            transform=transform,
            pad_to=pad_to,
            oversize=oversize,
            on_bad_sample=on_bad_sample,
            seed=seed,
            dummy_tokens=dummy,
        )
        self._is_once = isinstance(samples, Iterator)
        if num_workers:
            for what, value in (("samples", samples), ("the transform", transform)):
                name = f"{what} ({type(value).__name__})"
                check_picklable(name, value, multiprocessing_context)
        self._samples = samples
        self._part = StreamPart(
            rank=self._world.dp_rank,
            num_ranks=self._world.dp_world_size,
            num_workers=max(num_workers, 1),
        )
        self._group = process_group
        self._agreement: Agreement | None = None
        self._begun = 0
        self.counts = StreamCounts()

    @property
    def world(self) -> World:
        """Who this process is among all."""
        return self._world

    def __iter__(self) -> Iterator[PackedBatch]:
        if self._is_once and self._begun:
            raise StateError(
                "this stream is an iterator and was begun before. Give a function that opens it, "
                "or a new StreamLoader."
            )
        if self._agreement is None:
            self._agreement = Agreement(self._world, self._group)
        part = replace(self._part, epoch=self._begun)
        self._begun += 1
        self.counts = StreamCounts()
        made = start_stream(self._samples, self._settings, part, self._options)
        return self._steps(made, self._agreement, self._begun)

    def _steps(
        self, made: Iterator[Made], agreement: Agreement, number: int
    ) -> Iterator[PackedBatch]:
        for step in itertools.count():
            if number != self._begun:
                raise StateError("this iterator was replaced by a newer one of the same loader.")
            batches, failure = self._collect(made)
            facts = _facts(batches, self._accumulation, failed=failure is not None)
            if failure is not None:
                if self._options.num_workers:
                    # whoever keeps the error would keep torch's iterator in its frames, and a
                    # garbage collection closes the queues to the workers before it ends them
                    release_frames(failure)
                del made
                agreement.sum(facts)
                raise failure
            try:
                found = agreement.sum(facts)
            except OmniloadError:
                del made  # as above
                raise
            if not found[1]:
                return
            self.counts.steps += 1
            for micro_step in range(self._accumulation):
                batch = batches[micro_step] if micro_step < len(batches) else None
                has_tiles = found[5 + micro_step] > 0
                yield replace(
                    self._filled(batch, has_tiles),
                    step=step,
                    micro_step=micro_step,
                    is_last_micro_step=micro_step == self._accumulation - 1,
                    num_loss_tokens_step=round(found[2]),
                    num_loss_samples_step=round(found[3]),
                    sqrt_loss_tokens_step=found[4],
                    dp_world_size=self._world.dp_world_size,
                    accumulation=self._accumulation,
                )

    def _collect(self, made: Iterator[Made]) -> tuple[list[Made], Exception | None]:
        """Take the batches of a step, or what went wrong: all ranks must hear of it."""
        batches: list[Made] = []
        try:
            while len(batches) < self._accumulation:
                found = next(made, None)
                if found is None:
                    break
                self._count(found)
                if found.batch is not None:
                    batches.append(found)
        except Exception as error:
            return batches, explained(error, timeout_s=self._options.timeout)
        return batches, None

    def _filled(self, made: Made | None, has_tiles: bool) -> PackedBatch:
        """Give the batch of a micro-step: a filler where there is none."""
        padding = self._settings.padding
        if made is None or made.batch is None:
            self.counts.fillers += 1
            filler = self._fillers.make(with_image=has_tiles)
            return pack([filler], is_filler=True, num_loss_tokens_step=0, pad_to=padding)
        self.counts.batches += 1
        self.counts.samples += made.batch.num_samples
        if not (self._uniform and has_tiles and made.batch.num_tiles == 0):
            return made.batch
        return pack(
            made.batch.unpack(),
            dummy=self._fillers.make(with_image=True),
            num_loss_tokens_step=made.totals.num_tokens,
            pad_to=padding,
        )

    def _count(self, made: Made) -> None:
        for dropped in made.dropped:
            self.counts.dropped[dropped.kind] += 1
            if len(self.counts.listed) < _MOST_LISTED:
                self.counts.listed.append(dropped)


def _facts(batches: list[Made], accumulation: int, *, failed: bool) -> list[float]:
    """What the ranks sum: failures, batches, loss totals, and tiles of each micro-step."""
    tiles = [made.batch.num_tiles for made in batches if made.batch is not None]
    return [
        float(failed),
        len(batches),
        sum(made.totals.num_tokens for made in batches),
        sum(made.totals.num_samples for made in batches),
        sum(made.totals.sqrt_tokens for made in batches),
        *tiles,
        *[0] * (accumulation - len(tiles)),
    ]
