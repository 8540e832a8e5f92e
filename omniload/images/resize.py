"""Bicubic resize with antialiasing, in 8-bit integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["as_batch", "resize"]

UInt8Array = npt.NDArray[np.uint8]


def resize(image: UInt8Array, width: int, height: int) -> UInt8Array:
    """Resize an RGB image with torch's 8-bit antialiased bicubic filter.

    Bit-identical to Pillow-SIMD; plain Pillow differs in less than 1 % of the values by 1 or 2.

    Args:
        image: uint8 (h, w, 3).
        width: columns of the result, pixels.
        height: rows of the result, pixels.

    Returns:
        uint8 (height, width, 3), contiguous; `image` itself if it has that size already.

    Raises:
        ConfigError: not uint8 (h, w, 3), or a side below 1.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ConfigError(f"resize takes uint8 (h, w, 3), got {image.dtype} {image.shape}.")
    if width < 1 or height < 1:
        raise ConfigError(f"resize needs sides of at least 1, got {width}x{height}.")
    if image.shape[:2] == (height, width):
        return image
    from torch.nn.functional import interpolate  # torch takes a second to load

    resized = interpolate(
        as_batch(image), size=(height, width), mode="bicubic", antialias=True, align_corners=False
    )
    result: UInt8Array = resized.permute(0, 2, 3, 1)[0].contiguous().numpy()
    return result


def as_batch(image: UInt8Array) -> torch.Tensor:
    """View an image as a batch of one, (1, 3, h, w), with the strides that torch is quick with.

    The stride of the batch dimension, though it has one entry only, decides whether torch takes its
    path for interleaved pixels, which is up to 3 times faster and gives interleaved pixels.

    Args:
        image: uint8 (h, w, 3); copied only if it is not contiguous and writable.
    """
    import torch

    pixels = np.require(image, requirements=["C", "W"])
    return torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
