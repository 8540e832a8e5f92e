"""From the pieces of a conversation to its arrays of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload.transforms.pieces import Piece
from omniload.transforms.vocabulary import Chunk, Vocabulary
from omniload.types import IGNORE_INDEX

__all__ = ["Encoded", "TokenCollector"]

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """A conversation as tokens.

    Args:
        input_ids: int32 (num_tokens,), image tokens expanded.
        labels: int32 (num_tokens,), the token's own id where it gives loss, else -100.
        image_spans: int32 (num_images, 2), [start, end) of each image's tokens.
    """

    input_ids: Int32Array
    labels: Int32Array
    image_spans: Int32Array


class TokenCollector:
    """Collects the tokens of one conversation, piece by piece.

    Args:
        vocabulary: the tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._chunks: list[Chunk] = []
        self._spans: list[tuple[int, int]] = []
        self._text: list[tuple[str, bool]] = []
        self._length = 0
        self._is_first = True
        self._strip = False

    def add_text(self, piece: Piece) -> None:
        """Add plain text; it is tokenised together with its neighbours where that is due."""
        text = piece.text
        if self._strip:  # the control token before it takes the white space
            text = text.lstrip()
            if not text:
                return
            self._strip = False
        apart = piece.fresh or (bool(self._text) and self._text[-1][1] != piece.loss)
        if not self._vocabulary.adds_space:
            if apart:
                self._flush()
            elif self._text:
                text = self._text.pop()[0] + text
        self._text.append((text, piece.loss))

    def add_control(self, piece: Piece) -> None:
        """Add a control token."""
        if piece.text in self._vocabulary.strips_left and self._text:
            text, loss = self._text.pop()
            if text.rstrip():
                self._text.append((text.rstrip(), loss))
        self.add_ids([self._vocabulary.controls[piece.text]], loss=piece.loss)
        self._is_first = self._is_first and piece.kind == "begin"
        self._strip = piece.text in self._vocabulary.strips_right

    def add_ids(self, ids: Sequence[int], *, loss: bool = False) -> None:
        """Add token ids as they are."""
        if ids:
            self._flush()
            self._add(Chunk(ids, loss))

    def add_image(self, token: int, count: int, *, row_break: tuple[int, int] | None) -> None:
        """Add the tokens of an image.

        Args:
            token: the image token.
            count: how many tokens the image gets, breaks included.
            row_break: (columns, token): after so many image tokens comes this token, but not at the
                end; None: no breaks.
        """
        self._flush()
        self._is_first = False
        self._spans.append((self._length, self._length + count))
        ids = np.full(count, token, dtype=np.int32)
        if row_break is not None:
            columns, break_token = row_break
            ids[columns :: columns + 1] = break_token
        self._add(Chunk(ids, False))

    def encoded(self) -> Encoded:
        """Give all that was added."""
        self._flush()
        input_ids = np.empty(self._length, dtype=np.int32)
        gives_loss = np.empty(self._length, dtype=bool)
        at = 0
        for ids, loss in self._chunks:
            end = at + len(ids)
            input_ids[at:end] = ids
            gives_loss[at:end] = loss
            at = end
        return Encoded(
            input_ids=input_ids,
            labels=np.where(gives_loss, input_ids, np.int32(IGNORE_INDEX)),
            image_spans=np.array(self._spans, dtype=np.int32).reshape(-1, 2),
        )

    def _flush(self) -> None:
        self._strip = False
        if self._text:
            for chunk in self._vocabulary.chunks(self._text, first=self._is_first):
                self._add(chunk)
            self._text = []
            self._is_first = False

    def _add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._length += len(chunk.ids)
