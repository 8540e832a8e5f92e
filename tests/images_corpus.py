"""Makes encoded images of every kind and mode, small, from known pixels."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from omniload.images import missing_codecs

__all__ = [
    "HEIGHT",
    "KINDS",
    "WIDTH",
    "encode",
    "exif",
    "noise",
    "photo",
    "png",
    "readable",
    "rgb_of",
]

WIDTH, HEIGHT = 60, 40
KINDS = {
    "jpeg": ("JPEG", {}),
    "png": ("PNG", {}),
    "gif": ("GIF", {}),
    "webp": ("WEBP", {}),
    "bmp": ("BMP", {}),
    "tiff": ("TIFF", {}),
    "avif": ("AVIF", {}),
    "jpeg2000": ("JPEG2000", {}),
    "ppm": ("PPM", {}),
    "ico": ("ICO", {"sizes": [(WIDTH, HEIGHT)]}),
}


def noise(width, height, channels=3, dtype=np.uint8, seed=0):
    """Random pixels (height, width[, channels])."""
    shape = (height, width) if channels == 1 else (height, width, channels)
    top = np.iinfo(dtype).max + 1
    return np.random.default_rng(seed).integers(0, top, shape).astype(dtype)


def photo(width, height, seed=0):
    """Smooth pixels, as photographs have; uint8 (height, width, 3)."""
    small = Image.fromarray(noise(8, 6, seed=seed))
    return np.array(small.resize((width, height), Image.Resampling.BICUBIC))


def encode(image, kind, **options):
    """Encode a PIL image or an array."""
    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def exif(orientation):
    """Exif data with nothing but an orientation."""
    data = Image.Exif()
    data[274] = orientation
    return data


def png(pixels, *, colour_type, chunks=(), depth=None):
    """A PNG written by hand: extra chunks (name, data) before the pixels, 1 to 16 bits.

    Reaches what PIL doesn't write: 16-bit colour, tRNS of 16 bits, chunks in odd places. A depth
    below 8 is for greyscale.
    """
    height, width = pixels.shape[:2]
    if depth is None:
        depth = 8 * pixels.dtype.itemsize
    if depth < 8:
        bits = np.unpackbits(pixels[:, :, None].astype(np.uint8), axis=2)[:, :, 8 - depth :]
        big_endian = np.packbits(bits.reshape(height, -1), axis=1)
    else:
        big_endian = pixels.astype(pixels.dtype.newbyteorder(">")).reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in big_endian)
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    out = [b"\x89PNG\r\n\x1a\n"]
    for name, data in parts:
        out.append(struct.pack(">I", len(data)) + name + data)
        out.append(struct.pack(">I", zlib.crc32(name + data)))
    return b"".join(out)


def rgb_of(grey):
    """Greyscale (h, w) as RGB (h, w, 3)."""
    return np.repeat(grey[:, :, None], 3, axis=2)


def readable(kind):
    """Skip the test where PIL can't read a kind of image."""
    if kind in missing_codecs():
        pytest.skip(missing_codecs()[kind])
