"""Encoded images to RGB: every kind and mode has one defined result.

| image | result |
|---|---|
| JPEG, grey or colour | libjpeg-turbo, accurate DCT and upsampling; grey is copied to R, G, B |
| JPEG with an error that can be recovered from (stray bytes between segments) | as PIL reads it |
| JPEG in CMYK or YCCK | PIL's plain conversion, (255 - ink) * (255 - black) / 255 |
| 1-bit | 0 and 255 |
| greyscale, 8-bit | copied to R, G, B |
| greyscale, 16-bit | the high byte (value >> 8) |
| greyscale, 32-bit integer | clipped to 0 .. 65535, then the high byte |
| floating point, LAB | SampleError: its range is not defined |
| RGB, 16-bit | the high byte |
| alpha (LA, RGBA, 16-bit too) | over white: (c * a + 255 * (255 - a)) / 255, rounded |
| palette | its colours; with transparency: over white |
| one transparent colour (tRNS) | white in its place |
| icon (ICO) | the largest of its images |
| animated (GIF, WebP, PNG, AVIF), multi-page TIFF | the first frame |
| EXIF orientation 2 to 8 | applied; anything else in Exif is ignored |
| embedded colour profile (ICC) | ignored |
| over `MAX_PIXELS` pixels, or `MAX_SIDE` a side | SampleError, before anything is decoded |
| truncated or damaged, empty, not an image | SampleError with the reason |
"""

from __future__ import annotations

import re
import warnings

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from omniload import _native
from omniload.errors import SampleError
from omniload.images.formats import open_pil, reason
from omniload.images.header import MAX_PIXELS, read_header, unsigned

__all__ = ["decode"]

UInt8Array = npt.NDArray[np.uint8]

_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_REFUSED = ("F", "LAB")

_OF_READERS = r"PIL\.(Tiff|Png|Ico)ImagePlugin$"
_OF_IMAGES = r"PIL\.Image$"


def decode(data: bytes) -> UInt8Array:
    """Decode an image to 8-bit RGB, upright.

    Args:
        data: an encoded image.

    Returns:
        uint8 (height, width, 3), contiguous and writable.

    Raises:
        SampleError: empty, not an image, damaged, too large, or of a kind or mode that has no
            defined result; says why.
    """
    data = unsigned(data)
    header = read_header(data)
    if header.kind == "tiles":
        raise SampleError(
            "the image was stored as tiles of their final size (preprocess --store resized): the "
            "original is not there. A transform cuts it with omniload.images.cut_stored."
        )
    if header.kind == "jpeg" and header.components in (1, 3):
        pixels = _decode_jpeg(data)
    else:
        pixels = _decode_pil(data, header.kind)
    if header.kind != "tiff":  # PIL turns TIFF upright itself
        pixels = _upright(pixels, header.orientation)
    width, height = header.size
    if pixels.shape != (height, width, 3):
        raise SampleError(
            f"damaged {header.kind} image: header says {width}x{height}, decoded "
            f"{pixels.shape[1]}x{pixels.shape[0]}."
        )
    return pixels


def _decode_jpeg(data: bytes) -> UInt8Array:
    try:
        pixels: UInt8Array = simplejpeg.decode_jpeg(data, "RGB")
    except ValueError:
        # strict: it refuses files with stray bytes, which PIL reads; PIL refuses truncated ones
        return _decode_pil(data, "jpeg")
    return pixels


def _decode_pil(data: bytes, kind: str) -> UInt8Array:
    data = bytes(data)
    if kind in ("tiff", "ico") or (kind == "png" and b"acTL" in data[: max(data.find(b"IDAT"), 0)]):
        _hush(_OF_READERS, UserWarning)
    with open_pil(data, kind) as image:
        try:
            if kind == "tiff" and image.width * image.height > (
                Image.MAX_IMAGE_PIXELS or MAX_PIXELS
            ):
                _hush(_OF_IMAGES, Image.DecompressionBombWarning)  # `read_header` holds our limit
            image.load()
            if kind == "png":
                _match_depth_of_transparency(image, depth=data[24])
            return np.array(_to_rgb(image))
        except SampleError:
            raise
        except Exception as error:  # PIL's readers raise whatever the damage leads to
            raise SampleError(f"damaged {kind} image: {reason(error)}.") from error


def _hush(module: str, category: type[Warning]) -> None:
    """Drop what PIL warns of, such as damaged tags: pixels or an error are our result.

    One narrow filter, which stays: `warnings.catch_warnings` in a thread can leave the filters of
    another thread behind, for the whole process.
    """
    entry = ("ignore", None, category, re.compile(module), 0)  # as `filterwarnings` makes it
    if entry not in warnings.filters[:2]:
        warnings.filterwarnings("ignore", category=category, module=module)


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode in _REFUSED:
        raise SampleError(
            f"{image.format} images of mode {mode} have no defined RGB result: convert them to "
            "8-bit RGB first."
        )
    if mode.startswith("I"):
        return _from_integers(image)
    palette = image.palette
    if (
        mode in _WITH_ALPHA
        or "transparency" in image.info
        or (mode == "P" and palette is not None and palette.mode == "RGBA")
    ):
        with_alpha = image.convert("RGBA")
        over_white = Image.new("RGB", image.size, (255, 255, 255))
        over_white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return over_white
    return image if mode == "RGB" else image.convert("RGB")


def _match_depth_of_transparency(image: Image.Image, *, depth: int) -> None:
    """PIL gives the pixels of a PNG as 8 bits, but its transparent colour in the file's depth.

    Not so for 16-bit grey, where both are 16 bits, and for 1 bit, where both are 8.
    """
    colour = image.info.get("transparency")
    if depth == 16 and isinstance(colour, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    elif depth in (2, 4) and isinstance(colour, int) and image.mode == "L":
        image.info["transparency"] = colour * 255 // ((1 << depth) - 1)


def _from_integers(image: Image.Image) -> Image.Image:
    """Greyscale of 16 bits, or of 32 bits clipped to 16: the high byte."""
    values = np.asarray(image)
    if values.dtype.itemsize > 2:
        values = np.clip(values, 0, 65535)
    grey = (values >> 8).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        grey[values == transparent] = 255
    return Image.fromarray(grey).convert("RGB")


def _upright(pixels: UInt8Array, orientation: int, backend: str = "auto") -> UInt8Array:
    """Apply an EXIF orientation, 1 to 8.

    With NumPy, turning a photo of 12 megapixels takes longer than decoding it; in C++ a third.
    """
    if orientation == 1:
        return pixels
    native = _native.choose(backend)
    if native is not None:
        height, width = pixels.shape[:2] if orientation < 5 else pixels.shape[1::-1]
        turned = np.empty((height, width, 3), dtype=np.uint8)
        native.turn_upright(pixels, orientation, turned)
        return turned
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
