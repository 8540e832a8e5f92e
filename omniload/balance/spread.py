"""Tiles for groups that have none, so that the ranks of a micro-step all have some."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["spread_tiles"]

Int64Array = npt.NDArray[np.int64]


@jit
def spread_tiles(
    sizes: Int64Array,
    loads: Int64Array,
    order: Int64Array,
    group_offsets: Int64Array,
    caps: Int64Array,
    wanted: int,
) -> int:
    """Give tiles to groups that have none, each by one swap with a group that can spare a sample.

    Of all swaps that the caps allow, the one that moves fewest tokens is taken.

    Args:
        sizes: int64 (n, 2), tokens and tiles of each entry; written, as `loads` and `order` are.
        loads: int64 (n, 2), moved along.
        order: int64 (n,), moved along.
        group_offsets: int64 (num_groups + 1,), entries of each group.
        caps: int64 (num_groups, 2), tokens and tiles that a group may hold.
        wanted: groups that are to get tiles, the first ones for which there is a swap.

    Returns:
        Groups that got tiles.
    """
    num_groups = len(group_offsets) - 1
    room = caps.copy()
    tiled = np.zeros(num_groups, np.int64)  # samples with tiles
    for group in range(num_groups):
        for entry in range(group_offsets[group], group_offsets[group + 1]):
            room[group, 0] -= sizes[entry, 0]
            room[group, 1] -= sizes[entry, 1]
            tiled[group] += sizes[entry, 1] > 0
    done = 0
    for group in range(num_groups):
        if done == wanted:
            break
        if tiled[group] > 0:
            continue
        donor, mine, other = _cheapest(sizes, group_offsets, room, tiled, group)
        if donor < 0:
            continue
        done += 1
        tiled[donor] -= 1
        tiled[group] += 1
        for column in range(2):
            moved = sizes[mine, column] - sizes[other, column]
            room[donor, column] += moved
            room[group, column] -= moved
            loads[mine, column], loads[other, column] = loads[other, column], loads[mine, column]
            sizes[mine, column], sizes[other, column] = sizes[other, column], sizes[mine, column]
        order[mine], order[other] = order[other], order[mine]
    return done


@jit
def _cheapest(
    sizes: Int64Array, group_offsets: Int64Array, room: Int64Array, tiled: Int64Array, group: int
) -> tuple[int, int, int]:
    """Find who gives which sample for which one of the group; -1: nobody can."""
    least, mine, other, donor = -1, -1, -1, -1
    for giver in range(len(tiled)):
        if tiled[giver] < 2:
            continue
        for entry in range(group_offsets[giver], group_offsets[giver + 1]):
            if sizes[entry, 1] == 0 or sizes[entry, 1] > room[group, 1]:
                continue
            for swapped in range(group_offsets[group], group_offsets[group + 1]):
                tokens = sizes[entry, 0] - sizes[swapped, 0]
                if -tokens <= room[giver, 0] and tokens <= room[group, 0]:
                    if least < 0 or abs(tokens) < least:
                        least, mine, other, donor = abs(tokens), entry, swapped, giver
    return donor, mine, other
