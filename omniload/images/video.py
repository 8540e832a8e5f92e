"""Video containers, told from images by their first bytes: they are refused by name."""

from __future__ import annotations

__all__ = ["VIDEO_SUFFIXES", "video_container", "video_message"]

#: Endings of video files.
VIDEO_SUFFIXES = (
    ".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".3gp",
)  # fmt: skip

#: Brands of ISO files that hold a still image or a short animation of them.
_IMAGE_BRANDS = (b"avif", b"avis", b"mif1", b"msf1", b"heic", b"heix", b"hevc", b"hevx", b"heim",
                 b"heis", b"jp2 ", b"jpx ")  # fmt: skip


def video_container(data: bytes) -> str | None:
    """Name the video container that a file is.

    Args:
        data: a file; 16 bytes are enough.

    Returns:
        "mp4", "mov", "webm or mkv", "avi", "mpeg", "flv" or "wmv"; None for anything else.
    """
    head = bytes(data[:16])
    if head[4:8] == b"ftyp" and head[8:12] not in _IMAGE_BRANDS:
        return "mov" if head[8:12] == b"qt  " else "mp4"
    if head[4:8] in (b"moov", b"mdat", b"wide"):
        return "mov"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "webm or mkv"
    if head.startswith(b"RIFF") and head[8:12] == b"AVI ":
        return "avi"
    if head.startswith((b"\0\0\x01\xba", b"\0\0\x01\xb3")):
        return "mpeg"
    if head.startswith(b"FLV"):
        return "flv"
    return "wmv" if head.startswith(b"\x30\x26\xb2\x75\x8e\x66\xcf\x11") else None


def video_message(what: str) -> str:
    """Say that a video can't be read, and what to do.

    Args:
        what: the video, in words.
    """
    return (
        f"video containers are not supported yet, got {what}: extract its frames to images, and "
        "name their folder or list the files"
    )
