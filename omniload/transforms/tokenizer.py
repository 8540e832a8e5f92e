"""Tokenizers: a `tokenizer.json`, a Hugging Face folder, or the embedded byte-level one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from omniload.errors import ConfigError

__all__ = ["EMBEDDED", "LoadedTokenizer", "load_tokenizer"]

#: Name of the byte-level tokenizer that is built in code.
EMBEDDED = "bytes"


@dataclass(frozen=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer as text, with what its folder says about it; cheap to send to a process.

    Args:
        json: content of `tokenizer.json`.
        name: file or folder it came from (last part only); "bytes" for the embedded one.
        bos_token: text of the begin token; None if the folder names none.
        eos_token: text of the end token.
        pad_token: text of the padding token.
        chat_template: jinja source of the folder's chat template.
    """

    json: str
    name: str = EMBEDDED
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    chat_template: str | None = None

    def build(self) -> Tokenizer:
        """Make the tokenizer, with truncation and padding off.

        Raises:
            ConfigError: `json` is not a tokenizer.
        """
        try:
            tokenizer = Tokenizer.from_str(self.json)
        except Exception as error:  # tokenizers raises plain Exception
            raise ConfigError(f"not a tokenizer.json ({self.name}): {error}.") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @property
    def is_embedded(self) -> bool:
        """Whether it is the byte-level tokenizer that is built in code: byte b is token b."""
        return self.name == EMBEDDED and self.json == _embedded_json()

    @property
    def fingerprint(self) -> str:
        """32 hex digits of everything that decides token ids."""
        # how the tokenizers library writes the embedded one may change with its version
        content = EMBEDDED if self.is_embedded else self.json
        text = json.dumps([content, self.bos_token, self.eos_token, self.pad_token])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_tokenizer(path: str | Path | None = None) -> LoadedTokenizer:
    """Load a tokenizer; nothing is downloaded and no code of the folder runs.

    Args:
        path: a `tokenizer.json`; or a Hugging Face folder with one, whose
            `tokenizer_config.json`, `special_tokens_map.json` and `chat_template.jinja` are read
            too; None: the embedded byte-level tokenizer (256 tokens, one a byte).

    Raises:
        ConfigError: no such file, or not a tokenizer; says which file.
    """
    if path is None:
        return LoadedTokenizer(json=_embedded_json())
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        hint = (
            " Only the fast format (tokenizer.json) is read: save the tokenizer with a recent "
            "transformers to get one."
            if path.is_dir()
            else ""
        )
        raise ConfigError(f"the tokenizer can't be read: {file}: {error}.{hint}") from error
    facts = _folder_facts(path) if path.is_dir() else {}
    loaded = LoadedTokenizer(json=text, name=path.resolve().name, **facts)
    loaded.build()
    return loaded


def _folder_facts(folder: Path) -> dict[str, str | None]:
    facts: dict[str, str | None] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        content = _json_object(folder / file)
        for name in ("bos_token", "eos_token", "pad_token"):
            value = content.get(name)
            if isinstance(value, dict):  # a serialised AddedToken
                value = value.get("content")
            if isinstance(value, str):
                facts[name] = value
        template = content.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        if isinstance(template, str):
            facts["chat_template"] = template
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        facts["chat_template"] = jinja.read_text(encoding="utf-8")
    return facts


def _json_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"not JSON: {file}: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"must hold a JSON object: {file}, got {type(content).__name__}.")
    return content


def _embedded_json() -> str:
    """Byte b is token b; the ids of special tokens follow from 256."""
    symbols = _byte_symbols()
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: byte for byte, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable Latin-1 characters stand for themselves, the others for U+0100 and up, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    symbols = []
    moved = 0
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(256 + moved))
            moved += 1
    return symbols
