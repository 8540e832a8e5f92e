"""The published ablation again: what each step of balancing saves, simulated on made-up data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omniload.grouping import get_grouping
from omniload.index import LengthIndex
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.baselines import omnibal_search, partition_parameters
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.order import arrange_micro_batches
from omniload.pipeline.partition import Planner
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.predict import StepModel, step_places
from omniload.pipeline.presets import PUBLISHED_PAIRS, preset
from omniload.pipeline.simulate import gpu_days
from omniload.pipeline.stage_costs import StageCosts
from omniload.pipeline.table import CostTable
from omniload.rng import random_u64
from omniload.tools.pipeline_setting import SETTING, Setting, internvl_lengths
from omniload.types import Budget

__all__ = ["ARMS", "VARIATIONS", "Draw", "ablation", "mean_days", "pair_table", "planner_for"]

#: The arms of the ablation: what each adds to the one before it.
ARMS = ("baseline", "data", "model", "memory", "order", "ours")

#: Settings beside the one that counts: what is changed, and how.
VARIATIONS: Mapping[str, Setting] = {
    "8 micro-batches": replace(SETTING, micro_batches=8),
    "16 micro-batches": replace(SETTING, micro_batches=16),
    "64 micro-batches": replace(SETTING, micro_batches=64),
    "2 data-parallel ranks": replace(SETTING, data_parallel=2),
    "8 data-parallel ranks": replace(SETTING, data_parallel=8),
    "efficiency .45, .50": replace(SETTING, vision_efficiency=0.45, language_efficiency=0.50),
    "efficiency .50, .50": replace(SETTING, vision_efficiency=0.50, language_efficiency=0.50),
    "efficiency .35, .55": replace(SETTING, vision_efficiency=0.35, language_efficiency=0.55),
    "8192 tokens": replace(SETTING, tokens=8192, padded=8),
    "without ZeRO-1": replace(SETTING, zero_stage=0),
}

_PLANNED_SEED = 1000  # draws that plans are made from are others than those they are timed on
_WHOLE = 100_000  # rows that stand for the data set
_SHARE = 6.5  # rows drawn for each micro-batch; enough for packs of 4 to 5 samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Draw:
    """One draw of the made-up data, in micro-batches.

    Args:
        setting: how it is trained.
        seed: of the draw.
    """

    setting: Setting
    seed: int

    @cached_property
    def index(self) -> LengthIndex:
        """Lengths of the rows, each with at least one tile.

        The published runs give a sample without an image a blank tile, packed or not: in the code
        of InternVL that they build on `pure_text_get_item` makes it, and the published lengths of
        OmniBal have `vit_num` 1 there.
        """
        rows = int(self.setting.slots * self.setting.steps * _SHARE * self.setting.tokens / 4096)
        return _lengths(rows, self.seed)

    @cached_property
    def budget(self) -> Budget:
        """Bounds of a pack: those of the data set, so the same for all draws."""
        return self.setting.budget(_lengths(_WHOLE, 0))

    @cached_property
    def packs(self) -> Shapes:
        """Micro-batches of the published grouping (ISF), shuffled as its sampler does.

        It emits them round by round, and those of the first rounds have more samples.
        """
        return self._packs[0]

    @property
    def samples_per_pack(self) -> float:
        """Samples of a pack, on average."""
        return self._packs[1]

    @cached_property
    def _packs(self) -> tuple[Shapes, float]:
        lengths = {"num_tokens": self.index.num_tokens, "num_tiles": self.index.num_tiles}
        groups = get_grouping("isf")(
            self.index.num_tokens, self.index.num_tiles, budget=self.budget, key=(self.seed, 0)
        )
        shapes = Shapes.from_groups(groups, **lengths)
        order = np.argsort(random_u64(len(groups), self.seed, 8), kind="stable")
        return shapes.take(order), len(groups.rows) / len(groups)

    @cached_property
    def padded(self) -> Shapes:
        """Micro-batches of random samples, each padded to the longest of its own."""
        size = self.setting.padded
        order = np.argsort(random_u64(len(self.index), self.seed, 7), kind="stable")
        rows = order[: len(order) // size * size].reshape(-1, size)
        longest = self.index.num_tokens[rows].max(axis=1).astype(np.float64)
        return Shapes(
            num_tiles=self.index.num_tiles[rows].sum(axis=1).astype(np.float64),
            num_tokens=size * longest,
            sum_squares=size * longest**2,
        )

    @property
    def full(self) -> Shapes:
        """The pack that fills the budget."""
        tokens = float(self.budget.tokens)
        return Shapes(
            num_tiles=np.array([self.budget.tiles], np.float64),
            num_tokens=np.array([tokens]),
            sum_squares=np.array([tokens * float(self.index.num_tokens.max())]),
        )


def _lengths(rows: int, seed: int) -> LengthIndex:
    drawn = internvl_lengths(rows, seed=seed)
    return LengthIndex.from_arrays(
        num_tokens=drawn.num_tokens,
        num_tiles=np.maximum(drawn.num_tiles, 1),
        num_loss_tokens=drawn.num_loss_tokens,
    )


def pair_table(name: str, setting: Setting, *, freeze: Sequence[str] = ()) -> CostTable:
    """Count the costs of a published pair."""
    return cost_table(
        preset(name).freeze(*freeze),
        machine=setting.machine,
        tensor_parallel=PUBLISHED_PAIRS[name],
        data_parallel=setting.data_parallel,
        zero_stage=setting.zero_stage,
    )


def planner_for(table: CostTable, draw: Draw) -> Planner:
    """Make a planner for the packs of a draw."""
    setting = draw.setting
    costs = StageCosts(
        table=table,
        shapes=draw.packs,
        worst=draw.full,
        num_stages=setting.stages,
        num_micro_batches=setting.micro_batches,
        selective=False,
    )
    return Planner(costs=costs, memory_gb=setting.memory_gb)


def step_seconds(
    table: CostTable, plan: PipelinePlan, shapes: Shapes, setting: Setting, *, ordered: bool = False
) -> float:
    """Simulate steps of a plan, and return their mean time."""
    ranks, most = setting.data_parallel, setting.steps
    places = step_places(len(shapes), setting.micro_batches, ranks, most_steps=most)
    model = StepModel(table=table, shapes=shapes)
    if ordered:
        times = model.times(plan.parts, plan.recompute)
        places = np.stack([_ordered(times, step, ranks) for step in places])
    return float(model.steps_ns(plan.parts, plan.recompute, places).mean()) / 1e9


def _ordered(times: object, step: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    numbers = step.T.reshape(-1)
    found = arrange_micro_batches(times.take(numbers), data_parallel=ranks)  # type: ignore[attr-defined]
    dealt: npt.NDArray[np.int64] = numbers[found]
    return dealt


def ablation(name: str, setting: Setting, seed: int) -> dict[str, float]:
    """Simulate all arms on one draw of the data.

    Args:
        name: a published pair.
        setting: how it is trained.
        seed: of the draw; plans are made from another one.

    Returns:
        GPU days of one pass over the data set, by arm: random padded micro-batches, DeepSpeed's cut
        by parameters, everything recomputed; packs; OmniBal's cut; as little recomputed as fits; in
        the order of `arrange_micro_batches`; our plan, in that order, too. An arm that doesn't fit
        into the memory has everything recomputed.
    """
    table = pair_table(name, setting)
    draw = Draw(setting=setting, seed=seed)
    planner = planner_for(table, Draw(setting=setting, seed=_PLANNED_SEED + seed))
    searched = omnibal_search(planner)
    cut = planner.predict(partition_parameters(table, setting.stages), None)
    moved = planner.predict(searched, None)
    freed = planner.predict(searched, planner.recompute(searched))
    ours = planner.plan() if planner.feasible else freed
    packs = draw.packs

    def days(plan: PipelinePlan, shapes: Shapes, samples: float, *, ordered: bool = False) -> float:
        return gpu_days(
            step_seconds(table, plan, shapes, setting, ordered=ordered),
            num_samples=setting.num_samples,
            samples_per_step=samples * setting.slots,
            num_gpus=setting.stages * setting.data_parallel * table.tensor_parallel,
        )

    each = draw.samples_per_pack
    return {
        "baseline": days(cut, draw.padded, setting.padded),
        "data": days(cut, packs, each),
        "model": days(moved, packs, each),
        "memory": days(freed, packs, each),
        "order": days(freed, packs, each, ordered=True),
        "ours": days(ours, packs, each, ordered=True),
    }


def mean_days(
    name: str,
    setting: Setting,
    draws: int,
    *,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[dict[str, float]]:
    """Simulate draw after draw."""
    for seed in range(draws):
        yield ablation(name, setting, seed)
        progress()
