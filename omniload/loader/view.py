"""What a loader tells about itself: its epoch, plan, data and ledger."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._checks import MAX_INT63, check_count
from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.loader.checks import gather_over_ranks
from omniload.loader.course import Course
from omniload.loader.explain import Explanation, check_step, explain_step
from omniload.loader.ledger import Ledger
from omniload.loader.settings import LoaderSettings
from omniload.loader.spans import over_ranks
from omniload.loader.stats import Stats
from omniload.loader.tally import Tally
from omniload.plan import StepPlan
from omniload.shards import Manifest
from omniload.source import RowSource
from omniload.transforms import Transform
from omniload.world import World

__all__ = ["LoaderView"]


class LoaderView:
    """The part of `omniload.DataLoader` that changes nothing."""

    _settings: LoaderSettings
    _source: RowSource
    _transform: Transform
    _course: Course
    _tally: Tally
    _apart: tuple[StepPlan, StepPlan, StepPlan] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that is running, or that `iter()` would start."""
        return self._course.place.epoch

    @property
    def plan(self) -> StepPlan:
        """The plan of this epoch, or of its rest where a state was loaded."""
        return self._course.plan

    @property
    def dropped(self) -> npt.NDArray[np.int64]:
        """int64 (n,), rows that are left out: over budget with oversize="drop", or excluded."""
        return self._course.plan.dropped

    @property
    def source(self) -> RowSource:
        """The rows of this epoch."""
        return self._course.source

    @property
    def index(self) -> LengthIndex:
        """Lengths of all rows of this epoch."""
        return self._course.source.index

    @property
    def transform(self) -> Transform:
        """From stored record to sample: the one given, or the one that the data was made for."""
        return self._transform

    @property
    def tail(self) -> str:
        """Whether ranks get fillers at the end of an epoch, "filler" or "empty"."""
        return self._settings.tail

    @property
    def manifest(self) -> Manifest:
        """What the shards hold and how they were made.

        Raises:
            ConfigError: the data is no folder of shards; see `source`.
        """
        manifest = getattr(self._source, "manifest", None)
        if not isinstance(manifest, Manifest):
            raise ConfigError(
                "manifest is that of a folder of shards, but the data is a "
                f"{type(self._source).__name__}. Use loader.source.settings."
            )
        return manifest

    @property
    def world(self) -> World:
        """Who this process is among all."""
        return self._settings.world

    def __len__(self) -> int:
        """Micro-batches of this rank in the current epoch; exact.

        Epochs differ a little, because each makes its groups anew. Where a state was loaded, the
        steps before it count too. Plans the whole epoch: about a second for a million rows.
        """
        return self._course.num_batches

    def ledger(self, *, reduce: bool = False) -> Ledger:
        """Say what became of each row of the running epoch, or of the last one where it ended.

        Each batch is held against the plan when it is handed out, and each epoch at its end;
        LedgerError if a row is missing or comes twice. So this is for the record.

        Args:
            reduce: sum over all ranks, and check the sums against the plan: a collective, of some
                hundred bytes, to be called on all ranks after the same batch.

        Returns:
            The ledger; `print` shows it in a line.

        Cost: 15 ms a million rows at the end of an epoch, or after a state was loaded.
        """
        account = self._course.account
        if not reduce:
            return account.ledger()
        return account.ledger(gather_over_ranks(account.of_rank(), self.world))

    def stats(self, *, reduce: bool = False) -> Stats:
        """Return figures of this rank: since the newest `iter()`, and since the loader was made.

        What was handed out, how long the training loop waited and the workers worked, how full
        batches are, how even the plan is over ranks, what was read, and what each set gave.

        Args:
            reduce: also the least, mean and largest figure over all ranks: a collective, of some
                hundred bytes, to be called on all ranks after the same batch.

        Returns:
            The figures; `print` shows them in a line.

        Cost: some 0.1 ms; with a mixture also a pass over the lengths, once an epoch.
        """
        stats = self._tally.stats()
        return over_ranks(stats, self.world) if reduce else stats

    def explain(self, step: int) -> Explanation:
        """Say which rows of a step go to which rank, and why the step costs what it does.

        Any step of the running epoch, before or after the place at hand, on all ranks alike and
        without communication; nothing of the iteration changes. After a state was loaded: from its
        step on.

        Args:
            step: the optimizer step, as in `PackedBatch.step`.

        Returns:
            Rows, loads and ratios; `print` shows a line a slot.

        Raises:
            ConfigError: no such step.

        Cost: the epoch is planned once more up to that step, some 0.3 s for each 250 000 rows; the
        last plan is kept for the next call.
        """
        check_count("step", step, most=MAX_INT63)
        place, plan = self._course.place, self._course.plan
        if self._apart is None or self._apart[0] is not plan:
            self._apart = (plan, *self._course.plans_apart())
        _, balanced, bare = self._apart
        number = int(step) - place.first_step
        check_step(int(step), first=place.first_step, has_step=balanced.has_step(number))
        return explain_step(
            balanced.step_groups(number),
            bare.step_groups(number),
            self.source,
            settings=self._settings,
            epoch=place.epoch,
            number=int(step),
        )
