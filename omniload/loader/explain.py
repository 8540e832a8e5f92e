"""Which rows of a step go where, and why the step costs what it does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.costs import REFERENCE_COST, CostModel
from omniload.errors import ConfigError, ShardError
from omniload.index import LengthIndex
from omniload.loader.settings import LoaderSettings
from omniload.metrics import dist_ratio
from omniload.source import RowSource, key_of
from omniload.types import Budget, Groups

__all__ = ["ExplainedSlot", "Explanation", "RowPlace", "check_step", "explain_step"]

_NAMES = ("tokens", "tiles", "cost")
_SHOWN_ROWS = 6
_SHOWN_CHARS = 60  # of a key


@dataclass(frozen=True, kw_only=True)
class RowPlace:
    """A row of a step, and where it is stored.

    Args:
        row: row of the index.
        set: the set of a mixture that it is of; "": no mixture.
        shard: name of the shard.
        shard_row: row in it.
        key: its name in the source, or in the set of the mixture; None: it is not at hand without
            reading the row, as at a URL, or the shard is damaged.
        tokens: its tokens.
        tiles: its tiles.
        loss_tokens: its tokens that give loss.
    """

    row: int
    set: str
    shard: str
    shard_row: int
    key: str | None
    tokens: int
    tiles: int
    loss_tokens: int


@dataclass(frozen=True, kw_only=True)
class ExplainedSlot:
    """What one rank has in one micro-step.

    Args:
        micro_step: the micro-step.
        rank: the data-parallel rank.
        is_filler: whether no row is left for it.
        tokens: tokens of its rows.
        tiles: tiles of its rows.
        cost: estimated time.
        fill_tokens: share of the token budget.
        fill_tiles: share of the tile budget; None: there is none.
        rows: its rows.
    """

    micro_step: int
    rank: int
    is_filler: bool
    tokens: int
    tiles: int
    cost: float
    fill_tokens: float
    fill_tiles: float | None
    rows: tuple[RowPlace, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A step, explained; what `DataLoader.explain` returns.

    Loads are sums over the micro-steps of a rank. Ratios and moved rows compare the step as it is
    with the order in which groups came, before samples were dealt so that ranks wait least.

    Args:
        epoch: the epoch.
        step: the optimizer step.
        sync: when ranks wait for each other.
        slots: all micro-steps and ranks, micro-step after micro-step.
        loads: for "tokens", "tiles" and "cost": the load of each rank.
        slowest: the rank of the largest cost.
        slowest_over_mean: its cost over the mean of all ranks; 1.0: they are even.
        dist: for "tokens", "tiles" and "cost": share of device time spent waiting for the rank with
            most, with ranks that meet as `sync` says.
        dist_before: the same without balance.
        moved: rows that the balance put in another slot; 0 without balance.
        fillers: slots without rows.
    """

    epoch: int
    step: int
    sync: str | None
    slots: tuple[ExplainedSlot, ...]
    loads: dict[str, tuple[float, ...]]
    slowest: int
    slowest_over_mean: float
    dist: dict[str, float]
    dist_before: dict[str, float]
    moved: int
    fillers: int

    @property
    def mean_cost(self) -> float:
        """Estimated time of a slot, the mean over all; 1.0 where there is none."""
        return sum(slot.cost for slot in self.slots) / max(len(self.slots), 1) or 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        found = asdict(self)
        found["slots"] = [{**slot, "rows": list(slot["rows"])} for slot in found["slots"]]
        found["loads"] = {name: list(values) for name, values in self.loads.items()}
        return found

    def __str__(self) -> str:
        lines = [f"epoch {self.epoch}, step {self.step}"]
        if len(self.loads["cost"]) > 1:
            lines.append(
                f"rank {self.slowest} is slowest: {self.slowest_over_mean:.3f} times the mean cost"
            )
            ratios = (
                f"{name} {self.dist_before[name]:.1%} -> {self.dist[name]:.1%}" for name in _NAMES
            )
            lines.append(
                f"waiting, before and after balance: {', '.join(ratios)}; "
                f"{_count(self.moved, 'row')} moved"
            )
        lines.append(
            f"{_count(sum(len(slot.rows) for slot in self.slots), 'row')} in "
            f"{_count(len(self.slots), 'slot')}, {_count(self.fillers, 'filler')}"
        )
        mean = self.mean_cost
        lines += [_shown(slot, slot.cost / mean) for slot in self.slots]
        return "\n".join(lines)


def explain_step(
    step: Groups,
    before: Groups,
    source: RowSource,
    *,
    settings: LoaderSettings,
    epoch: int,
    number: int,
) -> Explanation:
    """Explain a step.

    Args:
        step: its groups; that of micro-step m and rank r at m * dp_world_size + r.
        before: likewise, in the order in which groups came.
        source: the rows of the epoch.
        settings: budget, ranks, cost and sync.
        epoch: the epoch.
        number: of the step.
    """
    size, cost = settings.world.dp_world_size, settings.cost or REFERENCE_COST
    sums = _sums(step, source.index, cost, size)
    loads = {name: sums[name].sum(axis=0) for name in _NAMES}
    mean = float(loads["cost"].mean())
    places = _places(step, source)
    slots = tuple(
        _slot(step, number, places, sums, size=size, budget=settings.budget)
        for number in range(len(step))
    )
    return Explanation(
        epoch=epoch,
        step=number,
        sync=settings.sync,
        slots=slots,
        loads={name: tuple(values.tolist()) for name, values in loads.items()},
        slowest=int(loads["cost"].argmax()),
        slowest_over_mean=float(loads["cost"].max()) / mean if mean > 0 else 1.0,
        dist=_ratios(sums, settings.sync),
        dist_before=_ratios(_sums(before, source.index, cost, size), settings.sync),
        moved=_moved(before, step),
        fillers=sum(slot.is_filler for slot in slots),
    )


