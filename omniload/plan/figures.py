"""How good a plan is, as data: groups against their bound, balance over ranks, randomness."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.costs import CostModel
from omniload.plan.order import EpochOrder
from omniload.plan.steps import Loads, SlotSums, StepFigures, Totals, join_loads
from omniload.plan.stream import GroupStream
from omniload.types import Budget, Groups

__all__ = ["PlanFigures", "measure_plan"]

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_RESOURCES = ("tiles", "tokens", "time")
_GROUPS_AT_ONCE = 2**17  # bounds the memory; enough that NumPy's own overhead doesn't count


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanFigures:
    """The figures of a plan, or of the rest of an epoch that it covers.

    Dist ratios are means over the full steps, the shares of time lost are over all steps.
    `..._step` is for engines whose ranks meet once a step (DDP, ZeRO-1 and 2): the sums over the
    micro-steps count. `..._micro_step` is for those that meet in every micro-step (FSDP, ZeRO-3,
    pipelines): each micro-step counts like a step. A filler slot counts as no load.

    Args:
        grouping: how the rows were grouped.
        budget: upper bounds of a group.
        dp_world_size: data-parallel ranks.
        accumulation: micro-steps of a step.
        num_rows: rows that are fed.
        num_dropped: rows of the index left out: over the budget, or excluded.
        num_groups: groups.
        num_steps: steps.
        num_fillers: slots without a group, all in the last step.
        size_bound: no fewer groups can hold the rows, by the sums of their sizes.
        lp_bound: the same by a linear programme over patterns, which is sharper; None: not asked
            for.
        groups_over_bound: groups over the larger bound, at least 1.
        fill_tokens: mean share of the token budget that a group uses.
        fill_tiles: mean share of the tile budget that a group uses; None: there is none.
        pad_ratio: 0, as packed rows have no padding.
        pad_ratio_unpacked: what it would be with each group as a padded batch, mean over groups.
        dist_tiles_step: dist ratio of tiles.
        dist_tokens_step: dist ratio of tokens.
        dist_time_step: dist ratio of estimated time.
        dist_tiles_micro_step: dist ratio of tiles.
        dist_tokens_micro_step: dist ratio of tokens.
        dist_time_micro_step: dist ratio of estimated time.
        time_lost_step: share of the estimated device time spent waiting for the slowest rank.
        time_lost_micro_step: the same.
        samples_per_step: mean over the full steps.
        loss_tokens_per_step: mean over the full steps.
        variance_ratio: variance of the step means of tokens over that of independent samples. For
            a plain shuffle this is 1 and the next two are 0; see `omniload.randomness`.
        lag1: correlation of the mean of a step with that of the next one.
        intra_group: correlation of the tokens of two samples of the same group.
        steps: the figures by step.
    """

    grouping: str
    budget: Budget
    dp_world_size: int
    accumulation: int
    num_rows: int
    num_dropped: int
    num_groups: int
    num_steps: int
    num_fillers: int
    size_bound: int
    lp_bound: int | None
    groups_over_bound: float
    fill_tokens: float
    fill_tiles: float | None
    pad_ratio: float
    pad_ratio_unpacked: float
    dist_tiles_step: float
    dist_tokens_step: float
    dist_time_step: float
    dist_tiles_micro_step: float
    dist_tokens_micro_step: float
    dist_time_micro_step: float
    time_lost_step: float
    time_lost_micro_step: float
    samples_per_step: float
    loss_tokens_per_step: float
    variance_ratio: float
    lag1: float
    intra_group: float
    steps: StepFigures

    def as_dict(self, *, steps: bool = False) -> dict[str, Any]:
        """Return it as plain JSON values.

        Args:
            steps: with the figures by step, as lists.
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["budget"] = asdict(self.budget)
        by_step = _as_lists(found.pop("steps"))
        return {**found, "steps": by_step} if steps else found


