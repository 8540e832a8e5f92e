"""`omniload bench masks`: masks of a packed row, next to packing it and to torch's own search."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from omniload.types import Sample

__all__ = ["masks"]

_LISTS = ("kv", "full_kv", "q", "full_q")
_TOKENS_PER_TILE = 256
_TURN_S = 0.005


def masks(
    tokens: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens of a row; may be repeated.")
    ] = None,
    kind: Annotated[str, typer.Option(help="causal or full.")] = "causal",
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 128,
    min_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the shortest document.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest.")] = 2500,
    image_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of tokens that stand for images.")
    ] = 0.5,
    search_up_to: Annotated[
        int, typer.Option(min=0, help="Time torch's create_block_mask up to so many tokens.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the masks of a packed row on a CPU, against packing the same row.

    pack makes the batch, with one 448 x 448 tile for 256 image tokens. block mask is the whole way
    from cu_seqlens to a BlockMask, its constructor included; its blocks are compared with those of
    create_block_mask where that is timed. create_block_mask takes seconds at 8,192 tokens, its
    compiled form a minute or more before it is timed, and both memory for every pair of tokens.

    Example: `omniload bench masks --tokens 8192 --search-up-to 8192`
    """
    from omniload.errors import ConfigError
    from omniload.tools.bench_common import emit, one_thread

    if max_tokens < min_tokens:
        raise ConfigError(
            f"--max-tokens must be at least --min-tokens={min_tokens}, got {max_tokens}."
        )
    rows = []
    with one_thread():
        for size in tokens or [8192, 32768, 131072]:
            lengths = _lengths(size, min_tokens, max_tokens, seed)
            calls = _candidates(lengths, kind, block_size, image_share)
            searches = _searches(lengths, kind, block_size) if size <= search_up_to else {}
            rows += _figures(calls, searches, repeats, {"tokens": size, "docs": len(lengths)})
    notes = (
        f"us: CPU time of one thread, median of {repeats} rounds (one for create_block_mask). "
        "of pack: time by that of packing the row. times: time by that of block mask. KiB: all "
        "eight tensors."
    )
    emit("masks", rows, as_json, notes)


def _figures(
    calls: dict[str, Callable[[], Any]],
    searches: dict[str, Callable[[], Any]],
    repeats: int,
    size: dict[str, int],
) -> list[dict[str, Any]]:
    from omniload.tools.bench_common import measure

    turns = {name: _turn(call) for name, call in calls.items()}
    timings = measure(
        {name: turn for name, (turn, _) in turns.items()}, repeats=repeats, clock=time.thread_time
    )
    microseconds = {
        name: (timings[name].median_s / often * 1e6, timings[name].min_s / often * 1e6)
        for name, (_, often) in turns.items()
    }
    masks = {name: call() for name, call in calls.items() if name.startswith("block mask")}
    for name, call in searches.items():
        masks[name] = call()  # compiles
        begin = time.thread_time()
        call()
        spent = (time.thread_time() - begin) * 1e6
        microseconds[name] = (spent, spent)
        _check_equal(masks["block mask"], masks[name])
    base = microseconds["block mask"][0]
    return [
        {
            "way": name,
            **size,
            "us": median,
            "min_us": least,
            "of pack": median / microseconds["pack"][0],
            "times": median / base,
            "KiB": _num_bytes(masks[name]) / 1024 if name in masks else 0,
        }
        for name, (median, least) in microseconds.items()
    ]


def _turn(call: Callable[[], object]) -> tuple[Callable[[], None], int]:
    """Repeat a call until a turn lasts some milliseconds; return the turn, and how often it is."""
    call()
    begin = time.thread_time()
    call()
    often = max(1, round(_TURN_S / max(time.thread_time() - begin, 1e-6)))

    def turn() -> None:
        for _ in range(often):
            call()

    return turn, often


def _lengths(num_tokens: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Draw documents until the row is full; the last is cut."""
    import numpy as np

    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := num_tokens - sum(lengths)) > 0:
        lengths.append(min(int(rng.integers(shortest, longest + 1)), left))
    return lengths


def _candidates(
    lengths: list[int], kind: str, block_size: int, image_share: float
) -> dict[str, Callable[[], Any]]:
    from omniload import masks
    from omniload.packing import pack

    cu_seqlens = _offsets(lengths)
    samples = [_sample(index, length, image_share) for index, length in enumerate(lengths)]
    block_mask = partial(masks.block_mask, cu_seqlens, kind, block_size)
    return {
        "pack": partial(pack, samples),
        "intervals": partial(masks.intervals, cu_seqlens, kind),
        "block mask": block_mask,
        "block mask compact": partial(block_mask, compact=True),
    }


def _offsets(lengths: list[int]) -> torch.Tensor:
    import torch

    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _sample(index: int, length: int, image_share: float) -> Sample:
    import numpy as np

    from omniload.types import Sample

    tiles = int(length * image_share) // _TOKENS_PER_TILE
    ids = np.arange(length, dtype=np.int32)
    return Sample(
        sample_id=index,
        input_ids=ids,
        labels=ids,
        tiles=np.zeros((tiles, 3, 448, 448), np.uint8),
        image_num_tiles=np.full(min(tiles, 1), tiles, np.int32),
        image_sizes=np.full((min(tiles, 1), 2), 448, np.int32),
        image_grids=np.full((min(tiles, 1), 2), (tiles, 1), np.int32),
        image_spans=np.full((min(tiles, 1), 2), (0, tiles * _TOKENS_PER_TILE), np.int32),
    )


def _searches(lengths: list[int], kind: str, block_size: int) -> dict[str, Callable[[], Any]]:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    cu_seqlens = _offsets(lengths)
    size = int(cu_seqlens[-1])
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def seen(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        same = documents[query] == documents[key]
        return same if kind == "full" else same & (query >= key)

    arguments = (seen, None, None, size, size, "cpu", block_size)
    compiled: Callable[..., Any] = torch.compile(create_block_mask)
    return {
        "create_block_mask": partial(create_block_mask, *arguments),
        "create_block_mask compiled": partial(compiled, *arguments),
    }


def _check_equal(found: Any, want: Any) -> None:
    """Figures of ways that give different blocks would say nothing."""
    import torch

    for name in _LISTS:
        counts = getattr(want, f"{name}_num_blocks")
        mine, other = (getattr(mask, f"{name}_indices") for mask in (found, want))
        listed = torch.arange(other.shape[-1]) < counts[..., None]
        if not (
            torch.equal(getattr(found, f"{name}_num_blocks"), counts)
            and torch.equal(mine[listed], other[listed].to(mine.dtype))
        ):
            raise RuntimeError(f"create_block_mask finds other {name} blocks.")


def _num_bytes(mask: Any) -> int:
    parts = [
        getattr(mask, f"{name}_{part}") for name in _LISTS for part in ("num_blocks", "indices")
    ]
    return sum(part.nbytes for part in parts)
