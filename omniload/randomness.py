"""How close an order of groups is to a plain shuffle: three figures, all of one column.

A step of stochastic gradient descent counts on a random sample. Packing chooses, so it may gather
like samples in a group, in a step, or in successive steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.types import Groups

__all__ = ["Randomness", "randomness"]

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """Figures of `randomness`; a plain shuffle has 1, 0, 0.

    Args:
        variance_ratio: variance of the means of steps, over that of independent samples. 4 means
            that a gradient has the noise of a batch 4 times smaller.
        lag1: correlation of the mean of a step with that of the next one.
        intra_group: correlation of two samples of the same group (intraclass correlation).
        num_steps: full steps that were looked at.
    """

    variance_ratio: float
    lag1: float
    intra_group: float
    num_steps: int


def randomness(groups: Groups, values: npt.ArrayLike, *, groups_per_step: int) -> Randomness:
    """Compare an order of groups with a plain shuffle of the same samples.

    Args:
        groups: groups of index rows, in the order in which they are fed.
        values: numbers (index rows,): the column that is looked at, for example tokens or tiles.
        groups_per_step: groups in a step, that is ranks times accumulation.

    Returns:
        The figures. Samples after the last full step don't count. Where there is nothing to compare
        (all values equal, or fewer than 3 full steps), a figure is that of a plain shuffle.

    Raises:
        ConfigError: a value that is not finite, or steps of no groups.

    Differs from the textbook: steps differ in their number of samples, so the variance of
    independent samples is the mean of `variance / num_samples` over the steps.
    """
    column = np.asarray(values, np.float64)[groups.rows]
    if not np.isfinite(column).all():
        raise ConfigError(
            f"values must be finite, got {column[~np.isfinite(column)][0]} among those of the "
            "groups."
        )
    if groups_per_step < 1:
        raise ConfigError(f"groups_per_step must be at least 1, got {groups_per_step}.")
    num_steps = len(groups) // groups_per_step
    bounds = groups.offsets[: num_steps * groups_per_step + 1]
    column = column[: bounds[-1]] if num_steps else column[:0]
    if column.size:
        column = column - column.mean()  # so that sums of squares don't cancel
    steps = bounds[::groups_per_step] if num_steps else bounds[:1]
    means, sizes = _means(column, steps)
    expected = float(column.var() * (1 / sizes).mean()) if len(sizes) else 0.0
    ratio = float(means.var(ddof=1) / expected) if len(means) > 2 and expected > 0 else 1.0
    return Randomness(
        variance_ratio=ratio,
        lag1=_lag1(means),
        intra_group=_intraclass(column, bounds) if num_steps else 0.0,
        num_steps=num_steps,
    )


def _means(
    column: Float64Array, bounds: npt.NDArray[np.int64]
) -> tuple[Float64Array, Float64Array]:
    """Return mean and number of samples of each part that has any."""
    sizes = np.diff(bounds)
    running = np.concatenate([np.zeros(1), np.cumsum(column)])
    sums = np.diff(running[bounds])
    kept = sizes > 0
    return sums[kept] / sizes[kept], sizes[kept].astype(np.float64)


def _lag1(means: Float64Array) -> float:
    centred = means - means.mean() if len(means) else means
    total = float((centred**2).sum())
    return (
        float((centred[1:] * centred[:-1]).sum() / total) if len(means) > 2 and total > 0 else 0.0
    )


def _intraclass(column: Float64Array, bounds: npt.NDArray[np.int64]) -> float:
    """Estimate the intraclass correlation from one-way analysis of variance."""
    means, sizes = _means(column, bounds)
    num_groups, total = len(sizes), float(sizes.sum())
    if num_groups < 2 or total <= num_groups:
        return 0.0
    between = float((sizes * means**2).sum() - (sizes * means).sum() ** 2 / total)
    within = max(float((column**2).sum()) - float((sizes * means**2).sum()), 0.0)
    mean_between, mean_within = between / (num_groups - 1), within / (total - num_groups)
    usual_size = (total - float((sizes**2).sum()) / total) / (num_groups - 1)
    spread = mean_between + (usual_size - 1) * mean_within
    return (mean_between - mean_within) / spread if spread > 0 else 0.0