def measure_plan(
    order: EpochOrder,
    stream: GroupStream,
    *,
    dp_world_size: int,
    accumulation: int,
    balanced: Callable[[int], Groups] | None,
    cost: CostModel,
    lp_bound: bool | int,
    max_steps: int | None,
) -> PlanFigures:
    """Measure a plan; `StepPlan.figures` is the way to call it.

    Args:
        order: the windows of the epoch.
        stream: its groups, from where the plan begins.
        dp_world_size: data-parallel ranks.
        accumulation: micro-steps of a step.
        balanced: gives the groups of a step after balancing; None: the order is fed as it is.
        cost: estimates times.
        lp_bound: compute the linear-programme bound too; a number: it is known.
        max_steps: steps whose loads are measured, spread evenly; None: all.

    Returns:
        The figures.
    """
    slots = dp_world_size * accumulation
    chosen = None if max_steps is None else _spread(-(-stream.known() // slots), max_steps)
    totals, measured = Totals(slots), [np.zeros(0, np.int64)]
    loads = [SlotSums.of(_joined([]), order.index).loads(dp_world_size, accumulation, cost)]
    rows = [np.zeros(0, np.int64)]
    for first, groups in _runs(stream, slots):
        sums = SlotSums.of(groups, order.index)
        totals.add(sums)
        if lp_bound is True:
            rows.append(groups.rows)
        steps = np.arange(first, first + len(groups) // slots)
        if chosen is not None:
            steps = steps[np.isin(steps, chosen)]
        if balanced is not None:
            sums = SlotSums.of(_joined([balanced(int(step)) for step in steps]), order.index)
        else:
            sums = sums.steps(steps - first, slots)
        measured.append(steps)
        loads.append(sums.loads(dp_world_size, accumulation, cost))
    by_step = StepFigures(
        **totals.by_step(),
        measured=np.concatenate(measured),
        tiles=join_loads([part["tiles"] for part in loads]),
        tokens=join_loads([part["tokens"] for part in loads]),
        time=join_loads([part["time"] for part in loads]),
    )
    settings = order.settings
    bound = _pattern_bound(order, rows) if lp_bound is True else (lp_bound or None)
    return PlanFigures(
        grouping=settings.grouping if settings.shuffle else "sequential",
        budget=settings.budget,
        dp_world_size=dp_world_size,
        accumulation=accumulation,
        num_dropped=len(order.left_out),
        steps=by_step,
        **_sizes(by_step, totals, settings.budget, bound),
        **_means(by_step, slots),
        **_randomness(by_step, totals, slots),
    )


def _spread(count: int, most: int) -> Int64Array:
    return np.unique(np.rint(np.linspace(0, count - 1, min(most, count))).astype(np.int64))


def _runs(stream: GroupStream, slots: int) -> Iterator[tuple[int, Groups]]:
    """Walk whole steps, many at once: the number of the first, and the slots of all."""
    at_once = max(1, _GROUPS_AT_ONCE // slots)
    for first in itertools.count(0, at_once):
        groups = stream.take(first * slots, (first + at_once) * slots)
        if len(groups) == 0:
            return
        fillers = np.full(-len(groups) % slots, len(groups.rows), np.int64)
        yield first, Groups(rows=groups.rows, offsets=np.concatenate([groups.offsets, fillers]))


def _joined(parts: list[Groups]) -> Groups:
    sizes = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.offsets) for part in parts)])
    rows = np.concatenate([np.zeros(0, np.int64), *(part.rows for part in parts)])
    return Groups(rows=rows, offsets=np.cumsum(sizes))


def _pattern_bound(order: EpochOrder, rows: list[Int64Array]) -> int:
    from omniload.bounds import pattern_bound  # Numba, only where it is asked for

    fed = np.concatenate(rows)
    tokens, tiles = order.index.num_tokens[fed], order.index.num_tiles[fed]
    return pattern_bound(tokens, tiles, order.settings.budget)


