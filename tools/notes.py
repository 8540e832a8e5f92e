"""What a run of `omniload preprocess` tells people beside its result, once each."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omniload.tools.sources import READERS, InputFile, RawSample, Rejection
from omniload.tools.sources.media import ImageLoader

if TYPE_CHECKING:
    from omniload.transforms.text import ConversationEncoder

__all__ = ["end_notes", "plural", "start_notes"]

_LOOKED_AT = 64
_SHOWN = 4


def plural(count: int, what: str) -> str:
    """Write a count with its noun: "1 shard", "2 shards"."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def start_notes(files: Sequence[InputFile], encoder: ConversationEncoder) -> Iterator[str]:
    """Say what a user should know before hours of work: tokens added, text lost, keys not used.

    Args:
        files: the input; its first records are looked at.
        encoder: of the run.
    """
    yield from dict.fromkeys(note for file in files for note in file.notes)
    yield from added_tokens(encoder.added_tokens, encoder.vocab_size)
    yield from _lost_text(files, encoder)


def added_tokens(added: Sequence[str], vocab_size: int) -> Iterator[str]:
    """Say that the vocabulary has grown."""
    if added:
        names = ", ".join(added[:_SHOWN]) + (", ..." if len(added) > _SHOWN else "")
        yield (
            f"{plural(len(added), 'token')} added to the tokenizer ({names}): the embedding needs "
            f"at least {vocab_size:,} rows"
        )


def _lost_text(files: Sequence[InputFile], encoder: ConversationEncoder) -> Iterator[str]:
    if encoder.tokenizer.is_embedded:
        return
    tokenizer = encoder.tokenizer.build()
    tokenizer.encode_special_tokens = True
    for text in _first_texts(files):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        lost = _characters(text) - _characters(tokenizer.decode(ids, skip_special_tokens=False))
        if lost:
            shown = "".join(sorted(lost))[:20]
            at = min(text.find(character) for character in lost if character in text)
            yield (
                f"the tokenizer loses text: {shown!r} of {text[max(0, at - 20) : at + 20]!r} does "
                "not come back from its tokens, so the model never sees it. Is it the tokenizer of "
                "this language?"
            )
            return


def _characters(text: str) -> set[str]:
    text = unicodedata.normalize("NFKC", text)  # another spelling of a character is no loss
    return {c for c in text if not (c.isspace() or unicodedata.category(c) in ("Cc", "Cf", "Mn"))}


def _first_texts(files: Iterable[InputFile]) -> Iterator[str]:
    """Texts of the first records of the first files; faults are for the run to tell."""
    for file in list(files)[:_SHOWN]:
        looked_at = 0
        for span in READERS[file.kind].scan(file):
            if isinstance(span, Rejection):
                continue
            for found in READERS[file.kind].read(file, span, _NoImages()):
                looked_at += 1
                if isinstance(found, RawSample):
                    yield from (message.content for message in found.messages)
                if looked_at >= _LOOKED_AT:
                    break
            break


class _NoImages(ImageLoader):
    def load(self, value: Any, root: str) -> bytes:
        return b"-"

    def frames(self, value: str, root: str) -> list[str] | None:
        return None


def end_notes(counts: Mapping[str, int], reasons: Mapping[str, int]) -> Iterator[str]:
    """Say what the counts of a run point to.

    Args:
        counts: of the run.
        reasons: category of rejection -> records.
    """
    missing = reasons.get("image is missing", 0)
    if missing > counts.get("images", 0):
        yield (
            f"{plural(missing, 'sample')} rejected because an image file is missing, more than "
            "were found: set --image-root to the folder that the image paths are relative to"
        )
