"""The one cost formula that planner and pipeline share."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError

__all__ = ["CostModel"]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Estimated time of one micro-batch: a * tiles + b * tokens + c * sum(len^2) + d.

    The unit of time is yours, as long as it is the same in all coefficients.

    Args:
        tile: time of one image tile in the vision encoder.
        token: time of one token in everything that is linear in tokens.
        token_pair: attention time of one pair of tokens of the same sample.
        fixed: time of a micro-batch whatever it holds.

    Raises:
        ConfigError: a coefficient is negative or not finite, or all are 0.
    """

    tile: float = 0.0
    token: float = 1.0
    token_pair: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"CostModel.{entry.name} must be finite and not negative, got {value!r}."
                )
        if self.tile == self.token == self.token_pair == 0:
            raise ConfigError("CostModel needs one coefficient above 0 besides `fixed`.")

    def cost(
        self, num_tiles: npt.ArrayLike, num_tokens: npt.ArrayLike, sum_squares: npt.ArrayLike = 0
    ) -> npt.NDArray[np.float64]:
        """Estimate the time of micro-batches.

        Args:
            num_tiles: tiles of each, any shape.
            num_tokens: tokens of each, the same shape.
            sum_squares: sum of the squared sample lengths of each, the same shape.

        Returns:
            float64 of that shape.
        """
        total = (
            self.tile * np.asarray(num_tiles, np.float64)
            + self.token * np.asarray(num_tokens, np.float64)
            + self.token_pair * np.asarray(sum_squares, np.float64)
            + self.fixed
        )
        return np.asarray(total, np.float64)
