"""Which tokens of a packed row may look at which: intervals, and what attention kernels want.

A row is documents end to end. Each query sees one interval of keys, [lo, hi), that holds the query
itself. Everything else follows from the intervals: the block lists of FlexAttention, the rows of
FlashMask, a dense mask. They are computed where `cu_seqlens` lies.

On a CPU all values are checked. On a GPU nothing waits for the device if `num_tokens` is given,
and then the offsets are believed: those that `omniload.packing` made are right. Best give the
offsets on a CPU and `device=`: they are checked, and only they travel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from omniload._checks import check_device, check_flag, check_optional_count
from omniload._mask_checks import (
    check_blocks,
    check_intervals,
    check_kind,
    check_longest,
    check_offsets,
    check_values,
    check_window,
)
from omniload._mask_native import fused_block_mask
from omniload._mask_tensors import block_mask_of
from omniload.kernels import ops

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = [
    "block_mask",
    "block_mask_from_intervals",
    "dense",
    "flashmask_rows",
    "intervals",
    "position_ids",
    "segment_ids",
]


def segment_ids(
    cu_seqlens: torch.Tensor, *, num_tokens: int | None = None, num_documents: int | None = None
) -> torch.Tensor:
    """Say for each token in which document it lies.

    Args:
        cu_seqlens: int32 (n + 1,), where the documents begin; the last is the number of tokens.
        num_tokens: see `intervals`.
        num_documents: documents after the first so many are padding, at most all. None: none is.

    Returns:
        int32 (num_tokens,), from 1; 0 is padding.

    Raises:
        ConfigError: offsets that are none, or more documents than there are.
    """
    num_tokens = check_offsets(cu_seqlens, num_tokens)
    most = cu_seqlens.shape[0] - 1
    given = check_optional_count("num_documents", num_documents, most=most, of="documents")
    return ops.token_ids(cu_seqlens, num_tokens, most if given is None else given)[0]


def position_ids(cu_seqlens: torch.Tensor, *, num_tokens: int | None = None) -> torch.Tensor:
    """Count the tokens of each document from 0.

    Args:
        cu_seqlens: int32 (n + 1,).
        num_tokens: see `intervals`.

    Returns:
        int64 (num_tokens,).

    Raises:
        ConfigError: offsets that are none.
    """
    num_tokens = check_offsets(cu_seqlens, num_tokens)
    return ops.token_ids(cu_seqlens, num_tokens, 0)[1]


def intervals(
    cu_seqlens: torch.Tensor,
    kind: str = "causal",
    *,
    image_spans: torch.Tensor | None = None,
    window: int | None = None,
    num_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say for each token which tokens it sees: those from lo to before hi.

    ==========  =====================================================================
    kind        a token sees, inside its document
    ==========  =====================================================================
    "causal"    itself and what comes before
    "full"      everything
    "prefix"    as "causal"; and a token of an image sees the whole image
    ==========  =====================================================================

    A window of w leaves those less than w tokens away: w with the token itself in "causal",
    2 * w - 1 in "full", as `sliding_window` of Hugging Face models counts. An image stays whole:
    in "prefix" its tokens see all of it, however long, and nothing before it that is w or more
    away.

    Neither lo nor hi ever falls from a token to the next.

    Args:
        cu_seqlens: int32 (n + 1,), where the documents begin; the last is the number of tokens.
        kind: "causal", "full" or "prefix".
        image_spans: for "prefix": int32 (m, 2), [start, end) of each image in the row, in the
            order of the tokens, without overlap, inside one document each.
        window: tokens of a sliding window, at least 1. None: no window.
        num_tokens: the last offset, if it is known: on a device it need not be waited for then.
            Inside of torch.compile(fullgraph=True) it must be given, since the size of the result
            follows from it.

    Returns:
        lo and hi, int32 (num_tokens,) each, on the device of the offsets.

    Raises:
        ConfigError: an unknown kind, or arguments that contradict each other; on a CPU also
            offsets or spans with wrong values.

    Cost: O(num_tokens).
    """
    num_tokens = check_offsets(cu_seqlens, num_tokens)
    check_kind(kind, cu_seqlens, image_spans, window)
    return ops.intervals(cu_seqlens, image_spans, num_tokens, kind, check_window(window))


def dense(
    cu_seqlens: torch.Tensor,
    kind: str = "causal",
    *,
    image_spans: torch.Tensor | None = None,
    window: int | None = None,
    num_tokens: int | None = None,
) -> torch.Tensor:
    """Make the mask as a matrix, for `scaled_dot_product_attention` and for tests.

    Args:
        cu_seqlens: int32 (n + 1,).
        kind: see `intervals`.
        image_spans: see `intervals`.
        window: see `intervals`.
        num_tokens: see `intervals`.

    Returns:
        bool (num_tokens, num_tokens), True where the query (row) sees the key (column).

    Raises:
        ConfigError: see `intervals`.

    Cost: one byte for each pair of tokens: 1 GiB at 32,768 tokens.
    """
    lo, hi = intervals(
        cu_seqlens, kind, image_spans=image_spans, window=window, num_tokens=num_tokens
    )
    keys = torch.arange(len(lo), dtype=torch.int32, device=lo.device)
    return (keys >= lo[:, None]) & (keys < hi[:, None])


