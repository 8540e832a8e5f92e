"""The one cost formula that planner and pipeline share."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel, language_flops, vision_flops

__all__ = ["REFERENCE_COST", "CostModel", "non_negative_least_squares"]

Float64Array = npt.NDArray[np.float64]

_UNITS_LOG2 = 30  # units of a full micro-batch in `quantised`: 2**33 of them fit an int64
_RANK_TOLERANCE = 1e-6  # of normalised columns: a profile is measured to three or four digits
_COLUMNS = ("tiles", "tokens", "sum of squared lengths", "a constant")


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

    @classmethod
    def from_model(
        cls,
        *,
        vision: VisionModel | None,
        language: LanguageModel,
        projector_trained: bool = True,
        flops_per_s: float = 1.0,
        vision_flops_per_s: float | None = None,
    ) -> CostModel:
        """Count the floating-point operations of one training step of a model.

        Left out, each below about 1 %: patch embedding, projector, norms, activations.

        Args:
            vision: the encoder; None: the model sees no images, or tiles are encoded beforehand.
            language: the language model; its attention is causal.
            projector_trained: the projector between the two gets gradients. Where neither it nor
                the encoder does, a frozen language model has no backward pass.
            flops_per_s: operations a second that the model reaches; 1: the cost is in operations.
            vision_flops_per_s: the same for the encoder; None: `flops_per_s`.

        Returns:
            The model, `fixed` 0.

        Raises:
            ConfigError: a rate that is not above 0.
        """
        rate = flops_per_s if vision_flops_per_s is None else vision_flops_per_s
        for name, value in (("flops_per_s", flops_per_s), ("vision_flops_per_s", rate)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} must be finite and above 0, got {value!r}.")
        tile = 0.0
        reached = projector_trained  # whether a gradient has to pass the language model
        if vision is not None:
            tile = vision_flops(vision) / rate
            reached = reached or vision.trained
        token, token_pair = language_flops(language, reached=reached)
        return cls(tile=tile, token=token / flops_per_s, token_pair=token_pair / flops_per_s)

    @classmethod
    def fit(
        cls,
        num_tiles: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        sum_squares: npt.ArrayLike | None,
        seconds: npt.ArrayLike,
    ) -> CostModel:
        """Fit the coefficients to measured times, each of them at least 0.

        Measure micro-batches whose tiles, tokens and lengths vary independently of each other: a
        plan fills all of them alike, and such a profile can't tell its coefficients apart.

        Args:
            num_tiles: tiles of each measured micro-batch, (n,).
            num_tokens: tokens of each, (n,).
            sum_squares: sum of the squared sample lengths of each, (n,); None: attention is left
                to the tokens.
            seconds: time of forward and backward of each, (n,).

        Returns:
            The least-squares model. What no micro-batch has costs 0.

        Raises:
            ConfigError: a profile that no model fits: numbers that can't be, too few of them,
                columns that only vary together, times that don't grow with the work.
        """
        columns, times = _profile(num_tiles, num_tokens, sum_squares, seconds)
        used = [place for place in range(len(_COLUMNS)) if columns[:, place].any()]
        scales = np.linalg.norm(columns[:, used], axis=0)
        design = columns[:, used] / scales
        names = ", ".join(_COLUMNS[place] for place in used)
        if np.linalg.matrix_rank(design, tol=_RANK_TOLERANCE) < len(used):
            raise ConfigError(
                f"a profile must tell {names} apart: got {len(times)} micro-batches in which some "
                "of them vary only together. Measure more micro-batches, of other shapes."
            )
        found = np.zeros(len(_COLUMNS))
        found[used] = non_negative_least_squares(design, times) / scales
        if not found[:3].any():
            raise ConfigError(
                f"the times of a profile must grow with {names}: the best fit is a constant of "
                f"{found[3]:.3g} s. Were the times taken before the device was done?"
            )
        tile, token, token_pair, fixed = map(float, found)
        return cls(tile=tile, token=token, token_pair=token_pair, fixed=fixed)

    def cost(
        self, num_tiles: npt.ArrayLike, num_tokens: npt.ArrayLike, sum_squares: npt.ArrayLike = 0
    ) -> Float64Array:
        """Estimate the time of micro-batches.

        Args:
            num_tiles: tiles of each, any shape.
            num_tokens: tokens of each, the same shape.
            sum_squares: sum of the squared sample lengths of each, the same shape.

        Returns:
            float64 of that shape.
        """
        return np.asarray(
            self._variable(num_tiles, num_tokens, sum_squares) + self.fixed, np.float64
        )

    def quantised(
        self,
        num_tiles: npt.ArrayLike,
        num_tokens: npt.ArrayLike,
        *,
        max_tiles: int,
        max_tokens: int,
    ) -> npt.NDArray[np.int64]:
        """Estimate the time of samples in whole numbers, for decisions that all ranks make alike.

        The cost of a micro-batch is the sum over its samples; `fixed`, the same for all, is left
        out. The unit is the power of two that gives a micro-batch of `max_tiles` tiles and one
        sample of `max_tokens` tokens between 2**29 and 2**30 units: rounding is below 1e-8 of such
        a micro-batch per sample, and the sum over 2**33 of them fits an int64. Each operation is
        one rounding of IEEE double precision, so the result is the same on every machine.

        Args:
            num_tiles: tiles of each sample, any shape.
            num_tokens: tokens of each sample, the same shape.
            max_tiles: tiles that a micro-batch may hold.
            max_tokens: tokens that a micro-batch may hold.

        Returns:
            int64 of that shape.

        Raises:
            ConfigError: the largest micro-batch costs nothing by this model.
        """
        largest = float(self._variable(max_tiles, max_tokens, float(max_tokens) ** 2))
        if not (math.isfinite(largest) and largest > 0):
            raise ConfigError(
                f"a micro-batch of {max_tiles} tiles and {max_tokens} tokens must cost more than "
                f"0, got {largest} by {self}."
            )
        tokens = np.asarray(num_tokens, np.float64)
        # largest is below 2**exponent; scaling by a power of two rounds nothing
        scale = math.ldexp(1.0, _UNITS_LOG2 - math.frexp(largest)[1])
        units = np.rint(self._variable(num_tiles, tokens, tokens * tokens) * scale)
        return np.asarray(units).astype(np.int64)

    def _variable(
        self, num_tiles: npt.ArrayLike, num_tokens: npt.ArrayLike, sum_squares: npt.ArrayLike
    ) -> Float64Array:
        tiles, tokens = np.asarray(num_tiles, np.float64), np.asarray(num_tokens, np.float64)
        squares = np.asarray(sum_squares, np.float64)
        return np.asarray(self.tile * tiles + self.token * tokens + self.token_pair * squares)


#: The larger model of the OmniBal paper, InternVL-Chat-1.5 (6B + 20B), all of it trained, in
#: operations: with three tiles in a thousand tokens, encoder and language model cost alike.
REFERENCE_COST = CostModel.from_model(
    vision=VisionModel(layers=45, width=3200, patches=1025),
    language=LanguageModel(
        layers=48, width=6144, vocabulary=92553, heads=48, kv_heads=8, mlp_ratio=16384 / 6144
    ),
)


def _profile(
    num_tiles: npt.ArrayLike,
    num_tokens: npt.ArrayLike,
    sum_squares: npt.ArrayLike | None,
    seconds: npt.ArrayLike,
) -> tuple[Float64Array, Float64Array]:
    times = np.asarray(seconds, np.float64)
    given = {"num_tiles": num_tiles, "num_tokens": num_tokens, "sum_squares": sum_squares}
    columns = np.ones((times.size, len(_COLUMNS)))
    for place, (name, values) in enumerate(given.items()):
        column = np.zeros(times.size) if values is None else np.asarray(values, np.float64)
        if times.ndim != 1 or column.shape != times.shape:
            raise ConfigError(
                f"a profile needs one entry a micro-batch: expected {name} of shape "
                f"({times.size},) and as many seconds, got {column.shape} and {times.shape}."
            )
        if not np.isfinite(column).all() or (column < 0).any():
            raise ConfigError(f"{name} of a profile must be finite and not negative.")
        columns[:, place] = column
    if not np.isfinite(times).all() or (times <= 0).any():
        raise ConfigError("seconds of a profile must be finite and above 0.")
    tokens, squares = columns[:, 1], columns[:, 2]
    wrong = np.flatnonzero((squares < tokens) | (squares > tokens * tokens))
    if sum_squares is not None and len(wrong):
        row = int(wrong[0])
        raise ConfigError(
            "sum_squares must lie between the tokens of a micro-batch and their square, got "
            f"{squares[row]:.0f} for {tokens[row]:.0f} tokens (micro-batch {row})."
        )
    return columns, times


def non_negative_least_squares(design: Float64Array, times: Float64Array) -> Float64Array:
    """Find the non-negative solution: the best of the plain ones over all subsets of columns.

    The constrained optimum is the plain optimum over the columns that it uses, and four columns
    have fifteen subsets.

    Args:
        design: float64 (n, columns), columns few and of like size.
        times: float64 (n,).

    Returns:
        float64 (columns,).
    """
    best, least = np.zeros(design.shape[1]), math.inf
    for size in range(1, design.shape[1] + 1):
        for subset in itertools.combinations(range(design.shape[1]), size):
            part = design[:, subset]
            solution = np.linalg.lstsq(part, times, rcond=None)[0]
            error = float(np.square(times - part @ solution).sum())
            if (solution >= 0).all() and error < least:
                best, least = np.zeros(design.shape[1]), error
                best[list(subset)] = solution
    return best
