"""Compiled search for what a stage recomputes, in whole nanoseconds and bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["all_stages", "solve_stage"]

Int64Array = npt.NDArray[np.int64]


@jit
def solve_stage(
    class_ends: Int64Array,
    starts: Int64Array,
    kept: Int64Array,
    ns: Int64Array,
    working: Int64Array,
    low: int,
    high: int,
    free: int,
    in_flight: int,
    fixed: int,
    picks: Int64Array,
) -> int:
    """Choose what a stage recomputes so that it fits and takes the least time.

    Args:
        class_ends: int64 (num_classes, num_layers + 1), layers of each class before each layer.
        starts: int64 (num_allowances, num_classes, most + 2), the trades of each number of layers.
        kept: int64, bytes that each trade keeps a micro-batch; rising within a number of layers.
        ns: int64, the time it takes; falling.
        working: int64 (num_allowances,), bytes formed anew at once; rising, the first 0.
        low: first layer of the stage.
        high: layer after its last.
        free: bytes for activations.
        in_flight: micro-batches that keep theirs at once.
        fixed: bytes a micro-batch keeps in layers without a choice.
        picks: int64 (num_classes,), written: the trade of each class.

    Returns:
        Time of recomputation, nanoseconds; -1: it doesn't fit.
    """
    num_classes = len(class_ends)
    best = -1
    first = np.zeros(num_classes, np.int64)
    end = np.zeros(num_classes, np.int64)
    at = np.zeros(num_classes, np.int64)
    for allowance in range(len(working)):
        if best == 0 or free < working[allowance]:
            break
        # how much a micro-batch may keep; in whole bytes, so rounding down loses nothing
        room = (free - working[allowance]) // in_flight - fixed
        if room < 0:
            break
        least = np.int64(0)
        for place in range(num_classes):
            number = class_ends[place, high] - class_ends[place, low]
            first[place] = starts[allowance, place, number]
            end[place] = starts[allowance, place, number + 1]
            at[place] = first[place]
            least += kept[first[place]]
        if least > room:
            continue
        if num_classes == 0:
            best = 0
            continue
        # all trades of all classes but the last two, in turn; of these two, one rises as one falls
        inner = max(num_classes - 2, 0)
        while True:
            left, time = room, np.int64(0)
            for place in range(inner):
                left -= kept[at[place]]
                time += ns[at[place]]
            if num_classes == 1:
                last = end[0] - 1
                while last >= first[0] and kept[last] > left:
                    last -= 1
                if last >= first[0] and (best < 0 or ns[last] < best):
                    best = ns[last]
                    picks[0] = last
            else:
                last = end[inner + 1] - 1
                for one in range(first[inner], end[inner]):
                    while last >= first[inner + 1] and kept[one] + kept[last] > left:
                        last -= 1
                    if last < first[inner + 1]:
                        break
                    found = time + ns[one] + ns[last]
                    if best < 0 or found < best:
                        best = found
                        picks[:inner] = at[:inner]
                        picks[inner], picks[inner + 1] = one, last
            outer = 0
            while outer < inner:
                at[outer] += 1
                if at[outer] < end[outer]:
                    break
                at[outer] = first[outer]
                outer += 1
            if outer >= inner:
                break
    return best


@jit
def all_stages(
    class_ends: Int64Array,
    starts: Int64Array,
    kept: Int64Array,
    ns: Int64Array,
    working: Int64Array,
    work_ns: Int64Array,
    cut_ns: Int64Array,
    static_bytes: Int64Array,
    fixed_kept: Int64Array,
    in_flight: Int64Array,
    limits: Int64Array,
    allowed: npt.NDArray[np.bool_],
    most_ns: int,
) -> Int64Array:
    """Compute the time of every stage [low, high) at every place.

    Args:
        class_ends: as for `solve_stage`, as the next four.
        starts: as there.
        kept: as there.
        ns: as there.
        working: as there.
        work_ns: int64 (num_layers + 1,), forward and backward time of the layers before each.
        cut_ns: int64 (num_layers + 1,), what a cut costs on each of its sides.
        static_bytes: int64 (num_layers + 1, num_layers + 1), what a stage always holds.
        fixed_kept: int64 (num_layers + 1,), kept by layers without a choice, before each.
        in_flight: int64 (num_stages,), micro-batches that keep their activations at once.
        limits: int64 (num_stages,), bytes.
        allowed: bool (num_stages, num_layers + 1, num_layers + 1), stages that may be.
        most_ns: stages that take longer are left out.

    Returns:
        int64 (num_stages, num_layers + 1, num_layers + 1), nanoseconds; -1: can't be.
    """
    num_stages, num_layers = len(limits), len(work_ns) - 1
    times = np.full((num_stages, num_layers + 1, num_layers + 1), -1, np.int64)
    picks = np.zeros(len(class_ends), np.int64)
    for stage in range(num_stages):
        # each stage before and after needs a layer
        for low in range(stage, num_layers):
            for high in range(low + 1, num_layers - (num_stages - 1 - stage) + 1):
                work = work_ns[high] - work_ns[low] + cut_ns[low]
                plain = work + cut_ns[high]
                if work > most_ns:
                    break
                if plain > most_ns or not allowed[stage, low, high]:
                    continue
                more = solve_stage(
                    class_ends,
                    starts,
                    kept,
                    ns,
                    working,
                    low,
                    high,
                    limits[stage] - static_bytes[low, high],
                    in_flight[stage],
                    fixed_kept[high] - fixed_kept[low],
                    picks,
                )
                if more >= 0 and plain + more <= most_ns:
                    times[stage, low, high] = plain + more
    return times
