"""Other ways to cut a model into stages, to compare: DeepSpeed's, by profile, and OmniBal's search.

`compare` plans one pipeline in all of these ways and in ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline._cut_search import least_worst
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.partition import Planner
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.stage_costs import StageCosts, worst_shape
from omniload.pipeline.table import CostTable

__all__ = [
    "Comparison",
    "compare",
    "omnibal_candidates",
    "partition_balanced",
    "partition_minmax",
    "partition_parameters",
    "partition_uniform",
]

Int64Array = npt.NDArray[np.int64]

_MOST_CANDIDATES = 10_000  # with more, only so many bounds are moved at once
_MOVED_AT_ONCE = 3


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One way to plan a pipeline.

    Args:
        plan: the plan, with predictions.
        fits: each stage fits into its memory. Where one doesn't, everything is recomputed.
    """

    plan: PipelinePlan
    fits: bool


def partition_uniform(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Give each stage as many layers, the first ones one more: `uniform` of DeepSpeed."""
    _check(num_layers, num_stages)
    size, more = divmod(num_layers, num_stages)
    return tuple(stage * size + min(stage, more) for stage in range(num_stages + 1))


def partition_balanced(weights: npt.ArrayLike, num_stages: int) -> tuple[int, ...]:
    """Balance weights over stages as DeepSpeed does for `parameters` and `type`.

    It makes the difference between largest and smallest stage least, by a programme that keeps one
    way a state and, of ways as good, the one whose last stage is shortest. Neither the difference
    nor the largest stage need be the least that is possible.

    Args:
        weights: numbers (num_layers,).
        num_stages: stages.

    Returns:
        Bounds of the stages, num_stages + 1.

    Raises:
        ConfigError: fewer layers than stages.
    """
    sizes = np.asarray(weights, np.float64)
    num_layers = len(sizes)
    _check(num_layers, num_stages)
    if num_layers == num_stages:
        return partition_uniform(num_layers, num_stages)
    ends = np.concatenate([[0.0], np.cumsum(sizes)])
    largest = np.full(num_layers + 1, np.inf)
    smallest = np.full(num_layers + 1, np.inf)
    largest[0] = 0.0
    cuts = np.zeros((num_stages + 1, num_layers + 1), np.int64)
    for stage in range(1, num_stages + 1):
        high, low = np.full_like(largest, np.inf), np.full_like(smallest, np.inf)
        for end in range(stage, num_layers + 1):
            last = ends[end] - ends[:end]
            most, least = np.maximum(largest[:end], last), np.minimum(smallest[:end], last)
            cut = end - 1 - int(np.argmin((most - least)[::-1]))
            cuts[stage, end], high[end], low[end] = cut, most[cut], least[cut]
        largest, smallest = high, low
    bounds = [num_layers]
    for stage in range(num_stages, 0, -1):
        bounds.append(int(cuts[stage, bounds[-1]]))
    return tuple(reversed(bounds))


def partition_parameters(table: CostTable, num_stages: int) -> tuple[int, ...]:
    """Balance trainable parameters: the default of DeepSpeed. Frozen layers count nothing."""
    return partition_balanced(np.where(table.trainable, table.params, 0), num_stages)


def partition_minmax(values: npt.ArrayLike, num_stages: int) -> tuple[int, ...]:
    """Make the largest sum of values of a stage as small as can be; for example a profile.

    Args:
        values: integers (num_layers,), 0 or more, such as the forward time of each layer.
        num_stages: stages.

    Returns:
        Bounds of the stages, num_stages + 1.
    """
    sizes = np.asarray(values, np.int64)
    _check(len(sizes), num_stages)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    sums = ends[np.newaxis, :] - ends[:, np.newaxis]
    layers = np.arange(len(ends))
    sums[layers[:, np.newaxis] >= layers[np.newaxis, :]] = -1
    every = np.ascontiguousarray(np.broadcast_to(sums, (num_stages, *sums.shape)))
    return tuple(least_worst(every)[1].tolist())


def omnibal_candidates(
    forward: npt.ArrayLike, sent: npt.ArrayLike, num_stages: int, *, radius: int = 1, top: int = 32
) -> list[tuple[int, ...]]:
    """List the plans that OmniBal would time, best first (Yao et al., ICML 2025, section 3.2).

    Each bound of an anchor is moved by up to `radius` layers. Plans are ranked by the variance of
    the forward times of the stages and by what is sent between them; the paper doesn't say how the
    two are joined, so here the ranks in both are added.

    Args:
        forward: numbers (num_layers,), forward time of each layer.
        sent: numbers (num_layers,), what is sent when a stage ends after a layer.
        num_stages: stages.
        radius: how far a bound may move. With more than 10000 ways, at most 3 bounds at once do.
        top: plans to return.

    Returns:
        Bounds of the stages of each; the first of them all where `top` is 1. The anchor is not
        always among them.
    """
    times, volume = np.asarray(forward, np.float64), np.asarray(sent, np.float64)
    anchor = np.array(greedy_anchor(times, num_stages))
    between = num_stages - 1
    if between == 0:
        return [(0, len(times))]
    moves = range(-radius, radius + 1)
    if len(moves) ** between <= _MOST_CANDIDATES:
        shifts = np.array(list(itertools.product(moves, repeat=between))).reshape(-1, between)
    else:
        shifts = _few_moved(moves, between)
    bounds = np.tile(anchor, (len(shifts), 1))
    bounds[:, 1:-1] += shifts
    bounds = bounds[(np.diff(bounds, axis=1) > 0).all(axis=1)]
    ends = np.concatenate([[0.0], np.cumsum(times)])
    variance = np.diff(ends[bounds], axis=1).var(axis=1)
    communication = volume[bounds[:, 1:-1] - 1].sum(axis=1)
    score = _ranks(variance) + _ranks(communication)
    order = np.lexsort((communication, variance, score))[:top]
    return [tuple(parts) for parts in bounds[order].tolist()]


def greedy_anchor(forward: npt.ArrayLike, num_stages: int) -> tuple[int, ...]:
    """Fill stage after stage until it is nearest to an even share of what is left."""
    times = np.asarray(forward, np.float64)
    _check(len(times), num_stages)
    ends = np.concatenate([[0.0], np.cumsum(times)])
    bounds = [0]
    for stage in range(num_stages - 1):
        left = num_stages - 1 - stage
        share = (ends[-1] - ends[bounds[-1]]) / (left + 1)
        choices = np.arange(bounds[-1] + 1, len(times) - left + 1)
        distance = np.abs(ends[choices] - ends[bounds[-1]] - share)
        bounds.append(int(choices[np.argmin(distance)]))
    return (*bounds, len(times))


def compare(
    table: CostTable,
    shapes: Shapes,
    *,
    num_stages: int,
    num_micro_batches: int,
    memory_gb: float | Sequence[float] | None = None,
    worst: Shapes | None = None,
    radius: int = 1,
    selective: bool = False,
    frozen_stages: bool = True,
) -> dict[str, Comparison]:
    """Plan one pipeline in all ways, and simulate each with the same micro-batches.

    Args:
        table: what layers cost.
        shapes: micro-batches as they come; as for `plan_pipeline`.
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of a step on each rank.
        memory_gb: the limit, as for `plan_pipeline`.
        worst: as for `plan_pipeline`.
        radius: how far OmniBal's search moves a bound.
        selective: let all of them recompute a part of a layer.
        frozen_stages: as for `plan_pipeline`; for ours only.

    Returns:
        By name: "parameters-recomputed" (DeepSpeed's default cut, everything recomputed), and,
        each with as little recomputed as fits, "parameters", "uniform", "profile" (least longest
        forward time), "omnibal", "exact" (ours by the formula alone) and "ours". The last two are
        missing where nothing fits.

    Raises:
        ConfigError: more stages than layers, and the like.
    """
    costs = StageCosts(
        table=table,
        shapes=shapes,
        worst=worst_shape(shapes) if worst is None else worst,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        selective=selective,
    )
    planner = Planner(costs=costs, memory_gb=memory_gb, frozen_stages=frozen_stages)
    forward = np.rint(table.forward(shapes).mean(axis=1) * 1e9).astype(np.int64)
    parameters = partition_parameters(table, num_stages)
    recomputed = planner.predict(parameters, None)
    found = {"parameters-recomputed": Comparison(plan=recomputed, fits=_fits(recomputed))}
    cuts = {
        "parameters": parameters,
        "uniform": partition_uniform(table.num_layers, num_stages),
        "profile": partition_minmax(forward, num_stages),
        "omnibal": omnibal_search(planner, radius=radius),
    }
    for name, parts in cuts.items():
        chosen = planner.recompute(parts)
        plan = planner.predict(parts, chosen)
        found[name] = Comparison(plan=plan, fits=chosen is not None)
    if planner.feasible:
        found["exact"] = Comparison(plan=planner.plan(simulated=0), fits=True)
        found["ours"] = Comparison(plan=planner.plan(), fits=True)
    return found


def omnibal_search(planner: Planner, *, radius: int = 1, top: int = 32) -> tuple[int, ...]:
    """Search as OmniBal does, with the simulator where it times real runs.

    Candidates are timed with everything recomputed, since the paper turns recomputation off only
    afterwards. Those that don't fit even so are left out; where none fits, it is the anchor.

    Args:
        planner: costs and limits.
        radius: how far a bound may move.
        top: candidates to time; with 4 stages and radius 1 these are all.

    Returns:
        Bounds of the stages.
    """
    costs = planner.costs
    forward = costs.table.forward(costs.shapes).mean(axis=1)
    sent = costs.table.output(costs.shapes).mean(axis=1)
    candidates = omnibal_candidates(forward, sent, costs.num_stages, radius=radius, top=top)
    timed = [(planner.predict(parts, None), parts) for parts in candidates]
    fitting = [(plan.step_ms, parts) for plan, parts in timed if _fits(plan)]
    if not fitting:
        return greedy_anchor(forward, costs.num_stages)
    return min(fitting)[1]


def _fits(plan: PipelinePlan) -> bool:
    return all(stage.headroom_gb is None or stage.headroom_gb >= 0 for stage in plan.stages)


def _few_moved(moves: range, between: int) -> Int64Array:
    found = [np.zeros(between, np.int64)]
    away = [move for move in moves if move]
    for number in range(1, _MOVED_AT_ONCE + 1):
        for places in itertools.combinations(range(between), number):
            for shift in itertools.product(away, repeat=number):
                moved = np.zeros(between, np.int64)
                moved[list(places)] = shift
                found.append(moved)
    return np.array(found)


def _ranks(values: npt.NDArray[np.float64]) -> Int64Array:
    """Rank values from 0; equal ones have the same rank."""
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _check(num_layers: int, num_stages: int) -> None:
    if num_stages < 1 or num_layers < num_stages:
        raise ConfigError(
            f"a pipeline needs a stage, and a layer for each: got {num_stages} stages for "
            f"{num_layers} layers."
        )
