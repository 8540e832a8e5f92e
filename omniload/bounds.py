"""Lower bounds of the number of groups: no packer can do with fewer.

- The sum of sizes by the budget, whichever resource needs most.
- The linear programme over patterns of Gilmore and Gomory ("A linear programming approach to the
  cutting-stock problem", Operations Research 1961), in two dimensions, by column generation. It
  sees what the first cannot: that three rows of 5 tiles don't fill 13.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload._jit import jit
from omniload.errors import ConfigError
from omniload.types import Budget

__all__ = ["pattern_bound", "size_bound"]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_MOST_TILES = 256  # more are rounded down to so many units
_TOKEN_UNITS = 1024
_PRICE = 2**40  # a group in units of the integer prices, so that the bound is exact


def size_bound(num_tokens: npt.ArrayLike, num_tiles: npt.ArrayLike, budget: Budget) -> int:
    """Compute the groups that the sums of tokens, tiles and samples need.

    Args:
        num_tokens: integers (n,), tokens of each row.
        num_tiles: integers (n,), tiles of each row.
        budget: upper bounds of a group.

    Returns:
        The largest of the sums, each by its bound and rounded up.
    """
    tokens, tiles = np.asarray(num_tokens), np.asarray(num_tiles)
    needs = [-(-int(tokens.sum(dtype=np.int64)) // budget.tokens)]
    if budget.tiles:
        needs.append(-(-int(tiles.sum(dtype=np.int64)) // budget.tiles))
    if budget.samples:
        needs.append(-(-len(tokens) // budget.samples))
    return max(needs)


def pattern_bound(
    num_tokens: npt.ArrayLike,
    num_tiles: npt.ArrayLike,
    budget: Budget,
    *,
    kinds: int = 320,
    rounds: int = 6000,
) -> int:
    """Compute a lower bound by the linear programme over patterns, never below `size_bound`.

    Rows are sorted into kinds of the same tiles and about the same tokens, rounded down, so the
    bound holds for the rows as they are. It also holds when the rounds run out before the best
    prices are found: any prices at which no pattern is worth more than one group give a bound.

    Args:
        num_tokens: integers (n,), tokens of each row, none above `budget.tokens`.
        num_tiles: integers (n,), tiles of each row, none above `budget.tiles`.
        budget: upper bounds of a group; `samples` counts in `size_bound` only.
        kinds: kinds of rows, about; more give a sharper bound and take longer.
        rounds: patterns that are tried at most.

    Returns:
        The bound, groups.

    Raises:
        ConfigError: a row over the budget, or fewer than 1 kind.

    Cost: some seconds, for any number of rows.
    """
    tokens, tiles = np.asarray(num_tokens, np.int64), np.asarray(num_tiles, np.int64)
    if kinds < 1:
        raise ConfigError(f"kinds must be at least 1, got {kinds}.")
    cap_tiles = budget.tiles
    if cap_tiles is None or len(tokens) == 0:
        cap_tiles, tiles = 0, np.zeros_like(tiles)
    if (tokens > budget.tokens).any() or (tiles > cap_tiles).any():
        raise ConfigError("every row must fit the budget, or there is no bound of the groups.")
    least = size_bound(num_tokens, num_tiles, budget)
    if len(tokens) == 0:
        return least
    found = _Kinds.of(tokens, tiles, budget.tokens, cap_tiles, kinds)
    return max(least, _column_generation(found, rounds) if found is not None else 0)


@dataclass(frozen=True, kw_only=True)
class _Kinds:
    """Kinds of rows in coarse units, and the budget in the same."""

    tokens: Int64Array
    tiles: Int64Array
    counts: Int64Array
    cap_tokens: int
    cap_tiles: int

    @classmethod
    def of(
        cls, tokens: Int64Array, tiles: Int64Array, cap_tokens: int, cap_tiles: int, kinds: int
    ) -> _Kinds | None:
        """Round down; where many rows are, kinds are narrow. None: all is rounded to nothing."""
        unit = -(-cap_tokens // _TOKEN_UNITS)
        tile_unit = max(1, -(-cap_tiles // _MOST_TILES))
        cells = np.stack([tiles // tile_unit, tokens // unit], axis=1)
        cells, counts = np.unique(cells, axis=0, return_counts=True)
        some = cells.any(axis=1)  # any number of what is rounded down to nothing fits a group
        cells, counts = cells[some], counts[some]
        # the loss by rounding is least where widths go with the root of the density
        if len(cells) == 0:
            return None
        weights = np.sqrt(counts)
        steps = np.floor((np.cumsum(weights) - weights) * kinds / weights.sum()).astype(np.int64)
        new = np.ones(len(cells), bool)
        new[1:] = (np.diff(steps) > 0) | (np.diff(cells[:, 0]) > 0)
        first = np.flatnonzero(new)
        return cls(
            tokens=cells[first, 1],
            tiles=cells[first, 0],
            counts=np.add.reduceat(counts, first),
            cap_tokens=cap_tokens // unit,
            cap_tiles=cap_tiles // tile_unit,
        )


def _column_generation(kinds: _Kinds, rounds: int) -> int:
    """Solve the programme with a revised simplex method; return the best bound on the way."""
    counts = kinds.counts.astype(np.float64)
    alone = np.full(len(counts), 2.0**20)  # rows of one kind in a group
    for sizes, cap in ((kinds.tokens, kinds.cap_tokens), (kinds.tiles, kinds.cap_tiles)):
        some = sizes > 0
        alone[some] = np.minimum(alone[some], cap // sizes[some])
    inverse, used = np.diag(1 / alone), counts / alone
    costs = np.ones(len(counts))
    value = np.zeros((kinds.cap_tiles + 1, kinds.cap_tokens + 1), np.int64)
    chosen = np.zeros_like(value)
    best = 0
    for _ in range(rounds):
        prices = costs @ inverse
        lowest = int(prices.argmin())
        column, cost = np.zeros(len(counts)), 1.0
        if prices[lowest] < -1e-9:
            column[lowest], cost = -1.0, 0.0  # more of a kind than there is
        else:
            whole = (np.maximum(prices, 0) * _PRICE).astype(np.int64)
            worth = int(_best_pattern(kinds.tokens, kinds.tiles, whole, value, chosen))
            total = sum(int(n) * int(p) for n, p in zip(kinds.counts, whole, strict=True))
            best = max(best, -(-total // max(worth, 1)))
            if best >= float(costs @ used) * (1 - 1e-6):
                break
            _read_pattern(kinds, chosen, column)
        change = inverse @ column
        up = change > 1e-9
        if not up.any():
            break
        steps = np.where(up, used / np.where(up, change, 1.0), np.inf)
        leaving = int(steps.argmin())
        used = np.maximum(used - steps[leaving] * change, 0)
        used[leaving] = steps[leaving]
        row = inverse[leaving] / change[leaving]
        inverse = inverse - np.outer(change, row)
        inverse[leaving] = row
        costs[leaving] = cost
    return best


def _read_pattern(kinds: _Kinds, chosen: Int64Array, column: Float64Array) -> None:
    """Count the kinds of the best pattern in `column`."""
    tiles, tokens = kinds.cap_tiles, kinds.cap_tokens
    while chosen[tiles, tokens] >= 0:
        kind = chosen[tiles, tokens]
        column[kind] += 1
        tiles, tokens = tiles - kinds.tiles[kind], tokens - kinds.tokens[kind]


@jit
def _best_pattern(
    tokens: Int64Array, tiles: Int64Array, prices: Int64Array, value: Int64Array, chosen: Int64Array
) -> int:
    """Fill the table of the unbounded knapsack in two dimensions; return its last entry."""
    value[:, :] = 0
    chosen[:, :] = -1
    for kind in range(len(tokens)):
        if prices[kind] <= 0:
            continue
        for tile in range(tiles[kind], value.shape[0]):
            for token in range(tokens[kind], value.shape[1]):
                worth = value[tile - tiles[kind], token - tokens[kind]] + prices[kind]
                if worth > value[tile, token]:
                    value[tile, token] = worth
                    chosen[tile, token] = kind
    return int(value[value.shape[0] - 1, value.shape[1] - 1])
