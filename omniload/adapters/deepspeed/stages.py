"""What each stage of a pipeline reads: all, tokens without images, or nothing.

The loader keeps its plan, place and state in all three: the stages stay in step by themselves.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from omniload.batch import PackedBatch
from omniload.errors import ConfigError
from omniload.loader import DataLoader
from omniload.loader.run import InProcess, Run
from omniload.loader.tasks import Walk
from omniload.loader.workers import Workers
from omniload.packing import pack
from omniload.transforms import TileTransform, Transform
from omniload.types import Record, Sample

__all__ = ["LabelsOnly", "is_closed", "read_nothing", "read_tokens_only"]

_log = logging.getLogger(__name__)

#: Tiles have to be as many as the index says; of this size they weigh nothing.
_TINY = (3, 1, 1)


class LabelsOnly:
    """A transform whose samples have the tokens of another's, and tiles of one black pixel.

    Args:
        inner: a `TileTransform`, or a transform with a method `labels_only(record, rng) -> Sample`
            that makes the sample without its pixels, its tiles of any size.
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
        raise ConfigError("the last stage of a pipeline reads labels and no model inputs.")


def _without_pixels(sample: Sample) -> Sample:
    fields = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    return Sample(**{**fields, "tiles": np.zeros((sample.num_tiles, *_TINY), np.uint8)})


class _NoWorkers(Workers):
    """Stands where a loader's workers are, and gives batches without a token."""

    def start(self, walk: Walk, *, seed: int) -> Run:
        """Give an empty batch for each task of a walk."""
        return InProcess(_empty_batches(walk))


def _empty_batches(walk: Walk) -> Iterator[PackedBatch]:
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


def is_closed(batches: Iterator[PackedBatch]) -> bool:
    """Say if the loader has ended this iterator: at the end of its epoch, or for a loaded state."""
    return getattr(batches, "_run", batches) is None


def read_nothing(loader: DataLoader) -> None:
    """Make a loader walk its plan without reading: no worker starts, no file is opened."""
    workers = loader._workers
    options = replace(workers._options, num_workers=0)
    vars(loader)["_workers"] = _NoWorkers(workers._dataset, options)


def read_tokens_only(loader: DataLoader) -> None:
    """Make a loader leave images undecoded, where its transform allows that."""
    workers = loader._workers
    if isinstance(workers, _NoWorkers):
        raise ConfigError("this loader was used on another stage; make one for this engine.")
    dataset = copy.copy(workers._dataset)
    transform = dataset._transform
    # where bad samples are skipped, this stage has to see as the first does which ones are bad
    if isinstance(transform, LabelsOnly) or dataset._skips:
        return
    if not LabelsOnly.fits(transform):
        _log.warning(
            "the last stage decodes images for nothing, because only %s knows its tokens; give it "
            "a method labels_only(record, rng) -> Sample",
            type(transform).__name__,
        )
        return
    vars(dataset).update(_transform=LabelsOnly(transform), _in_place=None)
    vars(loader)["_workers"] = Workers(dataset, workers._options)
