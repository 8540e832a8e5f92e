"""Conversations to token ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.transforms.pieces import (
    IMAGE_MARK,
    ROLES,
    ChatTemplate,
    ImageStrings,
    Piece,
    TurnLoss,
)
from omniload.transforms.templates import DataTemplate, load_template
from omniload.transforms.tokenizer import LoadedTokenizer, load_tokenizer
from omniload.transforms.vocabulary import Chunk, Vocabulary
from omniload.types import IGNORE_INDEX, Message

__all__ = [
    "IMAGE_MARK",
    "ChatTemplate",
    "ConversationEncoder",
    "DataTemplate",
    "Encoded",
    "ImageStrings",
    "LoadedTokenizer",
    "Loss",
    "load_template",
    "load_tokenizer",
]

Int32Array = npt.NDArray[np.int32]
Loss = Literal["assistant", "last", "all"]


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


class ConversationEncoder:
    """Turns conversations into token ids and labels; picklable, cheap to make.

    Each mark `<image>` becomes the template's start, `tokens_per_tile` image tokens for each tile
    of that image, and end; none of them ever gives loss. Text of the data can't become a control
    token, whatever it looks like. Control tokens that the tokenizer lacks are added at its end;
    `settings()["vocab_size"]` is what a model has to cover.

    Args:
        tokenizer: from `load_tokenizer`.
        template: from `load_template`.
        loss: "assistant": every answer, its end token included; "last": the last answer only;
            "all": every token but images. A message's weight of 0 or 1 goes before it.
        tokens_per_tile: tokens the language model sees for one image tile.

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        *,
        tokenizer: LoadedTokenizer,
        template: ChatTemplate,
        loss: Loss = "assistant",
        tokens_per_tile: int = 256,
    ) -> None:
        if loss not in get_args(Loss):
            raise ConfigError(f"loss must be one of {', '.join(get_args(Loss))}, got {loss!r}.")
        if isinstance(tokens_per_tile, bool) or not isinstance(tokens_per_tile, int):
            raise ConfigError(f"tokens_per_tile must be an integer, got {tokens_per_tile!r}.")
        if not 1 <= tokens_per_tile <= 1 << 20:
            raise ConfigError(
                f"tokens_per_tile must be between 1 and {1 << 20}, got {tokens_per_tile}."
            )
        self.tokenizer = tokenizer
        self.template = template
        self.loss = loss
        self.tokens_per_tile = tokens_per_tile
        image = template.image
        pad_token = tokenizer.pad_token or template.pad_token
        needed = (*template.special_tokens, image.start, image.token, image.end, pad_token)
        vocabulary = Vocabulary(tokenizer, [token for token in needed if token])
        self._vocabulary = vocabulary
        self.image_token_id = vocabulary.controls[image.token]
        self.pad_token_id = vocabulary.controls[pad_token]
        self.image_start_ids = (vocabulary.controls[image.start],) if image.start else ()
        self.image_end_ids = (vocabulary.controls[image.end],) if image.end else ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.tokenizer, self.template, self.loss, self.tokens_per_tile)

    @property
    def vocab_size(self) -> int:
        """Rows a model's embedding needs: the highest token id + 1."""
        return self._vocabulary.size

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Control tokens that the tokenizer lacked; added at its end, in this order."""
        return self._vocabulary.added

    def tokenizer_json(self) -> str:
        """Content of a `tokenizer.json` with the added tokens in it."""
        return self._vocabulary.json

    def settings(self) -> dict[str, Any]:
        """Give everything that decides token ids and labels, as plain JSON."""
        return {
            "tokenizer": self.tokenizer.name,
            "tokenizer_fingerprint": self.tokenizer.fingerprint,
            "template": self.template.name,
            "template_fingerprint": self.template.fingerprint,
            "loss": self.loss,
            "tokens_per_tile": self.tokens_per_tile,
            "vocab_size": self.vocab_size,
            "added_tokens": list(self.added_tokens),
            "image_token_id": self.image_token_id,
            "image_start_ids": list(self.image_start_ids),
            "image_end_ids": list(self.image_end_ids),
            "pad_token_id": self.pad_token_id,
            "filler_ids": self._vocabulary.plain_ids("."),
        }

    def encode(self, messages: Sequence[Message], image_num_tiles: Sequence[int]) -> Encoded:
        """Tokenise a conversation.

        Args:
            messages: the conversation; each image stands as the mark `<image>` in its text.
            image_num_tiles: tiles of each image, in the order of the marks.

        Returns:
            Token ids, labels and image spans.

        Raises:
            SampleError: no text and no image at all, an unknown role, a weight other than 0 and 1,
                a number of marks that isn't the number of images, text that is no valid Unicode,
                or a template that fails or moves images.
        """
        self._check(messages, image_num_tiles)
        pieces = self.template.pieces(
            messages, self._turn_losses(messages), self._vocabulary.pattern
        )
        num_images = sum(piece.kind == "image" for piece in pieces)
        if num_images != len(image_num_tiles):
            raise SampleError(
                f"template {self.template.name!r} must keep each image once: expected "
                f"{len(image_num_tiles)}, got {num_images}."
            )
        tokens = _Tokens(self._vocabulary)
        counts = iter(image_num_tiles)
        for piece in pieces:
            if piece.kind == "text":
                tokens.add_text(piece)
            elif piece.kind == "control":
                tokens.add_control(piece)
            else:
                tokens.add_ids(self.image_start_ids)
                tokens.add_image(self.image_token_id, int(next(counts)) * self.tokens_per_tile)
                tokens.add_ids(self.image_end_ids)
        return tokens.encoded()

    def _check(self, messages: Sequence[Message], image_num_tiles: Sequence[int]) -> None:
        if not any(message.content.strip() for message in messages):
            raise SampleError(f"the conversation is empty ({len(messages)} messages, no text).")
        for index, message in enumerate(messages):
            if message.role not in ROLES:
                raise SampleError(
                    f"message {index} has the unknown role {message.role!r}; known: "
                    f"{', '.join(ROLES)}."
                )
            if message.weight not in (None, 0, 1):
                raise SampleError(
                    f"message {index}: weight must be 0 or 1, got {message.weight!r}."
                )
        marks = sum(message.content.count(IMAGE_MARK) for message in messages)
        if marks != len(image_num_tiles):
            raise SampleError(
                f"each image needs one mark {IMAGE_MARK} in the text: expected "
                f"{len(image_num_tiles)} marks, got {marks}."
            )
        if any(count < 1 for count in image_num_tiles):
            raise SampleError(
                f"each image needs at least one tile, got {[int(c) for c in image_num_tiles]}."
            )

    def _turn_losses(self, messages: Sequence[Message]) -> list[TurnLoss]:
        last = max(
            (index for index, message in enumerate(messages) if message.role == "assistant"),
            default=-1,
        )
        losses = []
        for index, message in enumerate(messages):
            if message.weight is not None:
                content = bool(message.weight)
            elif self.loss == "last":
                content = index == last
            else:
                content = self.loss == "all" or message.role == "assistant"
            losses.append(TurnLoss(content, self.loss == "all" and message.weight != 0))
        return losses


class _Tokens:
    """Collects the tokens of one conversation."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._chunks: list[Chunk] = []
        self._spans: list[tuple[int, int]] = []
        self._text: list[tuple[str, bool]] = []
        self._length = 0
        self._is_first = True
        self._strip = False

    def add_text(self, piece: Piece) -> None:
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
        if piece.text in self._vocabulary.strips_left and self._text:
            text, loss = self._text.pop()
            if text.rstrip():
                self._text.append((text.rstrip(), loss))
        self.add_ids([self._vocabulary.controls[piece.text]], loss=piece.loss)
        self._strip = piece.text in self._vocabulary.strips_right

    def add_ids(self, ids: Sequence[int], *, loss: bool = False) -> None:
        if ids:
            self._flush()
            self._add(Chunk(ids, loss))

    def add_image(self, token: int, count: int) -> None:
        self._flush()
        self._spans.append((self._length, self._length + count))
        self._add(Chunk(np.full(count, token, dtype=np.int32), False))

    def encoded(self) -> Encoded:
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


def _rebuild(
    tokenizer: LoadedTokenizer, template: ChatTemplate, loss: Loss, tokens_per_tile: int
) -> ConversationEncoder:
    return ConversationEncoder(
        tokenizer=tokenizer, template=template, loss=loss, tokens_per_tile=tokens_per_tile
    )
