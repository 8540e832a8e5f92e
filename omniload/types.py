"""The values that travel between the layers; NumPy only, frozen, checked when made.

    LengthIndex -> Groups -> StepPlan -> Record -> Sample -> PackedBatch

`LengthIndex` is in `index.py`, `StepPlan` in `plan.py`, `PackedBatch` in `batch.py`; the rest is
here.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError

if TYPE_CHECKING:
    from omniload.index import LengthIndex

__all__ = ["IGNORE_INDEX", "Budget", "Groups", "Message", "Record", "Sample", "SkippedSample"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

#: Label of a position that gives no loss; the default of `torch.nn.functional.cross_entropy`.
IGNORE_INDEX = -100

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper bounds of one group, that is, of one packed row on one rank.

    Args:
        tokens: tokens the language model sees, image tokens included.
        tiles: image tiles the vision encoder sees; None: no limit.
        samples: samples in a group; None: no limit.

    Raises:
        ConfigError: a bound is not an integer, or too small or too large to be one.
    """

    tokens: int
    tiles: int | None = None
    samples: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("tokens", self.tokens, 1),
            ("tiles", self.tiles, 0),
            ("samples", self.samples, 1),
        ):
            if value is None and name != "tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ConfigError(f"Budget.{name} must be an integer, got {value!r}.")
            if not least <= value <= _INT32_MAX:
                raise ConfigError(
                    f"Budget.{name} must be between {least} and {_INT32_MAX}, got {value}."
                )
            object.__setattr__(self, name, int(value))

    @classmethod
    def auto(
        cls,
        index: LengthIndex,
        *,
        tokens: int | None = None,
        memory: str | float | None = None,
        model: Any = None,
        plan: Any = None,
        samples: int | None = None,
        accumulation: int = 1,
        verbose: bool = True,
    ) -> Budget:
        """Choose a budget from the data: the tiles that go with a token budget, or all of it.

        With `tokens`: starts from `ceil(tokens * mean tiles / mean tokens)`, packs a part of the
        rows with this many tiles, a few fewer and a few more, and takes the one that costs the
        least time. See `omniload.grouping.budgets.auto_budget`, which returns all trials.

        With `memory` and `model`: the largest budget whose micro-batches fit a GPU, tiles and
        tokens in the ratio of the data. See `omniload.pipeline.budget.fit_budget`.

        Args:
            index: lengths of all rows, for example `omniload.shards.open_shards(path).index`.
            tokens: token budget of a group.
            memory: memory of one GPU, as "80GB" or in bytes, instead of `tokens`.
            model: for `memory`, an `omniload.pipeline.CostTable`, or the name of a preset.
            plan: for `memory`, an `omniload.pipeline.PipelinePlan`; None: all layers on one GPU,
                nothing recomputed.
            samples: most samples of a group; None: no limit.
            accumulation: micro-batches of an optimizer step.
            verbose: print what was chosen, and what one tile fewer or more would cost.

        Raises:
            ConfigError: no row fits the token budget, the longest row doesn't fit the memory, or
                both or neither of them are given.
        """
        # The calls upwards: the searches need more than values, but users look for them here.
        if (tokens is None) == (memory is None) or (memory is None) != (model is None):
            raise ConfigError(
                "Budget.auto needs either tokens, or memory and model: got "
                f"tokens={tokens!r}, memory={memory!r}, model={model!r}."
            )
        if memory is not None:
            fits = importlib.import_module("omniload.pipeline.budget")
            budget: Budget = fits.auto_memory_budget(
                index.num_tokens,
                index.num_tiles,
                memory=memory,
                model=model,
                plan=plan,
                samples=samples,
            )
            if verbose:
                print(  # noqa: T201
                    f"budget for {memory}: {budget.tokens} tokens, {budget.tiles} tiles"
                )
            return budget
        budgets = importlib.import_module("omniload.grouping.budgets")
        choice = budgets.auto_budget(
            index, tokens=tokens, samples=samples, accumulation=accumulation
        )
        if verbose:
            print(choice)  # noqa: T201
        found: Budget = choice.budget
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """Groups of rows, in emission order: group g is `rows[offsets[g]:offsets[g + 1]]`.

    Args:
        rows: int64 (num_rows,), row numbers of the index.
        offsets: int64 (num_groups + 1,), never falling, first 0, last `len(rows)`.

    Raises:
        ConfigError: offsets that don't describe `rows`.
    """

    rows: Int64Array
    offsets: Int64Array

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", np.ascontiguousarray(self.rows, dtype=np.int64))
        object.__setattr__(self, "offsets", np.ascontiguousarray(self.offsets, dtype=np.int64))
        offsets = self.offsets
        if offsets.ndim != 1 or len(offsets) == 0 or offsets[0] != 0:
            raise ConfigError("Groups.offsets must be one-dimensional and start with 0.")
        if offsets[-1] != len(self.rows) or (np.diff(offsets) < 0).any():
            raise ConfigError(
                "Groups.offsets must not fall and must end at the number of rows: "
                f"expected {len(self.rows)}, got {int(offsets[-1])}."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, group: int) -> Int64Array:
        if not 0 <= group < len(self):
            raise IndexError(f"group {group} of {len(self)}")
        return self.rows[self.offsets[group] : self.offsets[group + 1]]

    def __iter__(self) -> Iterator[Int64Array]:
        return (self[group] for group in range(len(self)))

    def sums(self, values: npt.ArrayLike) -> Int64Array:
        """Sum a column of the index over each group.

        Args:
            values: integers (index rows,), for example `index.num_tokens`.

        Returns:
            int64 (num_groups,).
        """
        column = np.asarray(values)[self.rows].astype(np.int64)
        running = np.concatenate([np.zeros(1, np.int64), np.cumsum(column)])
        sums: Int64Array = running[self.offsets[1:]] - running[self.offsets[:-1]]
        return sums


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation.

    Args:
        role: "system", "user", "assistant" or "tool".
        content: its text; each image stands as the mark `<image>`.
        weight: 1: its tokens give loss, 0: they don't, None: the loss policy decides.
    """

    role: str
    content: str
    weight: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One sample as it is stored in a shard: encoded images, tokens, and where it came from.

    Args:
        row: row number in the index; the `sample_id` of the batch.
        key: name that the source data gave the sample.
        source: name of the data set that it came from.
        shard: file that it was read from; for messages.
        images: encoded image files, in the order of their marks.
        image_sizes: int32 (num_images, 2), (width, height) after EXIF orientation, pixels.
        image_num_tiles: int32 (num_images,), tiles planned for each image.
        image_spans: int32 (num_images, 2), [start, end) of each image's tokens in `input_ids`.
        input_ids: int32 (num_tokens,), image tokens expanded.
        labels: int32 (num_tokens,), -100 where there is no loss.
        messages: the conversation; None if the shards were written without it.
    """

    row: int
    key: str
    source: str
    shard: str
    images: tuple[bytes, ...]
    image_sizes: Int32Array
    image_num_tiles: Int32Array
    image_spans: Int32Array
    input_ids: Int32Array
    labels: Int32Array
    messages: tuple[Message, ...] | None = None


