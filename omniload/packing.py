"""Samples to a packed row: laid end to end, written once, padded only where it was asked for.

Two writers give the same bits: the C++ extension, one pass over the tokens without the interpreter
lock, and NumPy, which needs no compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload import _native
from omniload._layout import BatchSizes, Reserved, allocate_buffer
from omniload._rows import (
    ListColumn,
    TokenRow,
    check_lengths,
    checked_total,
    num_tokens,
    plain,
    slices,
    write_tokens,
)
from omniload.batch import PackedBatch
from omniload.errors import ConfigError, SampleError
from omniload.mrope import mrope_position_ids
from omniload.padding import Padding, RowPlan
from omniload.types import IGNORE_INDEX, Record, Sample, SkippedSample

__all__ = [
    "ListColumn",
    "Reserved",
    "TokenRow",
    "mrope_position_ids",
    "pack",
    "pack_list",
    "reserve",
]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


def pack(
    samples: Sequence[Sample],
    *,
    step: int = 0,
    micro_step: int = 0,
    is_last_micro_step: bool = True,
    num_loss_tokens_step: int | None = None,
    num_loss_samples_step: int | None = None,
    sqrt_loss_tokens_step: float | None = None,
    is_filler: bool = False,
    dummy: Sample | None = None,
    dp_world_size: int = 1,
    accumulation: int = 1,
    pad_to: int | Padding | None = None,
    reserved: Reserved | None = None,
    skipped_samples: Sequence[SkippedSample] = (),
    backend: str = "auto",
) -> PackedBatch:
    """Pack samples into one row, in the order given.

    Deterministic: the same samples give the same bytes with either backend.

    Args:
        samples: those of one group; none gives an empty row.
        step: optimizer step in the epoch.
        micro_step: place in the accumulation.
        is_last_micro_step: the optimizer steps after this batch.
        num_loss_tokens_step: loss tokens of the whole step, over all ranks and micro-steps. None:
            this batch is the whole step.
        num_loss_samples_step: samples of the whole step with a loss token, for
            `PackedBatch.loss_weights("sample")`; None: not known, or this batch is the whole step.
        sqrt_loss_tokens_step: sum over them of the root of their loss tokens, for
            `PackedBatch.loss_weights("sqrt")`; None: likewise.
        is_filler: the samples stand in for data that is not there (sample_id -1, no labels).
        dummy: a filler that becomes the last document of the row, because other ranks run the
            vision encoder; it gives no loss and is not in `sample_ids`.
        dp_world_size: data-parallel ranks.
        accumulation: micro-steps of a step.
        pad_to: the row gets a multiple of so many tokens; or a `Padding`, which can do more. None:
            no padding.
        reserved: what `reserve` gave for the records of these samples. Where the tiles of each
            sample are the array that was made for it, none is copied; else it is not used.
        skipped_samples: what could not be used; as many of the samples are blank ones in their
            place, with sample_id -1 and no labels.
        backend: "auto", "native" or "numpy".

    Returns:
        The batch, in shared memory when called in a worker process of a torch DataLoader.

    Raises:
        ConfigError: settings that contradict each other or the samples.
        SampleError: tiles that don't fit together.
        NativeUnavailableError: backend="native" without the extension.
    """
    _check_fillers(samples, is_filler, num_skipped=len(skipped_samples))
    num_sample_ids = 0 if is_filler else len(samples)
    if dummy is not None:
        _check_dummy(dummy)
        samples = [*samples, dummy]
    if num_loss_tokens_step is None and dp_world_size * accumulation != 1:
        raise ConfigError(
            "num_loss_tokens_step must be given where a step has more than one batch: got None "
            f"with dp_world_size={dp_world_size}, accumulation={accumulation}."
        )
    native = _native.choose(backend)
    padding = Padding.of(pad_to)
    lengths = [len(sample.input_ids) for sample in samples]
    plan = padding.plan(lengths)
    sizes = _sizes_of(samples, plan, num_sample_ids=num_sample_ids)
    tiles = [plain(sample.tiles) for sample in samples if sample.num_tiles]
    if reserved is not None and _is_filled(reserved, samples, sizes):
        buffer, arrays, tiles = reserved.buffer, reserved.arrays, []
    else:
        buffer, arrays = allocate_buffer(sizes)
    row = TokenRow(**{name: arrays[name] for name in TokenRow.__dataclass_fields__})
    token_id = padding.token_id or 0
    if native is None:
        num_loss_tokens = write_tokens(
            *_documents(samples, plan, token_id), _written_part(row, len(plan.documents))
        )
        row.cu_seqlens[len(plan.documents) + 1 :] = plan.num_tokens
        if tiles:
            np.concatenate(tiles, out=arrays["tiles"])
    else:
        num_loss_tokens = native.pack(
            [plain(sample.input_ids) for sample in samples],
            [plain(sample.labels) for sample in samples],
            tiles,
            *row.arrays(),
            arrays["tiles"] if tiles else arrays["tiles"][:0],
            padding.document_multiple,
            token_id,
        )
    _write_images(samples, row.cu_seqlens, arrays)
    arrays["sample_ids"][:] = [sample.sample_id for sample in samples[:num_sample_ids]]
    if is_filler and num_loss_tokens:
        raise ConfigError(f"a filler must give no loss, got {num_loss_tokens} loss tokens.")
    return PackedBatch(
        buffer=buffer,
        sizes=sizes,
        max_seqlen=max(plan.documents, default=0),
        sample_lengths=tuple(lengths),
        sample_images=tuple([len(sample.image_num_tiles) for sample in samples]),
        document_multiple=padding.document_multiple,
        step=step,
        micro_step=micro_step,
        is_last_micro_step=is_last_micro_step,
        num_loss_tokens=num_loss_tokens,
        num_loss_tokens_step=(
            num_loss_tokens if num_loss_tokens_step is None else int(num_loss_tokens_step)
        ),
        num_loss_samples_step=num_loss_samples_step,
        sqrt_loss_tokens_step=sqrt_loss_tokens_step,
        is_filler=is_filler,
        dp_world_size=dp_world_size,
        accumulation=accumulation,
        skipped_samples=tuple(skipped_samples),
    )


def reserve(
    records: Sequence[Record],
    *,
    tile_shape: tuple[int, int],
    pad_to: int | Padding | None = None,
) -> Reserved:
    """Make the buffer of a batch before its samples, so that tiles are written where they stay.

    Args:
        records: those of one group; their samples have as many tokens, images and tiles.
        tile_shape: (height, width) of the tiles, pixels.
        pad_to: as for `pack`.

    Returns:
        The buffer, in shared memory when called in a worker process of a torch DataLoader, and the
        tiles of each sample in it.

    Raises:
        ConfigError: the row does not fit its padding.
    """
    num_tiles = [int(record.image_num_tiles.sum()) for record in records]
    sizes = _sizes(
        Padding.of(pad_to).plan([len(record.input_ids) for record in records]),
        num_samples=len(records),
        num_sample_ids=len(records),
        num_images=sum(len(record.image_num_tiles) for record in records),
        num_tiles=sum(num_tiles),
        tile_shape=tile_shape if any(num_tiles) else (0, 0),
    )
    return Reserved.of(sizes, num_tiles)


def pack_list(
    input_ids: ListColumn,
    labels: ListColumn,
    rows: npt.ArrayLike,
    *,
    out: TokenRow | None = None,
    backend: str = "auto",
) -> tuple[TokenRow, int]:
    """Pack rows of two Arrow list columns, straight from their buffers.

    Args:
        input_ids: token ids.
        labels: labels; its lists are as long as those of `input_ids`.
        rows: integers (num_samples,), which lists, in this order.
        out: arrays of exactly the right sizes to write to; None: new ones.
        backend: "auto", "native" or "numpy".

    Returns:
        The row, and the number of its loss tokens.

    Raises:
        ConfigError: rows outside the column, offsets that fall or point outside the values, an
            empty list, lists of different lengths, or `out` of another size.
    """
    native = _native.choose(backend)
    picked = np.ascontiguousarray(rows, dtype=np.int64)
    if out is None:
        out = TokenRow.empty(num_tokens(input_ids, picked), len(picked))
    if native is None:
        ids, given = slices(input_ids, picked), slices(labels, picked)
        check_lengths(ids, given, picked, out)
        return out, write_tokens(ids, given, out)
    columns = (input_ids.values, input_ids.offsets, labels.values, labels.offsets)
    try:
        return out, native.pack_list(*map(plain, columns), picked, *out.arrays())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_fillers(samples: Sequence[Sample], is_filler: bool, *, num_skipped: int) -> None:
    blank = [sample for sample in samples if sample.sample_id < 0]
    if len(blank) != (len(samples) if is_filler else num_skipped) or (is_filler and num_skipped):
        wrong = [sample.sample_id for sample in samples if (sample.sample_id < 0) != is_filler]
        raise ConfigError(
            "samples of a filler, and those in place of skipped ones, must have sample_id=-1, all "
            f"others must not: got sample_id={wrong[0] if wrong else -1} with is_filler="
            f"{is_filler} and {num_skipped} skipped."
        )
    for sample in [] if is_filler else blank:
        if (sample.labels != IGNORE_INDEX).any():
            raise ConfigError(
                "a blank sample must give no loss: expected labels of -100 only, got "
                f"{sample.num_loss_tokens} loss tokens."
            )


def _check_dummy(dummy: Sample) -> None:
    if dummy.sample_id >= 0 or (dummy.labels != IGNORE_INDEX).any():
        raise ConfigError(
            "a dummy document must have sample_id=-1 and labels of -100 only: got "
            f"sample_id={dummy.sample_id}, {dummy.num_loss_tokens} loss tokens."
        )


def _written_part(row: TokenRow, num_documents: int) -> TokenRow:
    """Leave out the empty documents, which NumPy's writer doesn't know."""
    return replace(row, cu_seqlens=row.cu_seqlens[: num_documents + 1])


def _documents(
    samples: Sequence[Sample], plan: RowPlan, token_id: int
) -> tuple[list[Int32Array], list[Int32Array]]:
    """List ids and labels of each document; what is padded is copied, all else is not."""
    ids = [plain(sample.input_ids) for sample in samples]
    labels = [plain(sample.labels) for sample in samples]
    if plan.num_tokens == sum(map(len, ids)):
        return ids, labels
    for index, length in enumerate(plan.documents[: len(samples)]):
        given = len(ids[index])
        if length > given:
            padded = np.empty((2, length), np.int32)  # np.pad takes ten times as long
            padded[0, :given], padded[0, given:] = ids[index], token_id
            padded[1, :given], padded[1, given:] = labels[index], IGNORE_INDEX
            ids[index], labels[index] = padded
    for length in plan.documents[len(samples) :]:
        ids.append(np.full(length, token_id, np.int32))
        labels.append(np.full(length, IGNORE_INDEX, np.int32))
    return ids, labels


def _sizes_of(samples: Sequence[Sample], plan: RowPlan, num_sample_ids: int) -> BatchSizes:
    tile_shape: tuple[int, ...] | None = None
    for sample in samples:
        if not sample.num_tiles:
            continue
        shape = sample.tiles.shape[2:]
        if tile_shape is None:
            tile_shape = shape
        if shape != tile_shape:
            raise SampleError(
                "all tiles of a batch must have one size: expected (height, width) = "
                f"{tile_shape}, got {shape} (sample_id={sample.sample_id}). One transform with "
                "one tile size must make all samples."
            )
    return _sizes(
        plan,
        num_samples=len(samples),
        num_sample_ids=num_sample_ids,
        num_images=sum(len(sample.image_num_tiles) for sample in samples),
        num_tiles=sum(sample.num_tiles for sample in samples),
        tile_shape=tile_shape or (0, 0),
    )


def _sizes(
    plan: RowPlan,
    *,
    num_samples: int,
    num_sample_ids: int,
    num_images: int,
    num_tiles: int,
    tile_shape: tuple[int, ...],
) -> BatchSizes:
    height, width = tile_shape
    return BatchSizes(
        num_tokens=checked_total(plan.documents),
        num_samples=num_samples,
        num_sample_ids=num_sample_ids,
        num_images=num_images,
        num_tiles=num_tiles,
        tile_height=height,
        tile_width=width,
        num_other_documents=len(plan.documents) - num_samples + plan.num_empty,
    )


def _is_filled(reserved: Reserved, samples: Sequence[Sample], sizes: BatchSizes) -> bool:
    """Say whether the samples lie in the buffer that was made for them."""
    return reserved.sizes == sizes and all(
        sample.tiles is tiles or not sample.num_tiles
        for sample, tiles in zip(samples, reserved.tiles, strict=True)
    )


def _write_images(
    samples: Sequence[Sample], starts: Int32Array, arrays: dict[str, npt.NDArray[Any]]
) -> None:
    first = 0
    for start, sample in zip(starts.tolist()[: len(samples)], samples, strict=True):
        end = first + len(sample.image_num_tiles)
        if end > first:
            for name in ("image_num_tiles", "image_sizes", "image_grids"):
                arrays[name][first:end] = getattr(sample, name)
            np.add(sample.image_spans, start, out=arrays["image_spans"][first:end])
        first = end
