"""Windows over several sets of rows: each has the same share of every set."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload.plan.windows import cut_blocks, list_rows

__all__ = ["DealtWindows"]

Int64Array = npt.NDArray[np.int64]

_TAG_BLOCKS = 3  # keeps this use of (seed, epoch) apart from others


class DealtWindows:
    """The windows of an epoch over several sets: a pure function of its arguments.

    The rows of each set are put in order, its blocks shuffled, and cut into as many parts as there
    are windows; a window has one part of each set. Of the rows of a set that aren't left out, every
    window has its even share, rounded down or up.

    Args:
        num_rows: rows of the index.
        window_rows: rows that are planned together, at least 1.
        sets: int64 (num_sets + 1,), first row of each set, then `num_rows`.
        starts: int64 (num_shards + 1,), first row of each shard, then `num_rows`; None: not known.
            See `omniload.plan.windows.cut_blocks`.
        key: seed and epoch; None: no block is moved, and the rows of a window are interleaved, set
            by set at even distances, for rows that are grouped in order.
        left_out: int64 (n,), rising, rows that no window has.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        window_rows: int,
        sets: Int64Array,
        starts: Int64Array | None,
        key: tuple[int, int] | None,
        left_out: Int64Array,
    ) -> None:
        self.count = -(-num_rows // window_rows)
        self._left_out = left_out
        self._is_shuffled = key is not None
        self._sets = [
            self._blocks(number, int(first), int(end), starts, key)
            for number, (first, end) in enumerate(itertools.pairwise(sets))
            if first < end
        ]

    def _blocks(
        self,
        number: int,
        first: int,
        end: int,
        starts: Int64Array | None,
        key: tuple[int, int] | None,
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Give first and last row of each block of a set, in order, and the rows kept before it."""
        share = -(-(end - first) // self.count)
        inside = None
        if starts is not None:
            inside = np.concatenate([[0], np.clip(starts, first, end) - first])
        bounds = cut_blocks(end - first, share, inside) + first
        kept = np.diff(bounds) - np.diff(np.searchsorted(self._left_out, bounds))
        blocks = np.arange(len(kept), dtype=np.int64)
        if key is not None:
            blocks = rng.permutation(len(kept), *key, _TAG_BLOCKS, number)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept[blocks])])
        return bounds[blocks], bounds[blocks + 1], before

    def rows(self, window: int) -> Int64Array:
        """List the rows of the window that comes at this position: int64 (n,).

        Rising where blocks are shuffled.
        """
        parts, places = [np.zeros(0, np.int64)], [np.zeros(0)]
        for firsts, ends, before in self._sets:
            total = int(before[-1])
            begin, end = (number * total // self.count for number in (window, window + 1))
            if begin == end:
                continue
            low = int(np.searchsorted(before, begin, side="right")) - 1
            high = int(np.searchsorted(before, end, side="left"))
            rows = list_rows(firsts[low:high], ends[low:high], self._left_out)
            skip = begin - int(before[low])
            rows = rows[skip : skip + end - begin]
            parts.append(np.sort(rows) if self._is_shuffled else rows)
            places.append((np.arange(begin, end) + 0.5) / total)
        found: Int64Array = np.concatenate(parts)
        if self._is_shuffled:
            return found
        return found[np.argsort(np.concatenate(places), kind="stable")]
