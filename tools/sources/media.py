"""Image values of a record to image files in memory, inside a root folder only."""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass
from typing import Any

from omniload.conversations import MAX_IMAGE_BYTES, RefusedError, bounded, data_uri
from omniload.images.video import VIDEO_SUFFIXES, video_message
from omniload.tools.sources.frames import in_order

__all__ = ["ImageLoader"]

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif")

_FAULTS_OF_A_RECORD = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP,
    errno.ENAMETOOLONG, errno.ENXIO,
)  # fmt: skip
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True, kw_only=True)
class ImageLoader:
    """Reads what a record names as its image.

    Args:
        allow_outside_root: read paths that leave the image root too.
    """

    allow_outside_root: bool = False

    def load(self, value: Any, root: str) -> bytes:
        """Read one image value.

        Args:
            value: a path, a `data:` URI, bytes, or a dict with `bytes` and `path`.
            root: folder that a path is relative to, absolute.

        Returns:
            The encoded image file.

        Raises:
            RefusedError: a URL, a path outside the root, a file that is missing, not regular,
                empty or too large.
        """
        if isinstance(value, dict):
            if value.get("bytes"):
                value = value["bytes"]
            else:
                value = value.get("path") or value.get("url")
        if isinstance(value, (bytes, bytearray, memoryview)):
            return bounded(bytes(value), "an image given as bytes")
        if not isinstance(value, str) or not value:
            raise RefusedError(
                "not an image value",
                f"an image must be a path, a data: URI or bytes, got {type(value).__name__}",
            )
        if value[:5].lower() == "data:":
            return bounded(data_uri(value), "the data: URI")
        if _URL.match(value):
            raise RefusedError(
                "image is a URL",
                f"an image must be a local file, got the URL {value!r:.200}. Download the images "
                "first and name their paths",
            )
        return self._read(value, root)

    def frames(self, value: str, root: str) -> list[str] | None:
        """List the image files of a folder, in the order of the numbers in their names.

        Args:
            value: a path.
            root: folder that it is relative to, absolute.

        Returns:
            Paths like `value`; None if it is no folder.

        Raises:
            RefusedError: a folder outside the root, or without an image file.
        """
        lower = value.lower()
        if not value or lower.endswith(_IMAGE_SUFFIXES) or lower[:5] == "data:":
            return None  # no question to the file system for the paths of nearly all data
        if _URL.match(value):
            return None
        try:
            is_folder = os.path.isdir(os.path.join(root, value))  # noqa: PTH112, PTH118
        except ValueError:  # no path at all: `load` says so
            return None
        if not is_folder:
            return None
        folder = self._resolve(value, root)
        try:
            listed = os.listdir(folder)  # noqa: PTH208
        except OSError as error:
            if error.errno not in _FAULTS_OF_A_RECORD:
                raise
            raise RefusedError(
                "image unread", f"the folder {value!r:.200} can't be read: {error.strerror}"
            ) from None
        names = [name for name in listed if name.lower().endswith(_IMAGE_SUFFIXES)]
        if not names:
            raise RefusedError(
                "image is missing",
                f"the folder {value!r:.200} must hold image files ({', '.join(_IMAGE_SUFFIXES)})",
            )
        return [os.path.join(value, name) for name in in_order(names)]  # noqa: PTH118

    def _read(self, value: str, root: str) -> bytes:
        if value.lower().endswith(VIDEO_SUFFIXES):
            raise RefusedError("video container", video_message(f"{value!r:.200}"))
        try:
            return _read_file(self._resolve(value, root), f"the image {value!r:.200}")
        except RefusedError as error:
            if error.category != "image is missing" or os.path.isabs(value):  # noqa: PTH117
                raise
            raise RefusedError(
                error.category, f"{error.reason} in {root}; see --image-root"
            ) from None

    def _resolve(self, value: str, root: str) -> str:
        try:
            if b"\0" in os.fsencode(value):
                raise ValueError
        except ValueError:  # half of a surrogate pair can't be in a file name either
            raise RefusedError(
                "not an image value", f"a path must be valid text, got {value!r:.200}"
            ) from None
        path = os.path.join(root, value)  # noqa: PTH118 - must keep what the data says, unnormalised
        resolved = os.path.realpath(path)
        if not self.allow_outside_root:
            inside = os.path.realpath(root)
            if os.path.commonpath([inside, resolved]) != inside:
                raise RefusedError(
                    "outside the image root",
                    f"the image path {value!r:.200} leads outside its root. Set --image-root to a "
                    "folder above it, or trust the data with --allow-outside-root",
                )
        return resolved


def _read_file(path: str, what: str) -> bytes:
    try:
        # not blocking: a named pipe would wait for a writer for ever
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in _FAULTS_OF_A_RECORD:
            raise  # a file system that fails must not cost a data set its images
        missing = isinstance(error, FileNotFoundError)
        raise RefusedError(
            "image is missing" if missing else "image unread",
            f"{what} can't be read: {error.strerror}",
        ) from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise RefusedError("image unread", f"{what} is not a regular file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return bounded(file.read(min(facts.st_size, MAX_IMAGE_BYTES) + 1), what)
    finally:
        os.close(descriptor)
