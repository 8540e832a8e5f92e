"""ISF, iterative sampling and filtering: the grouping that OmniBal published."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload._jit import jit
from omniload.errors import ConfigError
from omniload.grouping.reorder import reordered
from omniload.types import Budget, Groups

__all__ = ["isf"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_LIMIT = 2**62
_FLOOR_BELOW_BUDGET = 128  # tokens; the published default of the token floor
_TAG_ROUND, _TAG_EMISSION = 1, 2  # keep the two uses of a key apart


def isf(
    num_tokens: Int32Array,
    num_tiles: Int32Array,
    *,
    budget: Budget,
    key: tuple[int, ...],
    rounds: int = 50,
    token_floor: int | None = None,
    tile_floor: int | None = None,
) -> Groups:
    """Group rows by iterative sampling and filtering.

    A round walks the remaining rows in random order and closes a group when the next row would pass
    a bound of the budget. Groups that are full enough stay: at least `token_floor` tokens, or at
    least `tile_floor` tiles, or as many samples as allowed. The rows of the others go to the next
    round. What is left after the last round is grouped without a floor.

    Args:
        num_tokens: int32 (n,), tokens per row, none above `budget.tokens`.
        num_tiles: int32 (n,), tiles per row, none above `budget.tiles`.
        budget: upper bounds of a group.
        key: integers that seed all randomness.
        rounds: rounds with a floor, T in the paper.
        token_floor: None: `budget.tokens - 128`.
        tile_floor: None: `budget.tiles`; without a tile budget, or with one of 0, tiles never make
            a group full.

    Returns:
        Groups of the rows 0 .. n-1, in random order.

    Raises:
        ConfigError: a negative number of rounds.

    Paper: OmniBal (ICML 2025), section 3. Differs from the published code:
        rows over the budget are refused or reported by `make_plan`, not dropped in silence;
        the group that is open at the end of a walk is kept;
        every round has a permutation of its own, the last grouping too;
        rounds end when nothing is left;
        groups are shuffled at the end. Those of later rounds hold what was hard to place: in
        filtering order, steps would be far from random samples, and ranks with contiguous parts
        would differ.
    Cost: O(rounds * rows left over) time, O(n) memory.
    """
    if rounds < 0:
        raise ConfigError(f"rounds must not be negative, got {rounds}.")
    tiles_cap = _NO_LIMIT if budget.tiles is None else budget.tiles
    samples_cap = _NO_LIMIT if budget.samples is None else budget.samples
    # copies: Numba compiles once more for read-only columns, such as those of a memory map
    num_tokens, num_tiles = np.array(num_tokens, np.int32), np.array(num_tiles, np.int32)
    if token_floor is None:
        token_floor = max(budget.tokens - _FLOOR_BELOW_BUDGET, 0)
    if tile_floor is None:
        tile_floor = tiles_cap or _NO_LIMIT

    total = len(num_tokens)
    left = np.arange(total, dtype=np.int64)
    rows = np.empty(total, np.int64)
    offsets = np.zeros(total + 1, np.int64)
    num_left, num_groups = total, 0
    for turn in range(rounds + 1):
        if num_left == 0:
            break
        if turn == rounds:
            token_floor = 0
        bits = (rng.random_u64(num_left, *key, _TAG_ROUND, turn) >> np.uint64(32)).astype(np.int64)
        num_left, num_groups = _round(
            left[:num_left],
            bits,
            num_tokens,
            num_tiles,
            (budget.tokens, tiles_cap, samples_cap),
            (token_floor, tile_floor),
            rows,
            offsets,
            num_groups,
        )
    kept = Groups(rows=rows, offsets=offsets[: num_groups + 1])
    return reordered(kept, rng.permutation(num_groups, *key, _TAG_EMISSION))


@jit
def _round(
    left: Int64Array,
    bits: Int64Array,
    num_tokens: Int32Array,
    num_tiles: Int32Array,
    caps: tuple[int, int, int],
    floors: tuple[int, int],
    rows: Int64Array,
    offsets: Int64Array,
    num_groups: int,
) -> tuple[int, int]:
    """Shuffle `left` and walk it once: full groups go to `rows`, all else to the front of `left`.

    `bits` holds a random integer below 2**32 for each row. Returns how many rows are left, and how
    many groups there are now.
    """
    tokens_cap, tiles_cap, samples_cap = caps
    token_floor, tile_floor = floors
    num_rows = len(left)
    for position in range(num_rows - 1, 0, -1):
        other = (bits[position] * (position + 1)) >> 32
        left[position], left[other] = left[other], left[position]

    num_left = 0
    num_kept = offsets[num_groups]
    start, tokens, tiles = 0, 0, 0
    for position in range(num_rows + 1):
        more_tokens, more_tiles = 0, 0
        if position < num_rows:
            # int(): in plain Python the sum of two NumPy int32 would wrap around
            more_tokens = int(num_tokens[left[position]])
            more_tiles = int(num_tiles[left[position]])
            if (
                tokens + more_tokens <= tokens_cap
                and tiles + more_tiles <= tiles_cap
                and position - start < samples_cap
            ):
                tokens += more_tokens
                tiles += more_tiles
                continue
        if tokens >= token_floor or tiles >= tile_floor or position - start == samples_cap:
            for place in range(start, position):
                rows[num_kept] = left[place]
                num_kept += 1
            num_groups += 1
            offsets[num_groups] = num_kept
        else:
            for place in range(start, position):
                left[num_left] = left[place]
                num_left += 1
        start, tokens, tiles = position, more_tokens, more_tiles
    return num_left, num_groups
