"""What a worker does with a task: read, transform, check, pack."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from omniload.batch import PackedBatch
from omniload.errors import OmniloadError, SampleError, ShardError
from omniload.loader.blank import blank_record, blank_sample
from omniload.loader.notes import NO_NOTES, Notes, Phase
from omniload.loader.settings import LoaderSettings
from omniload.loader.tasks import Task
from omniload.packing import Reserved, pack, reserve
from omniload.rng import sample_generator
from omniload.source import RowSource, lengths_of, read_tokens
from omniload.transforms import Transform, in_place
from omniload.types import Record, Sample, SkippedSample

__all__ = ["PackDataset"]

Tiles = npt.NDArray[np.uint8]


class PackDataset(Dataset[PackedBatch]):
    """Turns a `Task` into a packed batch; this is what each worker holds.

    Args:
        source: where rows are read; opens its files in each process by itself.
        transform: from record to sample.
        settings: for the seed of the transform, the padding, and ranks and accumulation, noted in
            each batch.
        skip_bad_samples: put a blank sample in the place of one that can't be used, and say so in
            the batch; else it is an error.
    """

    def __init__(
        self,
        source: RowSource,
        transform: Transform,
        *,
        settings: LoaderSettings,
        skip_bad_samples: bool = False,
    ) -> None:
        self._source = source
        self._transform = transform
        self._in_place = in_place(transform)
        self._settings = settings
        self._padding = settings.padding_with_token(source, transform)
        self._skips = skip_bad_samples
        self._reads_images = True
        self._of_epoch: tuple[int, RowSource] | None = None

    @property
    def transform(self) -> Transform:
        """From record to sample."""
        return self._transform

    @property
    def skips_bad_samples(self) -> bool:
        """Whether a blank sample has the place of one that can't be used."""
        return self._skips

    def without_images(self, transform: Transform) -> PackDataset:
        """Make one that reads no image file, where the source can do without.

        Args:
            transform: another, that needs none.
        """
        other = copy.copy(self)
        other._transform, other._in_place = transform, in_place(transform)
        other._reads_images = False
        return other

    def __getitem__(self, task: Task) -> PackedBatch:
        return self.make(task)

    def make(self, task: Task, notes: Notes = NO_NOTES) -> PackedBatch:
        """Make the batch of a task; threads may share this.

        Args:
            task: the task.
            notes: told of each row.

        Raises:
            SampleError: a sample can't be used.
            ShardError: a row can't be read.
            ConfigError: the batch doesn't fit its padding, or the shared memory that is free.
        """
        is_filler = len(task.rows) == 0
        uniform = self._settings.uniform_modality
        dummy, reserved = None, None
        skipped: list[SkippedSample] = []
        if is_filler:
            # where the data has images, ranks wait for each other in the vision encoder too
            with_image = task.has_images and (task.needs_image or not uniform)
            samples = [self._transform.filler(with_image=with_image)]
        else:
            samples, reserved = self._samples(task, skipped, notes)
            if uniform and task.needs_image:
                dummy = self._transform.filler(with_image=True)
        notes.at(Phase.PACK)
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
            skipped_samples=skipped,
        )

    def _samples(
        self, task: Task, skipped: list[SkippedSample], notes: Notes
    ) -> tuple[list[Sample], Reserved | None]:
        """Make the samples of a task, in the memory of the batch where the transform can.

        Args:
            task: the task.
            skipped: those that can't be used are added here.
            notes: told of each row.
        """
        source = self.rows(task.epoch)
        if task.upcoming:
            source.prefetch(task.upcoming)
        records: list[Record] = []
        unread: dict[int, SampleError] = {}
        for row in task.rows.tolist():
            notes.at(Phase.READ, row)
            try:
                records.append(_read(source, row, images=self._reads_images))
            except (SampleError, ShardError) as error:
                # a shard that can't be read at all is no matter of single samples
                if not self._skips or not _is_about_row(error, source, row):
                    raise
                unread[row] = _bad("damaged row", str(error))
                records.append(blank_record(source, row, self._transform))
        notes.took(sum(map(_stored_bytes, records)))
        reserved = None
        tiles: list[Tiles | None] = [None] * len(records)
        if self._in_place is not None:
            shape = self._in_place.tile_shape
            reserved = reserve(records, tile_shape=shape, pad_to=self._padding)
            tiles = list(reserved.tiles)
        samples = []
        for record, room in zip(records, tiles, strict=True):
            notes.at(Phase.TRANSFORM, record.row)
            notes.key(record.key)
            try:
                if record.row in unread:
                    raise unread[record.row]
                samples.append(self._sample(record, source, task.epoch, room))
            except SampleError as error:
                if not self._skips:
                    raise
                skipped.append(_skipped(error, record, source))
                samples.append(blank_sample(record, self._transform, source, tiles=room))
        return samples, reserved

    def _sample(self, record: Record, source: RowSource, epoch: int, tiles: Tiles | None) -> Sample:
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
        except (OmniloadError, MemoryError):
            raise
        except Exception as error:
            raise _bad(
                "failed transform",
                f"the transform failed with {type(error).__name__}: {error} ({_where(record)})",
            ) from error
        if not isinstance(sample, Sample):
            raise _bad(
                "failed transform",
                f"the transform must return an omniload.Sample, got {type(sample).__name__} "
                f"({_where(record)}).",
            )
        _check(sample, record, source)
        return sample

    @property
    def source(self) -> RowSource:
        """What is read from, whatever the epoch."""
        return self._source

    def rows(self, epoch: int) -> RowSource:
        """Give the rows of an epoch; those of the last one asked for are kept."""
        found = self._of_epoch
        if found is None or found[0] != epoch:
            found = self._of_epoch = (epoch, self._source.at_epoch(epoch))
        return found[1]


