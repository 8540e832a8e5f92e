"""The largest micro-batches that fit the memory of a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.presets import preset
from omniload.pipeline.stage_costs import StageCosts
from omniload.pipeline.table import CostTable, Recompute
from omniload.types import Budget

__all__ = ["auto_memory_budget", "fit_budget", "parse_memory"]

Int64Array = npt.NDArray[np.int64]

_INT32_MAX = 2**31 - 1
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10,
          "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip
_LEAST = 1e6  # bytes: less is meant in gigabytes


def fit_budget(
    num_tokens: npt.ArrayLike,
    num_tiles: npt.ArrayLike,
    table: CostTable,
    *,
    memory_bytes: float,
    parts: Sequence[int] | None = None,
    recompute: Recompute | Sequence[Recompute] = 0,
    num_stages: int = 1,
    samples: int | None = None,
) -> Budget:
    """Find the largest budget whose micro-batches fit a memory limit on every stage.

    Tiles go with tokens as they do in the data, so that both are used up together. A micro-batch
    that fills both is counted, with as much attention as its tokens can have in samples of the
    greatest length; stage s of N keeps those of N - s micro-batches. What a layer forms anew in its
    backward pass is there once on top. See `CostTable.reserve_bytes` for what is not counted.

    Args:
        num_tokens: tokens of each row of the index.
        num_tiles: tiles of each row.
        table: what layers cost.
        memory_bytes: memory of one GPU.
        parts: bounds of the stages; None: cut so that the most fits.
        recompute: what each layer recomputes, or one choice for all.
        num_stages: stages, where `parts` is None.
        samples: most samples of a micro-batch; passed on.

    Returns:
        The budget. Every row fits it.

    Raises:
        ConfigError: no rows, or the longest of them does not fit; says what it would need.
    """
    lengths, tiles = (np.asarray(column).astype(np.int64) for column in (num_tokens, num_tiles))
    if len(lengths) == 0 or len(lengths) != len(tiles):
        raise ConfigError(
            "a budget needs one or more rows with tokens and tiles: got "
            f"{len(lengths)} and {len(tiles)}."
        )
    if not (math.isfinite(memory_bytes) and memory_bytes > 0):
        raise ConfigError(f"memory_bytes must be finite and above 0, got {memory_bytes!r}.")
    need = _Need(
        table=table,
        parts=None if parts is None else tuple(parts),
        recompute=recompute,
        num_stages=num_stages if parts is None else len(parts) - 1,
        longest=int(lengths.max()),
        most_tiles=int(tiles.max()),
        tokens=int(lengths.sum()),
        tiles=int(tiles.sum()),
    )
    if not need.fits(need.longest, memory_bytes):
        raise ConfigError(need.refusal(memory_bytes))
    most = min(max(need.tokens, need.longest), _INT32_MAX)
    cap = _last(lambda tokens: need.fits(tokens, memory_bytes), need.longest, most)
    return Budget(tokens=cap, tiles=min(need.tiles_of(cap), _INT32_MAX), samples=samples)


def auto_memory_budget(
    num_tokens: npt.ArrayLike,
    num_tiles: npt.ArrayLike,
    *,
    memory: str | float,
    model: CostTable | str,
    plan: PipelinePlan | None = None,
    samples: int | None = None,
) -> Budget:
    """Find the budget of `fit_budget` for a model by name, and a plan.

    Args:
        num_tokens: tokens of each row of the index.
        num_tiles: tiles of each row.
        memory: of one GPU, as "80GB", or in bytes.
        model: its cost table, or the name of a preset, which is then on one GPU.
        plan: where it is cut and what is recomputed; None: one stage, nothing recomputed.
        samples: most samples of a micro-batch.

    Raises:
        ConfigError: as `fit_budget`, `parse_memory` and `preset`.
    """
    table = cost_table(preset(model)) if isinstance(model, str) else model
    if not isinstance(table, CostTable):
        raise ConfigError(
            f"model must be a CostTable or the name of a preset, got {type(model).__name__}."
        )
    if plan is not None and not isinstance(plan, PipelinePlan):
        raise ConfigError(
            f"plan must be a PipelinePlan, got {type(plan).__name__}. Read the file of one with "
            "PipelinePlan.from_json(text)."
        )
    return fit_budget(
        num_tokens,
        num_tiles,
        table,
        memory_bytes=parse_memory(memory),
        parts=None if plan is None else plan.parts,
        recompute=0 if plan is None else plan.recompute,
        samples=samples,
    )


def parse_memory(memory: str | float) -> float:
    """Read an amount of memory.

    Args:
        memory: "80GB" (1e9 bytes each), "80GiB" (2**30), or bytes.

    Returns:
        Bytes.

    Raises:
        ConfigError: not such an amount.
    """
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", memory, re.IGNORECASE)
        unit = found.group(2).upper() if found else None
        try:
            amount = float(found.group(1)) * _UNITS[unit] if found and unit in _UNITS else math.nan
        except ValueError:
            amount = math.nan
    else:
        is_number = isinstance(memory, (int, float)) and not isinstance(memory, bool)
        amount = float(memory) if is_number else math.nan
    if not (math.isfinite(amount) and amount >= _LEAST):
        raise ConfigError(f'memory must be like "80GB" or "40GiB", or in bytes: got {memory!r}.')
    return amount


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What micro-batches of so many tokens need."""

    table: CostTable
    parts: tuple[int, ...] | None
    recompute: Recompute | Sequence[Recompute]
    num_stages: int
    longest: int
    most_tiles: int
    tokens: int
    tiles: int

    def tiles_of(self, tokens: int) -> int:
        """Tiles that go with tokens: the share in the data, and room for the row with the most."""
        return max(-(-tokens * self.tiles // self.tokens), self.most_tiles)

    def fits(self, tokens: int, memory_bytes: float) -> bool:
        costs = self._costs(tokens)
        chosen = self.table.choices(self.recompute)
        if self.parts is not None:
            return bool(costs.memory(self.parts, chosen).max() <= memory_bytes)
        return _cut(costs, chosen, memory_bytes)

    def refusal(self, memory_bytes: float) -> str:
        """Say what the longest row would need."""
        stages = f"{self.num_stages} stage" + ("s" if self.num_stages > 1 else "")
        floor = _first(lambda megabytes: self.fits(self.longest, megabytes * 1e6))
        text = (
            f"the longest row must fit the memory: {self.longest} tokens with "
            f"{self.tiles_of(self.longest)} tiles need {floor / 1e3:.1f} GB on {stages} "
            f"of {self.table.name or 'the model'}, got {memory_bytes / 1e9:.1f} GB."
        )
        return f"{text} Recompute more, use more stages or tensor parallelism, or shorten rows."

    def _costs(self, tokens: int) -> StageCosts:
        worst = Shapes(
            num_tiles=np.array([self.tiles_of(tokens)], np.float64),
            num_tokens=np.array([tokens], np.float64),
            sum_squares=np.array([float(tokens) * self.longest]),
        )
        return StageCosts(
            table=self.table,
            shapes=worst,
            worst=worst,
            num_stages=self.num_stages,
            num_micro_batches=self.num_stages,
        )


def _cut(costs: StageCosts, chosen: Sequence[Recompute], memory_bytes: float) -> bool:
    """Say whether some cut fits: each stage takes all layers that it can, from the first on.

    Memory only grows with the layers of a stage, so leaving one to the next stage never helps
    that one.
    """
    kept = np.concatenate([[0], np.cumsum(costs.kept_bytes(chosen))])
    working = costs.working_bytes(chosen)
    low, layers = 0, costs.table.num_layers
    for stage in range(costs.num_stages):
        last = layers - (costs.num_stages - 1 - stage)
        ends = np.arange(low + 1, last + 1)
        memory = (
            costs.static_bytes[low, ends]
            + costs.in_flight[stage] * (kept[ends] - kept[low])
            + np.maximum.accumulate(working[low:last])
        )
        fitting = int(np.count_nonzero(memory <= memory_bytes))
        if fitting == 0:
            return False
        low += fitting
    return low == layers


def _last(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Find the last number that fits, of those from `low`, which does, to `high`."""
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _first(fits: Callable[[int], bool]) -> int:
    """Find the first number that fits, of those above 0."""
    high = 1
    while not fits(high):
        high *= 2
    return _last(lambda number: not fits(number), 0, high) + 1
