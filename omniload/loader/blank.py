"""Blank samples: what stands in the place of one that can't be used, with the same sizes.

So no rank's steps, shapes or collectives change: as many tokens and tiles as were planned, images
where images were, and no label.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import OmniloadError
from omniload.images.policies import policy_from_settings
from omniload.source import RowSource, key_of, lengths_of
from omniload.transforms import Transform
from omniload.types import IGNORE_INDEX, Record, Sample

__all__ = ["blank_record", "blank_sample"]

Int32Array = npt.NDArray[np.int32]


def blank_record(source: RowSource, row: int, transform: Transform) -> Record:
    """Make up the record of a row that can't be read, from its lengths.

    Args:
        source: the rows.
        row: the row.
        transform: its filler shows which tokens text and images have.

    Returns:
        A record without image files, of as many tokens and tiles as the index says. Tiles are those
        of as many smallest images as there is room for, or of one image.
    """
    tokens, tiles, _ = lengths_of(source, row)
    shard, _ = source.locate(row)
    text = transform.filler(with_image=False).input_ids
    input_ids = np.resize(text, tokens).astype(np.int32)
    images = _images(transform, tokens, tiles) if tiles else []
    spans, at = [], 0
    for ids, *_ in images:
        input_ids[at : at + len(ids)] = ids
        spans.append((at, at + len(ids)))
        at += len(ids)
    return Record(
        row=row,
        key=_key(source, row),
        source="",
        shard=source.shard_names[shard],
        images=(),
        image_sizes=np.array([size for _, _, size in images], np.int32).reshape(-1, 2),
        image_num_tiles=np.array([count for _, count, _ in images], np.int32),
        image_spans=np.array(spans, np.int32).reshape(-1, 2),
        input_ids=input_ids,
        labels=np.full(tokens, IGNORE_INDEX, np.int32),
    )


def _key(source: RowSource, row: int) -> str:
    try:
        return key_of(source, row) or ""
    except OmniloadError:  # as damaged as the rest of the row
        return ""


def blank_sample(
    record: Record,
    transform: Transform,
    source: RowSource,
    *,
    tiles: npt.NDArray[np.uint8] | None = None,
) -> Sample:
    """Make a sample of the sizes of a record that gives no loss and shows nothing.

    Args:
        record: as stored, or made up.
        transform: its filler shows how large tiles are; its tiling policy what grids they form.
        source: for the tiling policy, where the transform has none.
        tiles: uint8 (num_tiles, 3, height, width), to be used for the tiles; None: new ones.

    Returns:
        The sample, with `sample_id` -1.
    """
    if tiles is None:
        num_tiles = int(record.image_num_tiles.sum())
        shape = transform.filler(with_image=True).tiles.shape[2:] if num_tiles else (0, 0)
        tiles = np.zeros((num_tiles, 3, *shape), np.uint8)
    tiles[...] = 0
    policy = _policy(transform, source)
    grids = [
        _grid(policy, tuple(size), count)
        for size, count in zip(
            record.image_sizes.tolist(), record.image_num_tiles.tolist(), strict=True
        )
    ]
    return Sample(
        sample_id=-1,
        input_ids=record.input_ids,
        labels=np.full(len(record.input_ids), IGNORE_INDEX, np.int32),
        tiles=tiles,
        image_num_tiles=record.image_num_tiles,
        image_sizes=record.image_sizes,
        image_grids=np.array(grids, np.int32).reshape(-1, 2),
        image_spans=record.image_spans,
    )


def _images(
    transform: Transform, tokens: int, tiles: int
) -> list[tuple[Int32Array, int, tuple[int, int]]]:
    """Choose images that have `tiles` tiles together: (token ids, tiles, size) of each."""
    filler = transform.filler(with_image=True)
    start, end = filler.image_spans[0].tolist()
    ids, count = filler.input_ids[start:end], int(filler.image_num_tiles[0])
    width, height = filler.image_sizes[0].tolist()
    if tiles % count == 0 and tiles // count * len(ids) <= tokens:
        return [(ids, count, (width, height))] * (tiles // count)
    # no number of smallest images: one whose tokens grow with its tiles, cut where the row ends
    length = min(tokens, max(1, len(ids) * tiles // count))
    return [(np.resize(ids, length), tiles, (width * tiles, height))]


def _policy(transform: Transform, source: RowSource) -> Any:
    policy = getattr(transform, "policy", None)
    if policy is not None:
        return policy
    try:
        return policy_from_settings(dict(source.settings["tiling"]))
    except (OmniloadError, KeyError, TypeError, ValueError):
        return None


def _grid(policy: Any, size: tuple[int, ...], num_tiles: int) -> tuple[int, int]:
    """Say how the tiles of an image lie; in one row where no policy knows."""
    try:
        if policy.num_tiles(*size) != num_tiles:
            policy = policy.for_num_tiles(*size, num_tiles)
        columns, rows = policy.grid(*size)
        return int(columns), int(rows)
    except Exception:  # a policy of the user's, or a size that is damaged: any grid will do
        return num_tiles, 1
