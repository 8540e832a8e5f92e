"""Numba twins of the Triton kernels: what runs on CPU tensors, and what checks the values.

Every function writes to arrays that it is given. The checks are here because on a device a check
of values would have to wait for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = [
    "CAUSAL",
    "FULL",
    "PREFIX",
    "block_bounds",
    "find_interval_fault",
    "find_offset_fault",
    "find_span_fault",
    "write_image_spans",
    "write_intervals",
    "write_lists",
    "write_token_ids",
]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

#: Kinds of mask, as Numba compares them.
CAUSAL, FULL, PREFIX = 0, 1, 2


@jit
def find_offset_fault(cu: Int32Array, num_tokens: int) -> int:
    """Return the first offset that is wrong: 0, one that falls, or the last; -1 if none is."""
    if cu[0] != 0:
        return 0
    last = len(cu) - 1
    for i in range(last):
        if cu[i + 1] < cu[i]:
            return i + 1
    return last if cu[last] != num_tokens else -1


@jit
def find_span_fault(spans: Int32Array, cu: Int32Array) -> int:
    """Return the first span that overlaps the one before or lies in no one document, or -1."""
    document, before = 0, 0
    for i in range(len(spans)):
        start, end = spans[i, 0], spans[i, 1]
        if start < before or end < start:
            return i
        while document < len(cu) - 1 and cu[document + 1] <= start:
            document += 1
        if start < end and (document == len(cu) - 1 or end > cu[document + 1]):
            return i
        before = end
    return -1


@jit
def find_interval_fault(lo: Int32Array, hi: Int32Array) -> int:
    """Return the first query whose keys leave it or the row out, or begin or end too early."""
    lo_before, hi_before = 0, 0
    for q in range(len(lo)):
        if lo[q] < lo_before or hi[q] < hi_before or lo[q] > q or hi[q] <= q or hi[q] > len(lo):
            return q
        lo_before, hi_before = lo[q], hi[q]
    return -1


@jit
def write_token_ids(
    cu: Int32Array, num_documents: int, segments: Int32Array, positions: Int64Array
) -> None:
    """Number documents from 1, tokens of each from 0; documents past num_documents are 0."""
    for d in range(len(cu) - 1):
        start, end = cu[d], cu[d + 1]
        segments[start:end] = d + 1 if d < num_documents else 0
        # a loop over a slice from 0 compiles to vector stores; one from start to end doesn't
        out = positions[start:end]
        for i in range(len(out)):
            out[i] = i


@jit
def write_intervals(cu: Int32Array, kind: int, window: int, lo: Int32Array, hi: Int32Array) -> None:
    """Write which keys [lo, hi) each query sees; window 0 is none; image spans come after."""
    for d in range(len(cu) - 1):
        start, end = cu[d], cu[d + 1]
        starts, ends = lo[start:end], hi[start:end]
        starts[:] = start
        if kind == FULL:
            ends[:] = end
        else:
            for i in range(len(ends)):
                ends[i] = start + 1 + i
        if window:
            # the first `window` tokens see all that is before them, the last all that is after
            for i in range(window, len(starts)):
                starts[i] = start + 1 + i - window
            if kind == FULL:
                for i in range(len(ends) - window):
                    ends[i] = start + i + window


@jit
def write_image_spans(spans: Int32Array, lo: Int32Array, hi: Int32Array) -> None:
    """Let the tokens of an image see all of it."""
    for i in range(len(spans)):
        start, end = spans[i, 0], spans[i, 1]
        for t in range(start, end):
            lo[t] = min(lo[t], start)
            hi[t] = end


@jit
def block_bounds(
    lo: Int32Array,
    hi: Int32Array,
    q_block: int,
    kv_block: int,
    rows: Int32Array,
    columns: Int32Array,
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Find, for each row and column of blocks, the range that is not empty and the full one.

    `lo` and `hi` never fall, so the first and the last query of a block say it all; and a column
    meets a range of rows, whose ends move on from column to column.

    Args:
        lo: int32 (num_tokens,), first key of each query.
        hi: int32 (num_tokens,), after the last one.
        q_block: queries of a block.
        kv_block: keys of a block.
        rows: int32 (num_q_blocks, 4), written: [first, end) not empty, [first, end) full.
        columns: int32 (num_kv_blocks, 4), the same for columns.

    Returns:
        The longest list of partial and of full blocks in a row, then in a column.
    """
    num_tokens = len(lo)
    num_rows, num_columns = len(rows), len(columns)
    for i in range(num_rows):
        first, last = i * q_block, min((i + 1) * q_block, num_tokens) - 1
        rows[i, 0] = lo[first] // kv_block
        rows[i, 1] = (hi[last] + kv_block - 1) // kv_block
        rows[i, 2] = (lo[last] + kv_block - 1) // kv_block
        # a block that reaches past the last token is not full
        whole = (i + 1) * q_block <= num_tokens
        rows[i, 3] = max(hi[first] // kv_block, rows[i, 2]) if whole else rows[i, 2]
    whole_rows = num_tokens // q_block
    first = end = full_first = full_end = 0
    for j in range(num_columns):
        key, next_key = j * kv_block, (j + 1) * kv_block
        while first < num_rows and hi[min((first + 1) * q_block, num_tokens) - 1] <= key:
            first += 1
        while end < num_rows and lo[end * q_block] < next_key:
            end += 1
        while full_first < whole_rows and hi[full_first * q_block] < next_key:
            full_first += 1
        while full_end < whole_rows and lo[(full_end + 1) * q_block - 1] <= key:
            full_end += 1
        columns[j, 0], columns[j, 1] = first, end
        columns[j, 2] = full_first
        columns[j, 3] = max(full_end, full_first)
    return _longest(rows), _longest(columns)


@jit
def _longest(bounds: Int32Array) -> tuple[int, int]:
    partial, full = 0, 0
    for i in range(len(bounds)):
        num_full = bounds[i, 3] - bounds[i, 2]
        full = max(full, num_full)
        partial = max(partial, bounds[i, 1] - bounds[i, 0] - num_full)
    return partial, full


@jit
def write_lists(
    bounds: Int32Array,
    num_partial: Int32Array,
    partial: Int32Array,
    num_full: Int32Array,
    full: Int32Array,
) -> None:
    """Write the lists of partial and of full blocks; what comes after a list is left alone.

    Args:
        bounds: int32 (n, 4), see `block_bounds`.
        num_partial: int32 (n,).
        partial: int32 (n, width).
        num_full: int32 (n,).
        full: int32 (n, width).
    """
    for i in range(len(bounds)):
        first, end, full_first, full_end = bounds[i]
        count = 0
        # a row without full blocks has an empty full range, which may lie outside the other
        split = min(max(full_first, first), end) if full_end > full_first else end
        for j in range(first, split):
            partial[i, count] = j
            count += 1
        if full_end > full_first:
            for j in range(full_end, end):
                partial[i, count] = j
                count += 1
        num_partial[i] = count
        for j in range(full_first, full_end):
            full[i, j - full_first] = j
        num_full[i] = full_end - full_first
