"""Size and orientation of an image from its header alone, within limits: no pixel is decoded."""

from __future__ import annotations

import struct
from typing import Any

from omniload.errors import SampleError
from omniload.images.formats import Header, parse_header
from omniload.images.kinds import PIL_READERS, image_kind
from omniload.images.video import video_container, video_message

__all__ = ["MAX_PIXELS", "image_size", "read_header", "unsigned"]

#: Pixels an image may have; a file of a few kilobytes can claim any number of them. It is where
#: PIL gives up too; PIL's warning at half of it is not given.
MAX_PIXELS = 178_956_970

#: Pixels of a side above which an image is refused: what resizing puts in between would be larger
#: than image and result by far.
MAX_SIDE = 100_000


def image_size(data: bytes) -> tuple[int, int]:
    """Read the size of an encoded image from its header.

    Args:
        data: an encoded image.

    Returns:
        (width, height) after EXIF orientation, pixels.

    Raises:
        SampleError: empty, not an image, a damaged header, more than `MAX_PIXELS` pixels, or a side
            above `MAX_SIDE`.
    """
    return read_header(data).size


def read_header(data: bytes) -> Header:
    """Read kind, size and orientation of an encoded image.

    Args:
        data: an encoded image.

    Returns:
        The header; sides from 1 to `MAX_SIDE`, at most `MAX_PIXELS` pixels.

    Raises:
        SampleError: empty, not an image, a damaged header, or too many pixels.
    """
    data = unsigned(data)
    kind = image_kind(data)
    if kind == "unknown":
        if len(data) == 0:
            raise SampleError("the image is empty (0 bytes).")
        container = video_container(data)
        if container is not None:
            raise SampleError(f"{video_message(container)}.")
        raise SampleError(
            f"not an image of a known kind: expected {', '.join(PIL_READERS)}, got {len(data)} "
            f"bytes that start with {bytes(data[:8])!r}."
        )
    try:
        header = parse_header(data, kind)
    except (struct.error, IndexError, ValueError) as error:
        raise SampleError(f"damaged {kind} image: its header can't be read ({error}).") from error
    if header.width < 1 or header.height < 1:
        raise SampleError(
            f"damaged {kind} image: sides must be at least 1, got {header.width}x{header.height}."
        )
    if header.width * header.height > MAX_PIXELS:
        raise SampleError(
            f"{kind} image too large: at most {MAX_PIXELS} pixels, got "
            f"{header.width}x{header.height}. Resize it before preprocessing."
        )
    if max(header.width, header.height) > MAX_SIDE:
        raise SampleError(
            f"{kind} image too long: at most {MAX_SIDE} pixels a side, got "
            f"{header.width}x{header.height}. Cut it before preprocessing."
        )
    return header


def unsigned(data: Any) -> Any:
    """View an encoded image as unsigned bytes; those of an Arrow buffer are signed."""
    return data.cast("B") if isinstance(data, memoryview) else data
