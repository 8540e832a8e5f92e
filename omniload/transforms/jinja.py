"""Chat templates in jinja, rendered in jinja2's immutable sandbox only."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2

from omniload.errors import ConfigError, SampleError
from omniload.transforms.jinja_sandbox import (
    GENERATION_CLOSE,
    GENERATION_OPEN,
    ChatEnvironment,
    rendered,
)
from omniload.transforms.pieces import (
    IMAGE_MARK,
    ImageStrings,
    Piece,
    TurnLoss,
    split_text,
    template_fingerprint,
)
from omniload.types import Message

__all__ = ["JinjaTemplate"]

# three characters of Unicode's private use area stand in rendered text for an image and for the
# edges of text that must not be read as a control token; others are taken if the text has these
_PRIVATE = range(0xE000, 0xF900)
_PROBE = "\ufdd2"
_MARKS = re.compile(f"[{GENERATION_OPEN}{GENERATION_CLOSE}{_PROBE}]")


@dataclass(frozen=True, kw_only=True)
class JinjaTemplate:
    """A chat template in jinja, as Hugging Face tokenizers carry them.

    Where a turn starts and ends is found by rendering the conversation up to it; so the rendering
    of the first n messages must be the start of the rendering of all. An answer begins after the
    generation prompt, or, where the template takes no notice of `add_generation_prompt`, with its
    text. A template that has `{% generation %}` blocks says itself what gives loss: one block an
    answer. Content is passed as text; each image mark in it comes out as an image at the same
    place.

    Args:
        name: name, for messages and settings.
        source: the template.
        image: how an image stands in the token sequence.
        pad_token: padding token, where the tokenizer names none.
        bos_token: what the template sees as `bos_token`.
        eos_token: what the template sees as `eos_token`.

    Raises:
        ConfigError: the template can't be parsed.
    """

    name: str
    source: str
    image: ImageStrings
    pad_token: str
    bos_token: str = ""
    eos_token: str = ""

    def __post_init__(self) -> None:
        _ = self._compiled

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_compiled"}

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """The begin and end tokens; the others are the tokenizer's own."""
        return tuple(token for token in (self.bos_token, self.eos_token) if token)

    @property
    def fingerprint(self) -> str:
        """32 hex digits of everything that decides its output."""
        return template_fingerprint(self)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return ChatEnvironment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"template {self.name!r} is not valid jinja: {error}.") from error

    def pieces(
        self,
        messages: Sequence[Message],
        losses: Sequence[TurnLoss],
        controls: re.Pattern[str],
    ) -> list[Piece]:
        """Render a conversation; see `ChatTemplate.pieces`.

        Raises:
            SampleError: the template fails or refuses the conversation, does what the sandbox
                forbids, or renders a start of the conversation to something else.
        """
        guard = _Guard([message.content for message in messages], controls)
        turns = [
            {"role": message.role, "content": guard.close(message.content)} for message in messages
        ]
        if any(_MARKS.search(turn["content"]) for turn in turns):
            raise SampleError("the text is no valid Unicode: it has one of U+FDD0 to U+FDD2.")
        marked = self._render(turns)
        whole = _MARKS.sub("", marked)
        spans = self._generated(marked, turns)
        pieces: list[Piece] = []
        for text, loss, fresh in self._regions(turns, losses, whole, controls, spans):
            for index, part in enumerate(text.split(guard.image)):
                if index:
                    pieces.append(Piece("image", "", False))
                parts = split_text(part, controls, loss=loss, fresh=fresh and index == 0)
                pieces += (piece._replace(text=guard.open(piece.text)) for piece in parts)
        return pieces

    def _regions(
        self,
        turns: list[dict[str, str]],
        losses: Sequence[TurnLoss],
        whole: str,
        controls: re.Pattern[str],
        spans: dict[int, tuple[int, int]],
    ) -> list[tuple[str, bool, bool]]:
        """Cut the rendered text where loss starts and ends: (text, loss, tokenise apart)."""
        base = any(loss.frame for loss in losses)
        cuts: list[tuple[int, int, bool]] = []
        for index, (turn, loss) in enumerate(zip(turns, losses, strict=True)):
            answer = turn["role"] == "assistant"
            if loss == (base, base) and not answer:
                continue
            end = self._length(turns[: index + 1], whole)
            if answer:
                start = spans[index][0] if spans else self._answer_start(turns[:index], whole)
            else:
                start = self._length(turns[:index], whole) if index else 0
            if loss.frame != base and index:
                cuts.append((self._length(turns[:index], whole), start, loss.frame))
            in_block = answer and bool(spans)
            stop = spans[index][1] if in_block else _end_of_turn(whole, start, end, controls)
            cuts += [(start, stop, loss.content), (stop, end, loss.frame)]
        regions = []
        at = 0
        for start, end, gives_loss in cuts:
            regions += [(whole[at:start], base, at > 0), (whole[start:end], gives_loss, True)]
            at = end
        regions.append((whole[at:], base, at > 0))
        return [region for region in regions if region[0]]

    def _generated(self, marked: str, turns: list[dict[str, str]]) -> dict[int, tuple[int, int]]:
        """Where the `{% generation %}` blocks lie in the text without marks, by message."""
        edges = [match.start() for match in _MARKS.finditer(marked)]
        if not edges:
            return {}
        answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
        order = "".join(_MARKS.findall(marked))
        if order != (GENERATION_OPEN + GENERATION_CLOSE) * len(answers):
            raise SampleError(
                f"template {self.name!r} must have one {{% generation %}} block for each answer: "
                f"expected {len(answers)}, got {order.count(GENERATION_OPEN)}."
            )
        places = [edge - number for number, edge in enumerate(edges)]
        return dict(zip(answers, zip(places[::2], places[1::2], strict=True), strict=True))

    def _answer_start(self, turns: list[dict[str, str]], whole: str) -> int:
        before = self._plain(turns)
        prompt = self._plain(turns, add_generation_prompt=True)
        if prompt == before:  # the template takes no notice: find where the text of an answer goes
            probe = {"role": "assistant", "content": _PROBE}
            shown = self._render([*turns, probe])
            head, found, _ = shown.partition(_PROBE)
            if not found:
                raise SampleError(
                    f"template {self.name!r} writes no generation prompt and changes the text of "
                    "answers, so it is unknown where they begin. Use a template as data (JSON) "
                    "instead."
                )
            header = head.removeprefix(before)
            # no header, only the space that the model has to write too
            prompt = head if header.strip() else before
        return self._start_of(whole, prompt, len(turns))

    def _length(self, turns: list[dict[str, str]], whole: str) -> int:
        return self._start_of(whole, self._plain(turns), len(turns))

    def _start_of(self, whole: str, start: str, num_turns: int) -> int:
        if not whole.startswith(start):
            raise SampleError(
                f"template {self.name!r} renders the first {num_turns} messages to something that "
                "is not the start of the whole conversation, so it is unknown which tokens are the "
                "assistant's. Use a template as data (JSON) instead."
            )
        return len(start)

    def _plain(self, turns: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        return _MARKS.sub("", self._render(turns, add_generation_prompt=add_generation_prompt))

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            return rendered(
                self._compiled,
                messages=turns,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
            )
        except jinja2.exceptions.SecurityError as error:
            raise SampleError(
                f"template {self.name!r} does what the sandbox forbids: {error}"
            ) from error
        except Exception as error:  # a template can fail in any way that Python can
            raise SampleError(
                f"template {self.name!r} fails on this conversation: {error}"
            ) from error


class _Guard:
    """Hides image marks and control tokens of the data from the template and from the splitter."""

    def __init__(self, contents: Sequence[str], controls: re.Pattern[str]) -> None:
        used = set("".join(contents))
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        try:
            self.image, self._left, self._right = next(free), next(free), next(free)
        except StopIteration:
            raise SampleError("the text uses all of Unicode's private characters.") from None
        self._controls = controls
        self._hidden: list[str] = []

    def close(self, text: str) -> str:
        """Replace image marks and control tokens by private characters."""
        return IMAGE_MARK_PATTERN.sub(self.image, self._hide(text))

    def open(self, text: str) -> str:
        """Put hidden control tokens back, as plain text."""
        for index, hidden in enumerate(self._hidden):
            text = text.replace(f"{self._left}{index}{self._right}", hidden)
        return text

    def _hide(self, text: str) -> str:
        parts = text.split(IMAGE_MARK)
        return IMAGE_MARK.join(self._controls.sub(self._remember, part) for part in parts)

    def _remember(self, match: re.Match[str]) -> str:
        self._hidden.append(match.group())
        return f"{self._left}{len(self._hidden) - 1}{self._right}"


IMAGE_MARK_PATTERN = re.compile(re.escape(IMAGE_MARK))


def _end_of_turn(whole: str, start: int, end: int, controls: re.Pattern[str]) -> int:
    """Where a turn's loss ends: after its last control token if only white space follows that."""
    stop = max((match.end() for match in controls.finditer(whole, start, end)), default=end)
    return end if whole[stop:end].strip() else stop
