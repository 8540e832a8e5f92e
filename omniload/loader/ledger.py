"""The ledger: what became of each row of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Ledger"]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What became of the rows of one epoch.

    Of one rank, or summed over all with `DataLoader.ledger(reduce=True)`. Always:

        num_rows = planned + sum(dropped.values())
        planned = before + seen + sum(skipped.values()) + elsewhere + remaining

    Args:
        epoch: the epoch.
        ranks: data-parallel ranks that are counted: 1, or all.
        is_complete: whether the epoch was handed out to its end.
        num_rows: rows of the data.
        dropped: rows that are not planned: "oversize" and "excluded".
        planned: rows that are to be fed once, by all ranks together.
        resumed_from: (step, micro_step) of the state that the epoch was taken up from; None: it
            began at its beginning.
        before: rows that were fed before that.
        seen: rows that were handed out as samples.
        skipped: rows that could not be used, by what was wrong.
        elsewhere: rows that the plan gave to other ranks until now; 0 where all are counted.
        remaining: rows that are still to come, on all ranks.
        fillers: batches that held no row, because none was left for the rank.
        dummies: documents without rows that were added for their image.
        num_loss_tokens_missing: planned loss tokens of the skipped rows.
        balanced: whether each row came once.
        faults: what is wrong, in words, where it is not.
    """

    epoch: int
    ranks: int
    is_complete: bool
    num_rows: int
    dropped: Mapping[str, int]
    planned: int
    resumed_from: tuple[int, int] | None
    before: int
    seen: int
    skipped: Mapping[str, int]
    elsewhere: int
    remaining: int
    fillers: int
    dummies: int
    num_loss_tokens_missing: int
    balanced: bool
    faults: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        found = asdict(self)
        found["resumed_from"] = None if self.resumed_from is None else list(self.resumed_from)
        return {**found, "faults": list(self.faults)}

    def __str__(self) -> str:
        whose = "all ranks" if self.ranks > 1 or not self.elsewhere else "this rank"
        parts = [f"planned {self.planned} of {self.num_rows} rows"]
        parts += [f"dropped {count} ({name})" for name, count in self.dropped.items() if count]
        if self.resumed_from is not None:
            step, micro_step = self.resumed_from
            parts.append(f"{self.before} before step {step}, micro-step {micro_step}")
        parts.append(f"seen {self.seen}")
        parts += [f"skipped {count} ({kind})" for kind, count in self.skipped.items()]
        named = (("on other ranks", self.elsewhere), ("to come", self.remaining),
                 ("fillers", self.fillers), ("dummies", self.dummies))  # fmt: skip
        parts += [f"{count} {name}" for name, count in named if count]
        verdict = "balanced" if self.balanced else "NOT balanced: " + "; ".join(self.faults)
        return f"epoch {self.epoch}, {whose}: {', '.join(parts)}: {verdict}"
