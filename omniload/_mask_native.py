"""From offsets on a CPU to FlexAttention's BlockMask in one call of the C++ extension.

A row of 8,192 tokens has a mask of some microseconds; calling operators for it one by one takes
several times as long. What isn't plain goes the way of the operators, and so does what is wrong:
there it is found again and named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from omniload import _native
from omniload._checks import MAX_INT32
from omniload._mask_tensors import assemble, compact_widths

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["fused_block_mask"]

_INT32 = np.dtype(np.int32)
_KINDS = {"causal": 0, "full": 1, "prefix": 2}
#: Numbers in all lists. Longer ones are mostly zeros, which the system gives for nothing to NumPy.
_MAX_VALUES = 2**23


def fused_block_mask(
    cu_seqlens: torch.Tensor,
    kind: str,
    block_size: int | tuple[int, int],
    *,
    image_spans: torch.Tensor | None,
    window: int | None,
    num_tokens: int | None,
    compact: bool,
    reach: int | None,
) -> BlockMask | None:
    """Make the mask, if all is plain and right and the extension is there.

    Args:
        cu_seqlens: int32 (n + 1,), unchecked, as everything else.
        kind: see `omniload.masks.block_mask`.
        block_size: see `omniload.masks.block_mask`.
        image_spans: see `omniload.masks.block_mask`.
        window: see `omniload.masks.block_mask`.
        num_tokens: see `omniload.masks.block_mask`.
        compact: see `omniload.masks.block_mask`.
        reach: see `omniload._mask_tensors.block_mask_of`.

    Returns:
        The mask, or None: the operators make it, or say what is wrong.
    """
    if torch.compiler.is_compiling() or not _is_plain(cu_seqlens, 1):
        return None
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    if len(sizes) != 2 or type(sizes[0]) is not int or type(sizes[1]) is not int:
        return None
    q_block, kv_block = sizes
    length = 0 if window is None else window
    if q_block < 1 or kv_block < 1 or type(length) is not int or (length == 0) != (window is None):
        return None
    if image_spans is not None and not (_is_plain(image_spans, 2) and image_spans.shape[1] == 2):
        return None
    if reach is not None and (type(reach) is not int or not 1 <= reach <= MAX_INT32):
        return None
    door = _door()
    if door is None:
        return None
    make, block_mask = door
    offsets = cu_seqlens.numpy()
    if num_tokens is None:
        num_tokens = int(offsets[-1]) if len(offsets) else 0
    elif type(num_tokens) is not int:
        return None
    rows, columns = -(-num_tokens // q_block), -(-num_tokens // kv_block)
    in_row, in_column = columns, rows
    if compact:
        in_row = in_column = 0
        if reach is not None:
            in_row, in_column = compact_widths(q_block, kv_block, reach, num_tokens)
    if rows * in_row + columns * in_column > _MAX_VALUES // 2:
        return None
    try:
        bounds, lists, *widths = make(
            offsets,
            None if image_spans is None else image_spans.numpy(),
            _KINDS.get(kind, -1), length, num_tokens, q_block, kv_block, in_row, in_column,
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, MemoryError):
        return None
    both = np.frombuffer(bounds, _INT32)
    lo, hi = torch.from_numpy(both[:num_tokens]), torch.from_numpy(both[num_tokens:])
    tensors = _cut(lists, rows, columns, widths)
    return assemble(block_mask, lo, hi, tensors, (q_block, kv_block))


@functools.cache  # looking both up anew would take as long as finding the blocks
def _door() -> tuple[Callable[..., Any], type[BlockMask]] | None:
    # here, since most of a program never needs it
    from torch.nn.attention.flex_attention import BlockMask

    native = _native.choose("auto")
    return None if native is None else (native.block_mask, BlockMask)


def _is_plain(tensor: torch.Tensor, ndim: int) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.dtype == torch.int32
        and tensor.ndim == ndim
        and tensor.is_contiguous()
    )


def _cut(memory: bytearray, rows: int, columns: int, widths: list[int]) -> list[torch.Tensor]:
    """Cut memory into counts and lists, four times; views of torch would take twice as long."""
    found, at = [], 0
    for lines, width in zip((rows, rows, columns, columns), widths, strict=True):
        found.append(torch.from_numpy(np.ndarray((1, 1, lines), _INT32, memory, at)))
        at += 4 * lines
        found.append(torch.from_numpy(np.ndarray((1, 1, lines, width), _INT32, memory, at)))
        at += 4 * lines * width
    return found
