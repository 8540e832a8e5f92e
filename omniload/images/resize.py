"""Bicubic resize with antialiasing, in 8-bit integers.

Four backends: our own C++, torch and Pillow-SIMD give the same bits. Plain Pillow is never chosen
by itself: its pixels differ, up to version 12 in 0.5 % of the values by 1 or 2 levels. Version 13
takes rows before columns where that is quicker; after hard edges it then differs by up to 30
levels.

Our own writes tiles at once, and keeps only those rows in between that a row of the result needs:
of an image of 300 x 100,000 pixels torch makes 147 MB for a grid of 448 pixels, our own 1 MB.
"""

from __future__ import annotations

import os
import platform
import warnings
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image

from omniload import _native
from omniload.errors import ConfigError
from omniload.images.cells import write_cells
from omniload.images.kinds import pil_info

if TYPE_CHECKING:
    import torch

__all__ = [
    "RESIZE_BACKENDS",
    "as_batch",
    "resize",
    "resize_backend",
    "torch_is_quick",
    "write_resized",
]

UInt8Array = npt.NDArray[np.uint8]

RESIZE_BACKENDS = ("native", "torch", "pillow-simd", "pillow")

#: Set to one of `RESIZE_BACKENDS` to override the choice; worker processes inherit it.
_VARIABLE = "OMNILOAD_RESIZE"


@cache  # a fact about this process; asked for each image
def resize_backend() -> str:
    """Name what `resize` uses in this process.

    "native", our own C++, where it is built and the processor has AVX2. Else torch; but without
    vector code torch takes 10 to 20 times as long, and Pillow-SIMD is used where it is installed.
    The environment variable OMNILOAD_RESIZE overrides the choice.

    Returns:
        "native", "torch", "pillow-simd" or "pillow".

    Raises:
        ConfigError: OMNILOAD_RESIZE names no backend, or one that is not installed.
    """
    wanted = os.environ.get(_VARIABLE) or "auto"
    if wanted != "auto":
        return _checked(wanted)
    native = _native.choose("auto")
    if native is not None and native.resize_is_quick():
        return "native"
    if pil_info().simd and not torch_is_quick():
        return "pillow-simd"
    return "torch"


def resize(image: UInt8Array, width: int, height: int, *, backend: str = "auto") -> UInt8Array:
    """Resize an RGB image with an antialiased bicubic filter in 8-bit integers.

    Args:
        image: uint8 (h, w, 3).
        width: columns of the result, pixels.
        height: rows of the result, pixels.
        backend: "auto" (see `resize_backend`), "native", "torch", "pillow-simd" or "pillow".

    Returns:
        uint8 (height, width, 3), contiguous; `image` itself if it has that size already.

    Raises:
        ConfigError: not uint8 (h, w, 3), a side below 1, or a backend that is not there.
        NativeUnavailableError: backend="native" without the extension.
    """
    _check_image(image)
    if width < 1 or height < 1:
        raise ConfigError(f"resize needs sides of at least 1, got {width}x{height}.")
    chosen = resize_backend() if backend == "auto" else _checked(backend)
    if image.shape[:2] == (height, width):
        return image
    if chosen == "native":
        result = np.empty((height, width, 3), dtype=np.uint8)
        _native.require().resize(np.ascontiguousarray(image), 1, 1, result, True)
        return result
    if chosen == "torch":
        return _resize_torch(image, width, height)
    pixels = Image.fromarray(np.ascontiguousarray(image))
    return np.array(pixels.resize((width, height), Image.Resampling.BICUBIC))


def write_resized(
    image: UInt8Array, columns: int, rows: int, *, out: UInt8Array, backend: str = "auto"
) -> None:
    """Resize an image to a grid and write its cells, row by row.

    Args:
        image: uint8 (h, w, 3), in any memory layout.
        columns: cells side by side.
        rows: cells one below the other.
        out: uint8 (rows * columns, 3, height, width), filled here; in any memory layout.
        backend: as for `resize`.

    Raises:
        ConfigError: as `resize`, or another shape or type of `out`.
        NativeUnavailableError: backend="native" without the extension.
    """
    _check_image(image)
    chosen = resize_backend() if backend == "auto" else _checked(backend)
    if columns < 1 or rows < 1 or out.dtype != np.uint8 or out.shape[:2] != (columns * rows, 3):
        raise ConfigError(
            f"out must be uint8 (rows * columns, 3, height, width), got {out.dtype} {out.shape} "
            f"for {columns} columns and {rows} rows."
        )
    height, width = out.shape[2:]
    if chosen == "native" and out.flags.c_contiguous and out.size:
        _native.require().resize(np.ascontiguousarray(image), columns, rows, out, True)
        return
    resized = resize(image, columns * width, rows * height, backend=backend)
    write_cells(resized, columns, rows, out=out)


def _check_image(image: UInt8Array) -> None:
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ConfigError(f"resize takes uint8 (h, w, 3), got {image.dtype} {image.shape}.")


def _resize_torch(image: UInt8Array, width: int, height: int) -> UInt8Array:
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
    if min(pixels.strides) < 0:  # a mirrored side of 1 pixel counts as contiguous; torch refuses it
        pixels = pixels.copy()
    return torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)


@cache  # the warning comes once a process
def _checked(backend: str) -> str:
    if backend not in RESIZE_BACKENDS:
        raise ConfigError(
            f"the resize backend must be 'auto' or one of {RESIZE_BACKENDS}, got {backend!r} "
            f"(argument, or environment variable {_VARIABLE})."
        )
    if backend == "native":
        _native.require()
    info = pil_info()
    if backend == "pillow-simd" and not info.simd:
        raise ConfigError(
            f"the resize backend 'pillow-simd' needs Pillow-SIMD, but PIL is plain Pillow "
            f"{info.version}. Use 'native' or 'torch', which give the same pixels."
        )
    if backend == "pillow" and not info.simd:
        warnings.warn(
            f"images are resized by plain Pillow {info.version}: pixels differ by 1 or 2 levels "
            "from those of all other backends, from Pillow 13 on by up to 30 at hard edges, and it "
            "is several times slower.",
            stacklevel=3,
        )
    return backend


def torch_is_quick() -> bool:
    """Whether torch has vector code for 8-bit pixels here."""
    import torch

    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True  # Pillow-SIMD is for x86 only: there is nothing to prefer
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")
