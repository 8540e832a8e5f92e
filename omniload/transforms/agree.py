"""Whether a sample that a user's function made still is one that the model can read.

The model finds images by their tokens, and works out from sizes and grids how many each has. A
sample that contradicts itself would fail there, far from its cause, or not at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omniload.errors import SampleError
from omniload.images import AnyResTiles, NaViTPatches, QwenPatches, TilePolicy
from omniload.transforms.tile import TileTransform
from omniload.types import Record, Sample

__all__ = ["check_sample"]


def check_sample(
    sample: Sample, record: Record, *, base: TileTransform | None, as_stored: bool
) -> None:
    """Hold the images of a sample against its tokens, its record and the transform it is based on.

    Args:
        sample: as the function made it.
        record: as stored.
        base: knows the image token and the tiling; None: neither is known.
        as_stored: whether each image must have the tiles that are stored.

    Raises:
        SampleError: a contradiction; shows both sides.
    """
    spans = sample.image_spans
    if (spans[1:, 0] < spans[:-1, 1]).any():
        raise SampleError(
            f"image_spans must not overlap and must be in order, got {spans.tolist()}."
        )
    if as_stored and not np.array_equal(sample.image_num_tiles, record.image_num_tiles):
        raise SampleError(
            "image_num_tiles must be those that are stored, in the same order: expected "
            f"{record.image_num_tiles.tolist()}, got {sample.image_num_tiles.tolist()}. Give "
            "FunctionTransform lengths= if the function changes them."
        )
    if base is not None:
        _check_tokens(sample, base)
    for index, count in enumerate(sample.image_num_tiles.tolist()):
        grid = tuple(sample.image_grids[index].tolist())
        cells = grid[0] * grid[1]
        # a thumbnail is in none of its cells
        if cells not in (count, count - 1) or (count and min(grid) < 1):
            raise SampleError(
                f"image_grids must hold the tiles of an image, with or without a thumbnail: image "
                f"{index + 1} has {count} tiles, got the grid {grid} (columns, rows)."
            )
        if base is not None:
            _check_image(sample, index, base)


def _check_tokens(sample: Sample, base: TileTransform) -> None:
    """The image tokens of a sample are those in its spans, and nothing else is but breaks."""
    token = base.image_token_id
    breaks = isinstance(base.policy, NaViTPatches) and base.policy.row_breaks
    expected = np.zeros(sample.num_tokens, dtype=bool)
    for (start, end), (columns, _) in zip(
        sample.image_spans.tolist(), sample.image_grids.tolist(), strict=True
    ):
        expected[start:end] = True
        if breaks:
            expected[start + columns : end : columns + 1] = False
    wrong = np.flatnonzero((sample.input_ids == token) != expected)
    if not len(wrong):
        return
    at = int(wrong[0])
    if expected[at]:
        raise SampleError(
            f"the tokens in image_spans must be image tokens: expected {token} at position {at} of "
            f"{sample.num_tokens}, got {int(sample.input_ids[at])} (spans "
            f"{sample.image_spans.tolist()})."
        )
    raise SampleError(
        f"image tokens must lie in image_spans: the image token {token} is at position {at}, got "
        f"the spans {sample.image_spans.tolist()}."
    )


def _check_image(sample: Sample, index: int, base: TileTransform) -> None:
    start, end = sample.image_spans[index].tolist()
    count = int(sample.image_num_tiles[index])
    expected = _num_tokens(sample, index, base)
    if end - start != expected:
        width, height = sample.image_sizes[index].tolist()
        columns, rows = sample.image_grids[index].tolist()
        raise SampleError(
            f"image {index + 1} of {len(sample.image_spans)} must have the tokens that the model "
            f"counts: expected {expected} for {width}x{height} pixels, {count} tiles and a grid of "
            f"{columns}x{rows}, got {end - start} in its span."
        )


def _num_tokens(sample: Sample, index: int, base: TileTransform) -> int:
    """Tokens of an image by what the model works them out from: its size, grid or tiles."""
    policy: TilePolicy | Any = base.policy
    if isinstance(policy, AnyResTiles):
        width, height = sample.image_sizes[index].tolist()
        return policy.num_tokens(width, height)
    columns, rows = sample.image_grids[index].tolist()
    if isinstance(policy, QwenPatches):
        return int(columns // policy.merge) * int(rows // policy.merge)
    if isinstance(policy, NaViTPatches):
        return int(columns * rows + (rows - 1 if policy.row_breaks else 0))
    return int(sample.image_num_tiles[index]) * base.tokens_per_tile
