"""The operators on CPU tensors: checks of all values, then the Numba loops of `cpu.py`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from omniload.errors import ConfigError
from omniload.kernels import cpu

__all__ = [
    "block_tensors",
    "block_widths",
    "check_intervals",
    "check_offsets",
    "check_spans",
    "intervals",
    "pad",
    "token_ids",
    "unpad",
]

Pair = tuple[torch.Tensor, torch.Tensor]
_KINDS = {"causal": cpu.CAUSAL, "full": cpu.FULL, "prefix": cpu.PREFIX}


def check_offsets(cu_seqlens: torch.Tensor, num_tokens: int) -> None:
    """Check that contiguous offsets start at 0, don't fall and end at the number of tokens.

    Raises:
        ConfigError: they don't.
    """
    offsets = cu_seqlens.numpy()
    fault = cpu.find_offset_fault(offsets, num_tokens)
    if fault == 0:
        raise ConfigError(f"cu_seqlens must start at 0, got {offsets[0]}.")
    if fault > 0:
        before, got = offsets[fault - 1], offsets[fault]
        if got < before:
            raise ConfigError(
                f"cu_seqlens must not fall: got {before}, then {got} (at {fault}). Offsets past "
                "2147483647 don't fit into int32."
            )
        raise ConfigError(
            f"the last of cu_seqlens must be the number of tokens: expected {num_tokens}, got "
            f"{got}."
        )


def check_spans(image_spans: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Check contiguous spans against offsets that are right.

    Raises:
        ConfigError: a span that is out of order or in no one document.
    """
    spans = image_spans.numpy()
    fault = cpu.find_span_fault(spans, cu_seqlens.numpy())
    if fault >= 0:
        raise ConfigError(
            "image_spans must lie inside one document each, in the order of the tokens, without "
            f"overlap: got {spans[fault].tolist()} (image {fault}), after "
            f"{spans[fault - 1].tolist() if fault else None}."
        )


def check_intervals(lo: torch.Tensor, hi: torch.Tensor) -> None:
    """Check intervals on a CPU: each holds its query, lies in the row, and they never fall.

    Raises:
        ConfigError: a query for which that is not so.
    """
    fault = cpu.find_interval_fault(lo.numpy(), hi.numpy())
    if fault >= 0:
        raise ConfigError(
            f"the keys [lo, hi) of a query must hold the query, lie in the {len(lo)} tokens, and "
            "neither begin nor end before those of the query before: got "
            f"[{int(lo[fault])}, {int(hi[fault])}) for query {fault}."
        )


def token_ids(cu_seqlens: torch.Tensor, num_tokens: int, num_documents: int) -> Pair:
    """Do the work of `omniload.kernels.ops.token_ids`."""
    cu_seqlens = cu_seqlens.contiguous()
    check_offsets(cu_seqlens, num_tokens)
    segments = torch.empty(num_tokens, dtype=torch.int32)
    positions = torch.empty(num_tokens, dtype=torch.int64)
    cpu.write_token_ids(cu_seqlens.numpy(), num_documents, segments.numpy(), positions.numpy())
    return segments, positions


def intervals(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor | None,
    num_tokens: int,
    kind: str,
    window: int,
) -> Pair:
    """Do the work of `omniload.kernels.ops.intervals`."""
    cu_seqlens = cu_seqlens.contiguous()
    check_offsets(cu_seqlens, num_tokens)
    lo, hi = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int32)
    cpu.write_intervals(cu_seqlens.numpy(), _KINDS[kind], window, lo, hi)
    if image_spans is not None:
        image_spans = image_spans.contiguous()
        check_spans(image_spans, cu_seqlens)
        cpu.write_image_spans(image_spans.numpy(), lo, hi)
    return torch.from_numpy(lo), torch.from_numpy(hi)


def block_widths(lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int) -> list[int]:
    """Return the least `widths` with which `block_tensors` has room for all lists."""
    return _bounds(lo, hi, q_block, kv_block)[1]


def _bounds(
    lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int
) -> tuple[list[npt.NDArray[np.int32]], list[int]]:
    """Return the ranges of rows and of columns, and the longest lists; see `cpu.block_bounds`."""
    bounds = [np.empty((-(-len(lo) // size), 4), np.int32) for size in (q_block, kv_block)]
    starts, ends = lo.contiguous().numpy(), hi.contiguous().numpy()
    rows, columns = cpu.block_bounds(starts, ends, q_block, kv_block, *bounds)
    return bounds, [*rows, *columns]


def block_tensors(
    lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int, widths: list[int] | None
) -> tuple[torch.Tensor, ...]:
    """Do the work of `omniload.kernels.ops.block_tensors`; widths None: as wide as needed."""
    bounds, need = _bounds(lo, hi, q_block, kv_block)
    widths = need if widths is None else widths
    if any(room < width for room, width in zip(widths, need, strict=True)):
        raise ConfigError(f"widths must be at least {need}, got {list(widths)}.")
    found: list[torch.Tensor] = []
    for bound, partial, full in zip(bounds, widths[::2], widths[1::2], strict=True):
        # zeros come from the system for wide lists: pages that no list reaches cost nothing
        shape = (1, 1, len(bound))
        arrays = [np.zeros(shape, np.int32), np.zeros((*shape, partial), np.int32),
                  np.zeros(shape, np.int32), np.zeros((*shape, full), np.int32)]  # fmt: skip
        cpu.write_lists(bound, *(array[0, 0] for array in arrays))
        found += map(torch.from_numpy, arrays)
    return tuple(found)


def pad(packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Do the work of `omniload.kernels.ops.pad`."""
    padded = packed.new_zeros(len(cu_seqlens) - 1, length, *packed.shape[1:])
    index = _padded_index(cu_seqlens, len(packed), length)
    padded.flatten(0, 1).index_copy_(0, index, packed)
    return padded


def unpad(padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Do the work of `omniload.kernels.ops.unpad`."""
    index = _padded_index(cu_seqlens, num_tokens, padded.shape[1])
    return padded.flatten(0, 1).index_select(0, index)


def _padded_index(cu_seqlens: torch.Tensor, num_tokens: int, length: int) -> torch.Tensor:
    """Return int64 (num_tokens,), where each token lies in the lines laid end to end."""
    segments, positions = token_ids(cu_seqlens, num_tokens, len(cu_seqlens))
    if num_tokens and int(positions.max()) >= length:
        raise ConfigError(
            f"length must be at least the tokens of the longest document: expected "
            f"{int(positions.max()) + 1}, got {length}."
        )
    return (segments.long() - 1) * length + positions
