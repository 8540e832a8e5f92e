"""Figures of a span of time, from what was read at its two ends; and of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.loader.checks import gather_over_ranks
from omniload.loader.notes import Count
from omniload.loader.stats import CacheUse, SourceShare, Span, Spread, Stats
from omniload.world import World

__all__ = ["SUMS", "Reading", "Wanted", "make_span", "over_ranks"]

Int64Array = npt.NDArray[np.int64]
#: Shares of samples, tokens and tiles that a set has in the epoch; None: no mixture.
Wanted = tuple[float | None, float | None, float | None]

SUMS = (
    "batches", "fillers", "steps", "samples", "tokens", "padding_tokens", "loss_tokens", "tiles",
    "wait_ns", "loop_ns", "ready_ns", "filled", "fill_tokens", "fill_tiles", "pad_unpacked",
    "dist_count", "dist_tokens", "dist_tiles", "dist_cost",
)  # fmt: skip
_WHOLE = (
    "batches",
    "fillers",
    "steps",
    "samples",
    "tokens",
    "padding_tokens",
    "loss_tokens",
    "tiles",
)
_CACHE = ("hits", "misses", "fetched_files", "fetched_bytes", "wait_s")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """All sums at one moment.

    Args:
        sums: by name.
        skipped: rows that could not be used, by what was wrong.
        counts: int64 (num_workers, 16), of the workers.
        cache: of this process; empty: nothing is far away.
        sources: int64 (num_sets, 3), samples, tokens and tiles of each set.
    """

    sums: dict[str, float]
    skipped: Counter[str]
    counts: Int64Array
    cache: dict[str, float]
    sources: Int64Array


def make_span(
    first: Reading, last: Reading, *, has_tile_budget: bool, sources: Mapping[str, Wanted]
) -> Span:
    """Make the figures of a span.

    Args:
        first: what was read at its beginning.
        last: what was read at its end.
        has_tile_budget: whether tiles have a budget.
        sources: for each set, in order, the shares that it has in the epoch.
    """
    sums = {name: last.sums[name] - first.sums[name] for name in SUMS}
    counts = last.counts - first.counts
    wall = sums["wait_ns"] + sums["loop_ns"]
    busy = counts[:, [Count.READ, Count.TRANSFORM, Count.PACK]]
    shares = np.clip(busy.sum(axis=1) / max(wall, 1), 0.0, 1.0)
    filled, met = max(sums["filled"], 1), max(sums["dist_count"], 1)
    read_s, transform_s, pack_s = (busy.sum(axis=0) / 1e9).tolist()
    values: dict[str, Any] = {name: int(sums[name]) for name in _WHOLE}
    return Span(
        **values,
        skipped=dict(last.skipped - first.skipped),
        wait_s=sums["wait_ns"] / 1e9,
        loop_s=sums["loop_ns"] / 1e9,
        wait_ready_s=sums["ready_ns"] / 1e9,
        busy=tuple(shares.tolist()),
        read_s=read_s,
        transform_s=transform_s,
        pack_s=pack_s,
        bytes_read=int(counts[:, Count.BYTES].sum()),
        cache=_cache_use(first, last, counts),
        fill_tokens=sums["fill_tokens"] / filled,
        fill_tiles=sums["fill_tiles"] / filled if has_tile_budget else None,
        pad_ratio=sums["padding_tokens"] / max(sums["tokens"] + sums["padding_tokens"], 1),
        pad_ratio_unpacked=sums["pad_unpacked"] / filled,
        dist_tokens=sums["dist_tokens"] / met,
        dist_tiles=sums["dist_tiles"] / met,
        dist_cost=sums["dist_cost"] / met,
        sources=_shares(last.sources - first.sources, sources),
    )


def over_ranks(stats: Stats, world: World) -> Stats:
    """Add the figures of the other ranks; a collective over all processes.

    Args:
        stats: of this rank.
        world: who this rank is.

    Raises:
        ConfigError: the collective failed or timed out.
    """
    gathered = gather_over_ranks(_compared(stats.this_epoch), world, what="stats")
    order = sorted(gathered)
    ranks = {}
    for name in gathered[world.dp_rank]:
        values = [float(gathered[rank][name]) for rank in order]
        most = max(range(len(order)), key=values.__getitem__)
        ranks[name] = Spread(
            least=min(values),
            mean=sum(values) / len(values),
            most=values[most],
            rank=order[most],
        )
    return replace(stats, ranks=ranks)


def _compared(span: Span) -> dict[str, float]:
    names = ("batches", "samples", "tokens", "loss_tokens", "tiles", "wait_s", "loop_s",
             "wait_share", "busy_share", "read_s", "transform_s", "pack_s", "bytes_read",
             "fill_tokens", "pad_ratio", "pad_ratio_unpacked")  # fmt: skip
    found = {name: float(getattr(span, name)) for name in names}
    return {**found, "skipped": float(sum(span.skipped.values()))}


def _shares(found: Int64Array, sources: Mapping[str, Wanted]) -> dict[str, SourceShare]:
    totals = np.maximum(found.sum(axis=0), 1)
    lines = zip(sources.items(), found.tolist(), (found / totals).tolist(), strict=True)
    return {
        name: SourceShare(
            samples=line[0],
            tokens=line[1],
            tiles=line[2],
            share_of_samples=share[0],
            share_of_tokens=share[1],
            share_of_tiles=share[2],
            wanted_samples=wanted[0],
            wanted_tokens=wanted[1],
            wanted_tiles=wanted[2],
        )
        for (name, wanted), line, share in lines
    }


def _cache_use(first: Reading, last: Reading, counts: Int64Array) -> CacheUse | None:
    if not last.cache:
        return None
    of_workers = counts[:, Count.CACHE_HITS : Count.CACHE_WAIT + 1].sum(axis=0).tolist()
    of_workers[-1] /= 1e9
    found = [
        last.cache[name] - first.cache.get(name, 0.0) + more
        for name, more in zip(_CACHE, of_workers, strict=True)
    ]
    return CacheUse(
        hits=int(found[0]),
        misses=int(found[1]),
        fetched_files=int(found[2]),
        fetched_bytes=int(found[3]),
        wait_s=found[4],
    )
