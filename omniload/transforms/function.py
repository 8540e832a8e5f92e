"""A user's own function as a transform."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from omniload.errors import ConfigError
from omniload.transforms.agree import check_sample
from omniload.transforms.base import Transform
from omniload.transforms.shared import stored_lengths
from omniload.transforms.tile import TileTransform
from omniload.types import Record, Sample

__all__ = ["FunctionTransform"]


class FunctionTransform:
    """Makes a transform of a function, by default with the lengths that are stored.

    The function must be picklable: defined at the top of a module, no lambda.

    Each sample is checked: spans in order, grids that hold the tiles, and, without `lengths`, the
    stored tiles of each image. Where `filler` is a `TileTransform`, or a transform made from one,
    its image token and its tiling are known too: the tokens in spans must be image tokens, no
    others may be, and each image must have as many as the model counts.

    Args:
        function: (record, rng) -> sample. Must draw from `rng` only.
        fingerprint: any text that changes whenever what the function does changes.
        filler: with_image -> a short sample with all labels -100 and `sample_id` -1; or a transform
            whose filler (and `model_inputs`, if not given) is used.
        lengths: record -> (num_tokens, num_tiles, num_loss_tokens) of the sample. None: as stored:
            the function changes neither the number of tokens, of loss tokens nor of tiles.
        model_inputs: batch -> arguments of the model. None: as `filler`, if it is a transform, else
            `batch.model_inputs()`.

    Raises:
        ConfigError: not callable, or no fingerprint.
    """

    def __init__(
        self,
        function: Callable[[Record, np.random.Generator], Sample],
        *,
        fingerprint: str,
        filler: Callable[[bool], Sample] | Transform,
        lengths: Callable[[Record], tuple[int, int, int]] | None = None,
        model_inputs: Callable[[Any], dict[str, Any]] | None = None,
    ) -> None:
        for name, value in (
            ("function", function),
            ("filler", filler),
            ("lengths", lengths or stored_lengths),
            ("model_inputs", model_inputs or _own_names),
        ):
            if not callable(value):
                raise ConfigError(f"FunctionTransform needs a callable {name}, got {value!r}.")
        if not isinstance(fingerprint, str) or not fingerprint:
            raise ConfigError(
                "FunctionTransform needs a fingerprint: a text that changes whenever what the "
                f"function does changes, got {fingerprint!r}."
            )
        base = filler if isinstance(filler, Transform) else None
        self._function = function
        self._fingerprint = fingerprint
        self._filler: Callable[[bool], Sample] = filler if base is None else base.filler  # type: ignore[assignment]
        self._lengths = lengths or stored_lengths
        self._as_stored = lengths is None
        self._base = _tile_transform(base)
        self._model_inputs = model_inputs or (_own_names if base is None else base.model_inputs)

    @property
    def tile_transform(self) -> TileTransform | None:
        """What knows the image token and the tiling, where `filler` is made from one."""
        return self._base

    @property
    def fingerprint(self) -> str:
        """32 hex digits of the text given."""
        import hashlib

        if re.fullmatch("[0-9a-f]{32}", self._fingerprint):
            return self._fingerprint
        return hashlib.sha256(self._fingerprint.encode()).hexdigest()[:32]

    def __call__(self, record: Record, rng: np.random.Generator) -> Sample:
        """Call the function.

        Args:
            record: as stored.
            rng: random numbers that are a function of (seed, epoch, row).

        Raises:
            SampleError: images, tokens and record contradict each other; shows both sides.
        """
        sample = self._function(record, rng)
        # the loader says what is wrong with anything else
        if isinstance(sample, Sample) and not (sample.input_ids < 0).any():
            check_sample(sample, record, base=self._base, as_stored=self._as_stored)
        return sample

    def filler(self, with_image: bool) -> Sample:
        """Make a sample that trains nothing.

        Args:
            with_image: whether it has a blank image.
        """
        return self._filler(with_image)

    def lengths(self, record: Record) -> tuple[int, int, int]:
        """Say what the sample of a record will have: (num_tokens, num_tiles, num_loss_tokens).

        Args:
            record: as stored.
        """
        return self._lengths(record)

    def model_inputs(self, batch: Any) -> dict[str, Any]:
        """Name the tensors of a packed batch as the model wants them.

        Args:
            batch: a PackedBatch.
        """
        return self._model_inputs(batch)


def _tile_transform(base: Transform | None) -> TileTransform | None:
    found = base if isinstance(base, TileTransform) else getattr(base, "tile_transform", None)
    return found if isinstance(found, TileTransform) else None


def _own_names(batch: Any) -> dict[str, Any]:
    return dict(batch.model_inputs())
