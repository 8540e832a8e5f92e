"""What each attention kernel wants to know of a packed row, as keyword arguments of its call."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from omniload import masks
from omniload._checks import check_choice, check_count, check_flag, check_optional_count
from omniload.errors import ConfigError

__all__ = ["BACKENDS", "AttentionOptions", "AttentionRow", "attention_arguments"]


@dataclass(frozen=True, kw_only=True)
class AttentionRow:
    """The facts of a packed row.

    Args:
        cu_seqlens: int32 (num_documents + 1,), where the documents lie.
        position_ids: int64 (num_tokens,).
        image_spans: int32 (num_images, 2), [start, end).
        num_tokens: tokens of the row.
        max_seqlen: tokens of the longest document.
        sample_lengths: tokens of each sample without padding, on the host.
        document_multiple: what each document was padded to.
    """

    cu_seqlens: torch.Tensor
    position_ids: torch.Tensor
    image_spans: torch.Tensor
    num_tokens: int
    max_seqlen: int
    sample_lengths: tuple[int, ...]
    document_multiple: int

    def document_lengths(self) -> list[int]:
        """List tokens of each document, its padding included; none is empty."""
        unit = self.document_multiple
        lengths = [-(-length // unit) * unit for length in self.sample_lengths]
        rest = self.num_tokens - sum(lengths)
        return [*lengths, rest] if rest else lengths

    def real_offsets(self) -> torch.Tensor:
        """Count tokens without the padding inside of documents: int32 (num_documents + 1,)."""
        if self.document_multiple == 1:
            return self.cu_seqlens
        lengths = [*self.sample_lengths, *self.document_lengths()[len(self.sample_lengths) :]]
        num_empty = len(self.cu_seqlens) - 1 - len(lengths)
        offsets = torch.tensor([0, *lengths, *[0] * num_empty]).cumsum(0).to(torch.int32)
        return offsets.to(self.cu_seqlens.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options of `PackedBatch.attention`, which describes them."""

    kind: str = "causal"
    window: int | None = None
    max_seqlen: int | None = None
    block_size: int | tuple[int, int] = 128
    compact: bool = False
    dtype: torch.dtype | None = None
    max_tokens: int = 8192
    mrope_position_ids: torch.Tensor | None = None
    seq_idx: bool = False
    context_parallel: int = 1


def attention_arguments(
    row: AttentionRow, backend: str, options: AttentionOptions
) -> dict[str, Any]:
    """Return the keyword arguments for a backend; see `PackedBatch.attention`."""
    check_choice("backend", backend, tuple(BACKENDS))
    build, reads, kinds = BACKENDS[backend]
    for option in fields(options):
        name, value = option.name, getattr(options, option.name)
        is_default = type(value) is type(option.default) and value == option.default
        if name not in ("kind", *reads) and not is_default:
            takes = f"only {', '.join(('kind', *reads))}"
            raise ConfigError(
                f"attention({backend!r}) must be given options that it reads, {takes}: got "
                f"{name}={value!r}{_REMEDIES.get((backend, name), '')}."
            )
    check_choice(
        "kind", options.kind, kinds,
        f"{backend!r} can do no other; 'flex', 'sdpa' and 'flashmask' can do every kind.",
    )  # fmt: skip
    if options.kind == "full" and row.document_multiple > 1 and backend != "megatron":
        raise ConfigError(
            "documents must not hold padding where tokens see what comes after them: got "
            f"kind='full' with document_multiple={row.document_multiple}. Use 'megatron', which "
            "knows real and padded offsets, or pad the row only."
        )
    check_optional_count("window", options.window, least=1, of="token")
    return build(row, options)


def _longest(row: AttentionRow, options: AttentionOptions) -> int:
    longest = check_optional_count(
        "max_seqlen", options.max_seqlen, least=row.max_seqlen,
        of="tokens, as the longest document has",
    )  # fmt: skip
    return row.max_seqlen if longest is None else longest


def _window_size(options: AttentionOptions) -> tuple[int, int]:
    """Tokens to the left and right of a query, -1 for all, as flash attention counts."""
    reach = -1 if options.window is None else options.window - 1
    return (reach, 0 if options.kind == "causal" else reach)


