"""The kernels as operators of torch, `torch.ops.omniload.*`: they compile without a graph break.

A CPU tensor takes the Numba twin, which checks all values; a CUDA tensor takes the Triton kernel,
which writes inside its outputs whatever the values are, and never waits for the device.

`omniload.masks` is the door for masks. Here are the operators, and `pad` and `unpad`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from omniload._checks import check_count
from omniload.errors import ConfigError

__all__ = ["block_tensors", "intervals", "pad", "token_ids", "unpad"]

Pair = tuple[torch.Tensor, torch.Tensor]
_SCHEMAS = (
    "token_ids(Tensor cu_seqlens, SymInt num_tokens, SymInt num_documents) -> (Tensor, Tensor)",
    "intervals(Tensor cu_seqlens, Tensor? image_spans, SymInt num_tokens, str kind, int window) "
    "-> (Tensor, Tensor)",
    "block_tensors(Tensor lo, Tensor hi, SymInt q_block, SymInt kv_block, SymInt[] widths) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "pad(Tensor packed, Tensor cu_seqlens, SymInt length) -> Tensor",
    "unpad(Tensor padded, Tensor cu_seqlens, SymInt num_tokens) -> Tensor",
)


def token_ids(cu_seqlens: torch.Tensor, num_tokens: int, num_documents: int) -> Pair:
    """Number documents and tokens.

    Args:
        cu_seqlens: int32 (n + 1,).
        num_tokens: the last offset, as a Python int.
        num_documents: documents after the first so many are padding.

    Returns:
        segment_ids int32 (num_tokens,), from 1, padding 0; position_ids int64 (num_tokens,).
    """
    if _is_plain(cu_seqlens):
        from omniload.kernels import twins

        return twins.token_ids(cu_seqlens, num_tokens, num_documents)
    found: Pair = torch.ops.omniload.token_ids(cu_seqlens, num_tokens, num_documents)
    return found


def intervals(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor | None,
    num_tokens: int,
    kind: str,
    window: int,
) -> Pair:
    """Compute which keys [lo, hi) each query sees; see `omniload.masks.intervals`.

    Args:
        cu_seqlens: int32 (n + 1,).
        image_spans: int32 (m, 2) for kind "prefix", else None.
        num_tokens: the last offset, as a Python int.
        kind: "causal", "full" or "prefix".
        window: tokens of the sliding window; 0 is none.

    Returns:
        lo and hi, int32 (num_tokens,) each.
    """
    if _is_plain(cu_seqlens):
        from omniload.kernels import twins

        return twins.intervals(cu_seqlens, image_spans, num_tokens, kind, window)
    found: Pair = torch.ops.omniload.intervals(cu_seqlens, image_spans, num_tokens, kind, window)
    return found


def block_tensors(
    lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int, widths: list[int]
) -> tuple[torch.Tensor, ...]:
    """Compute the eight tensors of a BlockMask from intervals that never fall.

    Args:
        lo: int32 (num_tokens,), first key of each query.
        hi: int32 (num_tokens,), after the last one.
        q_block: queries of a block.
        kv_block: keys of a block.
        widths: room for the partial and the full blocks of a row, then of a column.

    Returns:
        kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, and the same for q: int32
        (1, 1, blocks) and (1, 1, blocks, width). What comes after a list is 0.
    """
    if _is_plain(lo):
        from omniload.kernels import twins

        return twins.block_tensors(lo, hi, q_block, kv_block, widths)
    found: tuple[torch.Tensor, ...] = torch.ops.omniload.block_tensors(
        lo, hi, q_block, kv_block, widths
    )
    return found


def pad(packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Lay documents below each other, each filled up with zeros. Has a gradient.

    Args:
        packed: any dtype (num_tokens, ...).
        cu_seqlens: int32 (n + 1,), on the same device.
        length: tokens of a line, at least those of the longest document. On a CPU that is checked;
            on a device the rest of a longer document is left out.

    Returns:
        The same dtype, (n, length, ...).

    Raises:
        ConfigError: offsets that don't fit.
    """
    _check_padding("packed", packed, 1, cu_seqlens)
    _check_number("length", length)
    padded: torch.Tensor = torch.ops.omniload.pad(packed, cu_seqlens, length)
    return padded


