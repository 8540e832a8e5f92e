"""The tile budget and the constants of the packer, from the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload.errors import ConfigError
from omniload.grouping.buffered import BufferedSettings, buffered
from omniload.index import LengthIndex
from omniload.types import Budget

__all__ = ["BudgetChoice", "BudgetTrial", "auto_budget"]

_TAG_SAMPLE = 1  # keeps the draw of rows apart from other uses of the key
_KEY = (0x6175746F,)  # a fixed one: the same data always gives the same budget
_RANKS = 64  # that wait for each other in the estimate
_SLACK_WEIGHTS = (0, 32, 64)


@dataclass(frozen=True, kw_only=True)
class BudgetTrial:
    """What a budget would cost.

    Args:
        budget: what was tried.
        groups: groups for the rows that were tried.
        wait: share of device time that 64 ranks lose by waiting, mean of tiles and tokens.
        time: estimated time, over that of ranks with the same load in every step.
    """

    budget: Budget
    groups: int
    wait: float
    time: float


@dataclass(frozen=True, kw_only=True)
class BudgetChoice:
    """What `auto_budget` chose, and why.

    Args:
        budget: the choice.
        settings: packer constants that did best with it.
        trials: all budgets that were tried, by rising tiles.
    """

    budget: Budget
    settings: BufferedSettings
    trials: tuple[BudgetTrial, ...]

    def __str__(self) -> str:
        best = next(trial for trial in self.trials if trial.budget == self.budget)
        others = ", ".join(
            f"{trial.budget.tiles} tiles {trial.time / best.time - 1:+.1%}"
            for trial in self.trials
            if trial is not best and abs((trial.budget.tiles or 0) - (best.budget.tiles or 0)) == 1
        )
        return (
            f"budget of {self.budget.tokens} tokens: {self.budget.tiles} tiles, "
            f"estimated time lost {best.time - 1:.1%}"
            + (f"; instead of it {others}" if others else "")
        )


def auto_budget(
    index: LengthIndex,
    *,
    tokens: int,
    samples: int | None = None,
    accumulation: int = 1,
    scan: int = 2,
    rows: int = 50_000,
) -> BudgetChoice:
    """Choose the tile budget that goes with a token budget.

    It starts from `ceil(tokens * mean tiles / mean tokens)`, with which both are used up together,
    and packs a part of the rows with this many tiles, a few fewer and a few more. The time of a
    step is estimated half as the most tiles, half as the most tokens that a rank has.

    Args:
        index: lengths of all rows; those with more than `tokens` are left out.
        tokens: token budget of a group.
        samples: most samples of a group; None: no limit.
        accumulation: micro-steps of a step, where ranks meet once a step; more of them make unlike
            groups cost less, and so a looser tile budget better.
        scan: how many tiles fewer and more are tried.
        rows: rows that are packed in each trial, drawn by a fixed seed.

    Returns:
        The choice; `str()` of it says what it costs to be one off.

    Raises:
        ConfigError: no row fits the token budget, or a setting is out of range.

    Cost: about 0.1 s a trial, of which there are `2 * scan + 3`.
    """
    for name, value, smallest in (("scan", scan, 0), ("rows", rows, 1),
                                  ("accumulation", accumulation, 1)):  # fmt: skip
        if value < smallest:
            raise ConfigError(f"{name} must be at least {smallest}, got {value}.")
    fits = np.flatnonzero(index.num_tokens <= Budget(tokens=tokens).tokens)
    if len(fits) == 0:
        raise ConfigError(
            f"some row must fit the token budget: expected at most {tokens} tokens, got "
            f"{int(index.num_tokens.min()) if len(index) else 'no rows'} at least, in "
            f"{len(index)} rows. Raise it."
        )
    total = int(index.num_tokens[fits].sum(dtype=np.int64))
    tiles = int(index.num_tiles[fits].sum(dtype=np.int64))
    least = int(index.num_tiles[fits].max())
    matched = max(-(-tokens * tiles // total), least)
    part = _some_rows(index, fits, rows)
    caps = range(max(matched - scan, least), matched + scan + 1) if tiles else range(1)
    budgets = [Budget(tokens=tokens, tiles=cap, samples=samples) for cap in caps]
    trials = [_try(part, budget, BufferedSettings(), accumulation) for budget in budgets]
    # a tie goes to fewer tiles, which need less memory
    best = min(trials, key=lambda trial: (round(trial.time, 3), trial.budget.tiles))
    settings = [BufferedSettings(slack_weight=weight) for weight in _SLACK_WEIGHTS]
    tried = min(settings, key=lambda each: _try(part, best.budget, each, accumulation).time)
    return BudgetChoice(budget=best.budget, settings=tried, trials=tuple(trials))


def _some_rows(index: LengthIndex, fits: npt.NDArray[np.int64], rows: int) -> LengthIndex:
    """Draw rows among those that fit, with replacement."""
    if len(fits) > rows:
        places = rng.random_u64(rows, *_KEY, _TAG_SAMPLE) % np.uint64(len(fits))
        fits = fits[np.sort(places.astype(np.int64))]
    return LengthIndex(
        num_tokens=index.num_tokens[fits],
        num_tiles=index.num_tiles[fits],
        num_loss_tokens=index.num_loss_tokens[fits],
    )


def _try(
    part: LengthIndex, budget: Budget, settings: BufferedSettings, accumulation: int
) -> BudgetTrial:
    """Pack the rows, and estimate the time of all steps."""
    groups = buffered(part.num_tokens, part.num_tiles, budget=budget, key=_KEY, settings=settings)
    columns = [groups.sums(column) for column in (part.num_tiles, part.num_tokens)]
    ranks = min(_RANKS, max(len(groups) // accumulation, 1))
    full = len(groups) // (ranks * accumulation)
    if full == 0:  # fewer groups than micro-steps
        ranks, accumulation, full = 1, 1, len(groups)
    used = full * ranks * accumulation
    # heavy and light groups in turn: about what balancing a step does
    order = np.argsort(-columns[0][:used].reshape(full, -1), axis=1, kind="stable")
    times, waits = [], []
    for loads in columns:
        if not loads.any():
            continue
        steps = np.take_along_axis(loads[:used].reshape(full, -1), order, axis=1)
        steps = steps.reshape(full, accumulation, ranks)
        steps[:, 1::2] = steps[:, 1::2, ::-1]
        slowest = steps.sum(axis=1).max(axis=1)
        times.append(float(slowest.mean()) * full * ranks / float(loads[:used].sum()))
        waits.append(1 - 1 / times[-1])
    return BudgetTrial(
        budget=budget,
        groups=len(groups),
        wait=float(np.mean(waits)),
        time=float(np.mean(times)),
    )