def _mask_options(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    return {
        "image_spans": row.image_spans if options.kind == "prefix" else None,
        "window": options.window,
        "num_tokens": row.num_tokens,
    }


def _flash(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    longest = _longest(row, options)
    found = {
        "cu_seqlens_q": row.cu_seqlens,
        "cu_seqlens_k": row.cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": options.kind == "causal",
    }
    # versions differ in what "no window" is: (-1, -1) or (None, None)
    return found if options.window is None else {**found, "window_size": _window_size(options)}


def _torch_varlen(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        raise ConfigError(
            "attention('torch_varlen') needs torch.nn.attention.varlen: expected torch 2.10 or "
            f"newer, got {torch.__version__}. Use 'flash', 'flex' or 'sdpa'."
        ) from None
    longest = _longest(row, options)
    found: dict[str, Any] = {
        "cu_seq_q": row.cu_seqlens,
        "cu_seq_k": row.cu_seqlens,
        "max_q": longest,
        "max_k": longest,
    }
    return {**found, **_varlen_span(inspect.signature(varlen_attn).parameters, options)}


def _varlen_span(parameters: Mapping[str, Any], options: AttentionOptions) -> dict[str, Any]:
    """Say how far a query sees, in the words of the installed torch."""
    if "window_size" in parameters:
        return {"window_size": _window_size(options)}
    if options.window is not None:
        raise ConfigError(
            "the varlen attention of this torch has no sliding window: expected window=None, got "
            f"{options.window} (torch {torch.__version__}). Use 'flash' or 'flex'."
        )
    return {"is_causal": options.kind == "causal"}


def _flex(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    mask = masks.block_mask(
        row.cu_seqlens,
        options.kind,
        options.block_size,
        compact=options.compact,
        max_seqlen=row.max_seqlen,
        **_mask_options(row, options),
    )
    return {"block_mask": mask}


def _sdpa(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    most = check_count("max_tokens", options.max_tokens, least=1, of="token")
    if row.num_tokens > most:
        item = 1 if options.dtype is None else options.dtype.itemsize
        size = row.num_tokens**2 * item / 2**20
        raise ConfigError(
            f"a dense mask must be of at most {most} tokens: got {row.num_tokens}, "
            f"which takes {size:.0f} MiB. Use 'flex', 'flash' or 'torch_varlen', whose metadata "
            "grows with the tokens; or raise max_tokens=."
        )
    seen = masks.dense(row.cu_seqlens, options.kind, **_mask_options(row, options))
    if options.dtype is None:
        return {"attn_mask": seen[None, None]}
    added = torch.zeros(seen.shape, dtype=options.dtype, device=seen.device)
    return {"attn_mask": added.masked_fill_(~seen, float("-inf"))[None, None]}


def _transformers(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    positions = row.position_ids[None]
    if options.mrope_position_ids is not None:
        positions = _with_mrope(positions, options.mrope_position_ids)
    longest = _longest(row, options)
    found: dict[str, Any] = {
        "attention_mask": None,
        "position_ids": positions,
        "cu_seq_lens_q": row.cu_seqlens,
        "cu_seq_lens_k": row.cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }
    if check_flag("seq_idx", options.seq_idx):
        found["seq_idx"] = masks.segment_ids(row.cu_seqlens, num_tokens=row.num_tokens)[None] - 1
    return found


def _with_mrope(positions: torch.Tensor, mrope: Any) -> torch.Tensor:
    num_tokens = positions.shape[1]
    shapes = ((3, num_tokens), (3, 1, num_tokens))
    is_tensor = isinstance(mrope, torch.Tensor)
    if not is_tensor or mrope.dtype not in _INTEGERS or tuple(mrope.shape) not in shapes:
        got = f"{mrope.dtype} {tuple(mrope.shape)}" if is_tensor else type(mrope).__name__
        raise ConfigError(
            f"mrope_position_ids must be a tensor of integers, {shapes[0]} or {shapes[1]}, got "
            f"{got}. omniload.packing.mrope_position_ids makes them."
        )
    rows = mrope.reshape(3, 1, num_tokens).to(positions.device, torch.int64)
    return torch.cat([positions[None], rows])


def _megatron(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    ranks = check_count("context_parallel", options.context_parallel, least=1, of="rank")
    needed = 2 * ranks if ranks > 1 else 1
    if row.document_multiple % needed:
        raise ConfigError(
            f"each document must be padded to a multiple of {needed} tokens for {ranks} "
            f"context-parallel ranks, got a multiple of {row.document_multiple}. Pack with "
            f"pad_to=omniload.Padding(document_multiple={needed})."
        )
    real, longest = row.real_offsets(), _longest(row, options)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": row.cu_seqlens,
        "cu_seqlens_kv_padded": row.cu_seqlens,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def _flashmask(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    rows, causal = masks.flashmask_rows(row.cu_seqlens, options.kind, **_mask_options(row, options))
    return {"startend_row_indices": rows, "causal": causal}


def _xformers(row: AttentionRow, options: AttentionOptions) -> dict[str, Any]:
    return {"q_seqlen": row.document_lengths()}


_Backend = tuple[
    Callable[[AttentionRow, AttentionOptions], dict[str, Any]], tuple[str, ...], tuple[str, ...]
]
_CAUSAL, _PLAIN, _ALL = ("causal",), ("causal", "full"), ("causal", "full", "prefix")

#: Name -> what builds its arguments, the options it reads, the kinds of masks it can do.
BACKENDS: dict[str, _Backend] = {
    "flash": (_flash, ("window", "max_seqlen"), _PLAIN),
    "torch_varlen": (_torch_varlen, ("window", "max_seqlen"), _PLAIN),
    "flex": (_flex, ("window", "block_size", "compact"), _ALL),
    "sdpa": (_sdpa, ("window", "dtype", "max_tokens"), _ALL),
    "transformers": (_transformers, ("mrope_position_ids", "seq_idx", "max_seqlen"), _CAUSAL),
    "megatron": (_megatron, ("context_parallel", "max_seqlen"), _PLAIN),
    "flashmask": (_flashmask, ("window",), _ALL),
    "xformers": (_xformers, (), _PLAIN),
}

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REMEDIES = {
    ("transformers", "window"): ". The model's config has the window",
    ("megatron", "window"): ". Megatron's own config has the window",
    ("xformers", "window"): ". Call make_local_attention(window) of the mask",
}
