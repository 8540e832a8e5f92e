"""The length index: what grouping needs to know of each row, and nothing else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError

__all__ = ["LengthIndex"]

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthIndex:
    """Sizes of every row, as columns; row i is sample i for the whole life of the data set.

    Make one with `from_arrays`, which checks and converts.

    Args:
        num_tokens: int32 (num_rows,), tokens after image expansion, at least 1.
        num_tiles: int32 (num_rows,), image tiles, at least 0.
        num_loss_tokens: int32 (num_rows,), tokens that give loss, first label left out.
    """

    num_tokens: npt.NDArray[np.int32]
    num_tiles: npt.NDArray[np.int32]
    num_loss_tokens: npt.NDArray[np.int32]

    @classmethod
    def from_arrays(
        cls,
        *,
        num_tokens: npt.ArrayLike,
        num_tiles: npt.ArrayLike,
        num_loss_tokens: npt.ArrayLike | None = None,
    ) -> LengthIndex:
        """Build an index from columns.

        Args:
            num_tokens: integers (num_rows,), each at least 1.
            num_tiles: integers (num_rows,), each at least 0.
            num_loss_tokens: integers (num_rows,), each below `num_tokens` (the first label of a
                sample never gives loss); None: all that can.

        Returns:
            The index; int32 input is not copied, so a memory map stays one.

        Raises:
            ConfigError: not integers, different lengths, or a value out of range; says which row.
        """
        tokens = _column("num_tokens", num_tokens, least=1)
        tiles = _column("num_tiles", num_tiles, least=0)
        if num_loss_tokens is None:
            loss = tokens - np.int32(1)
        else:
            loss = _column("num_loss_tokens", num_loss_tokens, least=0)
        for name, column in (("num_tiles", tiles), ("num_loss_tokens", loss)):
            if len(column) != len(tokens):
                raise ConfigError(
                    f"{name} must have one entry a row: expected {len(tokens)}, got {len(column)}."
                )
        over = np.flatnonzero(loss >= tokens)
        if len(over):
            row = int(over[0])
            raise ConfigError(
                "num_loss_tokens must be below num_tokens, because the first label of a sample "
                f"never gives loss: got {int(loss[row])} of {int(tokens[row])} tokens (row {row}, "
                f"{len(over)} such rows)."
            )
        return cls(num_tokens=tokens, num_tiles=tiles, num_loss_tokens=loss)

    def __len__(self) -> int:
        return len(self.num_tokens)

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits that change when any length changes."""
        digest = hashlib.blake2b(digest_size=16)
        for column in (self.num_tokens, self.num_tiles, self.num_loss_tokens):
            digest.update(np.ascontiguousarray(column, dtype="<i4").data)
        return digest.hexdigest()

    def __reduce__(self) -> tuple[Any, ...]:
        # leaves the cached fingerprint behind: cheap to carry, wrong to trust
        return (_rebuild, (self.num_tokens, self.num_tiles, self.num_loss_tokens))


def _rebuild(tokens: Any, tiles: Any, loss: Any) -> LengthIndex:
    return LengthIndex(num_tokens=tokens, num_tiles=tiles, num_loss_tokens=loss)


def _column(name: str, values: npt.ArrayLike, *, least: int) -> npt.NDArray[np.int32]:
    if isinstance(values, np.ma.MaskedArray):
        raise ConfigError(
            f"{name} must be a plain array, got a masked one: its hidden entries would count. Pass "
            "values.filled(...) or values.compressed()."
        )
    array = np.asarray(values)
    if array.ndim != 1:
        raise ConfigError(f"{name} must be one-dimensional, got shape {array.shape}.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int32)
    if not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{name} must hold integers, got dtype {array.dtype}.")
    low, high = int(array.min()), int(array.max())
    if low < least or high > _INT32_MAX:
        row = int(array.argmin() if low < least else array.argmax())
        raise ConfigError(
            f"{name} must be between {least} and {_INT32_MAX}, got {int(array[row])} (row {row})."
        )
    return np.ascontiguousarray(array, dtype=np.int32)
