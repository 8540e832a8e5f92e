"""Rows that a run leaves out: those of a quarantine file, or a list of rows or keys."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError, ShardError
from omniload.source import RowSource

__all__ = ["Exclude", "excluded_rows", "exclusion_name"]

Int64Array = npt.NDArray[np.int64]
Exclude = str | os.PathLike[str] | Iterable[int] | Iterable[str] | None

#: How each line of a quarantine file begins.
_LINE_START = b'{"source": '
_SHOWN = 5


def excluded_rows(exclude: Exclude, source: RowSource) -> Int64Array:
    """Find the rows to leave out.

    Args:
        exclude: path of a file that `quarantine=` wrote; or rows, integers; or keys, strings.
        source: the data.

    Returns:
        int64 (n,), rising.

    Raises:
        ConfigError: no such file, row or key; a file of other data; data whose rows are others in
            each epoch.

    Cost: of keys, one reading of all rows, 20 us each.
    """
    if exclude is None:
        return np.zeros(0, np.int64)
    if isinstance(exclude, (str, os.PathLike)):
        found = _rows_of_file(Path(exclude), source)
    else:
        found = _rows_of_list(exclude, source)
    if found and source.at_epoch(0) is not source:
        raise ConfigError(
            "exclude= needs data whose rows are the same in every epoch, got "
            f"{type(source).__name__}. Give the sets of a mixture whole numbers as repeat, or "
            "preprocess the sets with the bad rows again, without these."
        )
    wrong = next((row for row in found if not 0 <= row < len(source)), None)
    if wrong is not None:
        raise ConfigError(f"exclude must hold rows from 0 to {len(source) - 1}, got {wrong}.")
    rows: Int64Array = np.unique(np.array(found, np.int64))
    return rows


def exclusion_name(rows: Int64Array) -> str:
    """Name excluded rows in a state: their number and a hash; "none" where there are none."""
    if len(rows) == 0:
        return "none"
    digest = hashlib.blake2b(rows.astype("<i8").tobytes(), digest_size=8).hexdigest()
    return f"{len(rows)} rows {digest}"


def _rows_of_list(exclude: Iterable[Any], source: RowSource) -> list[int]:
    try:
        if isinstance(exclude, (bytes, bytearray)):  # whose items would be taken for rows
            raise TypeError
        given = exclude.tolist() if isinstance(exclude, np.ndarray) else list(exclude)
    except TypeError:
        raise ConfigError(
            "exclude must be the path of a quarantine file, a list of rows, or a list of keys, got "
            f"{type(exclude).__name__}."
        ) from None
    if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in given):
        return [int(item) for item in given]
    if not all(isinstance(item, str) for item in given):
        raise ConfigError(
            f"exclude must hold rows (integers) or keys (strings), not both, got {given[:_SHOWN]}."
        )
    return _rows_of_keys(set(given), source)


def _rows_of_keys(keys: set[str], source: RowSource) -> list[int]:
    rows, missing = [], set(keys)
    for row in range(len(source)):
        try:
            key = source.read(row).key
        except (SampleError, ShardError):
            continue  # a row that can't be read has no key
        if key in keys:
            rows.append(row)
            missing.discard(key)
    if missing:
        raise ConfigError(
            f"exclude must hold keys of the data: {len(missing)} of {len(keys)} are not in "
            f"{source.location}, for example {sorted(missing)[:_SHOWN]}."
        )
    return rows


def _rows_of_file(path: Path, source: RowSource) -> list[int]:
    try:
        lines = path.read_bytes().split(b"\n")
    except (OSError, ValueError) as error:  # ValueError: no path at all
        raise ConfigError(
            f"exclude must be a file that quarantine= wrote, but {path} can't be read: "
            f"{getattr(error, 'strerror', None) or error}. For a list of keys pass a list."
        ) from None
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fact = json.loads(line)
            row, data = fact["row"], fact["data"]
        except (ValueError, KeyError, TypeError, RecursionError):
            if line.startswith(_LINE_START) or number == len(lines):
                continue  # cut off when a run was killed
            raise ConfigError(
                f"line {number} of {path} is not one that quarantine= wrote: {line[:80]!r}."
            ) from None
        if data != source.fingerprint:
            raise ConfigError(
                f"{path} lists rows of other data (line {number}: key {fact.get('key')!r} of shard "
                f"{fact.get('shard')!r}): expected data {source.fingerprint}, got {data}. Its row "
                "numbers mean nothing here; pass the keys as a list, or leave it out."
            )
        if isinstance(row, bool) or not isinstance(row, int):
            raise ConfigError(f"line {number} of {path} must have a row, got {row!r}.")
        rows.append(row)
    return rows
