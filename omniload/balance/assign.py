"""Groups of a step to micro-steps and ranks, with swaps of samples before or after."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload._jit import jit
from omniload.balance.spread import spread_tiles
from omniload.balance.swaps import ANY_KIND, KEEP_TILES, SAME_KIND, swap_samples
from omniload.types import Budget

__all__ = ["arrange"]

Int64Array = npt.NDArray[np.int64]

_NO_LIMIT = 2**62
_UNIT_BITS = 20  # loads of a rank are scaled to this many bits, so that products fit 64
_TOLERANCE = 4096  # a load is even enough when it is this small a part above the mean
_TRIALS = 3000  # pairs of samples that are looked at for each sample of a step, at most


def arrange(
    sizes: Int64Array,
    offsets: Int64Array,
    *,
    loads: Int64Array,
    budget: Budget,
    dp_world_size: int,
    by_micro_step: bool,
    uniform: bool,
    dummy_tokens: int,
) -> tuple[Int64Array, Int64Array]:
    """Arrange the entries of a step in other groups, and the groups in other slots.

    Args:
        sizes: int64 (n, 2), tokens and tiles of each entry.
        offsets: int64 (num_slots + 1,), entries of each slot, micro-steps one after the other.
        loads: int64 (n, 2), what is to be even over ranks.
        budget: no group may pass it.
        dp_world_size: data-parallel ranks.
        by_micro_step: each micro-step counts by itself, not the sum of a rank over them.
        uniform: tiles on all ranks of a micro-step or on none, as far as possible.
        dummy_tokens: room that a group without tiles keeps, where it has it.

    Returns:
        int64 (n,), the entries in their new order, and int64 (num_slots + 1,), the new slots.
    """
    slots = np.flatnonzero(np.diff(offsets) > 0)
    if len(slots) < 2:
        return np.arange(len(sizes), dtype=np.int64), offsets
    work = _Work(
        sizes=sizes,
        loads=_scaled(loads, offsets[slots], groups_of_a_rank=len(offsets) // dp_world_size),
        order=np.arange(len(sizes), dtype=np.int64),
        offsets=np.append(offsets[slots], offsets[-1]),
        caps=_caps(sizes, offsets[slots], budget, dummy_tokens if uniform else 0),
    )
    counts = np.bincount(slots // dp_world_size)  # groups of each micro-step
    if uniform:
        work.spread(_tail(counts, int((work.group_sums(sizes)[:, 1] == 0).sum())))
    if by_micro_step:
        _by_micro_step(work, counts, uniform)
    else:
        slots = _by_rank(work, slots, counts, dp_world_size, uniform)
    new_offsets = np.zeros(len(offsets), np.int64)
    new_offsets[slots + 1] = np.diff(work.offsets)
    work.put(np.argsort(slots, kind="stable"))
    return work.order, np.cumsum(new_offsets)


def _by_micro_step(work: _Work, counts: Int64Array, uniform: bool) -> None:
    """Make all groups alike, put those that are most alike into the same micro-step, repeat there.

    `counts` holds the groups of each micro-step.
    """
    kinds = KEEP_TILES if uniform else ANY_KIND
    work.swap(np.arange(work.num_groups + 1), kinds)
    if len(counts) == 1:
        return
    sums = work.group_sums(work.loads)
    last = (work.group_sums(work.sizes)[:, 1] == 0) & uniform
    candidates = [
        np.lexsort((np.arange(len(sums)), -key, last))
        for key in (sums.sum(axis=1), sums[:, 0], sums[:, 1])
    ]
    ends = np.cumsum(counts)
    waits = [
        sum(int(sums[order[end - count : end]].max(axis=0).sum())
            for end, count in zip(ends, counts, strict=True) if count)
        for order in candidates
    ]  # fmt: skip
    work.put(candidates[int(np.argmin(waits))])
    for end, count in zip(ends, counts, strict=True):
        work.swap(np.arange(end - count, end + 1), kinds)


def _by_rank(
    work: _Work, slots: Int64Array, counts: Int64Array, dp_world_size: int, uniform: bool
) -> Int64Array:
    """Deal groups to ranks, swap groups, then samples between ranks; return the slot of each group.

    `counts` holds the groups of each micro-step, `slots` the slots that are to be filled.
    """
    ranks, micro_steps = slots % dp_world_size, slots // dp_world_size
    last = (work.group_sums(work.sizes)[:, 1] == 0) & uniform
    if len(counts) > 1:
        owners = _dealt(work, ranks, micro_steps, last, dp_world_size)
        work.put(np.argsort(owners, kind="stable"))
    bounds = np.searchsorted(np.sort(ranks), np.arange(dp_world_size + 1))
    if len(counts) > 1:
        work.swap_groups(bounds, SAME_KIND if uniform else ANY_KIND)
    work.swap(bounds, KEEP_TILES if uniform else ANY_KIND)
    # inside a rank, groups without tiles come last: the same micro-steps for all ranks
    last = (work.group_sums(work.sizes)[:, 1] == 0) & uniform
    owners = np.repeat(np.arange(dp_world_size), np.diff(bounds))
    work.put(np.lexsort((last, owners)))
    free: Int64Array = slots[np.argsort(ranks, kind="stable")]  # of each rank, rising
    return free


def _dealt(
    work: _Work,
    ranks: Int64Array,
    micro_steps: Int64Array,
    last: npt.NDArray[np.bool_],
    dp_world_size: int,
) -> Int64Array:
    """Give each group a rank: the heaviest first, to the rank with least load that has a place.

    Those that are to come last get the places of the last micro-steps.
    """
    weights = work.group_sums(work.loads).sum(axis=1)
    owners = np.full(len(weights), -1, np.int64)
    held = np.zeros(dp_world_size, np.int64)
    heaviest = np.argsort(-weights, kind="stable")
    used = np.zeros(dp_world_size, np.int64)
    for micro_step in range(int(micro_steps.max()), -1, -1):
        if not (last & (owners < 0)).any():
            break
        places = np.bincount(ranks[micro_steps >= micro_step], minlength=dp_world_size)
        _deal(heaviest[last[heaviest]], weights, places - used, owners, held)
        used = np.bincount(owners[owners >= 0], minlength=dp_world_size)
    places = np.bincount(ranks, minlength=dp_world_size) - used
    _deal(heaviest, weights, places, owners, held)
    return owners


@jit
def _deal(
    groups: Int64Array,
    weights: Int64Array,
    places: Int64Array,
    owners: Int64Array,
    held: Int64Array,
) -> None:
    """Give the groups that have no owner yet to ranks with places; writes `owners` and `held`."""
    left = places.copy()
    for group in groups:
        if owners[group] >= 0:
            continue
        owner = -1
        for rank in range(len(left)):
            if left[rank] > 0 and (owner < 0 or held[rank] < held[owner]):
                owner = rank
        if owner >= 0:
            owners[group] = owner
            held[owner] += weights[group]
            left[owner] -= 1


@dataclass(kw_only=True)
class _Work:
    """A step while it is rearranged: entries in order of their groups, and where groups end."""

    sizes: Int64Array
    loads: Int64Array
    order: Int64Array
    offsets: Int64Array
    caps: Int64Array

    @property
    def num_groups(self) -> int:
        return len(self.offsets) - 1

    def group_sums(self, columns: Int64Array) -> Int64Array:
        """Sum (n, 2) columns over each group."""
        return np.add.reduceat(columns, self.offsets[:-1], axis=0)

    def put(self, groups: Int64Array) -> None:
        """Put the groups into another order."""
        lengths = np.diff(self.offsets)[groups]
        ends = np.cumsum(lengths)
        shift = np.repeat(self.offsets[groups] - (ends - lengths), lengths)
        places = np.arange(len(self.order)) + shift
        self.sizes, self.loads = self.sizes[places], self.loads[places]
        self.order, self.caps = self.order[places], self.caps[groups]
        self.offsets = np.concatenate([np.zeros(1, np.int64), ends])

    def spread(self, keep: int) -> None:
        """Give tiles to groups without, until `keep` of them are left, or none can get any."""
        bare = int((self.group_sums(self.sizes)[:, 1] == 0).sum())
        spread_tiles(self.sizes, self.loads, self.order, self.offsets, self.caps, bare - keep)

    def swap(self, bounds: Int64Array, kinds: int) -> None:
        """Swap samples between units; unit u holds the groups from bounds[u] to bounds[u + 1]."""
        first, end = self.offsets[bounds[0]], self.offsets[bounds[-1]]
        part = slice(first, end)
        loads = self.loads[part]
        swap_samples(
            loads,
            self.sizes[part],
            self.order[part],
            self.offsets[bounds[0] : bounds[-1] + 1] - first,
            bounds - bounds[0],
            self.caps[bounds[0] : bounds[-1]],
            _targets(loads, len(bounds) - 1),
            kinds,
            _TRIALS * len(loads),
        )

    def swap_groups(self, bounds: Int64Array, kinds: int) -> None:
        """Swap whole groups between units."""
        loads, sizes = self.group_sums(self.loads), self.group_sums(self.sizes)
        order = np.arange(self.num_groups)
        num_units = len(bounds) - 1
        swap_samples(
            loads,
            sizes,
            order,
            bounds,
            np.arange(num_units + 1),
            np.full((num_units, 2), _NO_LIMIT),
            _targets(loads, num_units),
            kinds,
            _TRIALS * len(loads),
        )
        self.put(order)


def _targets(loads: Int64Array, num_units: int) -> tuple[int, int]:
    """Return loads that are even enough: a little above the mean, and what whole tiles allow."""
    targets = []
    for column in range(2):
        total = int(loads[:, column].sum())
        step = int(np.gcd.reduce(loads[:, column])) or 1
        whole = -(-total // (num_units * step)) * step
        targets.append(max(whole, total // num_units + total // (num_units * _TOLERANCE)))
    return targets[0], targets[1]


def _scaled(loads: Int64Array, starts: Int64Array, *, groups_of_a_rank: int) -> Int64Array:
    """Scale both columns so that no rank has more than 2**20, whatever groups it gets."""
    scaled = np.zeros_like(loads)
    for column in range(2):
        largest = int(np.add.reduceat(loads[:, column], starts).max()) * groups_of_a_rank
        if largest >= 2**_UNIT_BITS:
            scaled[:, column] = loads[:, column] >> (largest.bit_length() - _UNIT_BITS)
        elif largest > 0:
            scaled[:, column] = loads[:, column] * (2**_UNIT_BITS // largest)
    return scaled


def _caps(sizes: Int64Array, starts: Int64Array, budget: Budget, dummy_tokens: int) -> Int64Array:
    """Return tokens and tiles that each group may hold; groups without tiles keep room."""
    sums = np.add.reduceat(sizes, starts, axis=0)
    caps = np.empty_like(sums)
    caps[:, 0] = budget.tokens
    caps[:, 1] = _NO_LIMIT if budget.tiles is None else budget.tiles
    bare = sums[:, 1] == 0
    caps[bare, 0] = np.maximum(sums[bare, 0], budget.tokens - dummy_tokens)
    return caps


def _tail(counts: Int64Array, bare: int) -> int:
    """Return the most groups, up to `bare`, that fill whole micro-steps from the last one on."""
    ends = np.cumsum(counts[::-1])
    return int(ends[ends <= bare].max(initial=0))