def check_step(step: int, *, first: int, has_step: bool) -> None:
    """Check that a plan has a step.

    Raises:
        ConfigError: it hasn't.
    """
    if step < first:
        raise ConfigError(
            f"explain needs a step of the plan at hand, which was taken up from a state: expected "
            f"at least {first}, got {step}. Make a loader without the state for earlier steps."
        )
    if not has_step:
        raise ConfigError(f"explain needs a step of this epoch, got {step}: it has fewer.")


def _sums(
    step: Groups, index: LengthIndex, cost: CostModel, size: int
) -> dict[str, npt.NDArray[np.float64]]:
    """Add up each slot: (accumulation, ranks) by name."""
    tokens = index.num_tokens[step.rows].astype(np.float64)
    columns = [tokens, index.num_tiles[step.rows].astype(np.float64), tokens * tokens]
    running = np.zeros((3, len(tokens) + 1))
    np.cumsum(columns, axis=1, out=running[:, 1:])
    per_slot = np.diff(running[:, step.offsets])
    times = cost.cost(per_slot[1], per_slot[0], per_slot[2]) * (per_slot[0] > 0)
    found = {"tokens": per_slot[0], "tiles": per_slot[1], "cost": times}
    return {name: values.reshape(-1, size) for name, values in found.items()}


def _ratios(sums: dict[str, npt.NDArray[np.float64]], sync: str | None) -> dict[str, float]:
    by_micro_step = sync == "micro-step"
    return {
        name: dist_ratio(values if by_micro_step else values.sum(axis=0))
        for name, values in sums.items()
    }


def _moved(before: Groups, after: Groups) -> int:
    """Count rows whose slot is another one."""
    slots = []
    for groups in (before, after):
        numbers = np.repeat(np.arange(len(groups)), np.diff(groups.offsets))
        slots.append(numbers[np.argsort(groups.rows, kind="stable")])
    return int((slots[0] != slots[1]).sum())


def _slot(
    step: Groups,
    number: int,
    places: dict[int, RowPlace],
    sums: dict[str, npt.NDArray[np.float64]],
    *,
    size: int,
    budget: Budget,
) -> ExplainedSlot:
    place = divmod(number, size)
    tokens, tiles = int(sums["tokens"][place]), int(sums["tiles"][place])
    rows = step[number]
    return ExplainedSlot(
        micro_step=place[0],
        rank=place[1],
        is_filler=len(rows) == 0,
        tokens=tokens,
        tiles=tiles,
        cost=float(sums["cost"][place]),
        fill_tokens=tokens / budget.tokens,
        fill_tiles=tiles / budget.tiles if budget.tiles else None,
        rows=tuple(places[row] for row in rows.tolist()),
    )


def _places(step: Groups, source: RowSource) -> dict[int, RowPlace]:
    """Find the rows of a step, in the order in which they lie, so that each shard opens once."""
    return {row: _place(row, source) for row in sorted(step.rows.tolist())}


def _place(row: int, source: RowSource) -> RowPlace:
    shard, shard_row = source.locate(row)
    names: Any = getattr(source, "set_names", None)
    index = source.index
    return RowPlace(
        row=row,
        set="" if names is None else names[int(source.source_of([row])[0])],  # type: ignore[attr-defined]
        shard=source.shard_names[shard],
        shard_row=shard_row,
        key=_key(row, source),
        tokens=int(index.num_tokens[row]),
        tiles=int(index.num_tiles[row]),
        loss_tokens=int(index.num_loss_tokens[row]),
    )


def _key(row: int, source: RowSource) -> str | None:
    try:
        return key_of(source, row)
    except ShardError:  # the plan is known all the same
        return None


def _shown(slot: ExplainedSlot, cost: float) -> str:
    if slot.is_filler:
        return f"  micro-step {slot.micro_step}, rank {slot.rank}: filler"
    fill = f"{slot.fill_tokens:.0%} of tokens"
    if slot.fill_tiles is not None:
        fill += f", {slot.fill_tiles:.0%} of tiles"
    rows = ", ".join(_shown_row(one) for one in slot.rows[:_SHOWN_ROWS])
    more = len(slot.rows) - _SHOWN_ROWS
    return (
        f"  micro-step {slot.micro_step}, rank {slot.rank}: {_count(slot.tokens, 'token')}, "
        f"{_count(slot.tiles, 'tile')}, cost {cost:.3f} of the mean; {fill}; rows {rows}"
        f"{f' and {more} more' if more > 0 else ''}"
    )


def _shown_row(one: RowPlace) -> str:
    key = "" if one.key is None else f" {one.key!r:.{_SHOWN_CHARS}}"
    return (
        f"{one.row}{key} ({one.shard}:{one.shard_row}, {_count(one.tokens, 'token')}, "
        f"{_count(one.tiles, 'tile')})"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + "s" * (number != 1)