def _read(source: RowSource, row: int, *, images: bool) -> Record:
    try:
        return source.read(row) if images else read_tokens(source, row)
    except (OmniloadError, MemoryError):
        raise
    except Exception as error:
        message = f"row {row} could not be read: {type(error).__name__}: {error}"
        raise ShardError(message) from error


def _stored_bytes(record: Record) -> int:
    return sum(map(len, record.images)) + record.input_ids.nbytes + record.labels.nbytes


def _is_about_row(error: OmniloadError, source: RowSource, row: int) -> bool:
    """Say if a row is damaged alone, so that others of its shard can be read."""
    if isinstance(error, SampleError):
        return True
    shard = source.locate(row)[0]
    for other in _neighbours(source, row):
        if other == row or source.locate(other)[0] != shard:
            continue
        try:
            source.read(other)
        except Exception:  # whatever it is: the question is whether it can be read
            continue
        return True
    return False


def _neighbours(source: RowSource, row: int) -> Iterator[int]:
    """Give some rows that may lie in the same shard: all near ones, and fewer far away."""
    yield row - source.locate(row)[1]
    for distance in (*range(1, 9), *(2**power for power in range(4, 18))):
        for other in (row - distance, row + distance):
            if 0 <= other < len(source):
                yield other


def _check(sample: Sample, record: Record, source: RowSource) -> None:
    # the plan was made from the index: other lengths would break the budget and the loss
    # denominators that all ranks agreed on
    row = record.row
    if sample.sample_id != row:
        raise _bad(
            "failed transform",
            f"sample_id must be the row of the record: expected {row}, got {sample.sample_id} "
            f"({_where(record)}).",
        )
    if (lowest := int(sample.input_ids.min())) < 0:
        raise _bad(
            "failed transform",
            f"input_ids must not be negative, got {lowest} ({_where(record)}).",
        )
    names = ("num_tokens", "num_tiles", "num_loss_tokens")
    for name, planned in zip(names, lengths_of(source, row), strict=True):
        got = getattr(sample, name)
        if planned != got:
            raise _bad(
                "wrong length",
                f"{name} of the sample must be what the index says: expected {planned}, got "
                f"{got} ({_where(record)}). Preprocess again with the settings of this "
                "transform, or keep lengths unchanged in the transform.",
            )


def _skipped(error: SampleError, record: Record, source: RowSource) -> SkippedSample:
    return SkippedSample(
        row=record.row,
        key=record.key,
        source=record.source,
        shard=record.shard,
        shard_row=source.locate(record.row)[1],
        kind=error.kind,
        reason=str(error),
        num_loss_tokens=lengths_of(source, record.row)[2],
    )


def _bad(kind: str, message: str) -> SampleError:
    error = SampleError(message)
    error.kind = kind
    return error


def _where(record: Record) -> str:
    """Name a record in a message."""
    return f"row={record.row}, key={record.key!r}, source={record.source!r}, shard={record.shard!r}"
