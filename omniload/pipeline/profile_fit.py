"""Fits linear costs to measured layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.costs import non_negative_least_squares
from omniload.errors import ConfigError
from omniload.pipeline.kinds import Linear, Shapes

__all__ = ["LayerSample", "design_of", "fit_linear", "fit_samples"]

Float64Array = npt.NDArray[np.float64]

_NAMES = ("tiles", "tokens", "sum of squared lengths", "a constant")
_RANK_TOLERANCE = 1e-6  # of normalised columns
_NEGLIGIBLE = 1e-7  # share of the largest value: what rounding leaves of an exact fit


@dataclass(frozen=True, kw_only=True)
class LayerSample:
    """What one layer took at one micro-batch.

    Args:
        forward_s: forward pass, seconds.
        backward_s: backward pass, seconds; 0: there was none.
        recompute_s: what recomputation added to it, seconds.
        kept_bytes: activations that it kept.
        kept_bytes_recompute: what it keeps when it is recomputed.
        output_bytes: what it gave to the next layer.
    """

    forward_s: float
    backward_s: float
    recompute_s: float
    kept_bytes: float
    kept_bytes_recompute: float
    output_bytes: float


def design_of(shapes: Shapes) -> Float64Array:
    """Arrange shapes as the columns of a fit, (n, 4), and check that they can be told apart.

    Raises:
        ConfigError: too few micro-batches, or columns that vary only together.
    """
    columns = np.stack(
        [shapes.num_tiles, shapes.num_tokens, shapes.sum_squares, np.ones(len(shapes))], axis=1
    )
    used = (columns != 0).any(axis=0)
    scaled = columns[:, used] / np.linalg.norm(columns[:, used], axis=0)
    if len(shapes) == 0 or np.linalg.matrix_rank(scaled, tol=_RANK_TOLERANCE) < used.sum():
        names = ", ".join(_NAMES[place] for place in np.flatnonzero(used))
        raise ConfigError(
            f"a profile must tell {names} apart: got {len(shapes)} micro-batches in which some "
            "of them vary only together. Measure more micro-batches, of other shapes."
        )
    return columns


def fit_linear(design: Float64Array, values: npt.ArrayLike) -> Linear:
    """Find the non-negative least-squares costs.

    Args:
        design: float64 (n, 4), as `design_of` gives it.
        values: measured values, (n,), at least 0.

    Returns:
        The costs; exact where the values are exactly linear, as bytes are.
    """
    measured = np.asarray(values, np.float64)
    used = np.flatnonzero(design.any(axis=0))
    found = np.zeros(design.shape[1])
    largest = measured.max(initial=0.0)
    while largest > 0 and len(used):
        scales = np.linalg.norm(design[:, used], axis=0)
        found[:] = 0.0
        found[used] = non_negative_least_squares(design[:, used] / scales, measured) / scales
        kept = used[found[used] * design[:, used].max(axis=0) > _NEGLIGIBLE * largest]
        if len(kept) == len(used):
            break
        used = kept
    tile, token, token_pair, fixed = map(float, found)
    return Linear(tile=tile, token=token, token_pair=token_pair, fixed=fixed)


def fit_samples(design: Float64Array, samples: Sequence[LayerSample]) -> dict[str, Any]:
    """Fit every figure of a layer.

    Args:
        design: float64 (n, 4), as `design_of` gives it.
        samples: what the layer took at each of the n micro-batches.

    Returns:
        The costs, `Linear`, by the names that `LayerSample` and `LayerKind` share.
    """
    return {
        entry.name: fit_linear(design, [getattr(sample, entry.name) for sample in samples])
        for entry in fields(LayerSample)
    }
