"""Bytes of layers that a cost table leaves to the stage: weights held once, work formed anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from omniload.pipeline.kinds import Shapes
from omniload.pipeline.table import CostTable, Recompute

__all__ = ["running", "static_bytes", "working_bytes"]

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


def static_bytes(table: CostTable) -> Int64Array:
    """Count what each stage [low, high) always holds: weights, gradients, optimizer, reserve.

    Tied weights are there once on each stage that has one of their layers.

    Returns:
        int64 (num_layers + 1, num_layers + 1), bytes, by low and high.
    """
    each = np.ceil(table.static_bytes).astype(np.int64)
    held = int(np.ceil(table.reserve_bytes)) + _between(each)
    for group in table.tied:
        members = np.zeros(table.num_layers, np.int64)
        members[list(group)] = 1
        has_one = _between(members) > 0
        held = held + has_one * each[list(group)].max() - _between(members * each)
    return np.ascontiguousarray(held)


def working_bytes(
    table: CostTable, shapes: Shapes, choice: Recompute | Sequence[Recompute]
) -> Float64Array:
    """Count what is formed anew while the backward pass of a layer runs.

    All of its activations where it keeps its input only, else the part that it lacks. They are gone
    before the backward pass of the next layer, so of a stage the largest counts.

    Args:
        table: what layers cost.
        shapes: the micro-batches.
        choice: what is recomputed, one for each layer, or one for all that offer it.

    Returns:
        float64 (num_layers, num_micro_batches), bytes.
    """
    chosen = table.choices(choice)
    whole = table.kept(shapes)
    lacking = np.maximum(whole - table.kept(shapes, chosen), 0.0)
    entire = np.array([each == 1 for each in chosen])[:, np.newaxis]
    nothing = np.array([each == 0 for each in chosen])[:, np.newaxis]
    return np.where(nothing, 0.0, np.where(entire, whole, lacking))


def running(values: npt.ArrayLike) -> Int64Array:
    """Sum integers up, from 0: int64 (n + 1,)."""
    return np.concatenate([[0], np.cumsum(np.asarray(values, np.int64))])


def _between(values: Int64Array) -> Int64Array:
    ends = running(values)
    return ends[np.newaxis, :] - ends[:, np.newaxis]
