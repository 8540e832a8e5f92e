"""A stream of samples through a bounded buffer to packed rows: what one process does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from omniload.batch import PackedBatch
from omniload.errors import ConfigError, OmniloadError, SampleError
from omniload.grouping.buffered import BufferedPacker
from omniload.loss import LossTotals
from omniload.packing import pack
from omniload.rng import sample_generator
from omniload.stream.settings import StreamPart, StreamSettings
from omniload.types import Budget, Groups, Record, Sample

__all__ = ["Dropped", "Made", "make_batches", "pack_stream"]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A sample that is left out.

    Args:
        kind: "oversize" or "bad".
        where: what names it.
        reason: what must hold and what was found.
    """

    kind: str
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class Made:
    """What comes out of a stream: a batch, and what was left out since the last one.

    Args:
        batch: None at the end of a stream, if something was left out after its last batch.
        totals: loss tokens of the batch.
        dropped: what was left out.
    """

    batch: PackedBatch | None
    totals: LossTotals
    dropped: tuple[Dropped, ...]

    def pin_memory(self) -> Made:
        """Copy the batch to page-locked memory; torch calls it."""
        batch = None if self.batch is None else self.batch.pin_memory()
        return Made(batch, self.totals, self.dropped)


def pack_stream(
    samples: Iterable[Sample | Record], settings: StreamSettings, *, part: StreamPart | None = None
) -> Iterator[PackedBatch]:
    """Pack a stream in this process; each batch is a step of its own, until the stream ends.

    It says nothing to other ranks: where several train together, use `StreamLoader`, or some of
    them will wait for ever.

    Args:
        samples: samples, or records for the transform.
        settings: how.
        part: whose numbers samples without one get; None: the only part.

    Yields:
        Batches. What is left out (oversize="drop", on_bad_sample="skip") is left out silently.

    Raises:
        ConfigError: a sample over budget; records without a transform.
        SampleError: the transform failed.
    """
    for step, made in enumerate(make_batches(samples, settings, part or StreamPart())):
        if made.batch is not None:
            yield replace(made.batch, step=step)


def make_batches(
    samples: Iterable[Any], settings: StreamSettings, part: StreamPart
) -> Iterator[Made]:
    """Pack a stream, and say what is left out.

    Args:
        samples: samples or records.
        settings: how.
        part: whose samples these are; samples without a number get one that no other part gives.

    Yields:
        Batches; the last may be None.
    """
    return _Packer(settings, part).run(samples)


