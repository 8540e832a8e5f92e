"""Cutting the input into pieces: a pure function of the input and a seed, never of the machine.

The spans of all files are put in a random order over the whole input and dealt to pieces, so that
each piece, and with it each shard, holds a mix of everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from omniload.rng import permutation
from omniload.tools.sources import READERS, InputFile, Rejection, Span

__all__ = ["SpanTable", "cut_pieces", "scan_input"]

Int64Array = npt.NDArray[np.int64]

#: A piece is what a killed run repeats at most: so many records, or so many bytes.
_PIECE_RECORDS = 4096
_PIECE_BYTES = 1 << 30
#: A small input is still cut, so that processes share it, but not into crumbs.
_LEAST_PIECES = 16
_CRUMB_RECORDS = 128

_ORDER_KEY = 0x5AA5_0001
_SUBSET_KEY = 0x5AA5_0002


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanTable:
    """All spans of the input, as columns: a large input has many.

    Args:
        columns: int64 (num_spans, 8): number of the file, start, stop, first, count, num_bytes,
            records to use (below `count`: a subset), round (for repeated sets).
    """

    columns: Int64Array

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def num_used(self) -> Int64Array:
        """Records to use, int64 (num_spans,)."""
        return self.columns[:, 6]

    @property
    def num_bytes(self) -> Int64Array:
        """Rough bytes, int64 (num_spans,)."""
        return self.columns[:, 5]

    def spans(self, rows: Int64Array, seed: int) -> Iterator[tuple[int, Span]]:
        """Give rows of the table as spans, each with the number of its file."""
        for file, start, stop, first, count, num_bytes, used, _ in self.columns[rows].tolist():
            span = Span(start=start, stop=stop, first=first, count=count, num_bytes=num_bytes)
            if used < count:
                chosen = permutation(count, seed, _SUBSET_KEY, file, first)[:used] + first
                span = replace(span, keep=frozenset(chosen.tolist()))
            yield file, span


def scan_input(
    files: Sequence[InputFile], progress: Iterable[InputFile] | None = None
) -> tuple[SpanTable, list[Rejection]]:
    """Walk all files once.

    Args:
        files: the input.
        progress: the same files, from an iterable that shows how far it is.

    Returns:
        The spans in input order, and what is lost already.

    Raises:
        ConfigError: a file that can't be read at all.
    """
    rows: list[Int64Array] = []
    rejections: list[Rejection] = []
    for number, file in enumerate(files if progress is None else progress):
        spans = []
        for found in READERS[file.kind].scan(file):
            if isinstance(found, Rejection):
                rejections.append(found)
            else:
                spans.append(
                    (number, found.start, found.stop, found.first, found.count, found.num_bytes)
                )
        rows += _repeated(np.array(spans, dtype=np.int64).reshape(-1, 6), file.repeat)
    columns = np.concatenate(rows) if rows else np.zeros((0, 8), np.int64)
    return SpanTable(columns=columns[columns[:, 6] > 0]), rejections


def _repeated(spans: Int64Array, repeat: float) -> Iterator[Int64Array]:
    """Add the columns 'records to use' and 'round', once for each round of a repeated set."""
    exact = Fraction(str(repeat))
    whole = int(exact)
    for number in range(whole):
        yield np.column_stack([spans, spans[:, 4], np.full(len(spans), number)])
    part = exact - whole
    if part:
        # each span gives its share; the shares sum to the share of the whole set, rounded down
        first, last = spans[:, 3], spans[:, 3] + spans[:, 4]
        up, down = part.numerator, part.denominator
        used = last * up // down - first * up // down
        yield np.column_stack([spans, used, np.full(len(spans), whole)])


def cut_pieces(table: SpanTable, *, seed: int, keep_order: bool = False) -> list[Int64Array]:
    """Deal the spans to pieces.

    Args:
        table: the spans.
        seed: of the random order.
        keep_order: leave the spans in input order.

    Returns:
        For each piece the rows of the table, int64.
    """
    order = np.arange(len(table)) if keep_order else permutation(len(table), seed, _ORDER_KEY)
    used, num_bytes = table.num_used[order], table.num_bytes[order]
    weight = np.maximum(used * (_PIECE_BYTES // _PIECE_RECORDS), num_bytes)
    total = int(weight.sum())
    if total == 0:
        return []
    wanted = -(-total // _PIECE_BYTES)
    for_processes = min(_LEAST_PIECES, -(-int(used.sum()) // _CRUMB_RECORDS))
    pieces = min(max(wanted, for_processes), len(table))
    # in floating point the cut could differ between machines
    step = -(-total // pieces)
    piece = (np.cumsum(weight) - weight) // step
    cuts = np.flatnonzero(np.diff(piece)) + 1
    return np.split(order, cuts)
