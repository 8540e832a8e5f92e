"""A tokenizer with the control tokens of a template: text to ids that data cannot forge."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from omniload.errors import SampleError
from omniload.transforms.tokenizer import LoadedTokenizer

__all__ = ["Chunk", "Vocabulary"]


class Chunk(NamedTuple):
    """Some tokens.

    Args:
        ids: token ids.
        loss: whether they give loss; for all of them, or bool (num_tokens,).
    """

    ids: Sequence[int] | npt.NDArray[Any]
    loss: bool | npt.NDArray[np.bool_]


class Vocabulary:
    """Token ids of control tokens and of plain text.

    Control tokens are looked up by name. Plain text is tokenised with special tokens switched off,
    so whatever it looks like, it can't become one.

    A tokenizer of the SentencePiece kind puts a space before the text it is given; there, text is
    tokenised in one piece between two control tokens, and what gives loss follows from where a
    token starts. Other tokenizers get the text before an answer and the answer itself apart, as
    they do when a model generates.

    Args:
        tokenizer: the tokenizer.
        needed: control tokens that must be there; those that are not are added at the end.

    Raises:
        ConfigError: not a tokenizer.
    """

    def __init__(self, tokenizer: LoadedTokenizer, needed: Sequence[str]) -> None:
        built = tokenizer.build()
        needed = tuple(dict.fromkeys(needed))
        self.added = tuple(token for token in needed if built.token_to_id(token) is None)
        _make_special(built, needed)
        self.json: str = built.to_str()
        self.size = max(built.get_vocab(with_added_tokens=True).values()) + 1
        known = built.get_added_tokens_decoder()
        self.controls = {token.content: index for index, token in known.items() if token.special}
        self.strips_left = frozenset(t.content for t in known.values() if t.special and t.lstrip)
        self.strips_right = frozenset(t.content for t in known.values() if t.special and t.rstrip)
        # longest first: a token may be the start of another
        names = sorted(self.controls, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, names)))
        built.encode_special_tokens = True  # sic: special tokens in text are encoded as text
        facts = json.loads(self.json)
        first_word = built.encode("a", add_special_tokens=False).tokens[:1]
        self.adds_space = bool(first_word) and first_word[0].startswith(("\u2581", "\u0120"))
        self._is_bytes = tokenizer.is_embedded
        self._first = built
        self._later = _without_first_space(facts) or built
        # a character that the vocabulary lacks is not a forgery
        self._forbidden = frozenset(self.controls.values()) - _unknown_ids(facts["model"], built)

    def chunks(self, parts: Sequence[tuple[str, bool]], *, first: bool) -> list[Chunk]:
        """Tokenise text that lies between two control tokens.

        Args:
            parts: (text, whether it gives loss).
            first: whether it is the first text of the conversation.

        Returns:
            Its tokens, in order.

        Raises:
            SampleError: text that is no valid Unicode, or that the tokenizer reads as a control
                token although told not to.
        """
        if not self.adds_space:
            return [Chunk(self._ids(text, first=first), loss) for text, loss in parts]
        ids, starts = self._encode("".join(text for text, _ in parts), first=first)
        ends = np.cumsum([len(text) for text, _ in parts])
        part_of_token = np.searchsorted(ends[:-1], np.array(starts, dtype=np.int64), side="right")
        gives_loss = np.array([loss for _, loss in parts], dtype=bool)
        return [Chunk(ids, gives_loss[part_of_token])]

    def plain_ids(self, text: str) -> list[int]:
        """Tokenise plain text by itself."""
        return [int(token) for token in self._ids(text, first=True)]

    def _ids(self, text: str, *, first: bool) -> Sequence[int] | npt.NDArray[np.uint8]:
        if not self._is_bytes:
            return self._encode(text, first=first)[0]
        try:  # the tokenizer gives the same, some hundred times slower
            return np.frombuffer(text.encode(), dtype=np.uint8)
        except UnicodeEncodeError as error:
            raise _not_unicode(error) from error

    def _encode(self, text: str, *, first: bool) -> tuple[list[int], list[int]]:
        """Token ids, and the character that each token starts at."""
        ids, starts = self._encode_as_is(text, first=first)
        if self._forbidden.isdisjoint(ids):
            return ids, starts
        # a Unigram model may take a control token for a word of its own: cut each in two
        cuts = [match.start() + 1 for match in self.pattern.finditer(text)]
        ids, starts = [], []
        for start, end in itertools.pairwise([0, *cuts, len(text)]):
            part_ids, part_starts = self._encode_as_is(text[start:end], first=first and start == 0)
            ids += part_ids
            starts += (start + at for at in part_starts)
        if self._forbidden.isdisjoint(ids):
            return ids, starts
        raise SampleError(
            f"the tokenizer reads plain text of the data as a control token: {text[:80]!r}."
        )

    def _encode_as_is(self, text: str, *, first: bool) -> tuple[list[int], list[int]]:
        tokenizer = self._first if first else self._later
        try:
            # one call a text: encode_batch saves nothing at these lengths, and starts threads that
            # a later fork would trip over
            encoding = tokenizer.encode(text, add_special_tokens=False)
        except UnicodeEncodeError as error:
            raise _not_unicode(error) from error
        except Exception as error:  # tokenizers raises plain Exception
            raise SampleError(f"the tokenizer fails on {text[:80]!r}: {error}.") from error
        # only tokenizers that add a space need to know where a token starts
        return encoding.ids, [at for at, _ in encoding.offsets] if self.adds_space else []


def _make_special(tokenizer: Tokenizer, needed: Sequence[str]) -> None:
    """Add tokens, and mark those that are there as special, else text could hold them."""
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for name in needed:
        token = known.get(name)
        if token is None:
            token = AddedToken(name, special=True, normalized=False)
        elif token.special:
            continue
        else:
            token = AddedToken(
                name, special=True, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip
            )
        tokenizer.add_special_tokens([token])


def _without_first_space(facts: dict[str, Any]) -> Tokenizer | None:
    """The tokenizer for all but the first text, where only that gets a space before it."""
    pre_tokenizer = facts.get("pre_tokenizer") or {}
    changed = False
    for step in (pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
            changed = True
    if not changed:
        return None
    tokenizer = Tokenizer.from_str(json.dumps(facts))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _unknown_ids(model: dict[str, Any], tokenizer: Tokenizer) -> set[int]:
    if isinstance(model.get("unk_id"), int):
        return {model["unk_id"]}
    unknown = model.get("unk_token")
    index = tokenizer.token_to_id(unknown) if isinstance(unknown, str) else None
    return set() if index is None else {index}


def _not_unicode(error: UnicodeEncodeError) -> SampleError:
    text = error.object[max(0, error.start - 20) : error.end]
    return SampleError(f"the text is no valid Unicode: a lone surrogate in {text!r}.")
