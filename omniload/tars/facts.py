"""What is known of a tar as a whole; and checks of facts that were read from a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["TarFacts", "check_counts", "check_tables", "check_texts"]


@dataclass(frozen=True, kw_only=True)
class TarFacts:
    """What is known of a tar as a whole.

    Args:
        num_bytes: its size when it was indexed.
        changed_ns: when it was changed last, nanoseconds since 1970.
        xxh3_128: checksum of the whole tar, 32 hexadecimal digits.
        source: name of its data set.
        settings_fingerprint: of the settings that lengths were measured with.
        num_members: members of its samples.
        num_samples: samples in it, also those that were refused.
        num_rows: samples that are used.
        bytes_skipped: bytes that could not be read as members.
        damage: (start, stop, reason) of the first parts that are damaged.
        num_damaged: all such parts.
        reasons: category of refusal -> samples.
        totals: sums over the rows: tokens, tiles, loss_tokens, images.
        digest: over all that the table says but reasons, 32 hexadecimal digits.

    Raises:
        ValueError: a value is of another kind.
    """

    num_bytes: int
    changed_ns: int
    xxh3_128: str
    source: str
    settings_fingerprint: str
    num_members: int
    num_samples: int
    num_rows: int
    bytes_skipped: int
    damage: tuple[tuple[int, int, str], ...]
    num_damaged: int
    reasons: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    digest: str = ""

    def __post_init__(self) -> None:
        counts = ("num_members", "num_samples", "num_rows", "bytes_skipped", "num_damaged")
        check_counts(self, "num_bytes", *counts)
        check_texts(self, "xxh3_128", "source", "settings_fingerprint", "digest")
        check_tables(self, "reasons", "totals")


def check_counts(facts: Any, *names: str) -> None:
    """Check that some facts are numbers from 0 on.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(facts, name)
        if type(value) is not int or not 0 <= value < 2**63:
            raise ValueError(f"{name} must be a count, got {value!r:.80}")


def check_texts(facts: Any, *names: str) -> None:
    """Check that some facts are texts.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(facts, name)
        if not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{name} must be a text, got {value!r:.80}")
        value.encode()  # a ValueError for half a character of UTF-16


def check_tables(facts: Any, *names: str) -> None:
    """Check that some facts are tables of counts.

    Raises:
        ValueError: one is not.
    """
    for name in names:
        value = getattr(facts, name)
        if not isinstance(value, dict) or any(
            type(count) is not int or count < 0 for count in value.values()
        ):
            raise ValueError(f"{name} must be a table of counts, got {value!r:.80}")
