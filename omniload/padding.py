"""How a packed row is filled up to shapes that compilers, FP8 and parallel ranks ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from omniload._checks import check_count, check_optional_count
from omniload.errors import ConfigError

__all__ = ["NO_PADDING", "Padding", "RowPlan"]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Where tokens go in one row.

    Args:
        documents: tokens of each document, its own padding included; samples first, then the
            padding at the end of the row, if there is any.
        num_tokens: their sum.
        num_empty: empty documents behind them, so that `cu_seqlens` has a fixed size.
    """

    documents: tuple[int, ...]
    num_tokens: int
    num_empty: int


@dataclass(frozen=True, kw_only=True)
class Padding:
    """What a row is padded to; the default pads nothing.

    Padding at the end of the row is a document of its own: no kernel leaves its positions
    unwritten, and no sample sees it. Its labels are -100, its positions count from 0, and it is
    not in `sample_ids`. Padding inside of documents (`document_multiple`) follows the tokens of
    each sample, so causal attention never sees it.

    Args:
        multiple: the row has a multiple of so many tokens: 16 for FP8, the number of ranks for
            sequence parallelism, 128 to spare compilers some shapes.
        num_tokens: the row has exactly so many tokens; None: no more than needed.
        document_multiple: each document has a multiple of so many tokens; twice the number of
            context-parallel ranks, as they deal each document among themselves.
        num_documents: `cu_seqlens` has exactly this many documents, empty ones at the end, which a
            captured CUDA graph needs; None: no empty documents.
        token_id: what stands in `input_ids`; it must not be an image token. None: the padding
            token of the transform in a `DataLoader`, 0 in `pack`.

    Raises:
        ConfigError: a number out of range, or numbers that contradict each other.
    """

    multiple: int = 1
    num_tokens: int | None = None
    document_multiple: int = 1
    num_documents: int | None = None
    token_id: int | None = None

    def __post_init__(self) -> None:
        check_count("Padding.multiple", self.multiple, least=1)
        check_optional_count("Padding.num_tokens", self.num_tokens, least=1)
        check_count("Padding.document_multiple", self.document_multiple, least=1)
        check_optional_count("Padding.num_documents", self.num_documents, least=1)
        check_optional_count("Padding.token_id", self.token_id)
        if self.num_tokens is not None and self.num_tokens % self.row_multiple:
            raise ConfigError(
                f"Padding.num_tokens must be a multiple of {self.row_multiple}, because rows and "
                f"documents are (multiple={self.multiple}, document_multiple="
                f"{self.document_multiple}), got {self.num_tokens}."
            )

    @classmethod
    def of(cls, pad_to: int | Padding | None) -> Padding:
        """Turn the argument `pad_to` of `pack` into a Padding; an integer is a `multiple`."""
        if pad_to is None:
            return NO_PADDING
        return pad_to if isinstance(pad_to, Padding) else cls(multiple=pad_to)

    @property
    def row_multiple(self) -> int:
        """What the tokens of a row are always a multiple of."""
        return math.lcm(self.multiple, self.document_multiple)

    def plan(self, lengths: Sequence[int]) -> RowPlan:
        """Lay documents out in a row.

        Args:
            lengths: tokens of each sample.

        Raises:
            ConfigError: more tokens or documents than the row may have.
        """
        if self is NO_PADDING:
            return RowPlan(documents=tuple(lengths), num_tokens=sum(lengths), num_empty=0)
        unit = self.document_multiple
        documents = tuple(lengths if unit == 1 else (-(-n // unit) * unit for n in lengths))
        used = sum(documents)
        total = self.num_tokens
        if total is None:
            total = -(-used // self.row_multiple) * self.row_multiple
        if total < used:
            raise ConfigError(
                f"the samples must fit the row: expected at most {total} tokens, got {used} in "
                f"{len(documents)} documents. Padding.num_tokens must be at least the token budget."
            )
        if total > used:
            documents = (*documents, total - used)
        num_empty = 0 if self.num_documents is None else self.num_documents - len(documents)
        if num_empty < 0:
            raise ConfigError(
                f"the row must have at most {self.num_documents} documents, got {len(documents)} "
                "with that of the padding. Raise Padding.num_documents, or give the budget a "
                f"limit: Budget(samples={(self.num_documents or 1) - 1})."
            )
        return RowPlan(documents=documents, num_tokens=total, num_empty=num_empty)


#: Rows as long as their samples.
NO_PADDING = Padding()
