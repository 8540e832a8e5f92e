"""Figures written out while a loader runs: JSON lines, a Prometheus file, a line in the log."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from omniload.errors import ConfigError
from omniload.loader.stats import Span, Stats
from omniload.world import World

__all__ = ["Metrics", "Reporter", "prometheus_text"]

_log = logging.getLogger(__name__)

#: seconds; some thirty years
_LONGEST_S = 1e9
#: sums since the loader was made -> what they are; in Prometheus their names end in _total
_SUMS = {
    "batches": "Micro-batches handed out.",
    "fillers": "Micro-batches without rows.",
    "steps": "Optimizer steps completed.",
    "samples": "Rows handed out.",
    "tokens": "Tokens handed out.",
    "padding_tokens": "Tokens of padding.",
    "loss_tokens": "Tokens that give loss.",
    "tiles": "Image tiles.",
    "wait_s": "Seconds that the training loop waited for data.",
    "loop_s": "Seconds that the training loop worked.",
    "bytes_read": "Bytes of the records that were read.",
}
#: ratios of the running epoch
_RATIOS = {
    "wait_share": "Share of the time that the training loop waited for data.",
    "busy_share": "Share of the time that workers made batches.",
    "fill_tokens": "Share of the token budget that a batch uses.",
    "fill_tiles": "Share of the tile budget that a batch uses.",
    "pad_ratio": "Share of positions that is padding.",
    "dist_tokens": "Share of tokens that ranks wait for.",
    "dist_tiles": "Share of tiles that ranks wait for.",
    "dist_cost": "Share of estimated time that ranks wait for.",
}
_CACHE = {
    "hits": "Files found in the cache.",
    "misses": "Files that had to be fetched first.",
    "fetched_files": "Files fetched.",
    "fetched_bytes": "Bytes fetched.",
}


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Where a loader writes its figures while it runs; `omniload.DataLoader(metrics=)`.

    With more than one data-parallel rank each has files of its own: `metrics.jsonl` becomes
    `metrics.rank3.jsonl`. Of ranks that share their data, the first writes. A file that can't be
    written is told of in the log, once, and never ends training.

    Args:
        jsonl: file that gets one JSON line each time: time, and `Stats.as_dict()`.
        prometheus: file that is replaced each time, for the textfile collector of node_exporter,
            which reads `*.prom`.
        every_s: seconds between two of them; there is one more at the end of an epoch.
        log_every_s: seconds between two lines in the log; None: no such lines.

    Raises:
        ConfigError: a value is wrong.
    """

    jsonl: str | os.PathLike[str] | None = None
    prometheus: str | os.PathLike[str] | None = None
    every_s: float = 15.0
    log_every_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("jsonl", "prometheus"):
            path = getattr(self, name)
            if path is not None and not isinstance(path, (str, os.PathLike)):
                raise ConfigError(
                    f"Metrics.{name} must be a path or None, got {type(path).__name__}."
                )
            if path is not None and not _names_file(path):
                raise ConfigError(f"Metrics.{name} must name a file, got {os.fspath(path)!r}.")
        if self.jsonl is not None and self.prometheus is not None:
            if Path(self.jsonl).resolve() == Path(self.prometheus).resolve():
                raise ConfigError(
                    "Metrics.jsonl and Metrics.prometheus must be two files, got "
                    f"{os.fspath(self.jsonl)!r} for both."
                )
        for name in ("every_s", "log_every_s"):
            value = getattr(self, name)
            if value is None and name == "log_every_s":
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and 0 <= value <= _LONGEST_S):
                raise ConfigError(f"Metrics.{name} must be seconds, at least 0, got {value!r}.")


