"""Times of the micro-batches of a step on each stage, as whole nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError

__all__ = ["StageTimes", "nanoseconds"]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_NS = 1e9
_LONGEST_S = 1e6  # of one entry: sums over a step stay far below 2**63 nanoseconds


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTimes:
    """Times of the micro-batches of one pipeline on each of its stages, whole nanoseconds.

    Args:
        forward: int64 (num_stages, num_micro_batches).
        backward: int64 (num_stages, num_micro_batches), recomputation included.
        transfer: int64 (num_stages - 1, num_micro_batches), activations over each boundary.
        gradient_transfer: the same of gradients.
        weight: int64 (num_stages, num_micro_batches), the part of `backward` that makes gradients
            of weights, which a zero-bubble schedule puts off; None: half of it.

    Raises:
        ConfigError: arrays that don't fit together, or times that can't be.
    """

    forward: Int64Array
    backward: Int64Array
    transfer: Int64Array
    gradient_transfer: Int64Array
    weight: Int64Array | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "transfer", "gradient_transfer", "weight"):
            value = getattr(self, name)
            if name == "weight" and value is None:
                value = self.backward // 2
            value = np.ascontiguousarray(value)
            between = name.endswith("transfer")
            shape = np.shape(self.forward)
            if len(shape) == 2 and between:
                shape = (shape[0] - 1, shape[1])
            if value.dtype != np.int64 or value.shape != shape or not len(shape) == 2:
                raise ConfigError(
                    f"StageTimes.{name} must be int64 of shape {shape} (stages, micro-batches), "
                    f"got {value.dtype} {value.shape}."
                )
            if value.size and not (value.min() >= 0 and value.max() <= _LONGEST_S * _NS):
                raise ConfigError(f"StageTimes.{name} must be 0 to {_LONGEST_S:g} s, in ns.")
            value.flags.writeable = False
            object.__setattr__(self, name, value)
        if 0 in self.forward.shape:
            raise ConfigError("StageTimes need at least one stage and one micro-batch.")

    @classmethod
    def from_seconds(
        cls,
        forward: npt.ArrayLike,
        backward: npt.ArrayLike,
        transfer: npt.ArrayLike = 0.0,
        gradient_transfer: npt.ArrayLike | None = None,
    ) -> StageTimes:
        """Make times of seconds.

        Args:
            forward: floats (num_stages, num_micro_batches).
            backward: floats, the same shape.
            transfer: floats (num_stages - 1, num_micro_batches), or of a shape that spreads to it.
            gradient_transfer: the same; None: as `transfer`.

        Raises:
            ConfigError: arrays that don't fit together, or times that can't be.
        """
        ahead = np.asarray(forward, np.float64)
        if ahead.ndim != 2:
            raise ConfigError(
                f"forward must have the shape (stages, micro-batches), got {ahead.shape}."
            )
        between = (len(ahead) - 1, ahead.shape[1])
        back = transfer if gradient_transfer is None else gradient_transfer
        return cls(
            forward=nanoseconds(ahead),
            backward=nanoseconds(backward),
            transfer=nanoseconds(transfer, between),
            gradient_transfer=nanoseconds(back, between),
        )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.forward)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step."""
        return int(self.forward.shape[1])

    @property
    def weight_ns(self) -> Int64Array:
        """`weight`, which is filled in when the times are made."""
        assert self.weight is not None
        return self.weight

    @property
    def work_ns(self) -> int:
        """Time of all forward and backward passes on all stages."""
        return int(self.forward.sum() + self.backward.sum())

    def take(self, order: npt.ArrayLike) -> StageTimes:
        """Put the micro-batches into another order, or pick some."""
        chosen = np.asarray(order, np.int64)
        names = ("forward", "backward", "transfer", "gradient_transfer", "weight")
        return StageTimes(**{name: getattr(self, name)[:, chosen] for name in names})

    def evened(self, *, over_stages: bool) -> StageTimes:
        """Spread the work of each stage over its micro-batches, and maybe over the stages too.

        Transfers take no time then.
        """
        axes = (0, 1) if over_stages else (1,)

        def even(values: Int64Array) -> Int64Array:
            mean = np.rint(values.mean(axis=axes, keepdims=True)).astype(np.int64)
            return np.ascontiguousarray(np.broadcast_to(mean, values.shape))

        still = np.zeros_like(self.transfer)
        return StageTimes(
            forward=even(self.forward),
            backward=even(self.backward),
            transfer=still,
            gradient_transfer=still,
            weight=even(self.weight_ns),
        )

    def without_transfers(self) -> StageTimes:
        """Let transfers take no time."""
        still = np.zeros_like(self.transfer)
        return replace(self, transfer=still, gradient_transfer=still)


def nanoseconds(seconds: npt.ArrayLike, shape: tuple[int, ...] | None = None) -> Int64Array:
    """Round seconds to whole nanoseconds, spread to a shape.

    Raises:
        ConfigError: times that can't be, or that don't spread to the shape.
    """
    values = np.asarray(seconds, np.float64)
    if values.size and not (values.min() >= 0 and values.max() <= _LONGEST_S):  # NaN fails too
        raise ConfigError(f"times must be finite and 0 to {_LONGEST_S:g} s.")
    whole = np.rint(values * _NS).astype(np.int64)
    if shape is None:
        return whole
    try:
        return np.ascontiguousarray(np.broadcast_to(whole, shape))
    except ValueError:
        raise ConfigError(
            f"transfer times must have the shape (stages - 1, micro-batches) {shape}, got "
            f"{whole.shape}."
        ) from None
