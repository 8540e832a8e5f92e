"""Chat templates as data: what stands around the text of each turn.

A template file is a JSON object:

    {"name": "mine",
     "bos": "<s>",                     text at the very start, "" if left out
     "eos": "",                        text at the very end; gives loss if the last turn does
     "default_system": "Be brief.",    used where a conversation has no system message
     "trim": false,                    strip white space around the text of each turn
     "roles": {"user": {"prefix": "USER: ", "suffix": " "},
               "assistant": {"prefix": "ASSISTANT:", "content_prefix": " ", "end": "</s>"}},
     "image_start": "", "image_token": "<image>", "image_end": "",
     "image_break": "",                token between rows of patches, for a tiling with row_breaks
     "pad_token": "<unk>",
     "special_tokens": ["</s>"]}       tokens that the texts above contain

A turn is prefix, content_prefix, its text, end, suffix. Where a turn gives loss, content_prefix,
text and end do; prefix and suffix don't. `roles` needs "user" and "assistant"; "system" and "tool"
where the data has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from omniload.errors import ConfigError, SampleError
from omniload.transforms.jinja import JinjaTemplate
from omniload.transforms.pieces import (
    IMAGE_MARK,
    ROLES,
    ChatTemplate,
    ImageStrings,
    Piece,
    TurnLoss,
    split_text,
    template_fingerprint,
)
from omniload.transforms.tokenizer import LoadedTokenizer
from omniload.types import Message

__all__ = ["BUILT_IN", "DataTemplate", "RoleFormat", "load_template"]

BUILT_IN = ("chatml", "qwen-vl", "vicuna", "llama3", "pixtral")


@dataclass(frozen=True, kw_only=True)
class RoleFormat:
    """What stands around the text of a turn; see the module for where loss falls.

    Args:
        prefix: text that opens the turn.
        content_prefix: text between the opening and the content that the model has to write too.
        end: text that ends the turn, which the model has to write too.
        suffix: text between this turn and the next.
    """

    prefix: str = ""
    content_prefix: str = ""
    end: str = ""
    suffix: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_string(f"roles: {item.name}", getattr(self, item.name))


@dataclass(frozen=True, kw_only=True)
class DataTemplate:
    """A chat template made of texts only; the module says what each of them does.

    Raises:
        ConfigError: a value of another type, an unknown role, or no user or assistant.
    """

    name: str
    roles: Mapping[str, RoleFormat]
    image: ImageStrings
    pad_token: str
    bos: str = ""
    eos: str = ""
    default_system: str | None = None
    trim: bool = False
    special_tokens: tuple[str, ...] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.roles) - set(ROLES))
        if unknown:
            raise ConfigError(
                f"template {self.name!r}: unknown roles {unknown}; known: {', '.join(ROLES)}."
            )
        for role in ("user", "assistant"):
            if role not in self.roles:
                raise ConfigError(f"template {self.name!r} must have the role {role!r}.")
        for name in ("name", "pad_token", "bos", "eos"):
            _check_string(name, getattr(self, name))
        for name in ("token", "start", "end", "row_break"):
            _check_string(f"image_{name}", getattr(self.image, name))
        if not self.image.token or not self.pad_token:
            raise ConfigError(f"template {self.name!r}: image_token and pad_token must be set.")
        if self.default_system is not None:
            _check_string("default_system", self.default_system)
        if not isinstance(self.trim, bool):
            raise ConfigError(f"template {self.name!r}: trim must be a bool, got {self.trim!r}.")

    @property
    def fingerprint(self) -> str:
        """32 hex digits of everything that decides its output."""
        return template_fingerprint(self)

    def pieces(
        self,
        messages: Sequence[Message],
        losses: Sequence[TurnLoss],
        controls: re.Pattern[str],
    ) -> list[Piece]:
        """Render a conversation; see `ChatTemplate.pieces`.

        Raises:
            SampleError: a role that this template doesn't have.
        """
        # the frame of every turn gives loss (loss="all") or none does; a weight of 0 takes it away
        frame = any(loss.frame for loss in losses)
        pieces = [
            piece._replace(kind="begin") if piece.kind == "control" else piece
            for piece in split_text(self.bos, controls, loss=frame)
        ]
        if self.default_system and messages[0].role != "system":
            system = Message(role="system", content=self.default_system)
            pieces += self._turn(system, TurnLoss(frame, frame), controls)
        for message, loss in zip(messages, losses, strict=True):
            pieces += self._turn(message, loss, controls)
        pieces += split_text(self.eos, controls, loss=losses[-1].content)
        return pieces

    def _turn(self, message: Message, loss: TurnLoss, controls: re.Pattern[str]) -> list[Piece]:
        role = self.roles.get(message.role)
        if role is None:
            raise SampleError(
                f"template {self.name!r} has no role {message.role!r}; it has "
                f"{', '.join(self.roles)}."
            )
        content = message.content.strip() if self.trim else message.content
        # an answer starts where generation starts: its text is tokenised apart from the prompt's,
        # whatever the loss policy
        fresh = message.role == "assistant"
        pieces = [*split_text(role.prefix, controls, loss=loss.frame)]
        for index, part in enumerate((role.content_prefix + content).split(IMAGE_MARK)):
            if index:
                pieces.append(Piece("image", "", False))
            if part:
                pieces.append(Piece("text", part, loss.content, fresh and index == 0))
        pieces += split_text(role.end, controls, loss=loss.content)
        pieces += split_text(role.suffix, controls, loss=loss.frame, fresh=fresh)
        return pieces


def load_template(
    name_or_path: str | Path = "chatml",
    *,
    tokenizer: LoadedTokenizer | None = None,
    image: ImageStrings | None = None,
) -> ChatTemplate:
    """Load a chat template; no code but jinja in its sandbox is ever run.

    Args:
        name_or_path: "chatml" (InternVL 2.5), "qwen-vl" (the same with the image tokens of
            Qwen2-VL and later), "vicuna" (LLaVA-1.5), "llama3" or "pixtral"; a JSON file as the
            module describes; a `.jinja` file; or "tokenizer": the chat template of the tokenizer's
            folder.
        tokenizer: the tokenizer, for "tokenizer"; also gives a jinja template its begin and end
            tokens.
        image: how an image stands in the token sequence; None: as the template says, or as in
            "chatml" for a jinja template.

    Raises:
        ConfigError: no such template, or a damaged one.
    """
    text = str(name_or_path)
    if text in BUILT_IN:
        data = resources.files("omniload.transforms").joinpath(f"data/{text}.json")
        return _from_json(data.read_text(encoding="utf-8"), where=text, image=image)
    if text == "tokenizer":
        if tokenizer is None or tokenizer.chat_template is None:
            raise ConfigError(
                "template 'tokenizer' needs a tokenizer folder with a chat template "
                "(chat_template.jinja, or chat_template in tokenizer_config.json)."
            )
        return _jinja(text, tokenizer.chat_template, tokenizer, image)
    path = Path(name_or_path)
    if path.suffix not in (".json", ".jinja"):
        raise ConfigError(
            f"unknown template {text!r}: known are {', '.join(BUILT_IN)}, 'tokenizer', and paths "
            "that end in .json or .jinja."
        )
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the template can't be read: {path}: {error}.") from error
    if path.suffix == ".jinja":
        return _jinja(path.name, source, tokenizer, image)
    return _from_json(source, where=text, image=image)


def _jinja(
    name: str, source: str, tokenizer: LoadedTokenizer | None, image: ImageStrings | None
) -> JinjaTemplate:
    default = load_template("chatml")
    return JinjaTemplate(
        name=name,
        source=source,
        image=image or default.image,
        pad_token=default.pad_token,
        bos_token=(tokenizer and tokenizer.bos_token) or "",
        eos_token=(tokenizer and tokenizer.eos_token) or "",
    )


def _from_json(text: str, *, where: str, image: ImageStrings | None) -> DataTemplate:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"template {where!r} is not JSON: {error}.") from error
    if not isinstance(content, dict) or not isinstance(content.get("roles"), dict):
        raise ConfigError(f"template {where!r} must be a JSON object with 'roles'.")
    known = {item.name for item in fields(DataTemplate)} - {"image"}
    known |= {"image_start", "image_token", "image_end", "image_break"}
    _check_keys(where, content, known)
    roles = {}
    for role, texts in content.pop("roles").items():
        if not isinstance(texts, dict):
            raise ConfigError(f"template {where!r}: role {role!r} must be a JSON object.")
        _check_keys(f"{where}: {role}", texts, {item.name for item in fields(RoleFormat)})
        roles[role] = RoleFormat(**texts)
    own = ImageStrings(
        token=content.pop("image_token", ""),
        start=content.pop("image_start", ""),
        end=content.pop("image_end", ""),
        row_break=content.pop("image_break", ""),
    )
    special = content.pop("special_tokens", [])
    if not isinstance(special, list) or not all(isinstance(t, str) and t for t in special):
        raise ConfigError(f"template {where!r}: special_tokens must be a list of texts.")
    content = {"name": where, "pad_token": "", **content}
    return DataTemplate(roles=roles, image=image or own, special_tokens=tuple(special), **content)


def _check_keys(where: str, content: dict[str, Any], known: set[str]) -> None:
    unknown = sorted(set(content) - known)
    if unknown:
        raise ConfigError(
            f"template {where!r}: unknown keys {unknown}; known: {', '.join(sorted(known))}."
        )


def _check_string(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"a template's {name} must be a text, got {value!r}.")
