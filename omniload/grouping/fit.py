"""The compiled part of the buffered grouping: how a group is chosen from the buffer.

`buffered.py` says what it does; here is how. All that is decided depends on the arrival of the
samples alone, and never on which slot of the buffer a sample happens to be in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numba.core.cgutils
import numba.extending
import numpy as np
import numpy.typing as npt

from omniload._jit import jit

if TYPE_CHECKING:
    from omniload.grouping.fit_state import FitState

__all__ = ["BEFORE", "BUFFERED", "CELLS", "NEXT", "fit_groups"]

Int16Array = npt.NDArray[np.int16]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

CELLS = 4096  # places by token count in each tile class: 64 words of 64 bits
_PREFIXES = 3  # ends of the chain at which a closing sample is looked for
_TRIES = 4  # samples looked at in a tile class of which only a part may fit
_WORST = 2**62

# columns of `FitState.slots`, one row a buffered sample: 32 bytes, half a cache line
_TOKENS, _TILES, _CLASS, _TAKEN, NEXT, BEFORE, _CELL_NEXT, _CELL_BEFORE = range(8)
# columns of `FitState.front`
_SLOT, _FRONT_TOKENS, _FRONT_TILES = range(3)
# entries of `FitState.limits`
_CAP_TOKENS, _CAP_TILES, _CAP_SAMPLES, _TOKEN_UNIT, _TILE_UNIT, _SHIFT = range(6)
_RETRIES, _REACH, _SLACK_WEIGHT, _DUMMY = range(6, 10)
# entries of `FitState.counters`
_FREE, BUFFERED, _ARRIVED = range(3)

_ALL_BITS = np.uint64(2**64 - 1)
_ONE = np.uint64(1)


@jit
def fit_groups(
    state: FitState,
    tokens: Int32Array,
    tiles: Int32Array,
    classes: Int32Array,
    at_end: bool,
    rows: Int64Array,
    offsets: Int64Array,
) -> int:
    """Take all samples in; make a group when the buffer is full, and until it is empty at the end.

    Args:
        state: written.
        tokens: int32 (n,), of each sample.
        tiles: int32 (n,), of each sample.
        classes: int32 (n,), of each sample: 0 for the class of the most tiles.
        at_end: empty the buffer.
        rows: int64 (n + buffered,), written: arrival numbers, group by group.
        offsets: int64 (n + buffered + 1,), written from entry 1 on: where groups end.

    Returns:
        Groups made.
    """
    counters, slots, arrivals = state.counters, state.slots, state.arrivals
    buffer = len(arrivals)
    num_groups, num_rows, taken_in = 0, 0, 0
    while True:
        while counters[BUFFERED] < buffer and taken_in < len(tokens):
            slot = counters[_FREE]
            counters[_FREE] = slots[slot, NEXT]
            slots[slot, _TOKENS] = tokens[taken_in]
            slots[slot, _TILES] = tiles[taken_in]
            slots[slot, _CLASS] = classes[taken_in]
            arrivals[slot] = counters[_ARRIVED]
            counters[_ARRIVED] += 1
            counters[BUFFERED] += 1
            taken_in += 1
            last = slots[buffer, BEFORE]
            slots[slot, BEFORE], slots[slot, NEXT] = last, buffer
            slots[last, NEXT] = slots[buffer, BEFORE] = slot
            _insert(slots, state.words, state.cells, slot, state.limits[_SHIFT])
        if counters[BUFFERED] == 0 or (counters[BUFFERED] < buffer and not at_end):
            return num_groups
        for place in range(_keep_room(state, _choose(state))):
            slot = state.best[place]
            _remove(slots, state.words, state.cells, slot, state.limits[_SHIFT])
            before, after = slots[slot, BEFORE], slots[slot, NEXT]
            slots[before, NEXT], slots[after, BEFORE] = after, before
            slots[slot, NEXT] = counters[_FREE]
            counters[_FREE] = slot
            counters[BUFFERED] -= 1
            rows[num_rows] = arrivals[slot]
            num_rows += 1
        num_groups += 1
        offsets[num_groups] = num_rows


@jit
def _choose(state: FitState) -> int:
    """Write the slots of the next group to `best`, the oldest sample first; return their number."""
    limits, slots, front, chain = state.limits, state.slots, state.front, state.chain
    units = (limits[_TOKEN_UNIT], limits[_TILE_UNIT], limits[_SLACK_WEIGHT], limits[_SHIFT])
    most = limits[_CAP_SAMPLES]
    oldest = slots[len(slots) - 1, NEXT]
    slots[oldest, _TAKEN] = 1
    state.best[0] = oldest
    lowest, size, num_front = _WORST, 1, 0
    for start in range(limits[_RETRIES]):
        length, tokens, tiles, num_front = _follow(state, oldest, start, num_front)
        changed, closing = 0, -1
        score = _score(tokens * units[0], tiles * units[1], units[2])
        if score < lowest:
            lowest, changed = score, length
        for last in range(length, max(length - _PREFIXES, 0), -1):
            if last < length:
                place = chain[last]
                slots[front[place, _SLOT], _TAKEN] = 0
                tokens += front[place, _FRONT_TOKENS]
                tiles += front[place, _FRONT_TILES]
            if last < most and lowest > 0:
                score, slot = _closing(
                    slots, state.words, state.cells, state.spans, tokens, tiles, lowest, units
                )
                if slot >= 0:
                    lowest, changed, closing = score, last, slot
        for place in range(1, length):
            slots[front[chain[place], _SLOT], _TAKEN] = 0
        if changed > 0:
            for place in range(1, changed):
                state.best[place] = front[chain[place], _SLOT]
            size = changed
            if closing >= 0:
                state.best[size] = closing
                size += 1
        if lowest == 0:
            break
    slots[oldest, _TAKEN] = 0
    return size


@jit
def _follow(state: FitState, oldest: int, start: int, num_front: int) -> tuple[int, int, int, int]:
    """Take the oldest sample and each that fits from the one at offset `start` after it on.

    Writes places in `front` to `chain[1:]`, marks what is taken, and goes on until `reach` samples
    didn't fit. Returns samples, tokens and tiles left, and how many samples `front` holds now.
    """
    limits, slots, front, chain = state.limits, state.slots, state.front, state.chain
    head = len(slots) - 1
    tokens = limits[_CAP_TOKENS] - slots[oldest, _TOKENS]
    tiles = limits[_CAP_TILES] - slots[oldest, _TILES]
    most, reach = limits[_CAP_SAMPLES], limits[_REACH]
    length, skipped, place = 1, 0, start
    while skipped < reach and length < most:
        while place >= num_front:
            before = oldest if num_front == 0 else front[num_front - 1, _SLOT]
            slot = slots[before, NEXT]
            if slot == head:
                return length, tokens, tiles, num_front
            front[num_front, _SLOT] = slot
            front[num_front, _FRONT_TOKENS] = slots[slot, _TOKENS]
            front[num_front, _FRONT_TILES] = slots[slot, _TILES]
            num_front += 1
        if front[place, _FRONT_TOKENS] <= tokens and front[place, _FRONT_TILES] <= tiles:
            slots[front[place, _SLOT], _TAKEN] = 1
            chain[length] = place
            length += 1
            tokens -= front[place, _FRONT_TOKENS]
            tiles -= front[place, _FRONT_TILES]
        else:
            skipped += 1
        place += 1
    return length, tokens, tiles, num_front


@jit
def _score(tokens: int, tiles: int, weight: int) -> int:
    """Weigh slack in tokens and tiles, both in units; 0: the budget is used up."""
    return (64 * min(tokens, tiles) + weight * max(tokens, tiles)) >> 6


@jit
def _closing(
    slots: Int32Array,
    words: UInt64Array,
    cells: Int16Array,
    spans: Int64Array,
    tokens: int,
    tiles: int,
    lowest: int,
    units: tuple[int, int, int, int],
) -> tuple[int, int]:
    """Look up the sample that leaves least of so many tokens and tiles.

    Returns its score and slot; slot -1: none is better than `lowest`. Of equals, the one with more
    tiles, then the older one is taken.
    """
    token_unit, tile_unit, weight, shift = units
    found = -1
    used = words[len(words) - 1, 0]
    while used != 0:
        group = _lowest_bit(used)
        used &= used - _ONE
        if spans[0, group] > tiles:
            continue
        if _score(0, max(tiles - spans[1, group], 0) * tile_unit, weight) >= lowest:
            break  # the classes to come leave more tiles over
        slot = _find(slots, words, cells, group, tokens, shift)
        tries = 1
        while slot >= 0 and (slots[slot, _TAKEN] != 0 or slots[slot, _TILES] > tiles):
            tries += 1 - slots[slot, _TAKEN]  # few are taken, and they don't count
            if tries > _TRIES:
                slot = -1
            elif slots[slot, _CELL_NEXT] >= 0:
                slot = slots[slot, _CELL_NEXT]
            else:
                cell = (slots[slot, _TOKENS] - 1) >> shift
                slot = _find(slots, words, cells, group, cell << shift, shift)
        if slot >= 0:
            score = _score(
                (tokens - slots[slot, _TOKENS]) * token_unit,
                (tiles - slots[slot, _TILES]) * tile_unit,
                weight,
            )
            if score < lowest:
                lowest, found = score, slot
    return lowest, found


@jit
def _keep_room(state: FitState, size: int) -> int:
    """Shorten a group without tiles until a dummy document fits, if it isn't a single sample."""
    limits, slots, best = state.limits, state.slots, state.best
    if limits[_DUMMY] == 0:
        return size
    tokens, tiles = limits[_DUMMY], 0
    for place in range(size):
        tokens += slots[best[place], _TOKENS]
        tiles += slots[best[place], _TILES]
    while tiles == 0 and size > 1 and tokens > limits[_CAP_TOKENS]:
        size -= 1
        tokens -= slots[best[size], _TOKENS]
    return size


