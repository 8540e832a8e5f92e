"""What decides how a stream is packed, and which part of it a process reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from omniload._checks import check_count
from omniload.errors import ConfigError
from omniload.grouping.buffered import BufferedSettings
from omniload.padding import Padding
from omniload.transforms import Transform
from omniload.types import Budget, Record, Sample

__all__ = ["Samples", "StreamPart", "StreamSettings", "open_part"]


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
        check_count("seed", self.seed, least=0)
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


def open_part(samples: Samples, part: StreamPart) -> Iterator[Any]:
    """Begin to read a part of a stream.

    Raises:
        ConfigError: it is neither iterable nor a function that gives something iterable, or it is
            one iterable for several worker processes, which would each read all of it.
    """
    if isinstance(samples, Iterable):
        if part.num_workers > 1:
            raise ConfigError(
                "samples must be a function of a StreamPart where several workers read: got "
                f"{type(samples).__name__} with num_workers={part.num_workers}, of which each "
                "worker would read everything. Give a function that opens part `part.index` of "
                "`part.count`, or num_workers=1."
            )
        return iter(samples)
    if not callable(samples):
        raise ConfigError(
            "samples must be iterable, or a function of a StreamPart, got "
            f"{type(samples).__name__}."
        )
    opened: Any = samples(part)
    if not isinstance(opened, Iterable):
        raise ConfigError(
            f"samples must give something iterable for a StreamPart, got {type(opened).__name__}."
        )
    return iter(opened)
