"""What a rank reads: all, labels without images, or nothing.

The loader keeps its plan, place and state in all three, so the stages of a pipeline stay in step by
themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np

from omniload.batch import PackedBatch
from omniload.errors import ConfigError
from omniload.loader.tasks import Walk
from omniload.loader.worker import PackDataset
from omniload.packing import pack
from omniload.transforms import TileTransform, Transform
from omniload.types import Record, Sample

__all__ = ["LabelsOnly", "dataset_for", "empty_batches"]

_log = logging.getLogger(__name__)

_READS = ("all", "labels", "nothing")
#: Tiles have to be as many as the index says; of this size they weigh nothing.
_TINY = (3, 1, 1)


def dataset_for(reads: str, dataset: PackDataset) -> PackDataset | None:
    """Choose what makes the batches of a rank; None: nothing does.

    Args:
        reads: "all", "labels" or "nothing".
        dataset: reads all.

    Raises:
        ConfigError: another word.
    """
    if reads not in _READS:
        raise ConfigError(
            f"reads must be one of {', '.join(map(repr, _READS))}, got {reads!r}. In a pipeline "
            "the first stage reads 'all', the last 'labels', those between 'nothing'."
        )
    if reads == "nothing":
        return None
    # where bad samples are skipped, each rank has to see for itself which ones are bad
    if reads == "all" or dataset.skips_bad_samples:
        return dataset
    if not LabelsOnly.fits(dataset.transform):
        _log.warning(
            "this rank reads and decodes images for their labels alone, because only %s knows its "
            "tokens; give it a method labels_only(record, rng) -> Sample",
            type(dataset.transform).__name__,
        )
        return dataset
    return dataset.without_images(LabelsOnly(dataset.transform))


def empty_batches(walk: Walk) -> Iterator[PackedBatch]:
    """Give a batch without a token for each task of a walk."""
    for task in walk:
        yield pack(
            [],
            step=task.step,
            micro_step=task.micro_step,
            is_last_micro_step=task.is_last_micro_step,
            num_loss_tokens_step=task.loss_totals.num_tokens,
            dp_world_size=walk.plan.dp_world_size,
            accumulation=walk.plan.accumulation,
        )


class LabelsOnly:
    """A transform whose samples have the tokens of another's, and tiles of one black pixel.

    Args:
        inner: a `TileTransform`, or a transform with a method `labels_only(record, rng) -> Sample`
            that makes the sample without its pixels, its tiles of any size; the record comes
            without image files and messages where the data can be read so.
    """

    def __init__(self, inner: Transform) -> None:
        self._inner = inner

    @staticmethod
    def fits(transform: Any) -> bool:
        """Say if a transform's tokens can be had without its pixels."""
        if callable(getattr(transform, "labels_only", None)):
            return True
        return isinstance(transform, TileTransform) and all(
            getattr(type(transform), name) is getattr(TileTransform, name)
            for name in ("__call__", "write")
        )

    @property
    def fingerprint(self) -> str:
        """That of the other: the samples that are trained on are its."""
        return self._inner.fingerprint

    def __call__(self, record: Record, rng: np.random.Generator) -> Sample:
        """Make a sample without decoding an image."""
        labels_only = getattr(self._inner, "labels_only", None)
        if labels_only is not None:
            return _without_pixels(labels_only(record, rng))
        num_tiles, num_images = int(record.image_num_tiles.sum()), len(record.image_num_tiles)
        return Sample(
            sample_id=record.row,
            input_ids=record.input_ids,
            labels=record.labels,
            tiles=np.zeros((num_tiles, *_TINY), np.uint8),
            image_num_tiles=record.image_num_tiles,
            image_sizes=record.image_sizes,
            image_grids=np.zeros((num_images, 2), np.int32),
            image_spans=record.image_spans,
        )

    def filler(self, with_image: bool) -> Sample:
        """Make the filler of the other."""
        return _without_pixels(self._inner.filler(with_image))

    def lengths(self, record: Record) -> tuple[int, int, int]:
        """Say what the sample of a record will have."""
        return self._inner.lengths(record)

    def model_inputs(self, batch: Any) -> dict[str, Any]:
        """Refuse: the pixels are not there."""
        raise ConfigError("a rank that reads labels has no model inputs.")


def _without_pixels(sample: Sample) -> Sample:
    fields = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    return Sample(**{**fields, "tiles": np.zeros((sample.num_tiles, *_TINY), np.uint8)})
