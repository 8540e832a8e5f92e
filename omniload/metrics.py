"""The two ratios that measure waste: pad ratio and dist ratio; 0 is perfect.

Definitions: OmniBal (Yao et al., ICML 2025, arXiv 2407.20761), section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError

__all__ = ["dist_ratio", "pad_ratio"]


def pad_ratio(lengths: npt.ArrayLike | Iterable[npt.ArrayLike]) -> float:
    """Compute the share of positions that padding fills: `sum(max - len) / (max * B)`.

    Args:
        lengths: lengths of the rows of one micro-batch, (B,); or several micro-batches, as
            (num_micro_batches, B) or as a sequence of one-dimensional arrays.

    Returns:
        The ratio of the micro-batch, or the mean over the micro-batches; 0.0 if there are none.

    Raises:
        ConfigError: a negative or not finite length.
    """
    ratios = [_waste(batch, "length") for batch in _rows(lengths)]
    return float(np.mean(ratios)) if ratios else 0.0


def dist_ratio(loads: npt.ArrayLike) -> float:
    """Compute the share of device time spent waiting for the slowest rank.

    For one step it is `sum_r(max - x_r) / (max * N)` over the loads x_r of N data-parallel ranks.

    Args:
        loads: tiles, tokens or estimated time of each rank in one step, (num_ranks,); or of
            several steps, (num_steps, num_ranks).

    Returns:
        The ratio of the step, or the mean over the steps; 0.0 if there are none. A step without
        any load counts as 0.

    Raises:
        ConfigError: a negative or not finite load.
    """
    ratios = [_waste(step, "load") for step in _rows(loads)]
    return float(np.mean(ratios)) if ratios else 0.0


def _rows(values: npt.ArrayLike | Iterable[npt.ArrayLike]) -> list[npt.NDArray[np.float64]]:
    if isinstance(values, np.ndarray):
        listed = [values] if values.ndim == 1 else list(values)
    else:
        outer = list(values)  # type: ignore[arg-type]
        listed = [outer] if all(np.ndim(entry) == 0 for entry in outer) else outer
    return [row for row in (np.asarray(entry, np.float64) for entry in listed) if row.size]


def _waste(row: npt.NDArray[np.float64], what: str) -> float:
    if row.ndim != 1:
        raise ConfigError(f"each entry must be one-dimensional, got shape {row.shape}.")
    if not np.isfinite(row).all() or (row < 0).any():
        raise ConfigError(f"every {what} must be finite and not negative, got {row.tolist()}.")
    largest = float(row.max())
    return float((largest - row).sum() / (largest * len(row))) if largest > 0 else 0.0
