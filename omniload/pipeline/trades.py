"""What recomputation of so many layers of a kind buys: the best trades of kept bytes for time.

Layers of one kind are alike, so a stage is free to recompute any of them: what counts is how many.
For every kind and number of layers the trades that no other beats are listed once, and a stage
takes one of each of its kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Trades", "list_trades"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Trades:
    """The best trades, for each allowance, class and number of layers.

    An allowance is a number of bytes that may be formed anew at once: choices that need more are
    left out. It comes once on top of what all micro-batches keep, however many layers need it.

    Args:
        starts: int64 (num_allowances, num_classes, most + 2): `starts[a, c, n]` is the first trade
            of n layers of class c, `starts[a, c, n + 1]` the end. Kept bytes rise, times fall.
        kept: int64, bytes that these layers keep a micro-batch.
        ns: int64, time that their recomputation takes.
        counts: int64 (num_trades, most choices), layers that take each choice of the class.
        working: int64 (num_allowances,), the allowances, rising from 0.
    """

    starts: Int64Array
    kept: Int64Array
    ns: Int64Array
    counts: Int64Array
    working: Int64Array


def list_trades(options: Sequence[Int64Array], numbers: Int64Array) -> Trades:
    """List the best trades.

    Args:
        options: of each class int64 (num_choices, 3): bytes kept, nanoseconds, bytes formed anew,
            of one layer. The first choice forms nothing anew.
        numbers: int64 (num_classes,), layers of each class in the model.
    """
    working = np.unique(np.concatenate([[0], *(each[:, 2] for each in options)])).astype(np.int64)
    most = int(numbers.max(initial=0))
    width = max((len(each) for each in options), default=1)
    starts = np.zeros((len(working), len(options), most + 2), np.int64)
    points: list[Int64Array] = [np.zeros((0, 2 + width), np.int64)]
    total = 0
    for allowance, allowed in enumerate(working):
        for place, table in enumerate(options):
            front = np.zeros((1, 2 + width), np.int64)
            for number in range(most + 1):
                starts[allowance, place, number] = total
                if number <= numbers[place]:
                    if number:
                        front = _one_more(front, table, int(allowed))
                    points.append(front)
                    total += len(front)
            starts[allowance, place, most + 1] = total
    every = np.concatenate(points)
    return Trades(
        starts=starts,
        kept=np.ascontiguousarray(every[:, 0]),
        ns=np.ascontiguousarray(every[:, 1]),
        counts=np.ascontiguousarray(every[:, 2:]),
        working=working,
    )


def _one_more(front: Int64Array, options: Int64Array, allowed: int) -> Int64Array:
    """Add one layer: of all trades, those that no other beats in both bytes and time."""
    grown = []
    for choice, (kept, ns, working) in enumerate(options):
        if working <= allowed:
            more = front.copy()
            more[:, 0] += kept
            more[:, 1] += ns
            more[:, 2 + choice] += 1
            grown.append(more)
    every = np.concatenate(grown)
    every = every[np.lexsort((every[:, 1], every[:, 0]))]
    best = np.minimum.accumulate(every[:, 1])
    better = np.concatenate([[True], every[1:, 1] < best[:-1]])
    chosen: Int64Array = every[better]
    return chosen
