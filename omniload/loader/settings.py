"""The arguments of the loader that decide which row goes where, as checked values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload._checks import MAX_INT63, check_count, check_flag
from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.grouping import get_grouping
from omniload.index import LengthIndex
from omniload.padding import Padding
from omniload.plan import StepPlan, make_plan
from omniload.plan.balance import Balance, check_balance, choose_balance
from omniload.shards import rows_per_window
from omniload.source import RowSource
from omniload.types import Budget, Sample
from omniload.world import World

__all__ = ["LoaderSettings"]

#: beyond it no run makes sense, and memory ends before any error
_MOST_MICRO_STEPS = 2**20
#: rows that the planner plans together unless told otherwise
_PLANNED_ROWS = 250_000


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What decides which row goes where; the arguments of `omniload.DataLoader` of the same names.

    Raises:
        ConfigError: a value is wrong.
    """

    budget: Budget
    world: World
    seed: int
    accumulation: int
    grouping: str
    shuffle: bool
    tail: str
    oversize: str
    window_rows: int | None
    pad_to: int | str | Padding | None = None
    sync: str | None = "step"
    cost: CostModel | None = None
    uniform_modality: bool = False
    balance: Balance | None = None
    dummy_tokens: int = 0  # of the document that `with_dummy` makes room for
    padding: Padding = field(init=False)

    def __post_init__(self) -> None:
        for name, value, kind in (("budget", self.budget, Budget), ("world", self.world, World)):
            if not isinstance(value, kind):
                raise ConfigError(
                    f"{name} must be an omniload.{kind.__name__}, got {type(value).__name__}."
                )
        check_count("seed", self.seed, most=MAX_INT63)
        check_count("accumulation", self.accumulation, least=1, most=_MOST_MICRO_STEPS)
        if self.window_rows is not None:
            check_count("window_rows", self.window_rows, least=1, most=MAX_INT63)
        check_flag("shuffle", self.shuffle)
        for name in ("seed", "accumulation", "window_rows"):
            # NumPy integers would not be JSON in the state
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else int(value))
        object.__setattr__(self, "padding", _choose_padding(self))
        get_grouping(self.grouping)
        choose_balance(  # raises where one of them is wrong
            sync=self.sync,
            cost=self.cost,
            uniform_modality=self.uniform_modality,
            dummy_tokens=self.dummy_tokens,
        )
        check_balance(self.balance)
        if self.balance is not None and self.uniform_modality:
            raise ConfigError(
                "balance replaces the one that uniform_modality=True needs: give one of the two."
            )
        for name, text, known in (
            ("tail", self.tail, ("filler", "empty")),
            ("oversize", self.oversize, ("error", "drop")),
        ):
            if not isinstance(text, str) or text not in known:
                raise ConfigError(f"{name} must be {known[0]!r} or {known[1]!r}, got {text!r}.")

    @property
    def order(self) -> str:
        """Name and version of the grouping: equal names with equal versions give equal groups."""
        grouping = get_grouping(self.grouping if self.shuffle else "sequential")
        room = f" with room for {self.dummy_tokens} tokens" if self.dummy_tokens else ""
        return f"{grouping.name}/{grouping.version}{room}"

    @property
    def facts(self) -> dict[str, Any]:
        """What of this goes into a state, by the names of `LoaderState`."""
        return {
            "dp_world_size": self.world.dp_world_size,
            "accumulation": self.accumulation,
            "seed": self.seed,
            "order": self.order,
            "oversize": self.oversize,
            "window_rows": self.window_rows,
            "budget_tokens": self.budget.tokens,
            "budget_tiles": self.budget.tiles,
            "budget_samples": self.budget.samples,
        }

    def make_plan(
        self,
        index: LengthIndex,
        *,
        epoch: int,
        start: tuple[int, int] | None,
        exclude: npt.NDArray[np.int64] | None = None,
        shard_starts: npt.NDArray[np.int64] | None = None,
        set_starts: npt.NDArray[np.int64] | None = None,
    ) -> StepPlan:
        """Make the plan of an epoch, or of its rest from `start` on.

        Args:
            index: lengths of all rows, as `padded` gives them.
            epoch: the epoch.
            start: window and groups of it where the plan starts; None: at the beginning.
            exclude: int64 (n,), rows to leave out.
            shard_starts: int64 (num_shards + 1,), see `omniload.make_plan`.
            set_starts: int64 (num_sets + 1,), likewise.

        Raises:
            ConfigError: a row over budget, or no row to plan.
            StateError: `start` is not in this epoch.
        """
        plan = make_plan(
            index,
            budget=self.budget,
            dp_world_size=self.world.dp_world_size,
            accumulation=self.accumulation,
            grouping=self.grouping,
            seed=self.seed,
            epoch=epoch,
            start=None if start is None else {"window": start[0], "groups": start[1]},
            shuffle=self.shuffle,
            oversize=self.oversize,
            window_rows=self.window_rows,
            sync=self.sync,
            cost=self.cost,
            uniform_modality=self.uniform_modality,
            balance=self.balance,
            dummy_tokens=self.dummy_tokens,
            exclude=exclude,
            shard_starts=shard_starts,
            set_starts=set_starts,
        )
        if len(plan.dropped) == len(index):
            # an epoch without a batch would let a loop over epochs spin for ever
            raise ConfigError(
                f"the data set must have at least one row within {self.budget} that is not "
                f"excluded, got none of {len(index)}."
            )
        return plan

    def with_source(self, source: RowSource) -> LoaderSettings:
        """Return settings whose windows read from no more shards than the cache of a source holds.

        Nothing changes where the user gave `window_rows`, or where the planner's windows fit.
        """
        own = getattr(source, "rows_per_window", None)  # a mixture has several caches to fit
        fit = rows_per_window(source, _PLANNED_ROWS) if own is None else own(_PLANNED_ROWS)
        if self.window_rows is not None or fit >= min(len(source), _PLANNED_ROWS):
            return self
        return replace(self, window_rows=fit)

    def with_dummy(self, dummy: Sample) -> LoaderSettings:
        """Return settings whose plans leave room for a dummy document in groups without tiles.

        Args:
            dummy: the document.

        Raises:
            ConfigError: it has no tiles, or passes the budget by itself.
        """
        unit = self.padding.document_multiple
        tokens, tiles = -(-dummy.num_tokens // unit) * unit, dummy.num_tiles
        most_tiles = self.budget.tiles
        if tiles == 0 or tokens >= self.budget.tokens or (most_tiles or tiles) < tiles:
            raise ConfigError(
                "uniform_modality=True appends the filler of the transform to text: expected one "
                f"with an image, below {self.budget.tokens} tokens and of at most {most_tiles} "
                f"tiles, got {tokens} tokens and {tiles} tiles. Raise the budget, or mend "
                "Transform.filler(with_image=True)."
            )
        return replace(self, dummy_tokens=tokens)

    def padding_with_token(self, source: RowSource, transform: object) -> Padding:
        """Fill in what stands in padded positions: what transform or data say, else 0."""
        if self.padding.token_id is not None:
            return self.padding
        encoder = source.settings.get("encoder")
        stored = encoder.get("pad_token_id") if isinstance(encoder, Mapping) else None
        token_id = getattr(transform, "pad_token_id", stored)
        return replace(self.padding, token_id=token_id if isinstance(token_id, int) else 0)

    def padded(self, index: LengthIndex) -> LengthIndex:
        """Round lengths up as documents will be, so that the budget holds with the padding."""
        unit = self.padding.document_multiple
        if unit == 1:
            return index
        tokens = index.num_tokens.astype(np.int64)
        return LengthIndex.from_arrays(
            num_tokens=-(-tokens // unit) * unit,
            num_tiles=index.num_tiles,
            num_loss_tokens=index.num_loss_tokens,
        )


def _choose_padding(settings: LoaderSettings) -> Padding:
    """Turn the loader's `pad_to` into a Padding that every group within the budget fits.

    Raises:
        ConfigError: not a padding, or one that the budget doesn't go with.
    """
    pad_to, budget = settings.pad_to, settings.budget
    if isinstance(pad_to, str):
        if pad_to != "full":
            raise ConfigError(
                f"pad_to must be an integer, 'full', or an omniload.Padding, got {pad_to!r}."
            )
        return Padding(num_tokens=budget.tokens)
    padding = Padding.of(pad_to)
    if budget.tokens % padding.row_multiple:
        raise ConfigError(
            "Budget.tokens must be a multiple of what rows are padded to, or padding would pass "
            f"it: expected a multiple of {padding.row_multiple}, got {budget.tokens}."
        )
    if padding.num_tokens not in (None, budget.tokens):
        raise ConfigError(
            f"Padding.num_tokens must be the token budget, {budget.tokens}, got "
            f"{padding.num_tokens}. Use pad_to='full', or change the budget."
        )
    if padding.num_documents is not None:
        # a row may end with one document of padding, also a filler's, and a dummy before that
        room = padding.num_documents - 1 - settings.uniform_modality
        if budget.samples is None or budget.samples > room:
            raise ConfigError(
                f"Budget.samples must be at most {room} where rows have {padding.num_documents} "
                f"documents, the last for padding or a dummy: got {budget.samples}. Set "
                f"Budget(samples={max(room, 1)}), or raise Padding.num_documents."
            )
    return padding
