"""What must hold of the arguments of `omniload.masks`, as far as it shows without their values.

Values are checked by the operators, on a CPU only: on a device a check would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from omniload._checks import check_choice, check_count, check_optional_count
from omniload.errors import ConfigError

__all__ = [
    "KINDS",
    "check_blocks",
    "check_intervals",
    "check_kind",
    "check_longest",
    "check_offsets",
    "check_tensor",
    "check_values",
    "check_window",
]

KINDS = ("causal", "full", "prefix")
_DEVICES = ("cpu", "cuda")


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
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ConfigError(
            f"cu_seqlens must be int32 (n + 1,), got the shape {tuple(cu_seqlens.shape)}. A row "
            "without documents has the one offset 0."
        )
    found: Any = _last(cu_seqlens) if num_tokens is None else num_tokens
    if isinstance(found, torch.SymInt):  # a size that has no value yet
        return cast(int, found)
    return check_count(
        "num_tokens", found, of="tokens", remedy="It is the last of cu_seqlens.", or_none=True
    )


def _last(cu_seqlens: torch.Tensor) -> int:
    """Read the last offset; inside of torch.compile that ends the graph."""
    # torch leaves these untyped
    dynamo: Any = torch._dynamo if torch.compiler.is_dynamo_compiling() else None
    if dynamo is not None:
        dynamo.graph_break(
            msg="omniload.masks: the number of tokens lies in cu_seqlens, which torch.compile can't"
            " look into. Give num_tokens=, the last offset as a Python integer (batch.num_tokens)."
        )
    return int(cu_seqlens[-1])


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
    check_choice("kind", kind, KINDS)
    check_window(window)
    if (image_spans is not None) != (kind == "prefix"):
        raise ConfigError(
            "image_spans must be given for kind='prefix', and for no other: got "
            f"{'them' if image_spans is not None else 'none'} with kind={kind!r}. A batch has them "
            "as batch.image_spans."
        )
    if image_spans is None:
        return
    check_tensor("image_spans", image_spans)
    if image_spans.ndim != 2 or image_spans.shape[1] != 2:
        raise ConfigError(f"image_spans must be int32 (m, 2), got {tuple(image_spans.shape)}.")
    if image_spans.device != cu_seqlens.device:
        raise ConfigError(
            f"image_spans must lie where cu_seqlens lie: expected {cu_seqlens.device}, got "
            f"{image_spans.device}."
        )


def check_window(window: int | None) -> int:
    """Return the tokens of a sliding window, 0 for none.

    Raises:
        ConfigError: no such number.
    """
    return check_optional_count("window", window, least=1, of="token") or 0


def check_longest(max_seqlen: int | None, cu_seqlens: torch.Tensor, num_tokens: int) -> int | None:
    """Check the tokens of the longest document; against the documents where they lie on a CPU.

    Raises:
        ConfigError: no such number, or a longer document.
    """
    max_seqlen = check_optional_count("max_seqlen", max_seqlen, least=1, of="token")
    is_known = cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if max_seqlen is not None and is_known and num_tokens:
        longest = int(cu_seqlens.diff().max())
        if longest > max_seqlen:
            raise ConfigError(
                f"max_seqlen must be at least the longest document: expected {longest} or more, "
                f"got {max_seqlen}."
            )
    return max_seqlen


def check_intervals(lo: torch.Tensor, hi: torch.Tensor) -> None:
    """Check the tensors of intervals, and on a CPU their values.

    Raises:
        ConfigError: they are none.
    """
    check_tensor("lo", lo)
    check_tensor("hi", hi)
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
    given: Any = block_size
    is_pair = isinstance(given, Sequence) and not isinstance(given, str)
    sizes = tuple(given) if is_pair else (given, given)
    try:
        q_block, kv_block = (check_count("block_size", size, least=1) for size in sizes)
    except (ConfigError, ValueError):
        raise ConfigError(
            "block_size must be a number of tokens, or two, of queries and keys, at least 1: got "
            f"{block_size!r}. The kernels of torch want 128, or a power of 2 near it."
        ) from None
    if num_tokens == 0:
        raise ConfigError("a block mask needs a row of at least 1 token, got 0.")
    return q_block, kv_block


def check_tensor(name: str, tensor: Any, dtypes: Sequence[torch.dtype] = (torch.int32,)) -> None:
    """Check that it is a tensor that can be read here, of one of the types.

    Raises:
        ConfigError: it isn't.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} must be a torch tensor, got {type(tensor).__name__}.")
    if tensor.dtype not in dtypes:
        wanted = ", as attention kernels want it" if len(dtypes) == 1 else ""
        raise ConfigError(
            f"{name} must be {' or '.join(str(d).removeprefix('torch.') for d in dtypes)}{wanted}, "
            f"got {tensor.dtype}."
        )
    if tensor.device.type not in _DEVICES or tensor.layout != torch.strided:
        raise ConfigError(
            f"{name} must lie on a CPU or a CUDA device as a dense tensor, got {tensor.device}, "
            f"{tensor.layout}. Compute on a CPU and move the result."
        )
