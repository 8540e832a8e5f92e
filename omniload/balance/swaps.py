"""Swaps of samples between the groups of one step, so that the loads of ranks become alike."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["ANY_KIND", "KEEP_TILES", "SAME_KIND", "swap_samples"]

Int64Array = npt.NDArray[np.int64]

#: Which swaps are allowed: all; none that takes the last tile out of a group; only tiles for tiles.
ANY_KIND, KEEP_TILES, SAME_KIND = 0, 1, 2

_FAR = 8  # partners that are tried first: those whose loads differ most
_WINDOW = 256  # partners that are looked at in one round, of however many
_MOST_PAIRS = 4096  # pairs of entries from which two swaps at once are put together
_FEWEST_PAIRS = 64
_NEAR = 8  # second swaps that are looked at for each first one
_OVERHEAD = 16  # trials that the choice of a partner counts as

# columns of the facts of a group
_TOKEN_ROOM, _TILE_ROOM, _TILES = range(3)


@jit
def swap_samples(
    loads: Int64Array,
    sizes: Int64Array,
    order: Int64Array,
    group_offsets: Int64Array,
    unit_offsets: Int64Array,
    caps: Int64Array,
    targets: tuple[int, int],
    kinds: int,
    most_trials: int,
) -> int:
    """Swap entries between units until no unit is above the targets, or nothing helps any more.

    The unit that is furthest above a target gives load to another one by the swap that lowers the
    sum of the squared loads most; where there is none, by two swaps at once. All in integers.

    Args:
        loads: int64 (n, 2), two loads of each entry; at most 2**20 summed over any unit.
        sizes: int64 (n, 2), tokens and tiles of each entry.
        order: int64 (n,), moved along with the rows of `loads` and `sizes`: all three are written.
        group_offsets: int64 (num_groups + 1,), entries of each group.
        unit_offsets: int64 (num_units + 1,), groups of each unit.
        caps: int64 (num_groups, 2), tokens and tiles that a group may hold.
        targets: loads that no unit has to go below.
        kinds: which swaps are allowed.
        most_trials: pairs of entries that may be looked at.

    Returns:
        Pairs of entries that were looked at.
    """
    num_units = len(unit_offsets) - 1
    facts = np.zeros((len(group_offsets) - 1, 3), np.int64)
    totals = np.zeros((num_units, 2), np.int64)
    _count(loads, sizes, group_offsets, unit_offsets, caps, facts, totals)
    given_up = np.zeros(num_units, np.bool_)
    distance = np.empty(min(num_units, _WINDOW), np.int64)
    swaps = np.empty((2, 2), np.int64)
    trials, turn = 0, 0
    while trials < most_trials:
        # int(): Numba compiles the callees once more for arguments that are literals
        unit, most = int(-1), 0  # noqa: UP018, RUF046
        for candidate in range(num_units):
            above = max(totals[candidate, 0] - targets[0], totals[candidate, 1] - targets[1])
            if above > most and not given_up[candidate]:
                unit, most = candidate, above
        if unit < 0:
            break
        turn += 1
        first = turn * _WINDOW if num_units > _WINDOW else 0
        partner = int(-1)  # noqa: UP018, RUF046
        for two in range(2):
            looked, partner, group, against = _best_partner(
                loads,
                sizes,
                group_offsets,
                unit_offsets,
                facts,
                totals,
                unit,
                (first, kinds, two),
                distance,
                swaps,
            )
            trials += looked
            if partner >= 0:
                break
        if partner < 0:
            given_up[unit] = True
            continue
        for number in range(two + 1):
            _swap(
                loads,
                sizes,
                order,
                facts,
                totals,
                (swaps[number, 0], swaps[number, 1]),
                (group, against),
                (unit, partner),
            )
        given_up[unit] = given_up[partner] = False
    return trials


@jit
def _count(
    loads: Int64Array,
    sizes: Int64Array,
    group_offsets: Int64Array,
    unit_offsets: Int64Array,
    caps: Int64Array,
    facts: Int64Array,
    totals: Int64Array,
) -> None:
    """Write the facts of each group, and the loads of each unit."""
    for unit in range(len(totals)):
        for group in range(unit_offsets[unit], unit_offsets[unit + 1]):
            facts[group, _TOKEN_ROOM] = caps[group, 0]
            facts[group, _TILE_ROOM] = caps[group, 1]
            for entry in range(group_offsets[group], group_offsets[group + 1]):
                facts[group, _TOKEN_ROOM] -= sizes[entry, 0]
                facts[group, _TILE_ROOM] -= sizes[entry, 1]
                facts[group, _TILES] += sizes[entry, 1]
                totals[unit, 0] += loads[entry, 0]
                totals[unit, 1] += loads[entry, 1]


@jit
def _best_partner(
    loads: Int64Array,
    sizes: Int64Array,
    group_offsets: Int64Array,
    unit_offsets: Int64Array,
    facts: Int64Array,
    totals: Int64Array,
    unit: int,
    settings: tuple[int, int, int],
    distance: Int64Array,
    swaps: Int64Array,
) -> tuple[int, int, int, int]:
    """Find the best swap of a unit with another, or the best two at once; written to `swaps`.

    Returns the pairs looked at, the other unit, and the two groups; unit -1: nothing helps.
    """
    first, kinds, two = settings
    num_units = len(totals)
    trials, partner, my_group, other_group = 0, -1, -1, -1
    best = int(0)  # noqa: UP018, RUF046 - as above
    for place in range(len(distance)):
        far = (first + place) % num_units
        ahead, above = totals[unit, 0] - totals[far, 0], totals[unit, 1] - totals[far, 1]
        distance[place] = ahead * ahead + above * above
    for attempt in range(len(distance)):
        if attempt >= _FAR and (best < 0 or two == 1):
            break
        place = int(np.argmax(distance))
        if distance[place] <= 0:
            break
        good = -(distance[place] // 40) * 9  # a quarter of it is the best that a swap can do
        distance[place] = -1
        far = (first + place) % num_units
        ahead, above = totals[unit, 0] - totals[far, 0], totals[unit, 1] - totals[far, 1]
        for group in range(unit_offsets[unit], unit_offsets[unit + 1]):
            for against in range(unit_offsets[far], unit_offsets[far + 1]):
                span = (group_offsets[group], group_offsets[group + 1])
                other_span = (group_offsets[against], group_offsets[against + 1])
                limits = (ahead, above, best, kinds)
                if (
                    two == 1
                    and (span[1] - span[0]) * (other_span[1] - other_span[0]) < _FEWEST_PAIRS
                ):
                    continue
                if two == 1:
                    gain = _best_two(
                        loads, sizes, facts[group], facts[against], span, other_span, limits, swaps
                    )
                else:
                    gain = _best_one(
                        loads, sizes, facts[group], facts[against], span, other_span, limits, swaps
                    )
                trials += (span[1] - span[0]) * (other_span[1] - other_span[0]) * (1 + 20 * two)
                if gain < best:
                    best, partner, my_group, other_group = gain, far, group, against
        trials += _OVERHEAD
        if best <= good:
            break
    return trials, partner, my_group, other_group


@jit
def _allowed(tokens: int, tiles: int, mine: Int64Array, other: Int64Array, kinds: int) -> bool:
    """Say if so many tokens and tiles may go from one group to the other."""
    if (
        -tokens > mine[_TOKEN_ROOM]
        or tokens > other[_TOKEN_ROOM]
        or -tiles > mine[_TILE_ROOM]
        or tiles > other[_TILE_ROOM]
    ):
        return False
    return kinds != KEEP_TILES or tiles == 0 or -other[_TILES] < tiles < mine[_TILES]


@jit
def _best_one(
    loads: Int64Array,
    sizes: Int64Array,
    mine: Int64Array,
    other: Int64Array,
    span: tuple[int, int],
    other_span: tuple[int, int],
    limits: tuple[int, int, int, int],
    swaps: Int64Array,
) -> int:
    """Find the swap between two groups that lowers the sum of the squares most, below `best`."""
    ahead, above, best, kinds = limits
    for entry in range(span[0], span[1]):
        for swapped in range(other_span[0], other_span[1]):
            first = loads[entry, 0] - loads[swapped, 0]
            second = loads[entry, 1] - loads[swapped, 1]
            gain = first * (first - ahead) + second * (second - above)
            if gain < best:
                if kinds == SAME_KIND and (sizes[entry, 1] > 0) != (sizes[swapped, 1] > 0):
                    continue
                tokens = sizes[entry, 0] - sizes[swapped, 0]
                tiles = sizes[entry, 1] - sizes[swapped, 1]
                if _allowed(tokens, tiles, mine, other, kinds):
                    best = gain
                    swaps[0, 0], swaps[0, 1] = entry, swapped
    return best


@jit
def _best_two(
    loads: Int64Array,
    sizes: Int64Array,
    mine: Int64Array,
    other: Int64Array,
    span: tuple[int, int],
    other_span: tuple[int, int],
    limits: tuple[int, int, int, int],
    swaps: Int64Array,
) -> int:
    """Find two swaps between two groups that help together, where neither need fit alone.

    For each first swap, the second ones that bring the tokens back into bounds are looked up in
    the sorted token differences of all swaps.
    """
    ahead, above, best, kinds = limits
    width = other_span[1] - other_span[0]
    num_pairs = min((span[1] - span[0]) * width, _MOST_PAIRS)
    keys = np.empty(num_pairs, np.int64)
    for pair in range(num_pairs):
        tokens = sizes[span[0] + pair // width, 0] - sizes[other_span[0] + pair % width, 0]
        keys[pair] = tokens * _MOST_PAIRS + pair
    keys.sort()
    for pair in range(num_pairs):
        entry, swapped = span[0] + pair // width, other_span[0] + pair % width
        first = loads[entry, 0] - loads[swapped, 0]
        second = loads[entry, 1] - loads[swapped, 1]
        if kinds == SAME_KIND or (first <= 0 and second <= 0):
            continue
        tokens = sizes[entry, 0] - sizes[swapped, 0]
        tiles = sizes[entry, 1] - sizes[swapped, 1]
        near = np.searchsorted(keys, (-mine[_TOKEN_ROOM] - tokens) * _MOST_PAIRS)
        for place in range(near, min(near + _NEAR, num_pairs)):
            again = keys[place] % _MOST_PAIRS
            entry_2, swapped_2 = span[0] + again // width, other_span[0] + again % width
            if tokens + keys[place] // _MOST_PAIRS > other[_TOKEN_ROOM]:
                break
            if entry_2 == entry or swapped_2 == swapped:
                continue
            all_first = first + loads[entry_2, 0] - loads[swapped_2, 0]
            all_second = second + loads[entry_2, 1] - loads[swapped_2, 1]
            gain = all_first * (all_first - ahead) + all_second * (all_second - above)
            if gain < best and _allowed(
                tokens + keys[place] // _MOST_PAIRS,
                tiles + sizes[entry_2, 1] - sizes[swapped_2, 1],
                mine,
                other,
                kinds,
            ):
                best = gain
                swaps[0, 0], swaps[0, 1] = entry, swapped
                swaps[1, 0], swaps[1, 1] = entry_2, swapped_2
    return best


@jit
def _swap(
    loads: Int64Array,
    sizes: Int64Array,
    order: Int64Array,
    facts: Int64Array,
    totals: Int64Array,
    entries: tuple[int, int],
    groups: tuple[int, int],
    units: tuple[int, int],
) -> None:
    """Swap two entries, and keep the books of their groups and units."""
    mine, other = entries
    for column in range(2):
        moved = sizes[mine, column] - sizes[other, column]
        facts[groups[0], column] += moved
        facts[groups[1], column] -= moved
        load = loads[mine, column] - loads[other, column]
        totals[units[0], column] -= load
        totals[units[1], column] += load
        loads[mine, column], loads[other, column] = loads[other, column], loads[mine, column]
        sizes[mine, column], sizes[other, column] = sizes[other, column], sizes[mine, column]
        if column == 1:
            facts[groups[0], _TILES] -= moved
            facts[groups[1], _TILES] += moved
    order[mine], order[other] = order[other], order[mine]
