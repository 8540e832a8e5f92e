"""What one layer of a pipeline costs, as values: times, bytes, and the shapes they depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.types import Groups

__all__ = ["PARTS", "LayerKind", "Linear", "ParamBytes", "Selective", "Shapes"]

Float64Array = npt.NDArray[np.float64]

#: The parts of a model, in the order of a pipeline.
PARTS = ("vision", "projector", "embedding", "language", "head")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Linear:
    """A quantity of a micro-batch: tile * tiles + token * tokens + token_pair * sum(len^2) + fixed.

    The unit stands in the name of the field that holds it: `_s` seconds, `_bytes` bytes.

    Args:
        tile: of one image tile.
        token: of one token that the language model sees.
        token_pair: of one pair of tokens of the same sample.
        fixed: of a micro-batch whatever it holds.

    Raises:
        ConfigError: a coefficient is negative or not finite.
    """

    tile: float = 0.0
    token: float = 0.0
    token_pair: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not _is_number(value) or value < 0:
                raise ConfigError(
                    f"Linear.{entry.name} must be finite and not negative, got {value!r}."
                )
            object.__setattr__(self, entry.name, float(value))

    def at(
        self, tiles: npt.ArrayLike, tokens: npt.ArrayLike, sum_squares: npt.ArrayLike = 0
    ) -> Float64Array:
        """Evaluate for micro-batches: arrays of one shape, float64 of that shape comes out."""
        tiles, tokens = np.asarray(tiles, np.float64), np.asarray(tokens, np.float64)
        squares = np.asarray(sum_squares, np.float64)
        found = self.tile * tiles + self.token * tokens + self.token_pair * squares + self.fixed
        return np.asarray(found, np.float64)

    def scaled(self, factor: float) -> Linear:
        """Multiply every coefficient."""
        return Linear(**{entry.name: getattr(self, entry.name) * factor for entry in fields(self)})

    def __add__(self, other: Linear) -> Linear:
        return Linear(
            **{
                entry.name: getattr(self, entry.name) + getattr(other, entry.name)
                for entry in fields(self)
            }
        )

    def __bool__(self) -> bool:
        return any(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True, kw_only=True)
class Selective:
    """One way to recompute a part of a layer only.

    Args:
        name: "attention" or "mlp": what is formed anew in the backward pass.
        recompute_s: time of that, seconds.
        kept_bytes: activation bytes of a micro-batch that are kept all the same.
    """

    name: str
    recompute_s: Linear
    kept_bytes: Linear

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"Selective.name must be a name, got {self.name!r}.")


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """What every layer of one kind costs on one GPU: all figures are after tensor parallelism.

    Args:
        name: unique in a table.
        part: "vision", "projector", "embedding", "language" or "head".
        forward_s: forward pass, seconds.
        backward_s: gradients of activations and weights, recomputation left out, seconds.
        backward_frozen_s: gradients of activations only, for a frozen layer that gradients have to
            pass; None: half of `backward_s`.
        recompute_s: forming all activations anew, seconds.
        kept_bytes: activations that a micro-batch in flight keeps when nothing is recomputed.
        kept_frozen_bytes: the same for a frozen layer that gradients have to pass; None:
            `kept_bytes`.
        kept_bytes_recompute: what it keeps when the layer is recomputed: its input. While its
            backward pass runs, `kept_bytes` are there once on top.
        output_bytes: what is sent on when a stage ends after this layer.
        params: parameters of one layer on one GPU.
        trainable: its weights get gradients.
        recomputable: recomputation is possible and useful; not so for embedding and head.
        selective: ways to recompute a part of it.

    Raises:
        ConfigError: an unknown part, or a number that can't be.
    """

    name: str
    part: str
    forward_s: Linear
    backward_s: Linear
    kept_bytes: Linear
    output_bytes: Linear
    recompute_s: Linear = Linear()
    kept_bytes_recompute: Linear = Linear()
    backward_frozen_s: Linear | None = None
    kept_frozen_bytes: Linear | None = None
    params: int = 0
    trainable: bool = True
    recomputable: bool = True
    selective: tuple[Selective, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"LayerKind.name must be a name, got {self.name!r}.")
        if self.part not in PARTS:
            raise ConfigError(
                f"LayerKind.part must be one of {', '.join(PARTS)}, got {self.part!r} "
                f"(kind {self.name})."
            )
        if isinstance(self.params, bool) or not isinstance(self.params, int) or self.params < 0:
            raise ConfigError(
                f"LayerKind.params must be an integer of at least 0, got {self.params!r} "
                f"(kind {self.name})."
            )
        names = [option.name for option in self.selective]
        if len(set(names)) != len(names) or (names and not self.recomputable):
            raise ConfigError(
                f"selective options must differ, and the layer be recomputable, got {names} "
                f"(kind {self.name})."
            )

    @property
    def choices(self) -> tuple[int | str, ...]:
        """What may stand in a plan's `recompute` for a layer of this kind: 0, 1, and names."""
        if not self.recomputable:
            return (0,)
        return (0, 1, *(option.name for option in self.selective))


