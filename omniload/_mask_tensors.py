"""From intervals to FlexAttention's BlockMask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from omniload._mask_checks import check_blocks
from omniload.errors import ConfigError
from omniload.kernels import ops

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

__all__ = ["assemble", "block_mask_of", "compact_widths"]

MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_mask_of(
    lo: torch.Tensor,
    hi: torch.Tensor,
    block_size: int | tuple[int, int],
    *,
    compact: bool,
    reach: int | None,
) -> BlockMask:
    """Make the mask from checked intervals.

    Args:
        lo: int32 (num_tokens,).
        hi: int32 (num_tokens,).
        block_size: see `omniload.masks.block_mask`.
        compact: see `omniload.masks.block_mask`.
        reach: no query sees a key, and no key is seen from a query, this many tokens away. None:
            unknown.
    """
    # here, since most of a program never needs it
    from torch.nn.attention.flex_attention import BlockMask

    num_tokens = lo.shape[0]
    q_block, kv_block = check_blocks(block_size, num_tokens)
    columns, rows = -(-num_tokens // kv_block), -(-num_tokens // q_block)
    if compact and reach is None:
        tensors = _narrowest(lo, hi, q_block, kv_block)
    else:
        in_row, in_column = columns, rows
        if compact and reach is not None:
            in_row, in_column = compact_widths(q_block, kv_block, reach, num_tokens)
        widths = [in_row, in_row, in_column, in_column]
        tensors = ops.block_tensors(lo, hi, q_block, kv_block, widths)
    return assemble(BlockMask, lo, hi, tensors, (q_block, kv_block))


def assemble(
    block_mask: type[BlockMask],
    lo: torch.Tensor,
    hi: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    block_size: tuple[int, int],
) -> BlockMask:
    """Put the mask together.

    Args:
        block_mask: the class; importing it takes as long as all that is done here.
        lo: int32 (num_tokens,).
        hi: int32 (num_tokens,).
        tensors: the eight, see `omniload.kernels.ops.block_tensors`.
        block_size: tokens of a block of queries, and of one of keys.
    """
    num_tokens = lo.shape[0]
    kv_num, kv, full_kv_num, full_kv, q_num, q, full_q_num, full_q = tensors
    return block_mask(
        seq_lengths=(num_tokens, num_tokens),
        kv_num_blocks=kv_num,
        kv_indices=kv,
        full_kv_num_blocks=full_kv_num,
        full_kv_indices=full_kv,
        q_num_blocks=q_num,
        q_indices=q,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q,
        BLOCK_SIZE=block_size,
        mask_mod=_mask_mod(lo, hi),
    )


def compact_widths(q_block: int, kv_block: int, reach: int, num_tokens: int) -> tuple[int, int]:
    """Bound the blocks in a list of a row, and in one of a column; see `block_mask_of`."""
    columns, rows = -(-num_tokens // kv_block), -(-num_tokens // q_block)
    in_row = min(_blocks_in_reach(q_block, kv_block, reach), columns)
    in_column = min(_blocks_in_reach(kv_block, q_block, reach), rows)
    return in_row, in_column


def _blocks_in_reach(size: int, other: int, reach: int) -> int:
    """Bound how many blocks of `other` tokens a block of `size` tokens meets."""
    tokens = size + 2 * (reach - 1)
    return (tokens - 2) // other + 2 if tokens > 1 else 1


def _narrowest(
    lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int
) -> tuple[torch.Tensor, ...]:
    if lo.device.type != "cpu":
        raise ConfigError(
            "compact on a device needs max_seqlen, the tokens of the longest document: without it "
            "the device would have to be waited for."
        )
    # not the operator: under torch.compile the size of a result must follow from sizes
    from omniload.kernels import twins

    return twins.block_tensors(lo, hi, q_block, kv_block, None)


def _mask_mod(lo: torch.Tensor, hi: torch.Tensor) -> MaskMod:
    def in_interval(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        # bounds looked up by the query alone: torch packs such masks on Blackwell, and not
        # document[query] == document[key]
        return (key >= lo[query]) & (key < hi[query])

    return in_interval
