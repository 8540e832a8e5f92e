"""Conversations to token ids and labels."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from omniload.errors import ConfigError, SampleError
from omniload.transforms.pieces import IMAGE_MARK, ROLES, ChatTemplate, ImageStrings, TurnLoss
from omniload.transforms.templates import DataTemplate, load_template
from omniload.transforms.tokenizer import LoadedTokenizer, load_tokenizer
from omniload.types import IGNORE_INDEX, Message

__all__ = [
    "ConversationEncoder",
    "DataTemplate",
    "Encoded",
    "ImageStrings",
    "LoadedTokenizer",
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

    Text of the data can never become a control token: what the template writes is looked up, what
    the data holds is tokenised as plain text, whatever it looks like. Tokens that the template
    needs and the tokenizer lacks are added at its end; `settings()["vocab_size"]` is what a model
    has to cover.

    Args:
        tokenizer: from `load_tokenizer`.
        template: from `load_template`.
        loss: "assistant": every answer; "last": the last answer only; "all": every token but
            images and padding. A message's weight of 0 or 1 goes before it.
        tokens_per_tile: tokens the language model sees for one image tile.

    Raises:
        ConfigError: a setting out of range, or a template that this tokenizer can't serve.
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
            raise ConfigError(f"tokens_per_tile must be at least 1, got {tokens_per_tile}.")
        self.tokenizer = tokenizer
        self.template = template
        self.loss = loss
        self.tokens_per_tile = tokens_per_tile
        self.pad_token = tokenizer.pad_token or template.pad_token
        built = tokenizer.build()
        needed = (
            *template.special_tokens,
            *(_bos_eos(template)),
            *(t for t in (template.image.start, template.image.token, template.image.end) if t),
            self.pad_token,
        )
        self.added_tokens = tuple(
            dict.fromkeys(token for token in needed if built.token_to_id(token) is None)
        )
        # marks tokens that are there already as special, so that data can't forge them
        built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in needed])
        self._controls = {
            token.content: index
            for index, token in built.get_added_tokens_decoder().items()
            if token.special
        }
        self._pattern = re.compile(
            "|".join(re.escape(token) for token in sorted(self._controls, key=len, reverse=True))
        )
        self._json: str = built.to_str()
        built.encode_special_tokens = True  # from here on special tokens in text are plain text
        self._built: Tokenizer = built
        self._control_ids = frozenset(self._controls.values())
        self._adds_space = built.encode("a", add_special_tokens=False).tokens[:1] not in (["a"], [])
        self.image_token_id = self._controls[template.image.token]
        self.pad_token_id = self._controls[self.pad_token]
        self.image_start_ids = self._ids_of_template_text(template.image.start)
        self.image_end_ids = self._ids_of_template_text(template.image.end)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.tokenizer, self.template, self.loss, self.tokens_per_tile)

    @property
    def vocab_size(self) -> int:
        """Rows a model's embedding needs: the highest token id + 1."""
        return max(self._built.get_vocab(with_added_tokens=True).values()) + 1

    def tokenizer_json(self) -> str:
        """Content of a `tokenizer.json` with the added tokens in it."""
        return self._json

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
            "filler_ids": self._plain_ids("."),
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
                a number of marks that isn't the number of images, or a template that fails.
        """
        self._check(messages, image_num_tiles)
        pieces = self.template.pieces(messages, self._turn_losses(messages), self._pattern)
        ids: list[int] = []
        gives_loss: list[bool] = []
        spans: list[tuple[int, int]] = []
        pending: list[str] = []
        pending_loss = False

        def flush() -> None:
            if pending:
                add(self._plain_ids("".join(pending)), pending_loss)
                pending.clear()

        def add(new: Sequence[int], loss: bool) -> None:
            ids.extend(new)
            gives_loss.extend([loss] * len(new))

        for piece in pieces:
            if piece.kind == "text":
                if piece.fresh or piece.loss != pending_loss:
                    flush()
                pending.append(piece.text)
                pending_loss = piece.loss
                continue
            flush()
            if piece.kind == "control":
                add([self._controls[piece.text]], piece.loss)
                continue
            if len(spans) == len(image_num_tiles):
                raise SampleError(
                    f"template {self.template.name!r} repeats an image: expected "
                    f"{len(image_num_tiles)}, got more."
                )
            add(self.image_start_ids, False)
            count = int(image_num_tiles[len(spans)]) * self.tokens_per_tile
            spans.append((len(ids), len(ids) + count))
            add([self.image_token_id] * count, False)
            add(self.image_end_ids, False)
        flush()
        if len(spans) != len(image_num_tiles):
            raise SampleError(
                f"template {self.template.name!r} drops an image: expected "
                f"{len(image_num_tiles)}, got {len(spans)}."
            )
        input_ids = np.array(ids, dtype=np.int32)
        labels = np.where(np.array(gives_loss, dtype=bool), input_ids, np.int32(IGNORE_INDEX))
        return Encoded(
            input_ids=input_ids,
            labels=labels,
            image_spans=np.array(spans, dtype=np.int32).reshape(-1, 2),
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
            frame = self.loss == "all" and message.weight != 0
            if message.weight is not None:
                content = bool(message.weight)
            elif self.loss == "last":
                content = index == last
            else:
                content = self.loss == "all" or message.role == "assistant"
            losses.append(TurnLoss(content, frame))
        return losses

    def _plain_ids(self, text: str) -> list[int]:
        """Tokenise text of the data; the result holds no control token."""
        if self._adds_space and text.startswith(" "):
            text = text[1:]  # the tokenizer puts one there itself
        ids: list[int] = self._built.encode(text, add_special_tokens=False).ids
        if self._control_ids.isdisjoint(ids):
            return ids
        raise SampleError(
            "the tokenizer reads plain text of the data as a control token: "
            f"{text[:80]!r}. Its control tokens must be special tokens."
        )

    def _ids_of_template_text(self, text: str) -> tuple[int, ...]:
        return (self._controls[text],) if text else ()


def _bos_eos(template: ChatTemplate) -> list[str]:
    if isinstance(template, DataTemplate):
        return [token for token in (template.bos, template.eos) if token]
    return []


def _rebuild(
    tokenizer: LoadedTokenizer, template: ChatTemplate, loss: Loss, tokens_per_tile: int
) -> ConversationEncoder:
    return ConversationEncoder(
        tokenizer=tokenizer, template=template, loss=loss, tokens_per_tile=tokens_per_tile
    )
