"""What a transform is: the one step of the loader that a user may replace."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from omniload.types import Record, Sample

__all__ = ["InPlaceTransform", "Transform", "in_place"]


@runtime_checkable
class Transform(Protocol):
    """Turns a stored record into a sample that can be packed; must be picklable."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits of all settings that change its samples."""

    def __call__(self, record: Record, rng: np.random.Generator) -> Sample:
        """Make the sample.

        Args:
            record: as stored.
            rng: random numbers that are a function of (seed, epoch, row).

        Raises:
            SampleError: the record can't be used, or doesn't give the lengths of `lengths`.
        """

    def filler(self, with_image: bool) -> Sample:
        """Make a short sample that trains nothing: all labels -100, `sample_id` -1.

        Args:
            with_image: whether it has a blank image.
        """

    def lengths(self, record: Record) -> tuple[int, int, int]:
        """Say what `__call__` will give: (num_tokens, num_tiles, num_loss_tokens)."""

    def model_inputs(self, batch: Any) -> dict[str, Any]:
        """Name the tensors of a packed batch as the model wants them."""


@runtime_checkable
class InPlaceTransform(Transform, Protocol):
    """A transform that can write tiles straight into a batch, which saves a copy of them."""

    @property
    def tile_shape(self) -> tuple[int, int]:
        """(height, width) of all its tiles, pixels."""

    def write(
        self, record: Record, rng: np.random.Generator, *, tiles: npt.NDArray[np.uint8]
    ) -> Sample:
        """Make the sample that `__call__` makes, with its tiles in memory that is given.

        Args:
            record: as stored.
            rng: as for `__call__`.
            tiles: uint8 (num_tiles, 3, height, width), filled here; the sample's `tiles` is this
                very array.
        """


def in_place(transform: Transform) -> InPlaceTransform | None:
    """Give a transform that can write tiles in place; None for one that can't.

    One that inherits `write` but has a `__call__` of its own can't: the two would differ.
    """
    if not isinstance(transform, InPlaceTransform):
        return None
    for kind in type(transform).__mro__:
        if "write" in vars(kind):
            return transform
        if "__call__" in vars(kind):
            return None
    return transform
