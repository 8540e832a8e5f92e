"""A file that a cache may hold, and a file that it does hold."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from omniload.errors import ShardError

__all__ = ["Entry", "Found"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file that the cache may hold.

    Args:
        url: where it comes from.
        num_bytes: its size.
        xxh3_128: its checksum, 32 hexadecimal digits.

    Attributes:
        name: the same for the same content, wherever it comes from.

    Raises:
        ShardError: a checksum that is none; it becomes part of a file name.
    """

    url: str
    num_bytes: int
    xxh3_128: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{32}", self.xxh3_128) or not 0 < self.num_bytes < 2**63:
            raise ShardError(
                f"the manifest must give size and xxh3_128 of each file, got {self.num_bytes} "
                f"bytes and {self.xxh3_128[:40]!r}. Preprocess again."
            )
        object.__setattr__(self, "name", f"{self.xxh3_128}-{self.num_bytes}")


@dataclass(frozen=True, kw_only=True)
class Found:
    """A file in the folder that takes room.

    Args:
        path: the file.
        name: of its entry.
        kind: "shard", "partial" or "evicted".
        num_bytes: its size; of a partial file the size that it will have.
        used_ns: when it was last opened or written.
    """

    path: Path
    name: str
    kind: str
    num_bytes: int
    used_ns: int
