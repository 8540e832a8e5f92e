"""Windows of rows: which rows are planned together, and in which order windows come."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload import rng

__all__ = ["Windows", "cut_blocks", "list_rows"]

Int64Array = npt.NDArray[np.int64]

#: Rows of a block where nothing says how rows lie on disk.
_BLOCK_ROWS = 2048
#: A window has at least so many blocks where shards say how rows lie, so that data which was
#: written set after set is mixed.
_LEAST_BLOCKS = 4
_TAG_BLOCKS = 1  # keeps this use of (seed, epoch) apart from others


def cut_blocks(num_rows: int, window_rows: int, starts: npt.ArrayLike | None) -> Int64Array:
    """Cut all rows into blocks, runs of rows that a window takes or leaves as a whole.

    Args:
        num_rows: rows of the index.
        window_rows: rows that are planned together.
        starts: integers (num_shards + 1,), first row of each shard, then `num_rows`: blocks are
            shards, or even parts of those that are large against a window, so that a window reads
            from few shards. None: blocks of one size.

    Returns:
        int64 (num_blocks + 1,), rising, first 0, last `num_rows`.
    """
    num_windows = -(-num_rows // window_rows)
    if num_windows <= 1:
        return np.array([0, num_rows], np.int64)
    if starts is None:
        parts = num_windows * max(1, window_rows // _BLOCK_ROWS)
        return np.arange(parts + 1, dtype=np.int64) * num_rows // parts
    shards = np.unique(np.asarray(starts, np.int64))
    sizes = np.diff(shards)
    parts_of = -(-sizes // max(1, window_rows // _LEAST_BLOCKS))
    shard = np.repeat(np.arange(len(sizes)), parts_of)
    first = np.cumsum(parts_of) - parts_of
    part = np.arange(len(shard)) - first[shard]
    bounds = shards[shard] + part * sizes[shard] // parts_of[shard]
    return np.concatenate([bounds, [num_rows]]).astype(np.int64)


def list_rows(firsts: Int64Array, ends: Int64Array, left_out: Int64Array) -> Int64Array:
    """List the rows of runs, one run after the other.

    Args:
        firsts: int64 (n,), first row of each run.
        ends: int64 (n,), the row after its last.
        left_out: int64 (m,), rising, rows that are not listed.
    """
    sizes = ends - firsts
    shifts = np.repeat(firsts - (np.cumsum(sizes) - sizes), sizes)
    rows: Int64Array = np.arange(len(shifts), dtype=np.int64) + shifts
    if len(left_out) == 0:
        return rows
    place = np.searchsorted(left_out, rows)
    place[place == len(left_out)] = 0
    kept: Int64Array = rows[left_out[place] != rows]
    return kept


class Windows:
    """The windows of an epoch: a pure function of its arguments, whatever is planned in them.

    Blocks are shuffled, and each window takes the next ones of about `window_rows` rows, so that
    every window is a sample of the whole data and still reads from few places.

    Args:
        num_rows: rows of the index.
        window_rows: rows that are planned together, at least 1.
        starts: first row of each shard, then `num_rows`; None: not known. See `cut_blocks`.
        key: seed and epoch; None: blocks in the order of rows.
        left_out: int64 (n,), rising, rows that no window has.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        window_rows: int,
        starts: npt.ArrayLike | None,
        key: tuple[int, int] | None,
        left_out: Int64Array,
    ) -> None:
        self._bounds = cut_blocks(num_rows, window_rows, starts)
        self._left_out = left_out
        self.count = -(-num_rows // window_rows)
        num_blocks = len(self._bounds) - 1
        self._blocks = np.arange(num_blocks, dtype=np.int64)
        if key is not None:
            self._blocks = rng.permutation(num_blocks, *key, _TAG_BLOCKS)
        sizes = np.diff(self._bounds)[self._blocks]
        # a block belongs to the window that its middle row falls into; blocks are smaller than
        # windows, so that no window stays empty
        middles = np.cumsum(sizes) - sizes + sizes // 2
        numbers = middles * self.count // max(num_rows, 1)
        self._edges = np.searchsorted(numbers, np.arange(self.count + 1))

    def rows(self, window: int) -> Int64Array:
        """List the rows of the window that comes at this position: int64 (n,), rising."""
        blocks = np.sort(self._blocks[self._edges[window] : self._edges[window + 1]])
        return list_rows(self._bounds[blocks], self._bounds[blocks + 1], self._left_out)
