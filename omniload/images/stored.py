"""Images stored at their final size: the grid and the thumbnail of a tiling policy, encoded.

A photo of 12 megapixels is decoded and resized once, by preprocessing, and never again. The format
is ours: a header, then one or two encoded images, each after its length.

| bytes | content |
|---|---|
| 8 | `MAGIC` |
| 4 + 4 | width and height of the original image, upright, pixels |
| 4 + 2 + 2 | side of a tile, columns and rows of the grid |
| 4, then that many | the grid, columns * side wide and rows * side high |
| 4, then that many | the thumbnail, side x side; left out for a grid without one |

All numbers are unsigned and little-endian.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from omniload.errors import ConfigError, SampleError
from omniload.images.cells import write_cells
from omniload.images.decode import decode
from omniload.images.header import image_size
from omniload.images.kinds import STORED_MAGIC as MAGIC
from omniload.images.kinds import image_kind
from omniload.images.resize import resize
from omniload.images.tiling import TilePolicy

__all__ = ["check_stored", "cut_stored", "is_stored", "store_tiles"]

UInt8Array = npt.NDArray[np.uint8]

_HEADER = struct.Struct("<8sIIIHH")
_LENGTH = struct.Struct("<I")


def is_stored(data: bytes) -> bool:
    """Say whether an image is stored at its final size."""
    return image_kind(data) == "tiles"


def store_tiles(data: bytes, policy: TilePolicy, *, quality: int | None = 95) -> bytes:
    """Encode an image at its final size, where that is less to decode.

    Args:
        data: an encoded image.
        policy: a tiling policy that resizes to a grid, without a `cut` of its own; the one by which
            the image is planned.
        quality: of the JPEG, 1 to 100, colours at full resolution; None: PNG, without loss.

    Returns:
        The stored image; `data` itself where the grid has no fewer pixels than the image, or where
        it is stored already.

    Raises:
        SampleError: the image can't be decoded, or is stored for another tiling.
        ConfigError: a policy with a `cut` of its own, or a quality out of range.
    """
    if hasattr(policy, "cut"):
        raise ConfigError(f"images can't be stored resized for {policy}: it is not a plain grid.")
    if quality is not None and not 1 <= quality <= 100:
        raise ConfigError(f"the quality must be 1 to 100, or None for no loss, got {quality}.")
    width, height = image_size(data)
    if is_stored(data):
        check_stored(data, policy, policy.num_tiles(width, height))
        return data
    columns, rows = policy.grid(width, height)
    size = policy.size
    if columns * rows * size * size >= width * height:
        return data
    image = decode(data)
    shapes = [(columns * size, rows * size)]
    if policy.num_tiles(width, height) > columns * rows:
        shapes.append((size, size))
    parts = [_encode(resize(image, *shape), quality) for shape in shapes]
    head = _HEADER.pack(MAGIC, width, height, size, columns, rows)
    return head + b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def check_stored(data: bytes, policy: TilePolicy, num_tiles: int) -> None:
    """Check that an image was stored for this tiling, and decode it.

    Args:
        data: a stored image.
        policy: the tiling policy that the image is planned with.
        num_tiles: tiles planned for it.

    Raises:
        SampleError: it is damaged, or stored for another tiling.
    """
    for _ in _parts(data, policy, num_tiles):
        pass


def cut_stored(data: bytes, policy: TilePolicy, *, out: UInt8Array) -> None:
    """Write the tiles of a stored image; nothing is resized.

    Args:
        data: a stored image.
        policy: the tiling policy that the image is planned with.
        out: uint8 (num_tiles, 3, size, size), filled here.

    Raises:
        SampleError: it is damaged, or stored for another tiling.
        ConfigError: `out` has another shape.
    """
    at = 0
    for pixels, columns, rows in _parts(data, policy, len(out)):
        write_cells(pixels, columns, rows, out=out[at : at + columns * rows])
        at += columns * rows


def _parts(
    data: bytes, policy: TilePolicy, num_tiles: int
) -> Iterator[tuple[UInt8Array, int, int]]:
    """Decode grid and thumbnail: (pixels, columns, rows) of each."""
    width, height = image_size(data)
    try:
        _, _, _, size, columns, rows = _HEADER.unpack_from(data)
    except struct.error as error:
        raise SampleError(f"damaged tiles image: {error}.") from error
    expected = (policy.size, *policy.grid(width, height))
    if (size, columns, rows) != expected or hasattr(policy, "cut"):
        raise SampleError(
            "it was stored resized for another tiling: expected tiles of "
            f"{expected[0]} pixels in {expected[1]}x{expected[2]}, got {size} in "
            f"{columns}x{rows}. Preprocess the original images again."
        )
    count = columns * rows
    shapes = [(columns, rows)] if num_tiles == count else [(columns, rows), (1, 1)]
    start = _HEADER.size
    for shape in shapes:
        length = int.from_bytes(data[start : start + _LENGTH.size], "little")
        start += _LENGTH.size
        part = data[start : start + length]
        start += length
        if len(part) != length or image_kind(part) not in ("jpeg", "png"):
            raise SampleError("damaged tiles image: its grid or its thumbnail is not there.")
        sides = (shape[0] * size, shape[1] * size)
        if image_size(part) != sides:  # before anything is decoded
            raise SampleError(
                f"damaged tiles image: expected {sides[0]}x{sides[1]} pixels, got "
                "{}x{}.".format(*image_size(part))
            )
        yield decode(part), *shape
    if start != len(data):
        raise SampleError(
            f"damaged tiles image: expected {start} bytes for {num_tiles} tiles, got {len(data)}."
        )


def _encode(pixels: UInt8Array, quality: int | None) -> bytes:
    if quality is not None:
        encoded: bytes = simplejpeg.encode_jpeg(pixels, quality, "RGB", "444")
        return encoded
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)  # higher ones hardly gain a tenth
    return file.getvalue()