class _Packer:
    def __init__(self, settings: StreamSettings, part: StreamPart) -> None:
        self._settings = settings
        self._part = part
        self._packer = BufferedPacker(budget=settings.budget, settings=settings.grouping)
        self._waiting: dict[int, Sample | Record] = {}
        self._arrived = 0
        self._pushed = 0
        self._dropped: list[Dropped] = []

    def run(self, samples: Iterable[Any]) -> Iterator[Made]:
        for item in samples:
            found = self._numbered(item)
            lengths = self._lengths(found)
            if lengths is None:
                continue
            self._waiting[self._pushed] = found
            self._pushed += 1
            yield from self._batches(
                self._packer.push(np.array([lengths[0]]), np.array([lengths[1]]))
            )
        yield from self._batches(self._packer.flush())
        if self._dropped:
            yield Made(None, LossTotals.of([]), self._taken_dropped())

    def _numbered(self, item: Any) -> Sample | Record:
        number = self._arrived * self._part.count + self._part.index
        self._arrived += 1
        if isinstance(item, Sample):
            return item if item.sample_id >= 0 else replace(item, sample_id=number)
        if isinstance(item, Record):
            if self._settings.transform is None:
                raise ConfigError("a stream of records needs a transform=, got None.")
            return item if item.row >= 0 else replace(item, row=number)
        hint = ""
        if isinstance(item, Mapping) and "__key__" in item:
            hint = (
                " Samples of webdataset become records by omniload.interop.records_stage(maker), "
                "as omniload.interop.open_webdataset(urls, maker=maker) does by itself."
            )
        raise ConfigError(
            "a stream must give omniload.Sample or omniload.Record, got "
            f"{type(item).__name__} (item {self._arrived - 1}).{hint}"
        )

    def _lengths(self, item: Sample | Record) -> tuple[int, int] | None:
        """Tokens and tiles, as they count for the budget; None: the sample is left out."""
        if isinstance(item, Sample):
            tokens, tiles = item.num_tokens, item.num_tiles
        else:
            try:
                tokens, tiles, _ = _transform(self._settings).lengths(item)
            except Exception as error:
                self._refuse(item, error)
                return None
        unit = self._settings.padding.document_multiple
        tokens = -(-tokens // unit) * unit
        reason = _over(self._settings.budget, tokens, tiles, self._settings.dummy_tokens)
        if not reason:
            return tokens, tiles
        if self._settings.oversize == "error":
            raise ConfigError(
                f"every sample must fit the budget: {reason} ({_where(item)}). Raise the budget, "
                "or use oversize='drop'."
            )
        self._dropped.append(Dropped("oversize", _where(item), reason))
        return None

    def _batches(self, groups: Groups) -> Iterator[Made]:
        for group in groups:
            items = [self._waiting.pop(number) for number in group.tolist()]
            samples = [sample for item in items if (sample := self._sample(item)) is not None]
            if not samples:
                continue
            totals = LossTotals.of([sample.num_loss_tokens for sample in samples])
            batch = pack(
                samples,
                num_loss_tokens_step=totals.num_tokens,
                num_loss_samples_step=totals.num_samples,
                sqrt_loss_tokens_step=totals.sqrt_tokens,
                pad_to=self._settings.padding,
            )
            yield Made(batch, totals, self._taken_dropped())

    def _sample(self, item: Sample | Record) -> Sample | None:
        """Transform a record; None if that fails and is to be passed over."""
        if isinstance(item, Sample):
            return item
        transform = _transform(self._settings)
        rng = sample_generator(self._settings.seed, self._part.epoch, item.row)
        try:
            sample: Any = transform(item, rng)
            if not isinstance(sample, Sample):
                raise SampleError(
                    f"the transform must return an omniload.Sample, got {type(sample).__name__}"
                )
            planned = tuple(transform.lengths(item))[:2]
            if (sample.num_tokens, sample.num_tiles) != planned:
                raise SampleError(
                    f"(tokens, tiles) must be {planned}, as lengths of the transform says, got "
                    f"{(sample.num_tokens, sample.num_tiles)}"
                )
        except Exception as error:
            self._refuse(item, error)
            return None
        return sample

    def _refuse(self, item: Record, error: Exception) -> None:
        said = (
            str(error) if isinstance(error, OmniloadError) else f"{type(error).__name__}: {error}"
        )
        if self._settings.on_bad_sample == "raise":
            raise SampleError(f"{said} ({_where(item)})") from error
        self._dropped.append(Dropped("bad", _where(item), said))

    def _taken_dropped(self) -> tuple[Dropped, ...]:
        taken, self._dropped = tuple(self._dropped), []
        return taken


def _transform(settings: StreamSettings) -> Any:
    return settings.transform


def _over(budget: Budget, tokens: int, tiles: int, dummy_tokens: int) -> str:
    if tokens > budget.tokens:
        return f"expected at most {budget.tokens} tokens, got {tokens}"
    if budget.tiles is not None and tiles > budget.tiles:
        return f"expected at most {budget.tiles} tiles, got {tiles}"
    if tiles == 0 and tokens > budget.tokens - dummy_tokens:
        return (
            f"expected at most {budget.tokens - dummy_tokens} tokens of a text, beside which a "
            f"dummy image has room, got {tokens}"
        )
    return ""


def _where(item: Sample | Record) -> str:
    if isinstance(item, Sample):
        return f"sample_id={item.sample_id}"
    return f"row={item.row}, key={item.key!r}, source={item.source!r}, shard={item.shard!r}"