def unpad(padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Lay documents end to end: the inverse of `pad`, without waiting for the device.

    Args:
        padded: any dtype (n, length, ...).
        cu_seqlens: int32 (n + 1,), on the same device.
        num_tokens: the last offset, as a Python int.

    Returns:
        The same dtype, (num_tokens, ...).

    Raises:
        ConfigError: offsets that don't fit.
    """
    _check_padding("padded", padded, 2, cu_seqlens)
    _check_number("num_tokens", num_tokens)
    lines = cu_seqlens.shape[0] - 1
    if padded.shape[0] != lines:
        raise ConfigError(
            f"padded must have a line for each document: expected {lines}, got {padded.shape[0]}."
        )
    packed: torch.Tensor = torch.ops.omniload.unpad(padded, cu_seqlens, num_tokens)
    return packed


def _is_plain(tensor: torch.Tensor) -> bool:
    """Say whether torch's dispatcher, half of the time of a small row, has nothing to add."""
    return (
        type(tensor) is torch.Tensor
        and tensor.device.type == "cpu"
        and not torch.compiler.is_compiling()
    )


def _check_padding(
    name: str, tensor: torch.Tensor, num_axes: int, cu_seqlens: torch.Tensor
) -> None:
    for called, given in ((name, tensor), ("cu_seqlens", cu_seqlens)):
        if not isinstance(given, torch.Tensor):
            raise ConfigError(f"{called} must be a torch tensor, got {type(given).__name__}.")
        if given.layout != torch.strided:
            raise ConfigError(f"{called} must be a dense tensor, got {given.layout}.")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1 or cu_seqlens.shape[0] == 0:
        raise ConfigError(
            f"cu_seqlens must be int32 (n + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}."
        )
    if tensor.ndim < num_axes or tensor.device != cu_seqlens.device:
        raise ConfigError(
            f"{name} must have at least {num_axes} axes and lie where cu_seqlens lie "
            f"({cu_seqlens.device}), got {tuple(tensor.shape)} on {tensor.device}."
        )


def _check_number(name: str, value: Any) -> None:
    # inside of torch.compile a size may have no value yet
    if not isinstance(value, torch.SymInt):
        check_count(name, value, of="tokens")


# -- what torch.compile knows of them -------------------------------------------------------------


def _token_ids_fake(cu_seqlens: torch.Tensor, num_tokens: int, num_documents: int) -> Pair:
    segments = cu_seqlens.new_empty(num_tokens)
    return segments, cu_seqlens.new_empty(num_tokens, dtype=torch.int64)


def _intervals_fake(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor | None,
    num_tokens: int,
    kind: str,
    window: int,
) -> Pair:
    return cu_seqlens.new_empty(num_tokens), cu_seqlens.new_empty(num_tokens)


def _block_tensors_fake(
    lo: torch.Tensor, hi: torch.Tensor, q_block: int, kv_block: int, widths: list[int]
) -> tuple[torch.Tensor, ...]:
    found = []
    for size, pair in ((q_block, widths[:2]), (kv_block, widths[2:])):
        blocks = (lo.shape[0] + size - 1) // size
        for width in pair:
            found += [lo.new_empty(1, 1, blocks), lo.new_empty(1, 1, blocks, width)]
    return tuple(found)


def _pad_fake(packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    return packed.new_empty(cu_seqlens.shape[0] - 1, length, *packed.shape[1:])


def _unpad_fake(padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return padded.new_empty(num_tokens, *padded.shape[2:])


# -- gradients and registration -------------------------------------------------------------------


def _keep_offsets(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    given, cu_seqlens, _ = inputs
    ctx.save_for_backward(cu_seqlens)
    ctx.shape = given.shape


def _pad_backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (cu_seqlens,) = context.saved_tensors
    return unpad(gradient, cu_seqlens, context.shape[0]), None, None


def _unpad_backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (cu_seqlens,) = context.saved_tensors
    return pad(gradient, cu_seqlens, context.shape[1]), None, None


def _lazy(module: str, name: str) -> Callable[..., Any]:
    """Import Numba or Triton when the first tensor comes, not before."""

    def call(*arguments: Any) -> Any:
        try:
            found = importlib.import_module(f"omniload.kernels.{module}")
        except ImportError as error:
            raise ConfigError(
                f"tensors on a GPU need Triton, which can't be imported: {error}. Install it "
                "(`pip install 'omniload-vlm[triton]'`), or compute on a CPU and move the result."
            ) from error
        return getattr(found, name)(*arguments)

    return call


def _register() -> None:
    """Define the operators once in a process, however often this module is imported."""
    namespace: Any = torch.ops.omniload
    if hasattr(namespace, "block_tensors"):
        return
    # torch leaves these untyped
    library: Any = torch.library.Library("omniload", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)
        name = schema.partition("(")[0]
        module = "block_mask" if name == "block_tensors" else "varlen"
        library.impl(name, _lazy("twins", name), "CPU")
        library.impl(name, _lazy(module, name), "CUDA")
        torch.library.register_fake(f"omniload::{name}", _FAKES[name], lib=library)
    for name, backward in (("pad", _pad_backward), ("unpad", _unpad_backward)):
        torch.library.register_autograd(
            f"omniload::{name}", backward, setup_context=_keep_offsets, lib=library
        )
    # the operators go when the library object goes: it lives where they live
    namespace._omniload_library = library


_FAKES: dict[str, Callable[..., Any]] = {
    "token_ids": _token_ids_fake,
    "intervals": _intervals_fake,
    "block_tensors": _block_tensors_fake,
    "pad": _pad_fake,
    "unpad": _unpad_fake,
}
_register()
