"""What a chat template gives for a conversation: pieces of text, control tokens and images."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol

from omniload.types import Message

__all__ = [
    "IMAGE_MARK",
    "ROLES",
    "ChatTemplate",
    "ImageStrings",
    "Piece",
    "TurnLoss",
    "split_text",
    "template_fingerprint",
]

#: What stands for an image in the text of a message.
IMAGE_MARK = "<image>"

ROLES = ("system", "user", "assistant", "tool")


class Piece(NamedTuple):
    """A part of a rendered conversation.

    Args:
        kind: "control": the text is one control token; "begin": one that stands before all text,
            as a tokenizer adds it; "text": plain text; "image": an image.
        text: the text; empty for an image.
        loss: whether its tokens give loss.
        fresh: whether it is tokenised apart from the text before it.
    """

    kind: Literal["begin", "control", "text", "image"]
    text: str
    loss: bool
    fresh: bool = False


class TurnLoss(NamedTuple):
    """Which part of a turn gives loss.

    Args:
        content: its text and its end token.
        frame: what the template puts around them.
    """

    content: bool
    frame: bool


@dataclass(frozen=True, kw_only=True)
class ImageStrings:
    """How an image stands in the token sequence: start, image tokens, end.

    Args:
        token: the token that is repeated, one for each visual token.
        start: text before them; may be empty.
        end: text after them; may be empty.
        row_break: control token between the rows of an image's patches, for a tiling with
            `row_breaks`; empty: none.
    """

    token: str
    start: str = ""
    end: str = ""
    row_break: str = ""

    def settings(self) -> dict[str, str]:
        """Give them as plain JSON."""
        given = asdict(self)
        if not self.row_break:  # a template without one keeps the fingerprint that it had
            del given["row_break"]
        return given


class ChatTemplate(Protocol):
    """What a chat template is."""

    @property
    def name(self) -> str:
        """Name, for messages and settings."""

    @property
    def image(self) -> ImageStrings:
        """How an image stands in the token sequence."""

    @property
    def pad_token(self) -> str:
        """Padding token, where the tokenizer names none."""

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Control tokens that the template writes."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits of everything that decides its output."""

    def pieces(
        self,
        messages: Sequence[Message],
        losses: Sequence[TurnLoss],
        controls: re.Pattern[str],
    ) -> list[Piece]:
        """Render a conversation.

        Args:
            messages: the conversation, at least one message.
            losses: what gives loss, one a message.
            controls: matches every control token of the tokenizer.

        Returns:
            Its pieces, in order.

        Raises:
            SampleError: a conversation that this template refuses.
        """


def template_fingerprint(template: Any) -> str:
    """Hash all fields of a template, a dataclass, to 32 hex digits."""
    text = json.dumps({**asdict(template), "image": template.image.settings()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def split_text(
    text: str, controls: re.Pattern[str], *, loss: bool, fresh: bool = False
) -> Iterator[Piece]:
    """Split text that the template wrote into control tokens and plain text."""
    at = 0
    for match in controls.finditer(text):
        if match.start() > at:
            yield Piece("text", text[at : match.start()], loss, fresh)
        yield Piece("control", match.group(), loss)
        at = match.end()
        fresh = False
    if at < len(text):
        yield Piece("text", text[at:], loss, fresh)