@dataclass(frozen=True, kw_only=True)
class ParamBytes:
    """Bytes that one parameter takes for the whole run; the defaults are those of bf16 with Adam.

    Args:
        weight: the weight itself.
        gradient: its gradient; fp32 accumulation in DeepSpeed.
        optimizer: fp32 copy and two moments; ZeRO-1 shares them out over data-parallel ranks.
    """

    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not _is_number(value) or value < 0:
                raise ConfigError(
                    f"ParamBytes.{entry.name} must be finite and not negative, got {value!r}."
                )

    def per_param(self, *, trainable: bool, zero_stage: int, data_parallel: int) -> float:
        """Bytes of one parameter on one GPU; of a frozen one only the weight is there."""
        if not trainable:
            return float(self.weight)
        shares = data_parallel if zero_stage else 1
        return self.weight + self.gradient + self.optimizer / shares


@dataclass(frozen=True, kw_only=True, eq=False)
class Shapes:
    """The shapes of micro-batches.

    Args:
        num_tiles: image tiles of each, (n,).
        num_tokens: tokens of each, (n,).
        sum_squares: sum of the squared sample lengths of each, (n,).

    Raises:
        ConfigError: columns of different length, or numbers that can't be.
    """

    num_tiles: Float64Array
    num_tokens: Float64Array
    sum_squares: Float64Array

    def __post_init__(self) -> None:
        sizes = []
        for entry in fields(self):
            column = np.ascontiguousarray(getattr(self, entry.name), dtype=np.float64)
            if column.ndim != 1 or not np.isfinite(column).all() or (column < 0).any():
                raise ConfigError(
                    f"Shapes.{entry.name} must be one finite number of at least 0 a micro-batch, "
                    f"got an array of shape {column.shape}."
                )
            column.flags.writeable = False
            object.__setattr__(self, entry.name, column)
            sizes.append(len(column))
        if len(set(sizes)) != 1:
            raise ConfigError(f"the columns of Shapes must have one length, got {sizes}.")

    @classmethod
    def from_groups(
        cls, groups: Groups, *, num_tiles: npt.ArrayLike, num_tokens: npt.ArrayLike
    ) -> Shapes:
        """Sum up the rows of each group.

        Args:
            groups: groups of rows, for example those of a `StepPlan`.
            num_tiles: tiles of each row of the index.
            num_tokens: tokens of each row of the index.
        """
        tokens = np.asarray(num_tokens).astype(np.int64)
        return cls(
            num_tiles=groups.sums(num_tiles).astype(np.float64),
            num_tokens=groups.sums(tokens).astype(np.float64),
            sum_squares=groups.sums(tokens * tokens).astype(np.float64),
        )

    def __len__(self) -> int:
        return len(self.num_tiles)

    def take(self, places: npt.NDArray[np.int64] | Sequence[int]) -> Shapes:
        """Pick micro-batches by number, in that order."""
        chosen = np.asarray(places, np.int64)
        return Shapes(
            num_tiles=self.num_tiles[chosen],
            num_tokens=self.num_tokens[chosen],
            sum_squares=self.sum_squares[chosen],
        )
