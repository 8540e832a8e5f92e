"""Whether a Hugging Face processor lays images out as the tiling policy of the shards does.

As many tiles in another layout would train on wrong pixels without an error: patches grouped by
another merge size, crops for another list of resolutions, a grid lying on its side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.images import AnyResTiles, InternVLTiles, NaViTPatches, QwenPatches, TilePolicy

__all__ = ["as_tiles", "call_options", "check_layout"]


def check_layout(processor: Any, facts: Mapping[str, Any], policy: TilePolicy) -> None:
    """Hold the settings of a processor against a tiling policy.

    Args:
        processor: the processor that was given; may be the image processor itself.
        facts: `to_dict()` of its image processor.
        policy: the policy that the shards were made with.

    Raises:
        ConfigError: one that decides the layout differs; shows both.
    """
    for name, expected, got in _settings(processor, facts, policy):
        if got is not None and got != expected:
            raise ConfigError(
                "the processor must lay images out as the shards were made: expected "
                f"{name} {expected} for {policy}, got {got}. Preprocess with the tiling of this "
                "processor, or load the processor of the model that the shards are for."
            )


def _settings(
    processor: Any, facts: Mapping[str, Any], policy: TilePolicy
) -> Iterator[tuple[str, Any, Any]]:
    """Give (name, as the policy has it, as the processor has it or None) of what must agree."""
    if isinstance(policy, QwenPatches):
        yield "patch_size", policy.patch_size, facts.get("patch_size")
        yield "merge_size", policy.merge, facts.get("merge_size")
        yield "temporal_patch_size", 2, facts.get("temporal_patch_size")
    elif isinstance(policy, NaViTPatches):
        for side, size in _pair(facts.get("patch_size")).items():
            yield f"patch_size ({side})", policy.patch_size, size
        yield "spatial_merge_size", 1, getattr(processor, "spatial_merge_size", None)
    elif isinstance(policy, AnyResTiles):
        given = facts.get("image_grid_pinpoints")
        found = None if given is None else tuple(tuple(pair) for pair in given)
        yield "image_grid_pinpoints (in this order)", policy.pinpoints, found
        yield "patch_size", policy.patch_size, getattr(processor, "patch_size", None)
        limit = "no limit" if policy.max_crops is None else f"anyres_max_{policy.max_crops}"
        yield "vision_aspect_ratio", limit, getattr(processor, "vision_aspect_ratio", None)
    elif isinstance(policy, InternVLTiles):
        yield "min_patches", policy.min_tiles, facts.get("min_patches")
        yield "max_patches", policy.max_tiles, facts.get("max_patches")


def _pair(size: Any) -> dict[str, Any]:
    if isinstance(size, Mapping):
        return {side: size.get(side) for side in ("height", "width")}
    return {"height": size, "width": size}


def call_options(facts: Mapping[str, Any], policy: TilePolicy) -> dict[str, Any]:
    """Give what an image processor must be told for one image.

    The image processor of InternVL cuts tiles only where its processor tells it to.

    Args:
        facts: `to_dict()` of the image processor.
        policy: the policy that the image was planned with.
    """
    if not isinstance(policy, InternVLTiles) or "crop_to_patches" not in facts:
        return {}
    return {
        "crop_to_patches": True,
        "min_patches": policy.min_tiles,
        "max_patches": policy.max_tiles,
    }


def as_tiles(
    result: Mapping[str, Any], policy: TilePolicy, width: int, height: int
) -> npt.NDArray[Any]:
    """Bring what an image processor returns for one image to the layout of a policy.

    Args:
        result: of the image processor, with NumPy arrays.
        policy: the policy that the image was planned with.
        width: of the image, pixels.
        height: of the image, pixels.

    Returns:
        (num_tiles, 3, height, width) of any type; a number of tiles that the policy doesn't give is
        left to the caller.

    Raises:
        SampleError: the grid is another one; shows both.
    """
    pixels = np.asarray(result["pixel_values"])
    if isinstance(policy, NaViTPatches):
        return _patches(pixels, policy, width, height)
    if isinstance(policy, QwenPatches):
        columns, rows = policy.grid(width, height)
        _check("image_grid_thw", result, [1, rows, columns], policy)
    if isinstance(policy, AnyResTiles) and "image_sizes" in result:
        _check("image_sizes", result, [height, width], policy)
    size = policy.size
    if pixels.ndim == 5:  # one image of several tiles
        return pixels.reshape(-1, *pixels.shape[2:])
    if pixels.ndim == 2 and pixels.shape[1] % (3 * size * size) == 0:
        # Qwen's patches: each channel holds the same patch for every frame
        return pixels.reshape(len(pixels), 3, -1, size, size)[:, :, 0]
    return pixels


def _check(name: str, result: Mapping[str, Any], expected: list[int], policy: TilePolicy) -> None:
    got = np.asarray(result[name]).tolist() if name in result else None
    if got != [expected]:
        raise SampleError(
            f"the image processor must give the grid that the policy counts: expected {name} "
            f"[{expected}] for {policy}, got {got}. Preprocess with the tiling of this processor."
        )


def _patches(
    pixels: npt.NDArray[Any], policy: NaViTPatches, width: int, height: int
) -> npt.NDArray[Any]:
    """Cut the one resized image that Pixtral's image processor gives into patches, row by row."""
    size = policy.size
    columns, rows = policy.grid(width, height)
    expected = (1, 3, rows * size, columns * size)
    if pixels.shape != expected:
        raise SampleError(
            "the image processor must resize an image as the policy does: expected pixels "
            f"{expected} (images, channels, height, width) for {policy}, got {pixels.shape}. "
            "Preprocess with the tiling of this processor."
        )
    cells = pixels.reshape(3, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    return cells.reshape(rows * columns, 3, size, size)
