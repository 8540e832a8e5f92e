"""Made-up lengths that look like those of vision-language training sets, the same everywhere.

What is fitted and what is assumed:
- `diagrams` and `charts` follow the lengths of the training sets of AI2D (12 thousand rows) and
  ChartQA (18 thousand rows), cut into 1 to 5 tiles of 256 tokens: shares of the tile counts, and
  nine quantiles of the text tokens. Text and tiles are drawn independently of each other.
- `instructions` and `text` are assumptions: the shape of a general instruction mix, log-normal with
  a median of 190 text tokens, and of conversations without an image, with a median of 900.
- A third of the text tokens gives loss.
All draws are integers from `omniload.rng`, so the lengths don't depend on the NumPy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload.errors import ConfigError
from omniload.index import LengthIndex

__all__ = ["KINDS", "TOKENS_PER_TILE", "Kind", "make_lengths"]

TOKENS_PER_TILE = 256
_PERCENT = (0, 5, 25, 50, 75, 90, 95, 99, 100)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One part of the mixture.

    Args:
        name: what it is.
        share: its weight among the parts.
        tiles: weight of each number of tiles.
        text: text tokens at 0, 5, 25, 50, 75, 90, 95, 99 and 100 percent of the rows; between
            them the distribution is linear.
    """

    name: str
    share: int
    tiles: dict[int, int]
    text: tuple[int, int, int, int, int, int, int, int, int]


KINDS = (
    Kind(
        name="diagrams",
        share=18,
        tiles={1: 467, 3: 299, 4: 48, 5: 186},
        text=(37, 41, 47, 52, 58, 67, 75, 99, 180),
    ),
    Kind(
        name="charts",
        share=27,
        tiles={1: 32, 3: 60, 4: 1, 5: 907},
        text=(33, 39, 43, 66, 119, 170, 218, 321, 450),
    ),
    Kind(
        name="instructions",
        share=49,
        tiles={1: 35, 3: 30, 4: 10, 5: 20, 7: 5},
        text=(6, 55, 115, 190, 316, 497, 653, 1092, 1900),
    ),
    Kind(
        name="text",
        share=6,
        tiles={0: 1},
        text=(7, 205, 491, 901, 1650, 2852, 3960, 7320, 12000),
    ),
)


def make_lengths(
    count: int, *, seed: int = 0, kinds: Sequence[Kind] = KINDS, max_tokens: int = 4096
) -> LengthIndex:
    """Draw the lengths of a data set.

    Args:
        count: rows.
        seed: any integer.
        kinds: parts of the mixture; for images only, leave out the one named "text".
        max_tokens: longer rows are cut to this, as preprocessing does.

    Returns:
        The index, a pure function of the arguments.

    Raises:
        ConfigError: no kinds, or a limit that would cut into images.
    """
    most_tiles = max((tiles for kind in kinds for tiles in kind.tiles), default=-1)
    if count < 0 or most_tiles < 0 or max_tokens <= most_tiles * TOKENS_PER_TILE:
        raise ConfigError(
            f"make_lengths needs rows, kinds, and room for the largest image: expected max_tokens "
            f"above {most_tiles * TOKENS_PER_TILE}, got count={count}, {len(kinds)} kinds, "
            f"max_tokens={max_tokens}."
        )
    which = _weighted([kind.share for kind in kinds], rng.random_u64(count, seed, 0))
    tile_words, text_words = rng.random_u64(count, seed, 1), rng.random_u64(count, seed, 2)
    tiles, text = np.zeros(count, np.int64), np.zeros(count, np.int64)
    for number, kind in enumerate(kinds):
        mine = which == number
        classes = np.array(list(kind.tiles), np.int64)
        tiles[mine] = classes[_weighted(list(kind.tiles.values()), tile_words[mine])]
        text[mine] = _quantile(kind.text, text_words[mine])
    text = np.minimum(text, max_tokens - TOKENS_PER_TILE * tiles)
    return LengthIndex.from_arrays(
        num_tokens=TOKENS_PER_TILE * tiles + text, num_tiles=tiles, num_loss_tokens=text // 3
    )


def _weighted(weights: Sequence[int], words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    ends = np.cumsum(weights)
    places = (words >> np.uint64(32)).astype(np.int64) * int(ends[-1]) >> 32
    return np.asarray(np.searchsorted(ends, places, side="right"), np.int64)


def _quantile(values: Sequence[int], words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    unit = 2**20  # of a percent
    place = (words >> np.uint64(32)).astype(np.int64) * (100 * unit) >> 32
    ends = np.array(_PERCENT, np.int64) * unit
    part = np.searchsorted(ends, place, side="right") - 1
    known = np.array(values, np.int64)
    width = ends[part + 1] - ends[part]
    drawn = known[part] + (place - ends[part]) * (known[part + 1] - known[part]) // width
    return np.asarray(drawn, np.int64)
