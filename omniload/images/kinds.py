"""Which kind of image some bytes are, and which kinds the installed PIL can read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import PIL
from PIL import features

from omniload.errors import SampleError

__all__ = [
    "PIL_READERS",
    "STORED_MAGIC",
    "PilInfo",
    "check_readable",
    "image_kind",
    "missing_codecs",
    "pil_info",
]

#: kind -> module and class of PIL that read it; PIL is never left to guess the kind.
PIL_READERS = {
    "jpeg": ("PIL.JpegImagePlugin", "JpegImageFile"),
    "png": ("PIL.PngImagePlugin", "PngImageFile"),
    "gif": ("PIL.GifImagePlugin", "GifImageFile"),
    "webp": ("PIL.WebPImagePlugin", "WebPImageFile"),
    "bmp": ("PIL.BmpImagePlugin", "BmpImageFile"),
    "tiff": ("PIL.TiffImagePlugin", "TiffImageFile"),
    "avif": ("PIL.AvifImagePlugin", "AvifImageFile"),
    "jpeg2000": ("PIL.Jpeg2KImagePlugin", "Jpeg2KImageFile"),
    "ppm": ("PIL.PpmImagePlugin", "PpmImageFile"),
    "ico": ("PIL.IcoImagePlugin", "IcoImageFile"),
}

#: First bytes of an image that is stored at its final size; see `omniload.images.stored`.
STORED_MAGIC = b"\x89OLTILE1"

_AVIF_BRANDS = (b"avif", b"avis")
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis")

# what `PIL.features` calls the library behind a kind; kinds not listed need none
_FEATURES = {
    "jpeg": ("jpg", "libjpeg-turbo (Debian: libjpeg62-turbo-dev)"),
    "png": ("zlib", "zlib (Debian: zlib1g-dev)"),
    "webp": ("webp", "libwebp (Debian: libwebp-dev)"),
    "tiff": ("libtiff", "libtiff (Debian: libtiff-dev)"),
    "avif": ("avif", "libavif (Pillow 11.3 or newer; Pillow-SIMD has none)"),
    "jpeg2000": ("jpg_2000", "OpenJPEG (Debian: libopenjp2-7-dev)"),
}


@dataclass(frozen=True, kw_only=True)
class PilInfo:
    """The PIL that Python imports here.

    Args:
        version: its version, such as "12.1.1" or "9.5.0.post2".
        simd: whether it is Pillow-SIMD.
        missing: kinds of image that it can't read.
    """

    version: str
    simd: bool
    missing: tuple[str, ...]


def image_kind(data: bytes) -> str:
    """Name the kind of an encoded image by its first bytes.

    Args:
        data: an encoded image; 32 bytes are enough.

    Returns:
        "jpeg", "png", "gif", "webp", "bmp", "tiff", "avif", "heic", "jpeg2000", "ppm" (PBM, PGM and
        PPM, plain or not), "ico", "tiles" (stored at its final size by preprocessing) or "unknown".
    """
    head = bytes(data[:32])
    if head.startswith(b"\xff\xd8\xff"):
        return "jpeg"
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if head.startswith(STORED_MAGIC):
        return "tiles"
    if head.startswith((b"GIF87a", b"GIF89a")):
        return "gif"
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "webp"
    if head.startswith((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")):
        return "tiff"
    if head[4:8] == b"ftyp":
        # the major brand, or for "mif1"/"msf1" the compatible ones that follow it
        brands = (head[8:12], head[16:20], head[20:24], head[24:28], head[28:32])
        if any(brand in _AVIF_BRANDS for brand in brands):
            return "avif"
        if any(brand in _HEIC_BRANDS for brand in brands):
            return "heic"
    if head.startswith((b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")):
        return "jpeg2000"
    if head.startswith(b"BM") and len(head) >= 18 and head[6:10] == b"\0\0\0\0":
        return "bmp"
    if head[:1] == b"P" and head[1:2] in b"123456" and head[2:3].isspace():
        return "ppm"
    # an icon: type 1, some entries, and a byte of the first that is always 0
    if head.startswith(b"\0\0\1\0") and len(head) >= 22 and head[4] and not head[5] | head[9]:
        return "ico"
    return "unknown"


def missing_codecs() -> dict[str, str]:
    """Say which kinds of image the installed PIL can't read, and what to do.

    Returns:
        kind -> remedy, empty if nothing is missing.
    """
    return dict(_missing_codecs())


def check_readable(kind: str) -> None:
    """Check that the installed PIL can read a kind of image.

    Raises:
        SampleError: it can't; names the remedy.
    """
    if kind == "heic":
        raise SampleError("heic images can't be read: convert them to JPEG or PNG first.")
    for missing, remedy in _missing_codecs():
        if missing == kind:
            raise SampleError(f"{kind} images can't be read here: {remedy}.")


@cache  # a fact about this process; the look-up takes longer than reading a header
def _missing_codecs() -> tuple[tuple[str, str], ...]:
    # an older PIL warns about a name that it doesn't know; these lists hold the known ones
    supported = {*features.get_supported_modules(), *features.get_supported_codecs()}
    # whoever has Pillow-SIMD has it on purpose
    loss = ", which resizes more slowly" if ".post" in PIL.__version__ else ""
    return tuple(
        (
            kind,
            f"PIL {PIL.__version__} was built without {library}; convert these images, install "
            f"that library and build PIL again, or use plain Pillow{loss}",
        )
        for kind, (feature, library) in _FEATURES.items()
        if feature not in supported
    )


def pil_info() -> PilInfo:
    """Describe the PIL that is imported: version, SIMD or not, missing kinds."""
    return PilInfo(
        version=PIL.__version__,
        simd=".post" in PIL.__version__,
        missing=tuple(missing_codecs()),
    )