@jit
def _find(
    slots: Int32Array, words: UInt64Array, cells: Int16Array, group: int, tokens: int, shift: int
) -> int:
    """Find the oldest sample of a class with most tokens up to a bound; -1: there is none."""
    if tokens <= 0:
        return -1
    # fewer tokens are at higher bits
    cell = CELLS - 1 - ((tokens - 1) >> shift)
    word = cell >> 6
    bits = words[group, word] & (_ALL_BITS << np.uint64(cell & 63))
    if bits != 0 and _lowest_bit(bits) == (cell & 63):
        slot = cells[group, cell]
        while slot >= 0 and slots[slot, _TOKENS] > tokens:
            slot = slots[slot, _CELL_NEXT]
        if slot >= 0:
            return int(slot)
        bits &= bits - _ONE
    if bits == 0:
        if word == 63:
            return -1
        summary = words[group, 64] & (_ALL_BITS << np.uint64(word + 1))
        if summary == 0:
            return -1
        word = _lowest_bit(summary)
        bits = words[group, word]
    return int(cells[group, (word << 6) + _lowest_bit(bits)])


@jit
def _insert(
    slots: Int32Array, words: UInt64Array, cells: Int16Array, slot: int, shift: int
) -> None:
    """Put a sample into its cell: most tokens first, of equals the oldest first."""
    group, tokens = slots[slot, _CLASS], slots[slot, _TOKENS]
    cell = CELLS - 1 - ((tokens - 1) >> shift)
    before, after = -1, cells[group, cell]
    while after >= 0 and slots[after, _TOKENS] >= tokens:
        before, after = after, slots[after, _CELL_NEXT]
    slots[slot, _CELL_BEFORE], slots[slot, _CELL_NEXT] = before, after
    if after >= 0:
        slots[after, _CELL_BEFORE] = slot
    if before >= 0:
        slots[before, _CELL_NEXT] = slot
    else:
        cells[group, cell] = slot
    words[group, cell >> 6] |= _ONE << np.uint64(cell & 63)
    words[group, 64] |= _ONE << np.uint64(cell >> 6)
    words[len(words) - 1, 0] |= _ONE << np.uint64(group)


