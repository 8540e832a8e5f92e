"""One sample made ready for a shard: tiles planned, text tokenised, length under a limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.images import TilePolicy, count_tokens
from omniload.transforms.text import ConversationEncoder, Encoded
from omniload.types import IGNORE_INDEX, Message

__all__ = ["Oversize", "Prepared", "has_breaks", "prepare_sample"]

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
    images = [_Image(size, policy, encoder.tokens_per_tile) for size in image_sizes]
    encoded = _encode(encoder, messages, images)
    over = 0 if max_tokens is None else len(encoded.input_ids) - max_tokens
    if over > 0 and oversize == "reject":
        raise SampleError(f"too long: at most {max_tokens} tokens, got {len(encoded.input_ids)}.")
    reduced = over > 0 and oversize == "fewer-tiles"
    if reduced:
        encoded = _encode(encoder, messages, _fewer_tiles(images, over))
    prepared = Prepared(
        input_ids=encoded.input_ids,
        labels=encoded.labels,
        image_num_tiles=np.array([image.num_tiles for image in images], dtype=np.int32),
        image_spans=encoded.image_spans,
        tiles_reduced=reduced,
    )
    if over > 0 and oversize == "truncate" and max_tokens is not None:
        return _truncated(prepared, max_tokens, margin=len(encoder.image_end_ids))
    return prepared


def has_breaks(policy: TilePolicy) -> bool:
    """Tell whether a tiling counts tokens between the rows of an image."""
    return bool(getattr(policy, "row_breaks", False))


def _check(max_tokens: int | None, oversize: str) -> None:
    if oversize not in get_args(Oversize):
        raise ConfigError(
            f"oversize must be one of {', '.join(get_args(Oversize))}, got {oversize!r}."
        )
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"max_tokens must be at least 1, got {max_tokens}.")


class _Image:
    """Tiles and tokens of one image under a policy whose limit may be lowered."""

    def __init__(self, size: tuple[int, int], policy: TilePolicy, tokens_per_tile: int) -> None:
        self._size = size
        self._policy = policy
        self._tokens_per_tile = tokens_per_tile
        self._plan(policy)

    def _plan(self, policy: TilePolicy) -> None:
        self.num_tiles = policy.num_tiles(*self._size)
        self.num_tokens = count_tokens(policy, *self._size, tokens_per_tile=self._tokens_per_tile)
        self.columns = policy.grid(*self._size)[0] if has_breaks(policy) else None

    def lower(self) -> bool:
        """Take the next lower number of tiles; False: there is none."""
        count = self.num_tiles
        for limit in range(count - 1, 0, -1):
            policy = self._policy.limited(limit)
            if policy.num_tiles(*self._size) < count:
                self._plan(policy)
                return True
            if policy is self._policy:  # it has no limit to lower
                break
        return False


def _encode(
    encoder: ConversationEncoder, messages: Sequence[Message], images: Sequence[_Image]
) -> Encoded:
    columns = [image.columns for image in images if image.columns is not None]
    return encoder.encode(
        messages,
        [image.num_tiles for image in images],
        image_num_tokens=[image.num_tokens for image in images],
        image_columns=columns or None,
    )


def _fewer_tiles(images: list[_Image], over: int) -> list[_Image]:
    """Lower the image with most tiles, the first of equals, until the tokens are saved."""
    total = sum(image.num_tiles for image in images)
    while over > 0:
        largest = max(images, key=lambda image: image.num_tiles, default=None)
        before = 0 if largest is None else largest.num_tokens
        if largest is None or not largest.lower():
            raise SampleError(
                f"too long by {over} tokens even with one tile an image ({len(images)} images, "
                f"{total} tiles at first)."
            )
        over -= before - largest.num_tokens
    return images


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
