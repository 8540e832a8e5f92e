"""What a transform is: the one step of the loader that a user may replace."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from omniload.types import Record, Sample

__all__ = ["Transform"]


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
