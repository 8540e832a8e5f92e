"""What stands in for a batch where the stream of a rank has ended and that of another has not."""

from __future__ import annotations

from typing import Any

from omniload.errors import ConfigError
from omniload.transforms import Transform
from omniload.types import Sample

__all__ = ["Fillers"]


class Fillers:
    """Makes what stands in for data that is not there.

    Args:
        transform: makes it; None: there is none.
        filler: what to take instead of what the transform makes; None: nothing.
    """

    def __init__(self, transform: Transform | None, filler: Sample | None) -> None:
        self._transform = transform
        self._filler = filler

    def check(self, *, needed: bool, with_image: bool) -> None:
        """Check that there is something to make a filler of.

        Args:
            needed: whether one may be missed.
            with_image: whether it must have an image.

        Raises:
            ConfigError: it is no filler, or there is none.
        """
        if self._filler is not None:
            is_filler = isinstance(self._filler, Sample) and self._filler.sample_id == -1
            if not is_filler or (self._filler.labels != -100).any():
                raise ConfigError(
                    "filler must be an omniload.Sample with sample_id=-1 and labels of -100 only."
                )
        if needed and self._transform is None and self._filler is None:
            raise ConfigError(
                "filler must be given where there is no transform to make one and a step has more "
                "than one batch: at the end of the stream some of them may be missing."
            )
        if with_image and self._transform is None:
            raise ConfigError("uniform_modality=True needs a transform, whose filler has an image.")

    def make(self, *, with_image: bool) -> Sample:
        """Make a sample that trains nothing."""
        if self._filler is not None:
            return self._filler
        transform: Any = self._transform
        found: Sample = transform.filler(with_image=with_image)
        return found
