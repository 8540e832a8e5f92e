"""Size and orientation as each kind of file says them.

EXIF orientation is read from the Exif segment of JPEG, the eXIf chunk of PNG, the EXIF chunk of
WebP, the first directory of TIFF, and as PIL gives it for AVIF. An orientation elsewhere (XMP, text
chunks) is not applied.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from importlib import import_module

from PIL import Image

from omniload.errors import SampleError
from omniload.images.kinds import PIL_READERS, check_readable

__all__ = ["Header", "open_pil", "parse_header", "reason"]

# frame headers of JPEG: all SOF markers but DHT (C4), JPG (C8) and DAC (CC)
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_TIFF_SIZES = {1: 1, 3: 2, 4: 4, 16: 8}
_TIFF_FORMATS = {1: "B", 3: "H", 4: "I", 16: "Q"}
_WIDTH, _HEIGHT, _ORIENTATION = 256, 257, 274


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the header of an image says.

    Args:
        kind: as `image_kind` names it.
        width: columns as stored, before orientation.
        height: rows as stored.
        orientation: EXIF orientation, 1 to 8; 1 where there is none or it is invalid.
        components: colour components of a JPEG; 0 for other kinds.
    """

    kind: str
    width: int
    height: int
    orientation: int = 1
    components: int = 0

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) after orientation."""
        if self.orientation >= 5:
            return self.height, self.width
        return self.width, self.height


def parse_header(data: bytes, kind: str) -> Header:
    """Read the header of an image of a known kind; nothing it says is checked.

    Args:
        data: an encoded image.
        kind: as `image_kind` names it.

    Raises:
        struct.error, IndexError, ValueError: damage.
        SampleError: PIL can't read it.
    """
    return _PARSERS.get(kind, _by_pil)(data, kind)


def open_pil(data: bytes, kind: str) -> Image.Image:
    """Open an image with PIL's reader of this kind, nothing decoded yet.

    `PIL.Image.open` would try other readers, and warn or raise at pixel limits of its own;
    `read_header` holds ours.

    Raises:
        SampleError: PIL can't read this kind, or the header is damaged.
    """
    check_readable(kind)
    module, name = PIL_READERS[kind]
    reader = getattr(import_module(module), name)
    try:
        image: Image.Image = reader(io.BytesIO(data), "")
    except Exception as error:  # PIL's readers raise whatever the damage leads to
        raise SampleError(f"damaged {kind} image: {reason(error)}.") from error
    return image


def reason(error: BaseException) -> str:
    """What an error of PIL says, without the full stop."""
    return str(error).strip().rstrip(".") or type(error).__name__


def _jpeg(data: bytes, kind: str) -> Header:
    """Walk the segments up to the frame header; Exif comes before it."""
    orientation = 0
    at = 2
    while True:
        while data[at] != 0xFF:  # stray bytes between segments: skipped, as libjpeg does
            at += 1
        while data[at] == 0xFF:  # any number of fill bytes may precede a marker
            at += 1
        marker = data[at]
        at += 1
        if marker in _SOF:
            height, width, components = struct.unpack_from(">HHB", data, at + 3)
            return Header(
                kind=kind,
                width=width,
                height=height,
                orientation=orientation or 1,
                components=components,
            )
        if marker in (0xD9, 0xDA):
            raise ValueError("image data before the frame header")
        if marker <= 0x01 or 0xD0 <= marker <= 0xD8:  # no marker, or one without a segment
            continue
        (length,) = struct.unpack_from(">H", data, at)
        if marker == 0xE1 and data[at + 2 : at + 8] == b"Exif\0\0":
            # of several segments the first counts, as for PIL
            orientation = orientation or _exif_orientation(bytes(data[at + 8 : at + length]))
        at += length


def _png(data: bytes, kind: str) -> Header:
    if data[12:16] != b"IHDR":
        raise ValueError("no IHDR chunk")
    width, height = struct.unpack_from(">II", data, 16)
    orientation = 1
    at = 8
    while at + 8 <= len(data):
        length, name = struct.unpack_from(">I4s", data, at)
        if name == b"eXIf":
            orientation = _exif_orientation(bytes(data[at + 8 : at + 8 + length]))
            break
        at += 12 + length
    return Header(kind=kind, width=width, height=height, orientation=orientation)


def _gif(data: bytes, kind: str) -> Header:
    """The logical screen, or more if the first frame reaches beyond it (PIL widens it too)."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while data[at] == 0x21:  # extensions: label, then sub-blocks up to an empty one
        at += 2
        while data[at]:
            at += 1 + data[at]
        at += 1
    if data[at] != 0x2C:
        raise ValueError("no frame")
    left, top, columns, rows = struct.unpack_from("<HHHH", data, at + 1)
    return Header(kind=kind, width=max(width, left + columns), height=max(height, top + rows))


def _bmp(data: bytes, kind: str) -> Header:
    (header_bytes,) = struct.unpack_from("<I", data, 14)
    if header_bytes == 12:
        width, height = struct.unpack_from("<HH", data, 18)
    else:  # a negative height means rows from top to bottom
        width, height = struct.unpack_from("<ii", data, 18)
    return Header(kind=kind, width=width, height=abs(height))