def _empty_tiles() -> UInt8Array:
    return np.zeros((0, 3, 0, 0), dtype=np.uint8)


def _no_pairs() -> Int32Array:
    return np.zeros((0, 2), dtype=np.int32)


def _no_counts() -> Int32Array:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sample ready to be packed: what a transform returns.

    Args:
        sample_id: row number in the index; -1 for a filler.
        input_ids: int32 (num_tokens,).
        labels: int32 (num_tokens,), -100 where there is no loss.
        tiles: uint8 (num_tiles, 3, height, width), RGB.
        image_num_tiles: int32 (num_images,), sums to `num_tiles`.
        image_sizes: int32 (num_images, 2), (width, height) of the original image, pixels.
        image_grids: int32 (num_images, 2), (columns, rows) of the tile grid, thumbnail left out.
        image_spans: int32 (num_images, 2), [start, end) of each image's tokens in `input_ids`.

    Raises:
        SampleError: shapes or dtypes that don't fit together.
    """

    sample_id: int
    input_ids: Int32Array
    labels: Int32Array
    tiles: UInt8Array = field(default_factory=_empty_tiles)
    image_num_tiles: Int32Array = field(default_factory=_no_counts)
    image_sizes: Int32Array = field(default_factory=_no_pairs)
    image_grids: Int32Array = field(default_factory=_no_pairs)
    image_spans: Int32Array = field(default_factory=_no_pairs)

    def __post_init__(self) -> None:
        num_images = len(self.image_num_tiles)
        for name, dtype, shape in (
            ("input_ids", np.int32, (None,)),
            ("labels", np.int32, self.input_ids.shape),
            ("tiles", np.uint8, (None, 3, None, None)),
            ("image_num_tiles", np.int32, (num_images,)),
            ("image_sizes", np.int32, (num_images, 2)),
            ("image_grids", np.int32, (num_images, 2)),
            ("image_spans", np.int32, (num_images, 2)),
        ):
            _check_array(self.sample_id, name, getattr(self, name), dtype, shape)
        if len(self.input_ids) == 0:
            raise SampleError(
                f"a sample must have at least one token (sample_id={self.sample_id})."
            )
        if num_images and int(self.image_num_tiles.min()) < 0:
            raise SampleError(
                f"image_num_tiles must not be negative, got {self.image_num_tiles.tolist()} "
                f"(sample_id={self.sample_id})."
            )
        planned = int(self.image_num_tiles.sum())
        if planned != len(self.tiles):
            raise SampleError(
                f"image_num_tiles must sum to the number of tiles: expected {len(self.tiles)}, "
                f"got {planned} (sample_id={self.sample_id})."
            )
        if num_images:
            starts, ends = self.image_spans[:, 0], self.image_spans[:, 1]
            if (starts < 0).any() or (ends < starts).any() or (ends > self.num_tokens).any():
                raise SampleError(
                    f"image_spans must lie in [0, {self.num_tokens}], got "
                    f"{self.image_spans.tolist()} (sample_id={self.sample_id})."
                )

    @property
    def num_tokens(self) -> int:
        """Tokens of this sample, image tokens included."""
        return len(self.input_ids)

    @property
    def num_tiles(self) -> int:
        """Tiles of all its images."""
        return len(self.tiles)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that give loss once the first label is ignored, as it is in a packed row."""
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True, kw_only=True)
class SkippedSample:
    """A sample that could not be used: a blank one of the same size has its place in the batch.

    Args:
        row: row number in the index.
        key: name that the source data gave the sample; "" where the row could not be read.
        source: name of the data set that it came from; "" likewise.
        shard: file that it was to be read from.
        shard_row: row in that file.
        kind: what is wrong, in two words: "damaged row", "damaged sample", "failed transform" or
            "wrong length".
        reason: the same in a sentence.
        num_loss_tokens: tokens that were planned to give loss.
    """

    row: int
    key: str
    source: str
    shard: str
    shard_row: int
    kind: str
    reason: str
    num_loss_tokens: int


def _check_array(
    sample_id: int, name: str, value: Any, dtype: type, shape: tuple[int | None, ...]
) -> None:
    fits = (
        isinstance(value, np.ndarray)
        and value.dtype == dtype
        and value.ndim == len(shape)
        and all(want is None or want == got for want, got in zip(shape, value.shape, strict=True))
    )
    if not fits:
        got = (
            f"{value.dtype} {value.shape}"
            if isinstance(value, np.ndarray)
            else type(value).__name__
        )
        want = tuple("n" if size is None else size for size in shape)
        raise SampleError(
            f"{name} must be a NumPy array of {np.dtype(dtype).name} {want}, got {got} "
            f"(sample_id={sample_id})."
        )
