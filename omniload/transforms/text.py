"""Conversations to token ids and labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

from omniload.errors import ConfigError, SampleError
from omniload.transforms.collect import Encoded, TokenCollector
from omniload.transforms.pieces import IMAGE_MARK, ROLES, ChatTemplate, ImageStrings, TurnLoss
from omniload.transforms.templates import DataTemplate, load_template
from omniload.transforms.tokenizer import LoadedTokenizer, load_tokenizer
from omniload.transforms.vocabulary import Vocabulary
from omniload.types import Message

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

Loss = Literal["assistant", "last", "all"]


class ConversationEncoder:
    """Turns conversations into token ids and labels; picklable, cheap to make.

    Each mark `<image>` becomes the template's start, `tokens_per_tile` image tokens for each tile
    of that image (or as many as its tiling policy says), and end; none of them ever gives loss.
    Text of the data can't become a control token, whatever it looks like. Control tokens that the
    tokenizer lacks are added at its end; `settings()["vocab_size"]` is what a model has to cover.

    Args:
        tokenizer: from `load_tokenizer`.
        template: from `load_template`.
        loss: "assistant": every answer, its end token included; "last": the last answer only;
            "all": every token but images. A message's weight of 0 or 1 goes before it. An answer
            without text gives none, lest the model learn to say nothing.
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
        marks = (image.start, image.token, image.end, image.row_break)
        needed = (*template.special_tokens, *marks, pad_token)
        vocabulary = Vocabulary(tokenizer, [token for token in needed if token])
        self._vocabulary = vocabulary
        self.image_token_id = vocabulary.controls[image.token]
        self.pad_token_id = vocabulary.controls[pad_token]
        self.image_start_ids = (vocabulary.controls[image.start],) if image.start else ()
        self.image_end_ids = (vocabulary.controls[image.end],) if image.end else ()
        self.image_break_id = vocabulary.controls[image.row_break] if image.row_break else None

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

    def encode(
        self,
        messages: Sequence[Message],
        image_num_tiles: Sequence[int],
        *,
        image_num_tokens: Sequence[int] | None = None,
        image_columns: Sequence[int] | None = None,
    ) -> Encoded:
        """Tokenise a conversation.

        Args:
            messages: the conversation; each image stands as the mark `<image>` in its text.
            image_num_tiles: tiles of each image, in the order of the marks.
            image_num_tokens: tokens of each image, where the tiling policy decides them; None:
                `tokens_per_tile` for each tile.
            image_columns: image tokens in a row of each image, for a template with a token that
                breaks rows; those tokens are in `image_num_tokens`. None: no breaks.

        Returns:
            Token ids, labels and image spans.

        Raises:
            ConfigError: `image_columns` for a template without a break, or the reverse.
            SampleError: no text at all, or none in the answers that would give loss, an unknown
                role, a weight other than 0 and 1, a number of marks that isn't the number of
                images, text that is no valid Unicode, or a template that fails or moves images.
        """
        if image_num_tiles:
            self.check_breaks(image_columns is not None)
        self._check(messages, image_num_tiles)
        losses = self._turn_losses(messages)
        if not any(loss.content for loss in losses) and _has_empty_answer(messages):
            raise SampleError("empty answer: the only turns that would give loss have no text.")
        pieces = self.template.pieces(messages, losses, self._vocabulary.pattern)
        num_images = sum(piece.kind == "image" for piece in pieces)
        if num_images != len(image_num_tiles):
            raise SampleError(
                f"template {self.template.name!r} must keep each image once: expected "
                f"{len(image_num_tiles)}, got {num_images}."
            )
        if image_num_tokens is None:
            image_num_tokens = [int(count) * self.tokens_per_tile for count in image_num_tiles]
        tokens = TokenCollector(self._vocabulary)
        counts = iter(image_num_tokens)
        columns = iter(image_columns or ())
        for piece in pieces:
            if piece.kind == "text":
                tokens.add_text(piece)
            elif piece.kind != "image":
                tokens.add_control(piece)
            else:
                tokens.add_ids(self.image_start_ids)
                at = None if self.image_break_id is None else (next(columns), self.image_break_id)
                tokens.add_image(self.image_token_id, int(next(counts)), row_break=at)
                tokens.add_ids(self.image_end_ids)
        return tokens.encoded()

    def check_breaks(self, row_breaks: bool) -> None:
        """Check that template and tiling agree on tokens between the rows of an image.

        Args:
            row_breaks: whether the tiling counts them.

        Raises:
            ConfigError: only one of them has them.
        """
        if row_breaks and self.image_break_id is None:
            raise ConfigError(
                "a tiling with row_breaks (--row-breaks) needs a template with an image_break, got "
                f"{self.template.name!r}, which has none. Use --template pixtral, or a file."
            )
        if not row_breaks and self.image_break_id is not None:
            raise ConfigError(
                f"template {self.template.name!r} breaks the rows of an image by "
                f"{self.template.image.row_break!r}, which the tiling must count: use --tiling "
                "navit --row-breaks (NaViTPatches(row_breaks=True)), or a template without "
                "image_break."
            )

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
            if self.loss != "all" and _is_empty_answer(message):
                content = False
            elif message.weight is not None:
                content = bool(message.weight)
            elif self.loss == "last":
                content = index == last
            else:
                content = self.loss == "all" or message.role == "assistant"
            losses.append(TurnLoss(content, self.loss == "all" and message.weight != 0))
        return losses


def _is_empty_answer(message: Message) -> bool:
    return message.role == "assistant" and not message.content.strip()


def _has_empty_answer(messages: Sequence[Message]) -> bool:
    return any(_is_empty_answer(message) for message in messages)


def _rebuild(
    tokenizer: LoadedTokenizer, template: ChatTemplate, loss: Loss, tokens_per_tile: int
) -> ConversationEncoder:
    return ConversationEncoder(
        tokenizer=tokenizer, template=template, loss=loss, tokens_per_tile=tokens_per_tile
    )
