"""Groups in another order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload.types import Groups

__all__ = ["reordered"]


def reordered(groups: Groups, order: npt.NDArray[np.int64]) -> Groups:
    """Put groups into another order, each with its rows as they are.

    Args:
        groups: n groups.
        order: int64 (n,), a permutation: the g-th group of the result is group `order[g]`.

    Returns:
        The n groups.
    """
    sizes = np.diff(groups.offsets)[order]
    ends = np.cumsum(sizes)
    # where an entry was before: the place in the result, moved as its group has moved
    places = np.arange(len(groups.rows)) + np.repeat(groups.offsets[order] - (ends - sizes), sizes)
    return Groups(rows=groups.rows[places], offsets=np.concatenate([np.zeros(1, np.int64), ends]))