class Reporter:
    """Writes the figures of one rank.

    Args:
        metrics: where and how often; None: nowhere.
        world: this rank.
        stats: gives the figures.
        clock: seconds.
    """

    def __init__(
        self,
        metrics: Metrics | None,
        *,
        world: World,
        stats: Callable[[], Stats],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if metrics is not None and not isinstance(metrics, Metrics):
            raise ConfigError(
                f"metrics must be an omniload.Metrics or None, got {type(metrics).__name__}."
            )
        metrics = metrics or Metrics()
        writes = world.replica_rank == 0
        self._jsonl = _of_rank(metrics.jsonl, world) if writes else None
        self._prometheus = _of_rank(metrics.prometheus, world) if writes else None
        self._every_s = metrics.every_s if self._jsonl or self._prometheus else math.inf
        log_every_s = metrics.log_every_s if writes else None
        self._log_every_s = math.inf if log_every_s is None else log_every_s
        self._stats, self._clock = stats, clock
        self._write_at = clock() + self._every_s
        self._log_at = clock() + self._log_every_s
        self._failed: set[Path] = set()

    def given(self) -> None:
        """Note that a batch was handed out; writes where it is time to."""
        now = self._clock()
        if now >= self._write_at:
            self._write_at = now + self._every_s
            self._write()
        if now >= self._log_at:
            self._log_at = now + self._log_every_s
            _log.info("%s", self._stats())

    def ended(self) -> None:
        """Note that an epoch ended."""
        if math.isfinite(self._every_s):
            self._write()

    def _write(self) -> None:
        stats = self._stats()
        if self._jsonl is not None:
            line = json.dumps({"time": round(time.time(), 3), **stats.as_dict()})
            self._try(self._jsonl, lambda path: _append(path, f"{line}\n"))
        if self._prometheus is not None:
            text = prometheus_text(stats)
            self._try(self._prometheus, lambda path: _replace(path, text))

    def _try(self, path: Path, write: Callable[[Path], None]) -> None:
        try:
            write(path)
        except OSError as error:
            if path not in self._failed:
                self._failed.add(path)
                _log.warning(
                    "figures can't be written to %s (%s); training goes on without",
                    path,
                    error.strerror,
                )


def prometheus_text(stats: Stats) -> str:
    """Write figures in the text format of Prometheus: sums as counters, ratios as gauges."""
    return "".join(f"{line}\n" for line in _prometheus_lines(stats))


def _prometheus_lines(stats: Stats) -> Iterator[str]:
    label = f'rank="{stats.rank}"'
    epoch, start = stats.this_epoch, stats.since_start
    for name, value, meaning in (
        ("epoch", stats.epoch, "Epoch that is running."),
        ("step", stats.step, "Optimizer step of the last batch."),
        ("ready", stats.ready, "Batches that wait for the training loop."),
    ):
        yield from _metric(name, "gauge", meaning, [(label, value)])
    for name, meaning in _SUMS.items():
        yield from _metric(_counter(name), "counter", meaning, [(label, getattr(start, name))])
    for name, meaning in _RATIOS.items():
        if getattr(epoch, name) is not None:
            yield from _metric(name, "gauge", meaning, [(label, getattr(epoch, name))])
    skipped = [(f'{label},kind="{_escaped(kind)}"', n) for kind, n in start.skipped.items()]
    yield from _metric("skipped_total", "counter", "Rows that could not be used.", skipped)
    yield from _by_source(label, start)
    for name, meaning in _CACHE.items() if start.cache is not None else ():
        value = getattr(start.cache, name)
        yield from _metric(f"cache_{name}_total", "counter", meaning, [(label, value)])


def _by_source(label: str, start: Span) -> Iterator[str]:
    for name, meaning in (("samples", "Rows"), ("tokens", "Tokens"), ("tiles", "Image tiles")):
        values = [
            (f'{label},source="{_escaped(source)}"', getattr(share, name))
            for source, share in start.sources.items()
        ]
        yield from _metric(f"source_{name}_total", "counter", f"{meaning} of each set.", values)


def _metric(
    name: str, kind: str, meaning: str, values: Sequence[tuple[str, float]]
) -> Iterator[str]:
    if values:
        yield f"# HELP omniload_{name} {meaning}"
        yield f"# TYPE omniload_{name} {kind}"
    for labels, value in values:
        yield f"omniload_{name}{{{labels}}} {value}"


def _counter(name: str) -> str:
    unit = f"{name[:-2]}_seconds" if name.endswith("_s") else name
    return f"{unit}_total"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _of_rank(path: str | os.PathLike[str] | None, world: World) -> Path | None:
    if path is None:
        return None
    given = Path(path)
    if world.dp_world_size == 1:
        return given
    return given.with_name(f"{given.stem}.rank{world.dp_rank}{given.suffix}")


def _names_file(path: str | os.PathLike[str]) -> bool:
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return bool(name) and b"\0" not in name


def _append(path: Path, text: str) -> None:
    """Add a line; one that was cut off when a run was killed is ended first."""
    # a pipe that nobody reads is not waited for
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            text = f"\n{text}"
        lines = text.encode()
        while lines:  # on a disk that is full a part may be written, and then an error comes
            lines = lines[os.write(descriptor, lines) :]
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    # loaders of one process, or of machines that share the folder, may write at the same time
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
