"""Plans against those of others: nine published pairs, tight memory, frozen encoders, times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from omniload.pipeline.baselines import omnibal_search, partition_minmax
from omniload.pipeline.order import arrange_micro_batches
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.predict import stage_times, step_places
from omniload.pipeline.presets import PUBLISHED_PAIRS
from omniload.tools.bench_pipeline_ablation import Draw, pair_table, planner_for, step_seconds
from omniload.tools.pipeline_setting import SETTING, Setting

__all__ = ["TIGHT", "Match", "all_pairs", "frozen_match", "order_ms", "pair_match", "solve_seconds"]

#: Settings with little memory: what is changed, and how.
TIGHT = {
    "48 GB": replace(SETTING, memory_gb=48.0),
    "80 GB, no ZeRO-1": replace(SETTING, zero_stage=0),
}

_PLANNED_SEED, _TIMED_SEED = 2000, 2001  # plans are timed on other data than they are made from


@dataclass(frozen=True, kw_only=True)
class Match:
    """Our plan against another, for one pair.

    Args:
        pair: name of the pair.
        other_s: step time of the other plan, seconds; None: it doesn't fit into the memory.
        ours_s: the same of ours.
        other: bounds of the other plan.
        ours: bounds of ours.
        most: what the ratio could be at most, if stages of any cut could be even; None: not known.
    """

    pair: str
    other_s: float | None
    ours_s: float | None
    other: tuple[int, ...]
    ours: tuple[int, ...]
    most: float | None = None

    @property
    def ratio(self) -> float | None:
        """Step time of the other plan by that of ours; above 1: ours is quicker."""
        if self.other_s is None or self.ours_s is None:
            return None
        return self.other_s / self.ours_s


def pair_match(name: str, setting: Setting) -> Match:
    """Plan a published pair as OmniBal does, and as we do, both with as little recomputed as fits.

    Both have whole layers recomputed, or not, and are timed on packs that neither has seen.
    """
    table = pair_table(name, setting)
    planner = planner_for(table, Draw(setting=setting, seed=_PLANNED_SEED))
    timed = Draw(setting=setting, seed=_TIMED_SEED)

    def seconds(plan: PipelinePlan) -> float:
        return step_seconds(table, plan, timed.packs, setting)

    searched = omnibal_search(planner)
    chosen = planner.recompute(searched)
    other_s = None if chosen is None else seconds(planner.predict(searched, chosen))
    ours = planner.plan() if planner.feasible else None
    return Match(
        pair=name,
        other_s=other_s,
        ours_s=None if ours is None else seconds(ours),
        other=searched,
        ours=() if ours is None else ours.parts,
    )


def frozen_match(name: str, setting: Setting) -> Match:
    """Plan a published pair with a frozen encoder: cut by forward time, and as we do."""
    table = pair_table(name, setting, freeze=("vision",))
    planner = planner_for(table, Draw(setting=setting, seed=_PLANNED_SEED))
    packs = planner.costs.shapes
    timed = Draw(setting=setting, seed=_TIMED_SEED)
    forward = np.rint(table.forward(packs).mean(axis=1) * 1e9).astype(np.int64)
    parts = partition_minmax(forward, setting.stages)
    chosen = planner.recompute(parts)
    other = planner.predict(parts, chosen)
    ours = planner.plan()
    return Match(
        pair=name,
        other_s=None if chosen is None else step_seconds(table, other, timed.packs, setting),
        ours_s=step_seconds(table, ours, timed.packs, setting),
        other=parts,
        ours=ours.parts,
        most=_most(other, setting),
    )


def _most(plan: PipelinePlan, setting: Setting) -> float:
    """Divide the time of a plan by what even stages would take, by formula."""
    stages = [stage.forward_ms + stage.backward_ms for stage in plan.stages]
    weight = setting.micro_batches - 1
    even = weight * sum(stages) / len(stages) + sum(stages)
    return (weight * max(stages) + sum(stages)) / even


def solve_seconds(stages: int, *, repeats: int = 3) -> float:
    """Time a plan of the longest published model, 131 layers: CPU seconds, compiled code warm."""
    setting = replace(SETTING, stages=stages)
    table = pair_table("eva-18b-70b", setting)
    draw = Draw(setting=setting, seed=_PLANNED_SEED)
    draw.packs  # noqa: B018 - made before the clock runs
    taken = []
    for turn in range(repeats + 1):
        begin = time.process_time()
        planner_for(table, draw).plan()
        if turn:  # the first one compiles
            taken.append(time.process_time() - begin)
    return float(np.median(taken))


def order_ms(stages: int, micro_batches: int, ranks: int) -> float:
    """Time the order of a step: CPU milliseconds for one pipeline of it, compiled code warm."""
    setting = replace(SETTING, stages=stages, micro_batches=micro_batches, data_parallel=ranks)
    table = pair_table("internvl-6b-20b", setting)
    draw = Draw(setting=setting, seed=_PLANNED_SEED)
    plan = planner_for(table, draw).plan(simulated=0)
    places = step_places(len(draw.packs), micro_batches, ranks, most_steps=4)
    times = stage_times(table, draw.packs, plan)
    taken = []
    for turn, step in enumerate([places[0], *places]):
        mine = times.take(step.T.reshape(-1))
        begin = time.process_time()
        arrange_micro_batches(mine, data_parallel=ranks)
        if turn:  # the first one compiles
            taken.append(time.process_time() - begin)
    return 1e3 * float(np.median(taken)) / ranks


def all_pairs(
    match: Callable[[str, Setting], Match],
    setting: Setting,
    *,
    progress: Callable[[], None] = lambda: None,
) -> list[Match]:
    """Match all published pairs."""
    found = []
    for name in PUBLISHED_PAIRS:
        found.append(match(name, setting))
        progress()
    return found
