"""One sample made ready for a shard: tiles planned, text tokenised, length under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.images import TilePolicy
from omniload.transforms.text import ConversationEncoder
from omniload.types import IGNORE_INDEX, Message

__all__ = ["Oversize", "Prepared", "prepare_sample"]

Int32Array = npt.NDArray[np.int32]
Oversize = Literal["truncate", "fewer-tiles", "reject"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A sample as a shard stores it.

    Args:
        input_ids: int32 (num_tokens,), image tokens expanded.
        labels: int32 (num_tokens,), -100 where there is no loss.
        image_num_tiles: int32 (num_images,).
        image_spans: int32 (num_images, 2), [start, end) of each image's tokens.
        truncated: whether tokens were cut off its end.
        tiles_reduced: whether an image has fewer tiles than the policy gives it.
    """

    input_ids: Int32Array
    labels: Int32Array
    image_num_tiles: Int32Array
    image_spans: Int32Array
    truncated: bool = False
    tiles_reduced: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens, image tokens included."""
        return len(self.input_ids)

    @property
    def num_tiles(self) -> int:
        """Tiles of all images."""
        return int(self.image_num_tiles.sum())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that give loss once the first label is ignored."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


def prepare_sample(
    messages: Sequence[Message],
    image_sizes: Sequence[tuple[int, int]],
    *,
    encoder: ConversationEncoder,
    policy: TilePolicy,
    max_tokens: int | None = None,
    oversize: Oversize = "truncate",
) -> Prepared:
    """Plan the tiles of a sample, tokenise it, and bring it under `max_tokens`.

    Args:
        messages: the conversation.
        image_sizes: (width, height) of each image after EXIF orientation, pixels.
        encoder: tokenizer, template and loss policy.
        policy: the tiling policy.
        max_tokens: most tokens of a sample; None: no limit.
        oversize: for a sample over the limit. "truncate": cut its end, but never an image;
            "fewer-tiles": lower the tile limit of its images, the one with most tiles first;
            "reject": refuse it.

    Returns:
        The sample as a shard stores it.

    Raises:
        SampleError: the sample must be left out; says why.
        ConfigError: an unknown `oversize`, or `max_tokens` below 1.
    """
    _check(max_tokens, oversize)
    counts = [policy.num_tiles(width, height) for width, height in image_sizes]
    encoded = encoder.encode(messages, counts)
    over = 0 if max_tokens is None else len(encoded.input_ids) - max_tokens
    if over > 0 and oversize == "reject":
        raise SampleError(f"too long: at most {max_tokens} tokens, got {len(encoded.input_ids)}.")
    reduced = over > 0 and oversize == "fewer-tiles"
    if reduced:
        counts = _fewer_tiles(counts, image_sizes, over, encoder.tokens_per_tile, policy)
        encoded = encoder.encode(messages, counts)
    prepared = Prepared(
        input_ids=encoded.input_ids,
        labels=encoded.labels,
        image_num_tiles=np.array(counts, dtype=np.int32),
        image_spans=encoded.image_spans,
        tiles_reduced=reduced,
    )
    if over > 0 and oversize == "truncate" and max_tokens is not None:
        return _truncated(prepared, max_tokens, margin=len(encoder.image_end_ids))
    return prepared


def _check(max_tokens: int | None, oversize: str) -> None:
    if oversize not in get_args(Oversize):
        raise ConfigError(
            f"oversize must be one of {', '.join(get_args(Oversize))}, got {oversize!r}."
        )
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}.")


def _fewer_tiles(
    counts: list[int],
    image_sizes: Sequence[tuple[int, int]],
    over: int,
    tokens_per_tile: int,
    policy: TilePolicy,
) -> list[int]:
    counts = list(counts)
    total = sum(counts)
    while over > 0:
        largest = max(range(len(counts)), key=counts.__getitem__, default=None)
        fewer = None
        if largest is not None:
            fewer = _next_fewer(policy, image_sizes[largest], counts[largest])
        if largest is None or fewer is None:
            raise SampleError(
                f"too long by {over} tokens even with one tile an image ({len(counts)} images, "
                f"{total} tiles at first)."
            )
        over -= (counts[largest] - fewer) * tokens_per_tile
        counts[largest] = fewer
    return counts


def _next_fewer(policy: TilePolicy, size: tuple[int, int], count: int) -> int | None:
    """The largest number of tiles below `count` that a lower limit gives; None: there is none."""
    for limit in range(count - 1, 0, -1):
        fewer = policy.limited(limit).num_tiles(*size)
        if fewer < count:
            return fewer
    return None


def _truncated(prepared: Prepared, max_tokens: int, *, margin: int) -> Prepared:
    for index, (_, end) in enumerate(prepared.image_spans.tolist()):
        if end + margin > max_tokens:
            raise SampleError(
                f"too long: image {index + 1} of {len(prepared.image_spans)} ends at token "
                f"{end + margin}, beyond the {max_tokens} allowed, and an image is never cut. "
                "Try oversize='fewer-tiles'."
            )
    cut = Prepared(
        input_ids=prepared.input_ids[:max_tokens].copy(),
        labels=prepared.labels[:max_tokens].copy(),
        image_num_tiles=prepared.image_num_tiles,
        image_spans=prepared.image_spans,
        truncated=True,
        tiles_reduced=prepared.tiles_reduced,
    )
    if cut.num_loss_tokens == 0:
        raise SampleError(
            f"no token that gives loss is left after cutting {prepared.num_tokens} tokens to "
            f"{max_tokens}."
        )
    return cut
