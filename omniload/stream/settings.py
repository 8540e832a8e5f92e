"""What decides how a stream is packed, and which part of it a process reads."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omniload._checks import MAX_INT63, check_count
from omniload.errors import ConfigError
from omniload.grouping.buffered import BufferedSettings
from omniload.padding import Padding
from omniload.source import RowSource
from omniload.transforms import Transform
from omniload.types import Budget, Record, Sample

__all__ = ["Samples", "StreamPart", "StreamSettings", "check_samples", "open_part"]


@dataclass(frozen=True, kw_only=True)
class StreamPart:
    """Which part of a stream one process reads: part `index` of `count`.

    Args:
        rank: data-parallel rank.
        num_ranks: data-parallel ranks.
        worker: worker process on that rank.
        num_workers: worker processes on each rank, at least 1.
        epoch: how often the stream was begun before.
    """

    rank: int = 0
    num_ranks: int = 1
    worker: int = 0
    num_workers: int = 1
    epoch: int = 0

    @property
    def index(self) -> int:
        """Number of this part, below `count`."""
        return self.rank * self.num_workers + self.worker

    @property
    def count(self) -> int:
        """Parts of the stream."""
        return self.num_ranks * self.num_workers


#: A stream: samples themselves, or a function that opens one part of them.
Samples = Iterable[Sample | Record] | Callable[[StreamPart], Iterable[Sample | Record]]


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """How a stream is packed; the arguments of `StreamLoader` of the same names.

    Raises:
        ConfigError: a value is wrong.
    """

    budget: Budget
    buffer: int = 1024
    transform: Transform | None = None
    pad_to: int | Padding | None = None
    oversize: str = "error"
    on_bad_sample: str = "raise"
    seed: int = 0
    dummy_tokens: int = 0  # of the document that text-only groups keep room for
    padding: Padding = field(init=False)
    grouping: BufferedSettings = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise ConfigError(
                f"budget must be an omniload.Budget, got {type(self.budget).__name__}."
            )
        check_count("seed", self.seed, most=MAX_INT63)
        if self.transform is not None and not isinstance(self.transform, Transform):
            raise ConfigError(
                "transform must follow omniload.transforms.Transform (callable, fingerprint, "
                f"filler, lengths, model_inputs), got {type(self.transform).__name__}."
            )
        for name, value, known in (
            ("oversize", self.oversize, ("error", "drop")),
            ("on_bad_sample", self.on_bad_sample, ("raise", "skip")),
        ):
            if value not in known:
                raise ConfigError(f"{name} must be {known[0]!r} or {known[1]!r}, got {value!r}.")
        padding = Padding.of(self.pad_to)
        if self.budget.tokens % padding.row_multiple:
            raise ConfigError(
                "Budget.tokens must be a multiple of what rows are padded to: expected a multiple "
                f"of {padding.row_multiple}, got {self.budget.tokens}."
            )
        object.__setattr__(self, "padding", padding)
        object.__setattr__(
            self,
            "grouping",
            BufferedSettings(buffer=self.buffer, dummy_tokens=self.dummy_tokens),
        )


def check_samples(samples: Any, *, num_workers: int) -> None:
    """Check what a stream is made of, as far as that shows before it is opened.

    Args:
        samples: as `StreamLoader` got them.
        num_workers: worker processes of this rank.

    Raises:
        ConfigError: it is neither iterable nor a function of a `StreamPart`; a path or an opened
            set; or one iterable for worker processes that can't share it.
    """
    kind = type(samples).__name__
    if isinstance(samples, (str, os.PathLike, RowSource)):
        raise ConfigError(
            f"samples must be a function of a StreamPart, or iterable, got {kind}: "
            f"{samples!r:.80}. Shards, indexed tars and mixtures are read by "
            "omniload.DataLoader(source)."
        )
    if isinstance(samples, Iterator) and num_workers:
        raise ConfigError(
            f"an iterator can't be sent to worker processes: got {kind} with "
            f"num_workers={num_workers}. Give a function of a StreamPart that opens the stream, or "
            "num_workers=0."
        )
    if isinstance(samples, Iterable):
        if num_workers > 1:
            raise ConfigError(
                "samples must be a function of a StreamPart where several workers read: got "
                f"{kind} with num_workers={num_workers}, of which each worker would read "
                "everything. Give a function that opens part `part.index` of `part.count`, or "
                "num_workers=1."
            )
        return
    if not callable(samples):
        raise ConfigError(f"samples must be iterable, or a function of a StreamPart, got {kind}.")
    try:
        signature = inspect.signature(samples)
    except (TypeError, ValueError):
        return  # of some functions in C nobody knows it
    try:
        signature.bind(StreamPart())
    except TypeError:
        raise ConfigError(
            "samples must be a function of one argument, the StreamPart that it opens, got one "
            f"with the arguments {signature}."
        ) from None


def open_part(samples: Samples, part: StreamPart) -> Iterable[Any]:
    """Begin to read a part of a stream.

    Raises:
        ConfigError: the function gives nothing iterable.
    """
    if isinstance(samples, Iterable):
        return samples
    opened: Any = samples(part)
    if not isinstance(opened, Iterable):
        raise ConfigError(
            f"samples must give something iterable for a StreamPart, got {type(opened).__name__}."
        )
    return opened
