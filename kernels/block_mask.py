"""Triton: from intervals to the eight tensors of FlexAttention's BlockMask.

`twins.py` says what is computed. Since the bounds of the intervals never fall, the first and the
last query of a block say which blocks of keys its queries see, and all of them see; and a column
of blocks meets a range of rows, whose ends are found by halving. So a program reads some dozens of
numbers, and the time goes into writing the lists. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

__all__ = ["block_tensors"]

#: Entries of a list that are written at a time.
_MAX_ENTRIES = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _write_list(  # type: ignore[no-untyped-def]
    first,
    end,
    full_first,
    full_end,
    num_partial,
    partial,
    num_full,
    full,
    line,
    partial_width,
    full_width,
    block: tl.constexpr,
):
    """Write which blocks of [first, end) are not in [full_first, full_end), and which are."""
    full_count = tl.maximum(full_end - full_first, 0)
    # blocks before the full ones; all where none is full
    before = tl.where(full_count > 0, full_first - first, end - first)
    count = end - first - full_count
    # never more than there is room for, whatever the intervals are
    tl.store(num_partial + line, tl.minimum(tl.maximum(count, 0), partial_width).to(tl.int32))
    tl.store(num_full + line, tl.minimum(full_count, full_width).to(tl.int32))
    for begin in range(0, partial_width, block):
        entry = begin + tl.arange(0, block)
        value = first + entry + tl.where(entry < before, 0, full_count)
        value = tl.where(entry < count, value, 0)
        tl.store(partial + line * partial_width + entry, value.to(tl.int32),
                 mask=entry < partial_width)  # fmt: skip
    for begin in range(0, full_width, block):
        entry = begin + tl.arange(0, block)
        value = tl.where(entry < full_count, full_first + entry, 0)
        tl.store(full + line * full_width + entry, value.to(tl.int32), mask=entry < full_width)


@triton.jit(do_not_specialize=["num_tokens", "partial_width", "full_width"])  # type: ignore[untyped-decorator]
def rows_kernel(  # type: ignore[no-untyped-def]
    lo,
    hi,
    num_partial,
    partial,
    num_full,
    full,
    num_tokens,
    partial_width,
    full_width,
    q_block: tl.constexpr,
    kv_block: tl.constexpr,
    block: tl.constexpr,
):
    """Write the lists of one block of queries."""
    row = tl.program_id(0).to(tl.int64)
    begin = row * q_block
    last = tl.minimum(begin + q_block, num_tokens) - 1
    first_lo, last_lo = tl.load(lo + begin).to(tl.int64), tl.load(lo + last).to(tl.int64)
    first_hi, last_hi = tl.load(hi + begin).to(tl.int64), tl.load(hi + last).to(tl.int64)
    full_first = (last_lo + kv_block - 1) // kv_block
    # a block that reaches past the last token is not full
    full_end = tl.where(begin + q_block <= num_tokens, first_hi // kv_block, full_first)
    _write_list(
        first_lo // kv_block,
        (last_hi + kv_block - 1) // kv_block,
        full_first,
        full_end,
        num_partial, partial, num_full, full, row, partial_width, full_width, block,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _rows_below(values, num_rows, bound, num_tokens, num_steps, q_block, take_last: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the rows from the first on whose first (or last) query has a value below the bound."""
    low = num_rows * 0
    high = num_rows
    for _ in range(num_steps):
        middle = (low + high) // 2
        at = middle * q_block
        if take_last:
            at = tl.minimum(at + q_block, num_tokens) - 1
        is_open = low < high
        is_below = is_open & (tl.load(values + at, mask=is_open, other=0) < bound)
        high = tl.where(is_open & (is_below == 0), middle, high)
        low = tl.where(is_below, middle + 1, low)
    return low


@triton.jit(do_not_specialize=["num_tokens", "num_steps", "partial_width", "full_width"])  # type: ignore[untyped-decorator]
def columns_kernel(  # type: ignore[no-untyped-def]
    lo,
    hi,
    num_partial,
    partial,
    num_full,
    full,
    num_tokens,
    num_steps,
    partial_width,
    full_width,
    q_block: tl.constexpr,
    kv_block: tl.constexpr,
    block: tl.constexpr,
):
    """Write the lists of one block of keys.

    Rows meet it from the first one on whose last query sees the first key, until the first one
    whose first query begins after the last key. They are full from the first one on whose first
    query sees the last key, until the first one whose last query begins after the first key.
    """
    column = tl.program_id(0).to(tl.int64)
    key, next_key = column * kv_block, (column + 1) * kv_block
    # in 64 bits: rounding up must not pass 2^31
    rows = (column * 0 + num_tokens + q_block - 1) // q_block
    whole = (column * 0 + num_tokens) // q_block
    first = _rows_below(hi, rows, key + 1, num_tokens, num_steps, q_block, True)
    end = _rows_below(lo, rows, next_key, num_tokens, num_steps, q_block, False)
    full_first = _rows_below(hi, whole, next_key, num_tokens, num_steps, q_block, False)
    full_end = _rows_below(lo, whole, key + 1, num_tokens, num_steps, q_block, True)
    _write_list(
        first, end, full_first, full_end,
        num_partial, partial, num_full, full, column, partial_width, full_width, block,
    )  # fmt: skip


def block_tensors(
    lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int, widths: list[int]
) -> tuple[torch.Tensor, ...]:
    """Do the work of `omniload.kernels.ops.block_tensors`."""
    lo, hi = lo.contiguous(), hi.contiguous()
    num_tokens = len(lo)
    num_rows, num_columns = triton.cdiv(num_tokens, q_block), triton.cdiv(num_tokens, kv_block)
    found = []
    for lines, partial, full in ((num_rows, *widths[:2]), (num_columns, *widths[2:])):
        for width in (partial, full):
            for shape in ((1, 1, lines), (1, 1, lines, width)):
                found.append(torch.empty(shape, dtype=torch.int32, device=lo.device))
    block = min(max(triton.next_power_of_2(max(widths)), 16), _MAX_ENTRIES)
    sizes = {"q_block": q_block, "kv_block": kv_block, "block": block}
    rows_kernel[(num_rows,)](lo, hi, *found[:4], num_tokens, *widths[:2], **sizes)
    # one more than the bits of the number: a range of n has n + 1 ends
    steps = num_rows.bit_length()
    columns_kernel[(num_columns,)](lo, hi, *found[4:], num_tokens, steps, *widths[2:], **sizes)
    return tuple(found)
