"""Compiled search for where to cut the layers of a pipeline, in whole numbers.

A stage that can't be is marked by -1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["best_cuts", "least_worst", "suffixes"]

Int64Array = npt.NDArray[np.int64]

_NEVER = 2**62


@jit
def suffixes(times: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Compute the least maximum and the least sum of the stages from each place and layer on.

    Returns:
        int64 (num_stages + 1, num_layers + 1) each; 2**62: can't be.
    """
    num_stages, num_layers = len(times), times.shape[1] - 1
    longest = np.full((num_stages + 1, num_layers + 1), _NEVER, np.int64)
    total = np.full((num_stages + 1, num_layers + 1), _NEVER, np.int64)
    longest[num_stages, num_layers] = 0
    total[num_stages, num_layers] = 0
    for stage in range(num_stages - 1, -1, -1):
        for low in range(num_layers):
            for high in range(low + 1, num_layers + 1):
                time = times[stage, low, high]
                if time >= 0 and total[stage + 1, high] < _NEVER:
                    found = max(time, longest[stage + 1, high])
                    longest[stage, low] = min(longest[stage, low], found)
                    total[stage, low] = min(total[stage, low], time + total[stage + 1, high])
    return longest, total


@jit
def best_cuts(
    times: Int64Array,
    longest: Int64Array,
    total: Int64Array,
    weight: int,
    bound: int,
    keep: int,
) -> tuple[Int64Array, Int64Array]:
    """Search the cuts with the least weight * maximum + sum of the stage times.

    A dynamic programme over stages and bounds, whose states are the pairs (maximum, sum) that no
    other pair beats in both. That is exact: what comes after can't turn the order of two such pairs
    around. With `keep`, each state has that many pairs besides, those with the best bounds: the
    plans that come of it are near the best, and not all of them.

    Args:
        times: int64 (num_stages, num_layers + 1, num_layers + 1), nanoseconds; -1: can't be.
        longest: least maximum of what comes after, of `suffixes`.
        total: least sum of what comes after.
        weight: of the maximum; micro-batches less 1.
        bound: nothing above this value is looked for.
        keep: pairs that a state keeps beside the exact ones.

    Returns:
        Values int64 (n,), rising, and bounds of the stages int64 (n, num_stages + 1).
    """
    num_stages, num_layers = len(times), times.shape[1] - 1
    size = 1024
    most = np.zeros(size, np.int64)  # of each label: the pair, where it came from
    added = np.zeros(size, np.int64)
    cut = np.zeros(size, np.int64)
    parent = np.full(size, -1, np.int64)
    starts = np.zeros((num_stages + 1, num_layers + 2), np.int64)
    used = 1  # label 0: no stage yet, no layer
    starts[0, 1:] = 1
    for stage in range(num_stages):
        for high in range(num_layers + 1):
            starts[stage + 1, high] = used
            # with values from bounds: (bound, maximum, sum, low, label)
            room, count = 256, 0
            found = np.zeros((room, 5), np.int64)
            for low in range(high):
                time = times[stage, low, high]
                if time < 0 or total[stage + 1, high] == _NEVER:
                    continue
                for label in range(starts[stage, low], starts[stage, low + 1]):
                    top = max(most[label], time)
                    whole = added[label] + time
                    value = weight * max(top, longest[stage + 1, high])
                    value += whole + total[stage + 1, high]
                    if value > bound:
                        continue
                    if count == room:
                        grown = np.zeros((2 * room, 5), np.int64)
                        grown[:room] = found
                        found, room = grown, 2 * room
                    found[count, 0], found[count, 1], found[count, 2] = value, top, whole
                    found[count, 3], found[count, 4] = low, label
                    count += 1
            chosen = _choose(found[:count], keep)
            if used + len(chosen) > size:
                size = max(2 * size, used + len(chosen))
                most, added = _grow(most, size), _grow(added, size)
                cut, parent = _grow(cut, size), _grow(parent, size)
            for place in chosen:
                most[used], added[used] = found[place, 1], found[place, 2]
                cut[used], parent[used] = found[place, 3], found[place, 4]
                used += 1
        starts[stage + 1, num_layers + 1] = used
    last = starts[num_stages, num_layers]
    values = weight * most[last:used] + added[last:used]
    order = np.argsort(values, kind="mergesort")
    bounds = np.zeros((len(order), num_stages + 1), np.int64)
    for place, number in enumerate(order):
        bounds[place, num_stages] = num_layers
        label = last + number
        for stage in range(num_stages - 1, -1, -1):
            bounds[place, stage] = cut[label]
            label = parent[label]
    return values[order], bounds


@jit
def _choose(found: Int64Array, keep: int) -> Int64Array:
    """Choose the labels of a state: pairs that no other beats, and `keep` more by their bounds."""
    by_sum = np.argsort(found[:, 2], kind="mergesort")
    order = by_sum[np.argsort(found[by_sum, 1], kind="mergesort")]
    chosen = np.zeros(len(order), np.int64)
    count = 0
    taken = np.zeros(len(order), np.bool_)
    least = _NEVER
    for place in order:
        if found[place, 2] < least:
            least = found[place, 2]
            chosen[count] = place
            taken[place] = True
            count += 1
    if keep > 0:
        more = 0
        for place in np.argsort(found[:, 0], kind="mergesort"):
            if more == keep:
                break
            if not taken[place]:
                chosen[count] = place
                count += 1
                more += 1
    return chosen[:count]


@jit
def _grow(values: Int64Array, size: int) -> Int64Array:
    grown = np.zeros(size, np.int64)
    grown[: len(values)] = values
    return grown


@jit
def least_worst(values: Int64Array) -> tuple[int, Int64Array]:
    """Find the cuts whose largest value over the stages is least.

    Args:
        values: int64 (num_stages, num_layers + 1, num_layers + 1), 0 or more; -1: can't be.

    Returns:
        That value and the bounds, int64 (num_stages + 1,); the value is -1 where there are none.
    """
    num_stages, num_layers = len(values), values.shape[1] - 1
    best = np.full((num_stages + 1, num_layers + 1), _NEVER, np.int64)
    cut = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    best[0, 0] = -1
    for stage in range(num_stages):
        for high in range(1, num_layers + 1):
            for low in range(high):
                value = values[stage, low, high]
                if value >= 0 and best[stage, low] < _NEVER:
                    top = max(best[stage, low], value)
                    if top < best[stage + 1, high]:
                        best[stage + 1, high] = top
                        cut[stage + 1, high] = low
    bounds = np.zeros(num_stages + 1, np.int64)
    if best[num_stages, num_layers] == _NEVER:
        return -1, bounds
    bounds[num_stages] = num_layers
    for stage in range(num_stages, 0, -1):
        bounds[stage - 1] = cut[stage, bounds[stage]]
    return best[num_stages, num_layers], bounds
