"""How even the plan is over ranks: the work of each, added up for many micro-batches at a time.

A few numbers for each batch cost more to hand to NumPy than to add, so they wait until there are
many, or until somebody asks.
"""

from __future__ import annotations

import numpy as np

from omniload.costs import CostModel
from omniload.index import LengthIndex
from omniload.loader.tasks import Slot

__all__ = ["DIST_NAMES", "PlannedLoads"]

#: what `PlannedLoads.sums` gives
DIST_NAMES = ("dist_count", "dist_tokens", "dist_tiles", "dist_cost")
#: Micro-batches that wait to be added up.
_MOST_WAITING = 64


class PlannedLoads:
    """Sums up the dist ratios of steps: the shares of tokens, tiles and time that ranks wait for.

    Args:
        cost: estimates time.
        meet_every: micro-steps after which ranks wait for each other.
    """

    def __init__(self, cost: CostModel, *, meet_every: int) -> None:
        self._cost = cost
        self._meet_every = meet_every
        self._index: LengthIndex | None = None
        self._waiting: list[Slot] = []
        self._sums = np.zeros(len(DIST_NAMES))

    def begin(self, index: LengthIndex) -> None:
        """Begin an epoch, or the rest of one.

        Args:
            index: lengths of its rows.
        """
        self._add_up()
        self._waiting.clear()  # of a step that was left
        self._index = index

    def add(self, slot: Slot) -> None:
        """Note a micro-batch; they come in order."""
        if slot.ends is None or len(slot.ends) < 3:
            return  # one rank waits for nobody
        if len(self._waiting) % self._meet_every != slot.micro_step % self._meet_every:
            return  # of a step that was taken up in its middle
        self._waiting.append(slot)
        if len(self._waiting) >= _MOST_WAITING:
            self._add_up()

    def sums(self) -> dict[str, float]:
        """Return the number of times that ranks met, and the sums of the ratios."""
        self._add_up()
        return dict(zip(DIST_NAMES, self._sums.tolist(), strict=True))

    def _add_up(self) -> None:
        """Add up the steps that are complete."""
        every = self._meet_every
        num_slots = len(self._waiting) // every * every
        slots, self._waiting = self._waiting[:num_slots], self._waiting[num_slots:]
        if not slots or self._index is None:
            return
        rows = np.concatenate([slot.all_rows for slot in slots])
        ends = np.stack([slot.ends for slot in slots if slot.ends is not None])
        tokens, tiles = self._index.num_tokens[rows].astype(np.int64), self._index.num_tiles[rows]
        running = np.zeros((3, len(rows) + 1), np.int64)
        np.cumsum([tokens, tiles, tokens * tokens], axis=1, out=running[:, 1:])
        firsts = np.cumsum(ends[:, -1]) - ends[:, -1]
        loads = np.diff(running[:, ends + firsts[:, None]]).astype(np.float64)
        loads[2] = self._cost.cost(loads[1], loads[0], loads[2]) * (loads[0] > 0)
        loads = loads.reshape(3, -1, every, loads.shape[-1]).sum(axis=2)
        most = loads.max(axis=2)
        ratios = np.where(most > 0, 1 - loads.mean(axis=2) / np.where(most > 0, most, 1), 0.0)
        self._sums[0] += ratios.shape[1]
        self._sums[1:] += ratios.sum(axis=1)