def _webp(data: bytes, kind: str) -> Header:
    name = data[12:16]
    if name == b"VP8 ":
        if data[23:26] != b"\x9d\x01\x2a":
            raise ValueError("no VP8 key frame")
        width, height = struct.unpack_from("<HH", data, 26)
        return Header(kind=kind, width=width & 0x3FFF, height=height & 0x3FFF)
    if name == b"VP8L":
        if data[20] != 0x2F:
            raise ValueError("no VP8L signature")
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header(kind=kind, width=(bits & 0x3FFF) + 1, height=(bits >> 14 & 0x3FFF) + 1)
    if name != b"VP8X":
        raise ValueError(f"first chunk {bytes(name)!r}")
    width = int.from_bytes(data[24:27], "little") + 1
    height = int.from_bytes(data[27:30], "little") + 1
    orientation = 1
    at = 12
    while data[20] & 8 and at + 8 <= len(data):  # bit 3 of the flags: there is an EXIF chunk
        chunk, length = struct.unpack_from("<4sI", data, at)
        if chunk == b"EXIF":
            orientation = _exif_orientation(bytes(data[at + 8 : at + 8 + length]))
            break
        at += 8 + length + (length & 1)
    return Header(kind=kind, width=width, height=height, orientation=orientation)


def _tiff(data: bytes, kind: str) -> Header:
    tags = _tiff_tags(data)
    if _WIDTH not in tags or _HEIGHT not in tags:
        raise ValueError("no size in the first directory")
    return Header(
        kind=kind,
        width=tags[_WIDTH],
        height=tags[_HEIGHT],
        orientation=_valid_orientation(tags.get(_ORIENTATION, 1)),
    )


def _by_pil(data: bytes, kind: str) -> Header:
    with open_pil(data, kind) as image:
        width, height = image.size
        orientation = _exif_orientation(image.info.get("exif", b""))
    return Header(kind=kind, width=width, height=height, orientation=orientation)


def _exif_orientation(exif: bytes) -> int:
    """Orientation in a block of Exif data (a TIFF header and its directory); 1 if damaged."""
    try:
        return _valid_orientation(_tiff_tags(exif.removeprefix(b"Exif\0\0")).get(_ORIENTATION, 1))
    except (struct.error, ValueError):
        return 1


def _valid_orientation(value: int) -> int:
    return value if 1 <= value <= 8 else 1


def _tiff_tags(data: bytes) -> dict[int, int]:
    """First value of each integer tag of the first directory, classic TIFF or BigTIFF."""
    order = {b"II": "<", b"MM": ">"}.get(bytes(data[:2]))
    if order is None:
        raise ValueError("no byte order")
    (version,) = struct.unpack_from(f"{order}H", data, 2)
    if version == 42:
        offset_format, count_format, offset_at = "I", "H", 4
    elif version == 43:
        offset_format, count_format, offset_at = "Q", "Q", 8
    else:
        raise ValueError(f"TIFF version {version}")
    (at,) = struct.unpack_from(order + offset_format, data, offset_at)
    (count,) = struct.unpack_from(order + count_format, data, at)
    at += struct.calcsize(order + count_format)
    inline_bytes = struct.calcsize(offset_format)
    entry_bytes = 4 + 2 * inline_bytes
    tags = {}
    for entry in range(at, at + min(count, 4096) * entry_bytes, entry_bytes):
        tag, type_ = struct.unpack_from(f"{order}HH", data, entry)
        if tag in (_WIDTH, _HEIGHT, _ORIENTATION) and _TIFF_SIZES.get(type_, 99) <= inline_bytes:
            value_at = entry + 4 + inline_bytes
            (tags[tag],) = struct.unpack_from(order + _TIFF_FORMATS[type_], data, value_at)
    return tags


def _ico(data: bytes, kind: str) -> Header:
    """The largest image of an icon. Each says its size twice if it is a PNG: both must agree."""
    best = (0, 0)
    for at in range(6, 6 + 16 * data[4], 16):
        size = (data[at] or 256, data[at + 1] or 256)
        (offset,) = struct.unpack_from("<I", data, at + 12)
        if bytes(data[offset : offset + 8]) == b"\x89PNG\r\n\x1a\n":
            inside = struct.unpack_from(">II", data, offset + 16)
            if inside != size:
                raise ValueError("an image of {}x{}, listed as {}x{}".format(*inside, *size))
        best = max(best, size, key=lambda size: size[0] * size[1])
    return Header(kind=kind, width=best[0], height=best[1])


def _tiles(data: bytes, kind: str) -> Header:
    """The original image's; see `omniload.images.stored`."""
    width, height = struct.unpack_from("<II", data, 8)
    return Header(kind=kind, width=width, height=height)


_PARSERS = {
    "jpeg": _jpeg,
    "png": _png,
    "gif": _gif,
    "bmp": _bmp,
    "webp": _webp,
    "tiff": _tiff,
    "ico": _ico,
    "tiles": _tiles,
}
