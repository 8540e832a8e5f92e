"""Simple groupings to compare with, and the one that keeps the order of the index.

All of them are a next fit: walk the rows in some order, and open a new group whenever the next row
would pass a bound of the budget. They differ in the order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload._jit import jit
from omniload.grouping.reorder import reordered
from omniload.types import Budget, Groups

__all__ = ["device", "length", "random", "sequential"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_LIMIT = 2**62
_BLOCK = 1024  # consecutive groups that "device" keeps together; more than the ranks of most runs
_TAG_ROWS, _TAG_GROUPS = 1, 2  # keep the two uses of a key apart


def sequential(
    num_tokens: Int32Array, num_tiles: Int32Array, *, budget: Budget, key: tuple[int, ...]
) -> Groups:
    """Group rows by next fit in index order, for evaluation; `key` is not used.

    Args, returns: as every grouping, see `omniload.grouping`.
    """
    del key
    return _next_fit(np.arange(len(num_tokens)), num_tokens, num_tiles, budget)


def random(
    num_tokens: Int32Array, num_tiles: Int32Array, *, budget: Budget, key: tuple[int, ...]
) -> Groups:
    """Group rows by next fit over a random order: what packing does without any care.

    Args, returns: as every grouping, see `omniload.grouping`.
    """
    order = rng.permutation(len(num_tokens), *key, _TAG_ROWS)
    return _next_fit(order, num_tokens, num_tiles, budget)


def length(
    num_tokens: Int32Array, num_tiles: Int32Array, *, budget: Budget, key: tuple[int, ...]
) -> Groups:
    """Group rows of like length: next fit over the rows by falling length, then shuffle the groups.

    The length group of OmniBal, table 1: rows of one group are alike, groups are not; so the ranks
    of a step wait for each other.

    Args, returns: as every grouping, see `omniload.grouping`.
    """
    groups = _next_fit(_by_length(num_tokens, key), num_tokens, num_tiles, budget)
    return _shuffled(groups, block=1, key=key)


def device(
    num_tokens: Int32Array, num_tiles: Int32Array, *, budget: Budget, key: tuple[int, ...]
) -> Groups:
    """Group rows so that neighbouring groups, thus the ranks of a step, hold rows of like length.

    The device group of OmniBal, table 1: the rows by falling length are cut into as many strata as
    a mean group has rows, and each group takes the next row of every stratum. Rows of one group
    differ in length (which pads an unpacked batch), groups next to each other do not. Blocks of
    1,024 groups are shuffled; inside a block the order is kept, so successive steps are alike too.

    Args, returns: as every grouping, see `omniload.grouping`.
    """
    count = len(num_tokens)
    order = _by_length(num_tokens, key)
    strata = max(1, count // max(1, _fewest_groups(num_tokens, num_tiles, budget)))
    height = -(-count // strata)
    # places column by column: 0, height, 2 * height, ..., then 1, height + 1, ...
    places = np.arange(strata * height, dtype=np.int64).reshape(strata, height).T.ravel()
    groups = _next_fit(order[places[places < count]], num_tokens, num_tiles, budget)
    return _shuffled(groups, block=_BLOCK, key=key)


def _by_length(num_tokens: Int32Array, key: tuple[int, ...]) -> Int64Array:
    shuffled = rng.permutation(len(num_tokens), *key, _TAG_ROWS)  # decides between equal lengths
    return shuffled[np.argsort(-num_tokens[shuffled].astype(np.int64), kind="stable")]


def _fewest_groups(num_tokens: Int32Array, num_tiles: Int32Array, budget: Budget) -> int:
    bounds = [(int(num_tokens.sum(dtype=np.int64)), budget.tokens)]
    if budget.tiles:
        bounds.append((int(num_tiles.sum(dtype=np.int64)), budget.tiles))
    if budget.samples:
        bounds.append((len(num_tokens), budget.samples))
    return max(-(-load // cap) for load, cap in bounds)


def _shuffled(groups: Groups, *, block: int, key: tuple[int, ...]) -> Groups:
    """Shuffle blocks of consecutive groups; the last block may be shorter."""
    num_blocks = -(-len(groups) // block)
    firsts = rng.permutation(num_blocks, *key, _TAG_GROUPS)[:, None] * block
    order = (firsts + np.arange(block)).ravel()
    return reordered(groups, order[order < len(groups)])


def _next_fit(
    order: Int64Array, num_tokens: Int32Array, num_tiles: Int32Array, budget: Budget
) -> Groups:
    offsets = np.zeros(len(order) + 1, np.int64)
    num_groups = _walk(
        num_tokens[order],
        num_tiles[order],
        (
            budget.tokens,
            _NO_LIMIT if budget.tiles is None else budget.tiles,
            _NO_LIMIT if budget.samples is None else budget.samples,
        ),
        offsets,
    )
    return Groups(rows=order, offsets=offsets[: num_groups + 1])


@jit
def _walk(
    num_tokens: Int32Array, num_tiles: Int32Array, caps: tuple[int, int, int], offsets: Int64Array
) -> int:
    """Write where groups end to `offsets[1:]`, return how many there are."""
    tokens_cap, tiles_cap, samples_cap = caps
    num_groups, start, tokens, tiles = 0, 0, 0, 0
    for row in range(len(num_tokens)):
        # int(): in plain Python the sum of two NumPy int32 would wrap around
        tokens += int(num_tokens[row])
        tiles += int(num_tiles[row])
        fits = tokens <= tokens_cap and tiles <= tiles_cap and row - start < samples_cap
        if row > start and not fits:
            num_groups += 1
            offsets[num_groups] = row
            start, tokens, tiles = row, int(num_tokens[row]), int(num_tiles[row])
    if len(num_tokens):
        num_groups += 1
        offsets[num_groups] = len(num_tokens)
    return num_groups