def _sizes(
    steps: StepFigures, totals: Totals, budget: Budget, lp_bound: int | None
) -> dict[str, Any]:
    rows, tokens, tiles, groups = (
        int(getattr(steps, name).sum())
        for name in ("num_samples", "num_tokens", "num_tiles", "num_groups")
    )
    bound = -(-tokens // budget.tokens)
    if budget.tiles:
        bound = max(bound, -(-tiles // budget.tiles))
    if budget.samples:
        bound = max(bound, -(-rows // budget.samples))
    larger = max(bound, lp_bound or 0)
    return {
        "num_rows": rows,
        "num_groups": groups,
        "size_bound": bound,
        "lp_bound": lp_bound,
        "groups_over_bound": groups / larger if larger else 1.0,
        "fill_tokens": tokens / (groups * budget.tokens) if groups else 0.0,
        "fill_tiles": tiles / (groups * budget.tiles) if groups and budget.tiles else None,
        "pad_ratio": 0.0,
        "pad_ratio_unpacked": totals.padding / groups if groups else 0.0,
    }


def _means(steps: StepFigures, slots: int) -> dict[str, Any]:
    full = _full(steps, slots)
    mine = full[steps.measured]
    found: dict[str, Any] = {
        "num_steps": len(full),
        "num_fillers": len(full) * slots - int(steps.num_groups.sum()),
        "samples_per_step": _mean(steps.num_samples[full]),
        "loss_tokens_per_step": _mean(steps.num_loss_tokens[full]),
    }
    for name in _RESOURCES:
        loads: Loads = getattr(steps, name)
        # a plan may have measured its last, partial step only
        kept = mine if mine.any() else np.ones(len(mine), bool)
        found[f"dist_{name}_step"] = _mean(loads.dist_step[kept])
        found[f"dist_{name}_micro_step"] = _mean(loads.dist_micro_step[kept])
    busy = float(steps.time.mean.sum())
    for sync, most in (("step", steps.time.most), ("micro_step", steps.time.most_micro_step)):
        found[f"time_lost_{sync}"] = 1 - busy / float(most.sum()) if busy else 0.0
    return found


def _randomness(steps: StepFigures, totals: Totals, slots: int) -> dict[str, Any]:
    """Compute the figures of `omniload.randomness` for tokens, from sums, a window at a time."""
    full = steps.num_groups == slots
    sizes, tokens = steps.num_samples[full].astype(float), steps.num_tokens[full].astype(float)
    found = {"variance_ratio": 1.0, "lag1": 0.0, "intra_group": 0.0}
    if not full.any():
        return found
    rows, mean = sizes.sum(), tokens.sum() / sizes.sum()
    apart = tokens / sizes - (tokens / sizes).mean()
    total = totals.squares - rows * mean**2  # of squared distances from the mean
    expected = total / rows * float((1 / sizes).mean())
    if len(apart) > 2 and expected > 0 and apart.any():
        found["variance_ratio"] = float(apart @ apart) / (len(apart) - 1) / expected
        found["lag1"] = float(apart[1:] @ apart[:-1] / (apart @ apart))
    groups = int(steps.num_groups[full].sum())
    if 1 < groups < rows:
        between = totals.squares_of_means - rows * mean**2
        within = max(totals.squares - totals.squares_of_means, 0.0) / (rows - groups)
        between /= groups - 1
        size = (rows - totals.squares_of_sizes / rows) / (groups - 1)
        if between + (size - 1) * within > 0:
            found["intra_group"] = float((between - within) / (between + (size - 1) * within))
    return found


def _full(steps: StepFigures, slots: int) -> npt.NDArray[np.bool_]:
    """Say which steps have no fillers; all, if none is without."""
    full = steps.num_groups == slots
    return full if full.any() else np.ones(len(full), bool)


def _mean(values: npt.ArrayLike) -> float:
    array = np.asarray(values, np.float64)
    return float(array.mean()) if array.size else 0.0


def _as_lists(figures: Any) -> dict[str, Any]:
    return {
        field.name: _as_lists(value) if is_dataclass(value) else value.tolist()
        for field in fields(figures)
        for value in [getattr(figures, field.name)]
    }