@jit
def _remove(
    slots: Int32Array, words: UInt64Array, cells: Int16Array, slot: int, shift: int
) -> None:
    """Take a sample out of its cell."""
    group = slots[slot, _CLASS]
    before, after = slots[slot, _CELL_BEFORE], slots[slot, _CELL_NEXT]
    if after >= 0:
        slots[after, _CELL_BEFORE] = before
    if before >= 0:
        slots[before, _CELL_NEXT] = after
        return
    cell = CELLS - 1 - ((slots[slot, _TOKENS] - 1) >> shift)
    cells[group, cell] = after
    if after < 0:
        word = cell >> 6
        words[group, word] &= ~(_ONE << np.uint64(cell & 63))
        if words[group, word] == 0:
            words[group, 64] &= ~(_ONE << np.uint64(word))
            if words[group, 64] == 0:
                words[len(words) - 1, 0] &= ~(_ONE << np.uint64(group))


def _lowest_bit(word: Any) -> int:
    """Number of the lowest bit that is set; compiled, it is one instruction."""
    return (int(word) & -int(word)).bit_length() - 1


@numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _count_trailing_zeros(context: Any, word: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], numba.core.cgutils.true_bit)

    return numba.int64(numba.uint64), generate


numba.extending.overload(_lowest_bit)(lambda word: lambda word: _count_trailing_zeros(word))
