"""Token arrays of one packed row, the Arrow columns they come from, and NumPy's way to write them.

`write_tokens` is the fallback of the C++ extension and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.types import IGNORE_INDEX

__all__ = [
    "ListColumn",
    "TokenRow",
    "check_lengths",
    "checked_total",
    "num_tokens",
    "plain",
    "slices",
    "write_tokens",
]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

#: Offsets into a row are int32, as attention kernels want them.
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRow:
    """Arrays of one packed row, to be written.

    Args:
        input_ids: int64 (num_tokens,).
        labels: int64 (num_tokens,), first of each sample -100.
        position_ids: int64 (num_tokens,), restart at 0 with each sample.
        cu_seqlens: int32 (num_samples + 1,).
    """

    input_ids: Int64Array
    labels: Int64Array
    position_ids: Int64Array
    cu_seqlens: Int32Array

    @classmethod
    def empty(cls, num_tokens: int, num_samples: int) -> Self:
        """Allocate, without writing."""
        return cls(
            input_ids=np.empty(num_tokens, np.int64),
            labels=np.empty(num_tokens, np.int64),
            position_ids=np.empty(num_tokens, np.int64),
            cu_seqlens=np.empty(num_samples + 1, np.int32),
        )

    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """Return them in the order of the fields."""
        return self.input_ids, self.labels, self.position_ids, self.cu_seqlens


@dataclass(frozen=True, kw_only=True, eq=False)
class ListColumn:
    """A column of integer lists as Arrow stores it: list i is `values[offsets[i]:offsets[i + 1]]`.

    Args:
        values: int32 (num_values,).
        offsets: int32 or int64 (num_lists + 1,).

    Raises:
        ConfigError: other dtypes or shapes. Offsets are checked when a row is read.
    """

    values: Int32Array
    offsets: npt.NDArray[np.int32] | Int64Array

    def __post_init__(self) -> None:
        values, offsets = self.values, self.offsets
        if values.dtype != np.int32 or values.ndim != 1:
            raise ConfigError(f"values must be int32 (n,), got {values.dtype} {values.shape}.")
        if offsets.dtype not in (np.int32, np.int64) or offsets.ndim != 1 or len(offsets) == 0:
            raise ConfigError(
                f"offsets must be int32 or int64 (n + 1,), got {offsets.dtype} {offsets.shape}."
            )

    @classmethod
    def from_arrow(cls, array: Any) -> Self:
        """Look at the buffers of a pyarrow ListArray or LargeListArray of int32, without a copy.

        Raises:
            ConfigError: lists or values that are null.
        """
        if array.null_count or array.values.null_count:
            raise ConfigError("a column of token lists must not hold nulls.")
        return cls(
            values=array.values.to_numpy(zero_copy_only=True),
            offsets=array.offsets.to_numpy(zero_copy_only=True),
        )


def checked_total(lengths: Iterable[int]) -> int:
    """Add lengths up; a row's offsets are int32."""
    total = sum(lengths)
    if total > _MAX_TOKENS:
        raise ConfigError(f"a row must have at most {_MAX_TOKENS} tokens, got {total}.")
    return total


def plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array laid out as the writers read it: contiguous and aligned."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, None, ["C", "A"])


def write_tokens(
    input_ids: Sequence[Int32Array], labels: Sequence[Int32Array], out: TokenRow
) -> int:
    """Write the token arrays with NumPy; return the number of loss tokens."""
    out.cu_seqlens[0] = 0
    if not input_ids:
        return 0
    lengths = list(map(len, input_ids))
    np.cumsum(lengths, out=out.cu_seqlens[1:])
    np.concatenate(input_ids, out=out.input_ids)
    np.concatenate(labels, out=out.labels)
    out.labels[out.cu_seqlens[:-1]] = IGNORE_INDEX
    positions = np.arange(max(lengths))
    for start, length in zip(out.cu_seqlens.tolist(), lengths, strict=False):
        out.position_ids[start : start + length] = positions[:length]
    return int(np.count_nonzero(out.labels != IGNORE_INDEX))


def num_tokens(column: ListColumn, rows: Int64Array) -> int:
    """Add up the lengths of the lists at `rows`."""
    _check_rows(column, rows)
    return checked_total((column.offsets[rows + 1] - column.offsets[rows]).tolist())


def _check_rows(column: ListColumn, rows: Int64Array) -> None:
    num_lists = len(column.offsets) - 1
    outside = (rows < 0) | (rows >= num_lists)
    if outside.any():
        raise ConfigError(
            f"rows must lie in the column of {num_lists} lists, got {rows[outside][0]}."
        )


def slices(column: ListColumn, rows: Int64Array) -> list[Int32Array]:
    """Return the lists at `rows`, each checked to lie in the values and not to be empty."""
    _check_rows(column, rows)
    starts, ends = column.offsets[rows], column.offsets[rows + 1]
    damaged = (starts < 0) | (ends <= starts) | (ends > len(column.values))
    if damaged.any():
        first = int(damaged.argmax())
        raise ConfigError(
            f"a list must lie in the {len(column.values)} values and not be empty, got "
            f"[{starts[first]}, {ends[first]}) (row {rows[first]})."
        )
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    return [column.values[start:end] for start, end in pairs]


def check_lengths(
    input_ids: list[Int32Array], labels: list[Int32Array], rows: Int64Array, out: TokenRow
) -> None:
    """Check that labels go with the tokens, and that `out` has the room of the row."""
    want_lengths, got_lengths = list(map(len, input_ids)), list(map(len, labels))
    if want_lengths != got_lengths:
        pairs = zip(want_lengths, got_lengths, strict=True)
        first = next(i for i, (want, got) in enumerate(pairs) if want != got)
        raise ConfigError(
            f"labels must be as long as input_ids: expected {want_lengths[first]}, got "
            f"{got_lengths[first]} (row {rows[first]})."
        )
    want, got = sum(want_lengths), len(out.input_ids)
    if want != got or len(out.cu_seqlens) != len(rows) + 1:
        raise ConfigError(
            f"out must be as large as the row: expected {want} tokens of {len(rows)} samples, got "
            f"{got} of {len(out.cu_seqlens) - 1}."
        )
