"""Room in groups without tiles, for a dummy document with an image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload.types import Groups

__all__ = ["keep_room"]


def keep_room(
    groups: Groups,
    num_tokens: npt.NDArray[np.int32],
    num_tiles: npt.NDArray[np.int32],
    *,
    most_tokens: int,
) -> Groups:
    """Split groups without tiles that are too full, each by next fit where it stands.

    Args:
        groups: groups of rows.
        num_tokens: int32 (n,), tokens per row.
        num_tiles: int32 (n,), tiles per row.
        most_tokens: tokens that a group without tiles may hold. A row with more stays alone.

    Returns:
        Groups of the same rows in the same order.
    """
    tokens, tiles, sizes = groups.sums(num_tokens), groups.sums(num_tiles), np.diff(groups.offsets)
    full = np.flatnonzero((tiles == 0) & (tokens > most_tokens) & (sizes > 1))
    cuts: list[int] = []
    for group in full.tolist():
        first, end = groups.offsets[group : group + 2].tolist()
        used = 0
        for place, size in enumerate(num_tokens[groups.rows[first:end]].tolist(), start=first):
            if used and used + size > most_tokens:
                cuts.append(place)
                used = 0
            used += size
    offsets = np.concatenate([groups.offsets, np.array(cuts, np.int64)])
    return Groups(rows=groups.rows, offsets=np.sort(offsets))
