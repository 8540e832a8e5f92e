"""What must hold of the arguments of `omniload.masks`, as far as it shows without their values.

Values are checked by the operators, on a CPU only: on a device a check would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from omniload.errors import ConfigError

__all__ = ["check_blocks", "check_intervals", "check_kind", "check_offsets", "check_values"]

_KINDS = ("causal", "full", "prefix")
_DEVICES = ("cpu", "cuda")
#: Offsets are int32.
_MAX_TOKENS = 2**31 - 1


def check_offsets(cu_seqlens: torch.Tensor, num_tokens: int | None) -> int:
    """Check offsets, and find out the number of tokens.

    Args:
        cu_seqlens: int32 (n + 1,).
        num_tokens: what the caller knows; None: read it, for which a device is waited for.

    Returns:
        The number of tokens.

    Raises:
        ConfigError: another type, dtype, shape or device, or a number that can't be.
    """
    _check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ConfigError(f"cu_seqlens must be int32 (n + 1,), got {tuple(cu_seqlens.shape)}.")
    if num_tokens is None:
        num_tokens = int(cu_seqlens[-1])
    if not 0 <= num_tokens <= _MAX_TOKENS:
        raise ConfigError(f"num_tokens must be from 0 to {_MAX_TOKENS}, got {num_tokens}.")
    return num_tokens


def check_values(
    cu_seqlens: torch.Tensor, image_spans: torch.Tensor | None, num_tokens: int
) -> None:
    """Check the values of offsets and spans, which lie on a CPU.

    Raises:
        ConfigError: see `omniload.masks.intervals`.
    """
    from omniload.kernels import twins

    cu_seqlens = cu_seqlens.contiguous()
    twins.check_offsets(cu_seqlens, num_tokens)
    if image_spans is not None:
        twins.check_spans(image_spans.contiguous(), cu_seqlens)


def check_kind(
    kind: str, cu_seqlens: torch.Tensor, image_spans: torch.Tensor | None, window: int | None
) -> None:
    """Check that kind, spans and window go together.

    Raises:
        ConfigError: they don't.
    """
    if kind not in _KINDS:
        raise ConfigError(f"kind must be one of {', '.join(map(repr, _KINDS))}, got {kind!r}.")
    is_count = isinstance(window, int) and not isinstance(window, bool)
    if window is not None and not (is_count and 1 <= window <= _MAX_TOKENS):
        raise ConfigError(f"window must be from 1 to {_MAX_TOKENS} tokens or None, got {window}.")
    if (image_spans is not None) != (kind == "prefix"):
        raise ConfigError(
            "image_spans must be given for kind='prefix', and for no other: got "
            f"{'them' if image_spans is not None else 'none'} with kind={kind!r}."
        )
    if image_spans is None:
        return
    _check_tensor("image_spans", image_spans)
    if image_spans.ndim != 2 or image_spans.shape[1] != 2:
        raise ConfigError(f"image_spans must be int32 (m, 2), got {tuple(image_spans.shape)}.")
    if image_spans.device != cu_seqlens.device:
        raise ConfigError(
            f"image_spans must lie where cu_seqlens lie: expected {cu_seqlens.device}, got "
            f"{image_spans.device}."
        )


def check_intervals(lo: torch.Tensor, hi: torch.Tensor) -> None:
    """Check the tensors of intervals, and on a CPU their values.

    Raises:
        ConfigError: they are none.
    """
    _check_tensor("lo", lo)
    _check_tensor("hi", hi)
    if lo.ndim != 1 or lo.shape != hi.shape or lo.device != hi.device:
        raise ConfigError(
            "lo and hi must be int32 (num_tokens,) on one device, got "
            f"{tuple(lo.shape)} on {lo.device} and {tuple(hi.shape)} on {hi.device}."
        )
    if lo.device.type == "cpu":
        from omniload.kernels import twins

        twins.check_intervals(lo.contiguous(), hi.contiguous())


def check_blocks(block_size: int | tuple[int, int], num_tokens: int) -> tuple[int, int]:
    """Return the tokens of a block of queries and of one of keys.

    Raises:
        ConfigError: a size below 1, or a row without tokens, of which there is no mask.
    """
    sizes = tuple(block_size) if isinstance(block_size, Sequence) else (block_size, block_size)
    if len(sizes) != 2 or not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise ConfigError(
            "block_size must be a number of tokens, or two, of queries and keys, at least 1: got "
            f"{block_size!r}."
        )
    if num_tokens == 0:
        raise ConfigError("a block mask needs a row of at least 1 token, got 0.")
    return sizes[0], sizes[1]


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} must be a torch tensor, got {type(tensor).__name__}.")
    if tensor.dtype != torch.int32:
        raise ConfigError(
            f"{name} must be int32, as attention kernels want it, got {tensor.dtype}."
        )
    if tensor.device.type not in _DEVICES:
        raise ConfigError(
            f"{name} must lie on a CPU or a CUDA device, got {tensor.device}. Compute on a CPU and "
            "move the result."
        )
