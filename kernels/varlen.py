"""Triton: from offsets to ids and intervals per token, and between packed and padded rows.

The twins in `twins.py` say what each function computes. Every kernel writes inside its outputs and
reads inside its inputs whatever the offsets are, and nothing waits for the device. Offsets in
memory are computed in 64 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from omniload.errors import ConfigError

__all__ = ["intervals", "pad", "token_ids", "unpad"]

Pair = tuple[torch.Tensor, torch.Tensor]

#: Tokens of a program: 4 or 8 for each thread of the usual 4 warps.
_TOKENS = 1024
#: Elements of a program that copies.
_MAX_ELEMENTS = 1024
#: Copying doesn't look at values: types of one size share a kernel.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _document_of(cu, num_documents, num_steps, token):  # type: ignore[no-untyped-def]
    """Find the last document that begins at or before each token, in a number of halvings."""
    first = tl.zeros_like(token)
    last = first + num_documents - 1
    for _ in range(num_steps):
        middle = (first + last + 1) // 2
        begins = tl.load(cu + middle) <= token
        first = tl.where(begins, middle, first)
        last = tl.where(begins, last, middle - 1)
    return first


@triton.jit(do_not_specialize=["num_tokens", "num_documents", "num_real", "num_steps"])  # type: ignore[untyped-decorator]
def token_ids_kernel(  # type: ignore[no-untyped-def]
    cu, segments, positions, num_tokens, num_documents, num_real, num_steps, block: tl.constexpr
):
    """Write segment and position of one block of tokens."""
    token = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = token < num_tokens
    document = _document_of(cu, num_documents, num_steps, token)
    start = tl.load(cu + document)
    segment = tl.where(document < num_real, document + 1, 0)
    tl.store(segments + token, segment.to(tl.int32), mask=inside)
    tl.store(positions + token, token - start, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_documents", "num_steps", "window"])  # type: ignore[untyped-decorator]
def intervals_kernel(  # type: ignore[no-untyped-def]
    cu,
    lo,
    hi,
    num_tokens,
    num_documents,
    num_steps,
    window,
    is_full: tl.constexpr,
    block: tl.constexpr,
):
    """Write the keys of one block of queries; without a window, `window` is as long as the row."""
    token = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = token < num_tokens
    document = _document_of(cu, num_documents, num_steps, token)
    start = tl.load(cu + document)
    first = tl.maximum(start, token - window + 1)
    if is_full:
        end = tl.minimum(tl.load(cu + document + 1), token + window)
    else:
        end = token + 1
    tl.store(lo + token, first.to(tl.int32), mask=inside)
    tl.store(hi + token, end.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def image_spans_kernel(spans, lo, hi, num_tokens, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the tokens of one image see all of it."""
    image = tl.program_id(0).to(tl.int64)
    start = tl.maximum(tl.load(spans + 2 * image), 0).to(tl.int64)
    end = tl.load(spans + 2 * image + 1).to(tl.int64)
    stop = tl.minimum(end, num_tokens)
    for begin in range(start, stop, block):
        token = begin + tl.arange(0, block)
        inside = token < stop
        first = tl.load(lo + token, mask=inside, other=0)
        tl.store(lo + token, tl.minimum(first, start).to(tl.int32), mask=inside)
        tl.store(hi + token, end.to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_documents", "num_steps", "length"])  # type: ignore[untyped-decorator]
def unpad_kernel(  # type: ignore[no-untyped-def]
    padded, cu, packed, num_documents, num_steps, length, size, block: tl.constexpr
):
    """Copy one block of one token; axis 0 counts tokens, which may be many."""
    token = tl.program_id(0).to(tl.int64)
    document = _document_of(cu, num_documents, num_steps, token)
    position = token - tl.load(cu + document)
    element = tl.program_id(1) * block + tl.arange(0, block)
    # a document longer than a line gives zeros
    readable = tl.where((position >= 0) & (position < length), size, 0)
    source = padded + (document * length + position) * size + element
    values = tl.load(source, mask=element < readable, other=0)
    tl.store(packed + token * size + element, values, mask=element < size)


@triton.jit(do_not_specialize=["num_tokens", "length"])  # type: ignore[untyped-decorator]
def pad_kernel(  # type: ignore[no-untyped-def]
    packed, cu, padded, num_tokens, length, size, block: tl.constexpr
):
    """Copy one block of one place of one line, or fill it with zeros; axis 0 counts places."""
    place = tl.program_id(0).to(tl.int64)
    document, position = place // length, place % length
    start, end = tl.load(cu + document), tl.load(cu + document + 1)
    token = start + position
    element = tl.program_id(1) * block + tl.arange(0, block)
    readable = tl.where((token >= 0) & (token < tl.minimum(end, num_tokens)), size, 0)
    values = tl.load(packed + token * size + element, mask=element < readable, other=0)
    tl.store(padded + place * size + element, values, mask=element < size)


def token_ids(cu_seqlens: torch.Tensor, num_tokens: int, num_documents: int) -> Pair:
    """Do the work of `omniload.kernels.ops.token_ids`."""
    cu = cu_seqlens.contiguous()
    segments = torch.empty(num_tokens, dtype=torch.int32, device=cu.device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=cu.device)
    if num_tokens:
        documents, steps = _halvings(cu)
        grid = (triton.cdiv(num_tokens, _TOKENS),)
        token_ids_kernel[grid](
            cu, segments, positions, num_tokens, documents, num_documents, steps, block=_TOKENS
        )
    return segments, positions


def intervals(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor | None,
    num_tokens: int,
    kind: str,
    window: int,
) -> Pair:
    """Do the work of `omniload.kernels.ops.intervals`."""
    cu = cu_seqlens.contiguous()
    lo = torch.empty(num_tokens, dtype=torch.int32, device=cu.device)
    hi = torch.empty(num_tokens, dtype=torch.int32, device=cu.device)
    if num_tokens:
        documents, steps = _halvings(cu)
        grid = (triton.cdiv(num_tokens, _TOKENS),)
        intervals_kernel[grid](
            cu, lo, hi, num_tokens, documents, steps, window or num_tokens,
            is_full=kind == "full", block=_TOKENS,
        )  # fmt: skip
        if image_spans is not None and len(image_spans):
            spans = image_spans.contiguous()
            image_spans_kernel[(len(spans),)](spans, lo, hi, num_tokens, block=_TOKENS)
    return lo, hi


def pad(packed: torch.Tensor, cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """Do the work of `omniload.kernels.ops.pad`."""
    cu, given = cu_seqlens.contiguous(), packed.contiguous()
    documents = len(cu) - 1
    shape = (documents, length, *given.shape[1:])
    padded = torch.empty(shape, dtype=given.dtype, device=given.device)
    if padded.numel():
        size, block = _row(padded, 2)
        grid = (documents * length, triton.cdiv(size, block))
        pad_kernel[grid](_bits(given), cu, _bits(padded), len(given), length, size, block=block)
    return padded


def unpad(padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Do the work of `omniload.kernels.ops.unpad`."""
    cu, given = cu_seqlens.contiguous(), padded.contiguous()
    shape = (num_tokens, *given.shape[2:])
    packed = torch.empty(shape, dtype=given.dtype, device=given.device)
    if packed.numel():
        size, block = _row(packed, 1)
        documents, steps = _halvings(cu)
        grid = (num_tokens, triton.cdiv(size, block))
        unpad_kernel[grid](
            _bits(given), cu, _bits(packed), documents, steps, given.shape[1], size, block=block
        )
    return packed


def _halvings(cu: torch.Tensor) -> tuple[int, int]:
    """Return the number of documents, and how often it must be halved to find one."""
    documents = len(cu) - 1
    if documents == 0:
        raise ConfigError("a row with tokens must have at least one document, got none.")
    return documents, (documents - 1).bit_length()


def _row(tensor: torch.Tensor, first_axis: int) -> tuple[int, int]:
    """Return the elements of one token, and how many of them a program copies."""
    size = tensor.shape[first_axis:].numel()
    return size, min(triton.next_power_of_2(size), _MAX_ELEMENTS)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.dtype.itemsize
    if size not in _BITS:
        raise ConfigError(f"padding works on types of 1, 2, 4 or 8 bytes, got {tensor.dtype}.")
    return tensor.view(-1).view(_BITS[size]) if tensor.ndim else tensor.view(_BITS[size])
