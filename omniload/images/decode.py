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
| a single transparent colour (tRNS) | white in its place |
| animated (GIF, WebP, PNG, AVIF), multi-page TIFF | the first frame |
| EXIF orientation 2 to 8 | applied; anything else in Exif is ignored |
| embedded colour profile (ICC) | ignored |
| more than `MAX_PIXELS` pixels | SampleError, before anything is decoded |
| truncated or damaged, empty, not an image | SampleError with the reason |
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

from omniload.errors import SampleError
from omniload.images.header import open_pil, read_header

__all__ = ["decode"]

UInt8Array = npt.NDArray[np.uint8]

_WITH_ALPHA = ("LA", "La", "PA", "RGBA", "RGBa")
_REFUSED = ("F", "LAB")


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
    header = read_header(data)
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
    with open_pil(data, kind) as image:
        try:
            # a damaged palette, text chunk or tag makes PIL warn; pixels or an error are the result
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                image.load()
                pixels = np.array(_to_rgb(image))
        except SampleError:
            raise
        except Exception as error:  # PIL's readers raise whatever the damage leads to
            reason = str(error).strip().rstrip(".") or type(error).__name__
            raise SampleError(f"damaged {kind} image: {reason}.") from error
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    mode = image.mode
    if mode in _REFUSED:
        raise SampleError(
            f"{image.format} images of mode {mode} have no defined RGB result: convert them to "
            "8-bit RGB first."
        )
    if mode.startswith("I"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if mode in _WITH_ALPHA or "transparency" in image.info:
        with_alpha = image.convert("RGBA")
        over_white = Image.new("RGB", image.size, (255, 255, 255))
        over_white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return over_white
    return image if mode == "RGB" else image.convert("RGB")


def _upright(pixels: UInt8Array, orientation: int) -> UInt8Array:
    """Apply an EXIF orientation, 1 to 8."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)
