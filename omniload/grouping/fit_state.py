"""What the buffered grouping remembers between two calls, as arrays for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omniload.grouping.fit import BEFORE, BUFFERED, CELLS, NEXT

__all__ = ["FitState", "make_state"]

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

_UNIT = 2**40  # a whole budget in units of the score, so that scores are integers


class FitState(NamedTuple):
    """What a packer holds, as arrays that compiled code writes to."""

    limits: Int64Array
    counters: Int64Array
    # (buffer + 1, 8): the buffered samples; the last row is the head of the ring in arrival order
    slots: Int32Array
    arrivals: Int64Array
    # (num_classes + 1, 65): a bit for each cell in use, then one for each word of them that isn't
    # 0; the last row has one for each class in use
    words: UInt64Array
    # (num_classes, 4096): the first sample of each cell; cells run from most tokens to least
    cells: Int16Array
    # (2, num_classes): least and most tiles of a class; the class of the most tiles is the first
    spans: Int64Array
    # (buffer, 4): the oldest samples in arrival order, side by side, as far as they are needed
    front: Int32Array
    chain: Int32Array
    best: Int32Array

    @property
    def num_buffered(self) -> int:
        """Samples in the buffer."""
        return int(self.counters[BUFFERED])

    def pending(self) -> Int64Array:
        """List the arrival numbers of the buffered samples, the oldest first."""
        found = []
        slot = int(self.slots[-1, NEXT])
        while slot != len(self.slots) - 1:
            found.append(int(self.arrivals[slot]))
            slot = int(self.slots[slot, NEXT])
        return np.array(found, np.int64)


def make_state(
    *,
    caps: tuple[int, int, int],
    bounds: Int64Array,
    buffer: int,
    retries: int,
    reach: int,
    slack_weight: int,
    dummy_tokens: int,
) -> FitState:
    """Make the state of an empty packer.

    Args:
        caps: tokens, tiles and samples that a group may hold.
        bounds: int64 (num_classes,), rising, the most tiles of each class; the last one is the cap.
        buffer: see `BufferedSettings`, as for the others.
        retries: the same.
        reach: the same.
        slack_weight: the same.
        dummy_tokens: the same.

    Returns:
        The state.
    """
    tokens, _, _ = caps
    shift = 0
    while (tokens - 1) >> shift >= CELLS:
        shift += 1
    tile_unit = _UNIT // int(bounds[-1]) if bounds[-1] else 0
    limits = [*caps, _UNIT // tokens, tile_unit, shift, retries, reach, slack_weight, dummy_tokens]
    slots = np.zeros((buffer + 1, 8), np.int32)
    slots[:-1, NEXT] = np.arange(1, buffer + 1)  # free slots are linked through the same column
    slots[-1, NEXT] = slots[-1, BEFORE] = buffer
    most = bounds[::-1]
    return FitState(
        limits=np.array(limits, np.int64),
        counters=np.zeros(3, np.int64),
        slots=slots,
        arrivals=np.zeros(buffer, np.int64),
        words=np.zeros((len(bounds) + 1, CELLS // 64 + 1), np.uint64),
        cells=np.full((len(bounds), CELLS), -1, np.int16),
        spans=np.stack([np.append(most[1:] + 1, 0), most]),
        front=np.zeros((buffer, 4), np.int32),
        chain=np.zeros(buffer + 1, np.int32),
        best=np.zeros(buffer + 1, np.int32),
    )
