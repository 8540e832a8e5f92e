"""The running count of an epoch: each batch is held against the plan before it is handed out.

A row counts when its batch is handed out, not when a worker has made it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.batch import PackedBatch
from omniload.errors import LedgerError
from omniload.loader.ledger import Ledger
from omniload.loader.row_sum import RowSum
from omniload.loader.tasks import Slot
from omniload.plan import StepPlan

__all__ = ["Account"]

Int64Array = npt.NDArray[np.int64]

_SHOWN = 10


@dataclass(kw_only=True)
class Account:
    """The running count of one rank in one epoch, or in the rest of one.

    Args:
        epoch: the epoch.
        num_rows: rows of the data.
        plan: the plan of the epoch, or of its rest.
        start: micro-batches of the plan that were handed out before.
        resumed_from: (step, micro_step) of the state that was loaded; None: none was.
    """

    epoch: int
    num_rows: int
    plan: StepPlan
    start: int = 0
    resumed_from: tuple[int, int] | None = None
    pending: deque[Slot] = field(default_factory=deque)
    handed: RowSum = field(default_factory=RowSum)
    passed: RowSum = field(default_factory=RowSum)
    skipped: Counter[str] = field(default_factory=Counter)
    fillers: int = 0
    dummies: int = 0
    missing: int = 0
    _before: RowSum | None = None
    _planned: RowSum | None = None

    @property
    def before(self) -> RowSum:
        """Rows that all ranks were fed before this account began, known from the plan."""
        if self._before is None:
            total = RowSum.of_parts(self.plan.rows_before())
            if self.start:
                groups = self.plan.step_groups(0)
                end = groups.offsets[self.start * self.plan.dp_world_size]
                total = total.plus(RowSum.of(groups.rows[:end]))
            self._before = total
        return self._before

    def expect(self, slot: Slot) -> None:
        """Note a micro-batch that is about to be made."""
        self.pending.append(slot)

    def hand_out(self, batch: PackedBatch) -> None:
        """Hold a batch against the plan.

        Raises:
            LedgerError: it is not the next one, or holds other rows.
        """
        self._pass_empty()
        slot = self.pending.popleft() if self.pending else None
        if slot is None or (slot.step, slot.micro_step) != (batch.step, batch.micro_step):
            expected = "none" if slot is None else f"step {slot.step}, micro-step {slot.micro_step}"
            raise LedgerError(
                f"batches must come in the order of the plan: expected {expected}, got step "
                f"{batch.step}, micro-step {batch.micro_step} (epoch {self.epoch})."
            )
        ids = batch.sample_ids.numpy()
        # a stage of a pipeline that needs no data gets batches without samples
        if batch.num_samples and not _is_as_planned(ids, batch, slot.rows):
            raise LedgerError(_differing(ids, batch, slot))
        handed = RowSum.of(slot.rows)
        is_alone = len(slot.rows) == len(slot.all_rows)
        self.handed = self.handed.plus(handed)
        self.passed = self.passed.plus(handed if is_alone else _all_of(slot))
        self.fillers += batch.is_filler
        self.dummies += not batch.is_filler and batch.num_samples > len(ids)
        if batch.skipped_samples:
            self.skipped.update(sample.kind for sample in batch.skipped_samples)
            self.missing += batch.num_loss_tokens_missing

    def close(self) -> None:
        """End the epoch.

        Raises:
            LedgerError: a batch of this rank is missing, or the steps of the plan don't hold each
                row once.
        """
        self._pass_empty()
        if self.pending:
            slot = self.pending[0]
            rows = np.concatenate([slot.rows for slot in self.pending])
            raise LedgerError(
                f"epoch {self.epoch} ended before its last batch: {len(self.pending)} are missing, "
                f"from step {slot.step}, micro-step {slot.micro_step} on, with {len(rows)} rows "
                f"{rows.tolist()[:_SHOWN]}."
            )
        if self.before.plus(self.passed) != self.planned:
            raise LedgerError(f"epoch {self.epoch} must feed each row once: {self._unbalanced()}.")

    @property
    def planned(self) -> RowSum:
        """Rows of the epoch that are planned, for all ranks."""
        if self._planned is None:
            dropped = RowSum.of(self.plan.dropped)
            self._planned = RowSum.of_range(self.num_rows).minus(dropped)
        return self._planned

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the epoch were handed out, over all ranks."""
        return self.before.num_rows + self.passed.num_rows >= self.plan.num_rows

    def of_rank(self) -> dict[str, Any]:
        """Say what this rank adds to the sum over ranks."""
        return {
            "epoch": self.epoch,
            "is_complete": self.is_complete,
            "before": tuple(self.before),
            "handed": tuple(self.handed),
            "passed": tuple(self.passed),
            "skipped": dict(self.skipped),
            "fillers": self.fillers,
            "dummies": self.dummies,
            "missing": self.missing,
        }

    def ledger(self, ranks: Mapping[int, Mapping[str, Any]] | None = None) -> Ledger:
        """Make the ledger of this rank, or of all.

        Args:
            ranks: dp_rank -> what `of_rank` gave there; None: this rank alone.
        """
        listed = [self.of_rank()] if ranks is None else [ranks[rank] for rank in sorted(ranks)]
        handed, skipped = RowSum(), Counter[str]()
        for one in listed:
            handed = handed.plus(RowSum(*one["handed"]))
            skipped.update(one["skipped"])
        faults = [] if ranks is None else self._faults(ranks, handed)
        if self.is_complete and self.before.plus(self.passed) != self.planned:
            faults.append(self._unbalanced())
        excluded = len(self.plan.excluded)
        return Ledger(
            epoch=self.epoch,
            ranks=len(listed),
            is_complete=self.is_complete,
            num_rows=self.num_rows,
            dropped={"oversize": len(self.plan.dropped) - excluded, "excluded": excluded},
            planned=self.plan.num_rows,
            resumed_from=self.resumed_from,
            before=self.before.num_rows,
            seen=handed.num_rows - skipped.total(),
            skipped=dict(skipped),
            elsewhere=self.passed.num_rows - handed.num_rows,
            remaining=self.plan.num_rows - self.before.num_rows - self.passed.num_rows,
            fillers=sum(one["fillers"] for one in listed),
            dummies=sum(one["dummies"] for one in listed),
            num_loss_tokens_missing=sum(one["missing"] for one in listed),
            balanced=not faults,
            faults=tuple(faults),
        )

    def _faults(self, ranks: Mapping[int, Mapping[str, Any]], handed: RowSum) -> list[str]:
        faults = []
        for rank, one in sorted(ranks.items()):
            for name in ("epoch", "is_complete", "before", "passed"):
                own = self.of_rank()[name]
                if one[name] != own:
                    faults.append(f"rank {rank} stands elsewhere: {name} is {one[name]}, not {own}")
        absent = sorted(set(range(self.plan.dp_world_size)) - set(ranks))
        if absent:
            faults.append(f"ranks {absent[:_SHOWN]} are missing")
        if handed != self.passed:
            more = handed.num_rows - self.passed.num_rows
            what = f"{abs(more)} rows too {'many' if more > 0 else 'few'}" if more else "other rows"
            faults.append(
                f"the ranks were handed {handed.num_rows} rows where the plan has "
                f"{self.passed.num_rows}: {what}"
            )
        return faults

    def _unbalanced(self) -> str:
        """Name the rows that the plan leaves out or feeds twice; walks through the whole plan."""
        fed = np.zeros(self.num_rows, np.int64)
        for rows in self.plan.rows_before():
            np.add.at(fed, rows, 1)
        step = 0
        while self.plan.has_step(step):
            np.add.at(fed, self.plan.step_groups(step).rows, 1)
            step += 1
        lost = np.setdiff1d(np.flatnonzero(fed == 0), self.plan.dropped)
        twice = np.flatnonzero(fed > 1)
        return (
            f"{len(lost)} rows are missing {lost.tolist()[:_SHOWN]}, {len(twice)} came more than "
            f"once {twice.tolist()[:_SHOWN]}"
        )

    def _pass_empty(self) -> None:
        """Go past micro-steps in which this rank has no batch."""
        while self.pending and not self.pending[0].has_batch:
            self.passed = self.passed.plus(_all_of(self.pending.popleft()))


def _all_of(slot: Slot) -> RowSum:
    return RowSum.of(slot.all_rows)


def _is_as_planned(ids: Int64Array, batch: PackedBatch, rows: Int64Array) -> bool:
    if not batch.skipped_samples and np.array_equal(ids, rows):
        return True  # as they nearly always are: in the order of the plan
    return np.array_equal(np.sort(_rows_in(ids, batch)), np.sort(rows))


def _rows_in(ids: Int64Array, batch: PackedBatch) -> Int64Array:
    """Rows that a batch holds or says that it skipped."""
    skipped = [sample.row for sample in batch.skipped_samples]
    return np.concatenate([ids[ids >= 0], np.array(skipped, np.int64)])


def _differing(ids: Int64Array, batch: PackedBatch, slot: Slot) -> str:
    found = _rows_in(ids, batch)
    lost = np.setdiff1d(slot.rows, found).tolist()
    extra = [int(row) for row in found if row not in slot.rows]
    return (
        f"a batch must hold the rows of the plan: missing {lost[:_SHOWN] or 'none'}, not planned "
        f"{extra[:_SHOWN] or 'none'}, expected {len(slot.rows)} rows, got {len(found)} (step "
        f"{slot.step}, micro-step {slot.micro_step})."
    )
