"""M-RoPE ids of a packed row, for `omniload bench pack`: next to the loop that is usual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["mrope_candidates"]

_IMAGE_TOKEN = 7
_MERGE = 2


def mrope_candidates(lengths: list[int], seed: int) -> dict[str, Callable[[], Any]]:
    """Return the ways to make M-RoPE ids, which give equal ones.

    Args:
        lengths: tokens of each document; about half of them are made those of images.
        seed: of the sizes and places of the images.
    """
    import torch

    from omniload import _native
    from omniload.mrope import mrope_position_ids

    documents, spans, grids = _documents(lengths, seed)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    row = (
        cu_seqlens,
        torch.tensor(spans, dtype=torch.int32).reshape(-1, 2),
        torch.tensor(grids).reshape(-1, 3),
        _MERGE,
    )
    calls: dict[str, Callable[[], Any]] = {}
    if _native.available():
        calls["M-RoPE native"] = partial(mrope_position_ids, *row, backend="native")
    calls["M-RoPE torch"] = partial(mrope_position_ids, *row, backend="numpy")
    calls["M-RoPE loop"] = partial(_loop, documents, grids)
    want = calls["M-RoPE loop"]()
    for name, call in calls.items():
        if not torch.equal(call(), want):
            raise RuntimeError(f"{name} gives other positions than the loop.")
    return calls


def _documents(
    lengths: list[int], seed: int
) -> tuple[list[torch.Tensor], list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Make documents of text, with images until half of the tokens are theirs."""
    import numpy as np
    import torch

    rng = np.random.default_rng(seed)
    documents: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    grids: list[tuple[int, int, int]] = []
    before = 0
    for length in lengths:
        ids = torch.zeros(length, dtype=torch.int64)
        at = int(rng.integers(4, 20))
        while True:
            high, wide = (int(side) for side in rng.integers(6, 23, 2))
            end = at + high * wide
            if end > length:
                break
            ids[at:end] = _IMAGE_TOKEN
            spans.append((before + at, before + end))
            grids.append((1, high * _MERGE, wide * _MERGE))
            at = end + int(rng.integers(100, 500))
        documents.append(ids)
        before += length
    return documents, spans, grids


def _loop(documents: list[torch.Tensor], grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """Look for images token by token and make the ids of each piece, as models do by themselves."""
    import torch

    parts: list[torch.Tensor] = []
    image = 0
    for document in documents:
        tokens = document.tolist()
        at = position = 0
        while at < len(tokens):
            if _IMAGE_TOKEN not in tokens[at:]:
                text = len(tokens) - at
                parts.append(torch.arange(text).expand(3, -1) + position)
                break
            text = tokens.index(_IMAGE_TOKEN, at) - at
            parts.append(torch.arange(text).expand(3, -1) + position)
            time, high, wide = grids[image]
            high, wide, image = high // _MERGE, wide // _MERGE, image + 1
            shape = (time, high, wide)
            steps = (
                torch.arange(time)[:, None, None].expand(shape).flatten(),
                torch.arange(high)[None, :, None].expand(shape).flatten(),
                torch.arange(wide)[None, None, :].expand(shape).flatten(),
            )
            parts.append(torch.stack(steps) + position + text)
            position = int(parts[-1].max()) + 1
            at += text + time * high * wide
    return torch.cat(parts, dim=1)
