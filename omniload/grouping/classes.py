"""Classes of tile counts, so that a lookup by tiles goes through at most 64 of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_CLASSES", "class_bounds"]

MOST_CLASSES = 64
_STEPS = 256  # a class is at least 1 / 256 narrower than the one above it


def class_bounds(tiles: int | None) -> npt.NDArray[np.int64]:
    """Cut the tile counts 0 .. `tiles` into classes.

    Up to 63 tiles each count is a class of its own. Above, counts are rounded up, never over the
    cap: 0 stays by itself, small counts too, and larger ones share classes that are a constant
    share of their size wide, the smallest with which 64 classes are enough.

    Args:
        tiles: tile budget of a group; None: tiles don't count.

    Returns:
        int64 (num_classes,), rising: the most tiles of each class; the last is `tiles`.
    """
    if tiles is None:
        return np.zeros(1, np.int64)
    if tiles < MOST_CLASSES:
        return np.arange(tiles + 1, dtype=np.int64)
    for share in range(_STEPS - 1, 0, -1):
        bounds = [tiles]
        while bounds[-1] > 0 and len(bounds) <= MOST_CLASSES:
            bounds.append(min(bounds[-1] * share // _STEPS, bounds[-1] - 1))
        if len(bounds) <= MOST_CLASSES:
            break
    return np.array(bounds[::-1], np.int64)