def flashmask_rows(
    cu_seqlens: torch.Tensor,
    kind: str = "causal",
    *,
    image_spans: torch.Tensor | None = None,
    window: int | None = None,
    num_tokens: int | None = None,
) -> tuple[torch.Tensor, bool]:
    """Make `startend_row_indices` of FlashMask: for each key, which queries don't see it.

    Args:
        cu_seqlens: int32 (n + 1,).
        kind: see `intervals`.
        image_spans: see `intervals`.
        window: see `intervals`.
        num_tokens: see `intervals`.

    Returns:
        The rows, and FlashMask's `causal`. For "causal" int32 (1, 1, num_tokens, 1) and True: the
        query from which on the key is hidden. Else int32 (1, 1, num_tokens, 2) and False: that,
        and the first query that sees the key.

    Raises:
        ConfigError: see `intervals`.
    """
    lo, hi = intervals(
        cu_seqlens, kind, image_spans=image_spans, window=window, num_tokens=num_tokens
    )
    keys = torch.arange(len(lo), dtype=torch.int32, device=lo.device)
    # lo and hi never fall: queries with lo <= key are the first ones, those with hi > key the last
    columns = [torch.searchsorted(lo, keys, right=True, out_int32=True)]
    if kind != "causal":
        columns.append(torch.searchsorted(hi, keys, right=True, out_int32=True))
    return torch.stack(columns, dim=-1)[None, None], kind == "causal"


def block_mask(
    cu_seqlens: torch.Tensor,
    kind: str = "causal",
    block_size: int | tuple[int, int] = 128,
    *,
    device: torch.device | str | None = None,
    image_spans: torch.Tensor | None = None,
    window: int | None = None,
    num_tokens: int | None = None,
    compact: bool = False,
    max_seqlen: int | None = None,
) -> BlockMask:
    """Make the mask of FlexAttention, equal to what `create_block_mask` finds, without its search.

    All eight tensors are there, so that nothing is computed from a dense matrix later. The rest of
    each index list is 0. `mask_mod` compares the key with the bounds of the query.

    Args:
        cu_seqlens: int32 (n + 1,).
        kind: see `intervals`.
        block_size: tokens of a block, or those of the queries and those of the keys.
        device: where the mask is needed; `cu_seqlens` and `image_spans` go there first. None:
            where they are.
        image_spans: see `intervals`.
        window: see `intervals`.
        num_tokens: see `intervals`.
        compact: make the index lists as wide as the longest needs, instead of as wide as the row
            has blocks: memory grows with the tokens, not with their square. CUDA kernels only read
            the lists; torch 2.13's CPU kernels and `to_dense` refuse them.
        max_seqlen: tokens of the longest document; needed for compact on a device.

    Returns:
        A BlockMask for batch size 1 and any number of heads.

    Raises:
        ConfigError: see `intervals`; a block size below 1, no token, compact without max_seqlen.

    Cost: O(num_tokens), and the size of the index lists.
    """
    check_flag("compact", compact)
    target = None if device is None else check_device(device, ("cpu", "cuda"))
    if target is None or target.type == "cpu":
        found = fused_block_mask(
            cu_seqlens,
            kind,
            block_size,
            image_spans=image_spans,
            window=window,
            num_tokens=num_tokens,
            compact=compact,
            reach=max_seqlen,
        )
        if found is not None:
            return found
    num_tokens = check_offsets(cu_seqlens, num_tokens)
    check_kind(kind, cu_seqlens, image_spans, window)
    check_blocks(block_size, num_tokens)
    max_seqlen = check_longest(max_seqlen, cu_seqlens, num_tokens)
    if target is not None and target != cu_seqlens.device:
        if cu_seqlens.device.type == "cpu":
            check_values(cu_seqlens, image_spans, num_tokens)
            if max_seqlen is None and compact:
                max_seqlen = int(cu_seqlens.diff().max())
        cu_seqlens = cu_seqlens.to(target, non_blocking=True)
        image_spans = None if image_spans is None else image_spans.to(target, non_blocking=True)
    lo, hi = ops.intervals(cu_seqlens, image_spans, num_tokens, kind, check_window(window))
    return block_mask_of(lo, hi, block_size, compact=compact, reach=max_seqlen)


def block_mask_from_intervals(
    lo: torch.Tensor,
    hi: torch.Tensor,
    block_size: int | tuple[int, int] = 128,
    *,
    compact: bool = False,
    max_seqlen: int | None = None,
) -> BlockMask:
    """Make the mask of FlexAttention from intervals of your own.

    Args:
        lo: int32 (num_tokens,), first key of each query; must not fall.
        hi: int32 (num_tokens,), after the last one; must not fall.
        block_size: see `block_mask`.
        compact: see `block_mask`.
        max_seqlen: tokens of the longest document; needed for compact on a device.

    Returns:
        A BlockMask, see `block_mask`.

    Raises:
        ConfigError: wrong dtypes or shapes; on a CPU also intervals that fall or that leave the
            query out.
    """
    check_intervals(lo, hi)
    check_flag("compact", compact)
    max_seqlen = check_optional_count("max_seqlen", max_seqlen, least=1, of="token")
    return block_mask_of(lo, hi, block_size, compact=compact, reach=max_seqlen)
