"""What the transforms share: checks of their settings, and the normalisation of model families."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.images import TilePolicy
from omniload.types import IGNORE_INDEX, Record, Sample

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "HALF",
    "CutTiles",
    "channels",
    "integer",
    "require_policy",
    "stored_lengths",
    "token_ids",
    "unlabelled",
]

#: Per-channel mean and standard deviation of CLIP's training images, RGB, pixels scaled to [0, 1]
#: (https://github.com/openai/CLIP).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

#: Mean and standard deviation of SigLIP and of Qwen3-VL: pixels from -1 to 1.
HALF = (0.5, 0.5, 0.5)


class CutTiles(Protocol):
    """What `omniload.images.cut_tiles` is."""

    def __call__(
        self, image: npt.NDArray[np.uint8], policy: TilePolicy, *, out: npt.NDArray[np.uint8]
    ) -> None:
        """Write the tiles of an image."""


def require_policy(transform: Any, *policies: type) -> None:
    """Check that a transform has one of the policies it is for.

    Raises:
        ConfigError: it has another.
    """
    if not isinstance(transform.policy, policies):
        names = " or ".join(policy.__name__ for policy in policies)
        raise ConfigError(
            f"{type(transform).__name__} is for {names}, got {transform.policy!r}. Preprocess with "
            "the tiling of the model, or use TileTransform."
        )


def unlabelled(tokens: list[int], **arrays: Any) -> Sample:
    """Make a filler: tokens that give no loss."""
    input_ids = np.array(tokens, dtype=np.int32)
    labels = np.full(len(tokens), IGNORE_INDEX, dtype=np.int32)
    return Sample(sample_id=-1, input_ids=input_ids, labels=labels, **arrays)


def stored_lengths(record: Record) -> tuple[int, int, int]:
    """Count what is stored: (num_tokens, num_tiles, num_loss_tokens), first label left out.

    Args:
        record: as stored.
    """
    loss = int(np.count_nonzero(record.labels[1:] != IGNORE_INDEX))
    return len(record.input_ids), int(record.image_num_tiles.sum()), loss


def integer(name: str, value: Any, least: int) -> int:
    """Check a setting that is a number; raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)


def token_ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """Check a setting that is token ids; raises ConfigError."""
    return tuple(integer(name, value, 0) for value in values)


def channels(name: str, values: Sequence[float] | None) -> tuple[float, ...] | None:
    """Check a setting that is one number a channel, or None; raises ConfigError."""
    if values is None:
        return None
    numbers = tuple(float(value) for value in values)
    if len(numbers) != 3:
        raise ConfigError(f"{name} must be 3 numbers, RGB, got {values!r}.")
    return numbers
