"""What crosses to the worker processes, and what they do: read, transform, check, pack.

The main process walks the plan; a worker gets one small `Task` and hands back one packed batch.
Nothing here grows with the length of the data set.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from omniload.batch import PackedBatch
from omniload.errors import OmniloadError, SampleError, ShardError
from omniload.index import LengthIndex
from omniload.loader.settings import LoaderSettings
from omniload.loss import LossTotals
from omniload.packing import Reserved, pack, reserve
from omniload.plan import StepPlan
from omniload.rng import sample_generator
from omniload.shards import ShardSet
from omniload.transforms import Transform, in_place
from omniload.types import Record, Sample

__all__ = ["PackDataset", "Task", "Walk"]


@dataclass(frozen=True, slots=True)
class Task:
    """One micro-batch to make.

    Args:
        epoch: epoch, for the randomness of the transform.
        step: optimizer step in the epoch.
        micro_step: micro-batch in the step.
        is_last_micro_step: whether it ends the step.
        loss_totals: denominators of the loss in the whole step, over all ranks.
        rows: int64 (n,), rows of the index; empty: a filler.
        needs_image: whether the rows have no image, but those of other ranks in this micro-step
            have some; likewise for a filler, or if all ranks have one.
    """

    epoch: int
    step: int
    micro_step: int
    is_last_micro_step: bool
    loss_totals: LossTotals
    rows: npt.NDArray[np.int64]
    needs_image: bool


@dataclass(frozen=True, kw_only=True)
class Walk:
    """One rank's way through a plan, lazily: a plan of millions of groups is never listed.

    Args:
        plan: the plan.
        index: the lengths that it was made from; for the loss.
        epoch: its epoch.
        dp_rank: the rank.
        first_step: number of the plan's step 0 in the epoch; not 0 in a plan of the rest.
        start: micro-batches of the plan to leave out.
        skip_empty: leave slots without rows out instead of making them fillers.
    """

    plan: StepPlan
    index: LengthIndex
    epoch: int
    dp_rank: int
    first_step: int = 0
    start: int = 0
    skip_empty: bool = False

    def count(self) -> int:
        """Count the tasks that the walk gives; plans the whole epoch."""
        plan = self.plan
        num_slots = plan.num_steps * plan.accumulation
        if self.skip_empty:
            # only the last step may have slots without rows
            last = max(num_slots - plan.accumulation, self.start)
            return last - self.start + sum(self._has_rows(slot) for slot in range(last, num_slots))
        return max(num_slots - self.start, 0)

    def is_done(self) -> bool:
        """Say if no task is left; plans no more than is needed to tell."""
        plan = self.plan
        step, micro_step = divmod(self.start, plan.accumulation)
        if not plan.has_step(step):
            return True
        if not self.skip_empty or plan.has_step(step + 1):
            return False
        rest = range(self.start, self.start + plan.accumulation - micro_step)
        return not any(self._has_rows(slot) for slot in rest)

    def __iter__(self) -> Iterator[Task]:
        plan = self.plan
        counted, totals = -1, LossTotals.of([])
        for slot in itertools.count(self.start):
            step, micro_step = divmod(slot, plan.accumulation)
            if not plan.has_step(step):
                return
            if step != counted:
                counted, totals = step, self._loss_totals(step)
            rows = plan.micro_batch(step, micro_step, self.dp_rank)
            if self.skip_empty and len(rows) == 0:
                continue
            yield Task(
                epoch=self.epoch,
                step=self.first_step + step,
                micro_step=micro_step,
                is_last_micro_step=micro_step == plan.accumulation - 1,
                loss_totals=totals,
                rows=rows,
                needs_image=self._needs_image(step, micro_step, rows),
            )

    def _needs_image(self, step: int, micro_step: int, rows: npt.NDArray[np.int64]) -> bool:
        if self.index.num_tiles[rows].any():
            return False
        groups, size = self.plan.step_groups(step), self.plan.dp_world_size
        first, end = groups.offsets[[micro_step * size, (micro_step + 1) * size]]
        return first == end or bool(self.index.num_tiles[groups.rows[first:end]].any())

    def _loss_totals(self, step: int) -> LossTotals:
        # of all ranks: each has the whole plan and index, so nothing is sent
        return LossTotals.of(self.index.num_loss_tokens[self.plan.step_groups(step).rows])

    def _has_rows(self, slot: int) -> bool:
        step, micro_step = divmod(slot, self.plan.accumulation)
        return len(self.plan.micro_batch(step, micro_step, self.dp_rank)) > 0


class PackDataset(Dataset[PackedBatch]):
    """Turns a `Task` into a packed batch; this is what each worker process holds.

    Args:
        shards: where rows are read; opens its files in each process by itself.
        transform: from record to sample.
        settings: for the seed of the transform, the padding, and ranks and accumulation, noted in
            each batch.
        with_image: whether fillers have an image.
    """

    def __init__(
        self,
        shards: ShardSet,
        transform: Transform,
        *,
        settings: LoaderSettings,
        with_image: bool,
    ) -> None:
        self._shards = shards
        self._transform = transform
        self._in_place = in_place(transform)
        self._settings = settings
        self._padding = settings.padding_with_token(shards, transform)
        # where the data has images, ranks wait for each other in the vision encoder too
        self._with_image = with_image

    def __getitem__(self, task: Task) -> PackedBatch:
        is_filler = len(task.rows) == 0
        uniform = self._settings.uniform_modality
        dummy, reserved = None, None
        if is_filler:
            with_image = self._with_image and (task.needs_image or not uniform)
            samples = [self._transform.filler(with_image=with_image)]
        else:
            samples, reserved = self._samples(task)
            if uniform and task.needs_image:
                dummy = self._transform.filler(with_image=True)
        return pack(
            samples,
            step=task.step,
            micro_step=task.micro_step,
            is_last_micro_step=task.is_last_micro_step,
            num_loss_tokens_step=task.loss_totals.num_tokens,
            num_loss_samples_step=task.loss_totals.num_samples,
            sqrt_loss_tokens_step=task.loss_totals.sqrt_tokens,
            is_filler=is_filler,
            dummy=dummy,
            dp_world_size=self._settings.world.dp_world_size,
            accumulation=self._settings.accumulation,
            pad_to=self._padding,
            reserved=reserved,
        )

    def _samples(self, task: Task) -> tuple[list[Sample], Reserved | None]:
        """Make the samples of a task, in the memory of the batch where the transform can."""
        records = [self._read(row) for row in task.rows.tolist()]
        if self._in_place is None:
            return [self._sample(record, task.epoch, None) for record in records], None
        reserved = reserve(records, tile_shape=self._in_place.tile_shape, pad_to=self._padding)
        samples = [
            self._sample(record, task.epoch, tiles)
            for record, tiles in zip(records, reserved.tiles, strict=True)
        ]
        return samples, reserved

    def _sample(self, record: Record, epoch: int, tiles: npt.NDArray[np.uint8] | None) -> Sample:
        """Transform one record, and hold the result against the index.

        Raises:
            SampleError: the transform failed, or gave another length than the index says; names
                row, key, source and shard.
        """
        rng = sample_generator(self._settings.seed, epoch, record.row)
        try:
            if self._in_place is None or tiles is None:
                sample = self._transform(record, rng)
            else:
                sample = self._in_place.write(record, rng, tiles=tiles)
        except SampleError as error:
            raise SampleError(f"{error} ({_where(record)})") from error
        except OmniloadError:
            raise
        except Exception as error:
            raise SampleError(
                f"the transform failed with {type(error).__name__}: {error} ({_where(record)})"
            ) from error
        if not isinstance(sample, Sample):
            raise SampleError(
                f"the transform must return an omniload.Sample, got {type(sample).__name__} "
                f"({_where(record)})."
            )
        self._check(sample, record)
        return sample

    def _read(self, row: int) -> Record:
        try:
            return self._shards.read(row)
        except OmniloadError:
            raise
        except Exception as error:
            raise ShardError(
                f"row {row} could not be read: {type(error).__name__}: {error}"
            ) from error

    def _check(self, sample: Sample, record: Record) -> None:
        # the plan was made from the index: other lengths would break the budget and the loss
        # denominators that all ranks agreed on
        index = self._shards.index
        row = record.row
        if sample.sample_id != row:
            raise SampleError(
                f"sample_id must be the row of the record: expected {row}, got {sample.sample_id} "
                f"({_where(record)})."
            )
        if (lowest := int(sample.input_ids.min())) < 0:
            raise SampleError(f"input_ids must not be negative, got {lowest} ({_where(record)}).")
        for name in ("num_tokens", "num_tiles", "num_loss_tokens"):
            planned, got = int(getattr(index, name)[row]), getattr(sample, name)
            if planned != got:
                raise SampleError(
                    f"{name} of the sample must be what the index says: expected {planned}, got "
                    f"{got} ({_where(record)}). Preprocess again with the settings of this "
                    "transform, or keep lengths unchanged in the transform."
                )


def _where(record: Record) -> str:
    """Name a record in a message."""
    return f"row={record.row}, key={record.key!r}, source={record.source!r}, shard={record.shard!r}"
