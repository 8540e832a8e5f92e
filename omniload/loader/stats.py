"""Figures of a running loader, as values: what was handed out, and who waited for whom."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["CacheUse", "SlowRow", "SourceShare", "Span", "Spread", "Stats"]


@dataclass(frozen=True, kw_only=True)
class SourceShare:
    """What one data set gave to a rank.

    Args:
        samples: rows of it that were handed out.
        tokens: their tokens.
        tiles: their tiles.
        share_of_samples: `samples` over those of all sets.
        share_of_tokens: likewise.
        share_of_tiles: likewise; 0 where there are none.
        wanted_samples: the share of rows that the mixture has in the whole epoch, over all ranks;
            None: no mixture.
        wanted_tokens: likewise.
        wanted_tiles: likewise.
    """

    samples: int
    tokens: int
    tiles: int
    share_of_samples: float
    share_of_tokens: float
    share_of_tiles: float
    wanted_samples: float | None = None
    wanted_tokens: float | None = None
    wanted_tiles: float | None = None


@dataclass(frozen=True, kw_only=True)
class CacheUse:
    """What a rank and its workers did with the caches of far-away shards.

    Args:
        hits: files that were opened and lay in the cache.
        misses: files that had to be fetched first.
        fetched_files: files fetched, ahead or not.
        fetched_bytes: their bytes.
        wait_s: seconds for which reading stood still, summed over workers.
    """

    hits: int
    misses: int
    fetched_files: int
    fetched_bytes: int
    wait_s: float


@dataclass(frozen=True, kw_only=True)
class SlowRow:
    """The row that took a worker longest in this epoch, but for its first seconds.

    Args:
        row: row of the index.
        seconds: time to read or transform it.
    """

    row: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """The figures of a rank over a span of time.

    Args:
        batches: micro-batches handed out.
        fillers: of them, those without rows.
        steps: optimizer steps completed.
        samples: rows handed out; those that were skipped are left out.
        skipped: rows that could not be used, by what was wrong.
        tokens: tokens handed out, fillers and dummies included, padding not.
        padding_tokens: tokens of padding.
        loss_tokens: tokens that give loss.
        tiles: image tiles.
        wait_s: seconds that the training loop waited in `iter()` and `next()`.
        loop_s: seconds that it worked between two calls of `next()`.
        wait_ready_s: the part of `wait_s` for which the next batch was made already.
        busy: for each worker, the share of `wait_s + loop_s` in which it made batches.
        read_s: seconds spent on reading, summed over workers.
        transform_s: likewise on transforms: decoding, resizing, tokens.
        pack_s: likewise on packing.
        bytes_read: bytes of the records that were read: encoded images and tokens.
        cache: of far-away shards; None: all are local.
        fill_tokens: mean share of the token budget that a batch uses, fillers left out.
        fill_tiles: likewise of tiles; None: no such budget.
        pad_ratio: share of all positions that is padding.
        pad_ratio_unpacked: what it would be with each batch as padded rows, mean over batches.
        dist_tokens: share of tokens that ranks wait for in a step, as planned: mean dist ratio of
            the steps, or of the micro-steps with sync="micro-step".
        dist_tiles: likewise of tiles.
        dist_cost: likewise of estimated time.
        sources: what each set of a mixture gave; one entry where all rows are of one set; empty
            where shards of several sources are read without a mixture.
    """

    batches: int
    fillers: int
    steps: int
    samples: int
    skipped: Mapping[str, int]
    tokens: int
    padding_tokens: int
    loss_tokens: int
    tiles: int
    wait_s: float
    loop_s: float
    wait_ready_s: float
    busy: tuple[float, ...]
    read_s: float
    transform_s: float
    pack_s: float
    bytes_read: int
    cache: CacheUse | None
    fill_tokens: float
    fill_tiles: float | None
    pad_ratio: float
    pad_ratio_unpacked: float
    dist_tokens: float
    dist_tiles: float
    dist_cost: float
    sources: Mapping[str, SourceShare] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time in all: waiting and working."""
        return self.wait_s + self.loop_s

    @property
    def wait_share(self) -> float:
        """Share of the time that the training loop waited; 0 to 1."""
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def busy_share(self) -> float:
        """Mean of `busy`."""
        return sum(self.busy) / len(self.busy) if self.busy else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        found = asdict(self)
        found["busy"] = list(self.busy)
        return {**found, "wait_share": self.wait_share, "busy_share": self.busy_share}

    def __str__(self) -> str:
        pace = self.tokens / self.seconds if self.seconds > 0 else 0.0
        parts = [
            f"{self.batches} batches",
            f"{self.samples} samples",
            f"{self.tokens} tokens ({pace:,.0f}/s)",
            f"{self.tiles} tiles",
            f"waited {self.wait_s:.1f} s ({self.wait_share:.1%})",
            f"workers busy {self.busy_share:.0%}",
            f"fill {self.fill_tokens:.1%}",
        ]
        if self.fill_tiles is not None:
            parts[-1] += f" of tokens, {self.fill_tiles:.1%} of tiles"
        if self.padding_tokens:
            parts.append(f"padding {self.pad_ratio:.1%}")
        parts.append(f"dist {self.dist_tokens:.1%} tokens, {self.dist_tiles:.1%} tiles")
        parts.append(f"read {self.bytes_read / 1e6:,.1f} MB")
        if self.cache is not None:
            fetched = self.cache.fetched_bytes / 1e6
            parts.append(
                f"cache {self.cache.hits} hits, {self.cache.misses} misses, {fetched:,.1f} MB"
            )
        parts += [f"skipped {count} ({kind})" for kind, count in self.skipped.items()]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over all data-parallel ranks.

    Args:
        least: smallest.
        mean: mean.
        most: largest.
        rank: the data-parallel rank that has the largest.
    """

    least: float
    mean: float
    most: float
    rank: int


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The figures of a loader on one rank; what `DataLoader.stats` returns.

    Args:
        rank: the data-parallel rank.
        dp_world_size: of so many.
        epoch: the epoch that is running, or that ended last.
        step: optimizer step of the last batch; -1: there was none.
        micro_step: micro-batch in it.
        num_workers: workers.
        worker_type: "process", "thread", or "none".
        ready: batches that are made and wait for the training loop.
        this_epoch: since the newest `iter()`.
        since_start: since the loader was made.
        slowest: the row that took longest in this epoch; None: nothing was read yet.
        ranks: with reduce=True, figures of `this_epoch` over all ranks, by name; else None.
    """

    rank: int
    dp_world_size: int
    epoch: int
    step: int
    micro_step: int
    num_workers: int
    worker_type: str
    ready: int
    this_epoch: Span
    since_start: Span
    slowest: SlowRow | None
    ranks: Mapping[str, Spread] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        spans = {name: getattr(self, name).as_dict() for name in ("this_epoch", "since_start")}
        return {**asdict(self), **spans}

    def __str__(self) -> str:
        text = f"rank {self.rank}, epoch {self.epoch}, step {self.step}: {self.this_epoch}"
        if self.ranks is not None:
            wait = self.ranks["wait_share"]
            text += (
                f"; over {self.dp_world_size} ranks waited {wait.least:.1%} to {wait.most:.1%}, "
                f"most on rank {wait.rank}"
            )
        return text
