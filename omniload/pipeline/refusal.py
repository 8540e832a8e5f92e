"""Says why a pipeline has no plan, and what would have one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from omniload.pipeline._cut_search import least_worst
from omniload.pipeline.kinds import LayerKind
from omniload.pipeline.table import CostTable

if TYPE_CHECKING:
    from omniload.pipeline.partition import Planner

__all__ = ["why_no_plan"]

_MOST_TRIED = 32  # numbers of stages; a tenth of a second with 131 layers
_FACTORS = (2, 4, 8)  # of tensor parallelism


def why_no_plan(planner: Planner) -> str:
    """Say what keeps a planner from a plan, and what a plan would need.

    Args:
        planner: one that is not feasible.

    Returns:
        A message: the pins or the memory, with the stages or the tensor parallelism that would fit.
    """
    costs, table = planner.costs, planner.costs.table
    zeros = np.where(planner.possible, np.int64(0), np.int64(-1))
    if least_worst(zeros)[0] < 0:
        return _no_cut(planner)
    needed = costs.least_memory
    over = needed - planner.limits[:, np.newaxis, np.newaxis]
    _, bounds = least_worst(np.where(planner.possible, over - int(over.min()), np.int64(-1)))
    held = needed[np.arange(costs.num_stages), bounds[:-1], bounds[1:]]
    worst = int(np.argmax(held - planner.limits))
    number = int(costs.in_flight[worst])
    return (
        f"no plan of {costs.num_stages} stage{'s' * (costs.num_stages > 1)} fits into the memory: "
        f"with everything recomputed, the best one needs {held[worst] / 1e9:.2f} GB on stage "
        f"{worst} ({int(table.reserve_bytes) / 1e9:.2f} GB of it in reserve), and the limit is "
        f"{planner.limits[worst] / 1e9:.2f} GB (parts {bounds.tolist()}, {number} "
        f"micro-batch{'es' * (number > 1)} in flight). {_what_fits(planner)}"
    )


def _no_cut(planner: Planner) -> str:
    table, num_stages = planner.costs.table, planner.costs.num_stages
    wanted = []
    if table.pinned:
        wanted.append(f"keeps the pins {dict(table.pinned)}")
    if not planner.frozen_stages:
        trained = int(table.trainable.sum())
        wanted.append(
            f"gives each a layer with trainable parameters ({trained} of the layers have some)"
        )
    return (
        f"no way to cut {table.num_layers} layers into {num_stages} stages "
        f"{' and '.join(wanted)}. Change the pins, what is frozen, or the number of stages."
    )


def _what_fits(planner: Planner) -> str:
    """Try more stages, and more tensor parallelism, each by itself."""
    costs, table = planner.costs, planner.costs.table
    if planner.limits.min() <= table.reserve_bytes:
        return "The reserve alone takes that: nothing fits."
    found = []
    most = min(table.num_layers, 4 * costs.num_stages, costs.num_stages + _MOST_TRIED)
    # limits of single stages say nothing about other numbers of them
    if not isinstance(planner.memory_gb, Sequence):
        counts = range(costs.num_stages + 1, most + 1)
        stages = next((n for n in counts if _fits(planner, stages=n)), None)
        if stages is not None:
            found.append(f"{stages} stages")
    shares = next((by for by in _FACTORS if _fits(planner, shares=by)), None)
    if shares is not None:
        found.append(f"tensor parallelism {shares * table.tensor_parallel}")
    others = "more data-parallel ranks with ZeRO-1, or smaller micro-batches"
    if found:
        return f"It would fit with {' or with '.join(found)}; or use {others}."
    return (
        f"Neither more stages (up to {most}) nor tensor parallelism "
        f"{_FACTORS[-1] * table.tensor_parallel} would fit by itself: use both, {others}."
    )


def _fits(planner: Planner, *, stages: int | None = None, shares: int = 1) -> bool:
    costs = planner.costs
    tried = replace(
        planner,
        costs=replace(
            costs, num_stages=stages or costs.num_stages, table=_shared(costs.table, shares)
        ),
    )
    fitting = tried.possible & (tried.costs.least_memory <= tried.limits[:, np.newaxis, np.newaxis])
    return least_worst(np.where(fitting, np.int64(0), np.int64(-1)))[0] >= 0


def _shared(table: CostTable, shares: int) -> CostTable:
    """Divide the memory of each layer among more GPUs; times stay, they don't matter here."""

    def shared(kind: LayerKind) -> LayerKind:
        frozen = kind.kept_frozen_bytes
        return replace(
            kind,
            params=math.ceil(kind.params / shares),
            kept_bytes=kind.kept_bytes.scaled(1 / shares),
            kept_frozen_bytes=None if frozen is None else frozen.scaled(1 / shares),
            kept_bytes_recompute=kind.kept_bytes_recompute.scaled(1 / shares),
            selective=tuple(
                replace(option, kept_bytes=option.kept_bytes.scaled(1 / shares))
                for option in kind.selective
            ),
        )

    return replace(table, kinds=tuple(map(shared, table.kinds)))
