"""The order of an epoch: all its groups one after the other, planned a window of rows at a time."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import OrderedDict
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload.errors import ConfigError
from omniload.grouping import DEFAULT_GROUPING, get_grouping
from omniload.index import LengthIndex
from omniload.types import Budget, Groups

__all__ = ["EpochOrder", "OrderSettings", "check_integer", "find_oversize"]

Int64Array = npt.NDArray[np.int64]

_LOG = logging.getLogger(__name__)
_VERSION = 1  # raised when the order of the same groups changes
_ROWS_AT_ONCE = 4_000_000  # rows of a window unless told otherwise: about 240 MB to plan one
_WINDOWS_KEPT = 2  # a step may begin in one window and end in the next
_LISTED = 10  # rows over the budget that a message names
_TAG_WINDOWS, _TAG_GROUPS = 1, 2  # keep the two uses of (seed, epoch) apart


@dataclass(frozen=True, kw_only=True)
class OrderSettings:
    """All that decides the order of an epoch, besides the index.

    Args:
        budget: upper bounds of a group.
        grouping: a name in `omniload.grouping.GROUPINGS`; not used with `shuffle=False`.
        seed: any integer; its low 64 bits count.
        epoch: at least 0.
        shuffle: False: next fit in index order.
        oversize: rows over the budget: "error", or "drop" to leave them out.
        window_rows: rows that are planned together; None: 4 million at most.
        dummy_tokens: room that a group without tiles keeps, where the data has tiles; a row
            without tiles that leaves less alone is over the budget.

    Raises:
        ConfigError: a setting of the wrong type or out of range.
    """

    budget: Budget
    grouping: str = DEFAULT_GROUPING
    seed: int = 0
    epoch: int = 0
    shuffle: bool = True
    oversize: str = "error"
    window_rows: int | None = None
    dummy_tokens: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise ConfigError(f"budget must be an omniload.Budget, got {self.budget!r}.")
        get_grouping(self.grouping)
        if not isinstance(self.shuffle, bool):
            raise ConfigError(f"shuffle must be True or False, got {self.shuffle!r}.")
        if not isinstance(self.oversize, str) or self.oversize not in ("error", "drop"):
            raise ConfigError(f"oversize must be 'error' or 'drop', got {self.oversize!r}.")
        for name, least in (
            ("seed", None), ("epoch", 0), ("window_rows", 1), ("dummy_tokens", 0)
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name == "window_rows":
                continue
            value = check_integer(name, value)
            if least is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
            object.__setattr__(self, name, value)
        if self.dummy_tokens >= self.budget.tokens:
            raise ConfigError(
                f"a dummy document must fit the budget: expected fewer than {self.budget.tokens} "
                f"tokens, got {self.dummy_tokens}. Raise Budget.tokens."
            )
        if not self.shuffle and self.grouping not in (DEFAULT_GROUPING, "sequential"):
            _warn_once(f"shuffle=False groups in index order: grouping={self.grouping!r} is unused")


class EpochOrder:
    """The groups of one epoch in emission order: a pure function of index and settings.

    The rows are cut into windows, contiguous and in a seeded order. A window is planned when it is
    asked for, and the last two are kept, so memory doesn't grow with the data.

    Args:
        index: lengths of all rows.
        settings: what decides the order.

    Raises:
        ConfigError: rows over the budget, with `oversize="error"`.
    """

    def __init__(self, index: LengthIndex, settings: OrderSettings) -> None:
        self.index = index
        self.settings = settings
        self._room = settings.dummy_tokens if index.num_tiles.any() else 0
        self.oversize = find_oversize(index, settings.budget, dummy_tokens=self._room)
        if len(self.oversize):
            _report_oversize(index, settings, self.oversize, self._room)
        self._grouping = get_grouping(settings.grouping if settings.shuffle else "sequential")
        rows = settings.window_rows
        if rows is None:
            rows = _even_share(len(index), _ROWS_AT_ONCE)
        self._window_rows = rows
        self.num_windows = -(-len(index) // rows)
        self._windows = (
            rng.permutation(self.num_windows, settings.seed, settings.epoch, _TAG_WINDOWS)
            if settings.shuffle
            else np.arange(self.num_windows, dtype=np.int64)
        )
        self._kept: OrderedDict[int, Groups] = OrderedDict()
        self._counts: dict[int, int] = {}

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, other ones for another index or setting; plans no window."""
        facts = {
            **asdict(self.settings),
            "grouping": [self._grouping.name, self._grouping.version],
            "window_rows": self._window_rows,
            "index": self.index.fingerprint,
            "version": _VERSION,
        }
        if not self._room:
            del facts["dummy_tokens"]  # it decides nothing
        text = json.dumps(facts, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def count(self, window: int) -> int:
        """Count the groups of the window that comes at position `window` of the epoch."""
        if window not in self._counts:
            self.groups(window)
        return self._counts[window]

    def groups(self, window: int) -> Groups:
        """Plan the window that comes at position `window` of the epoch, or take it from memory.

        Returns:
            Groups of index rows.
        """
        if window in self._kept:
            self._kept.move_to_end(window)
            return self._kept[window]
        while len(self._kept) >= _WINDOWS_KEPT:
            self._kept.popitem(last=False)
        groups = self._plan(int(self._windows[window]))
        self._kept[window] = groups
        self._counts[window] = len(groups)
        return groups

    def _plan(self, window: int) -> Groups:
        first = window * self._window_rows
        end = min(first + self._window_rows, len(self.index))
        tokens, tiles = self.index.num_tokens[first:end], self.index.num_tiles[first:end]
        begin, stop = np.searchsorted(self.oversize, (first, end))
        rows = np.arange(first, end, dtype=np.int64)
        if stop > begin:
            fits = np.ones(end - first, bool)
            fits[self.oversize[begin:stop] - first] = False
            rows, tokens, tiles = rows[fits], tokens[fits], tiles[fits]
        settings = self.settings
        key = (settings.seed, settings.epoch, _TAG_GROUPS, window)
        groups = self._grouping(
            tokens, tiles, budget=settings.budget, key=key, dummy_tokens=self._room
        )
        return Groups(rows=rows[groups.rows], offsets=groups.offsets)


def check_integer(name: str, value: object) -> int:
    """Return an argument as a Python integer.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{name} must be an integer, got {value!r}.")
    return int(value)


def find_oversize(index: LengthIndex, budget: Budget, *, dummy_tokens: int = 0) -> Int64Array:
    """Find the rows that don't fit the budget even alone.

    Args:
        index: lengths of all rows.
        budget: upper bounds of a group.
        dummy_tokens: room that has to be left beside a row without tiles.

    Returns:
        int64 (num_oversize,), rising.
    """
    found = [np.zeros(0, np.int64)]
    for first in range(0, len(index), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        over = index.num_tokens[part] > budget.tokens
        if dummy_tokens:
            bare = index.num_tiles[part] == 0
            over |= bare & (index.num_tokens[part] > budget.tokens - dummy_tokens)
        if budget.tiles is not None:
            over |= index.num_tiles[part] > budget.tiles
        found.append(np.flatnonzero(over) + first)
    return np.concatenate(found)


def _even_share(total: int, most: int) -> int:
    """Size of the parts when `total` is cut into as few equal parts of at most `most` as it can."""
    parts = max(1, -(-total // most))
    return max(1, -(-total // parts))


def _report_oversize(
    index: LengthIndex, settings: OrderSettings, rows: Int64Array, room: int
) -> None:
    budget = settings.budget
    tokens, tiles = index.num_tokens[rows], index.num_tiles[rows]
    needed = tokens.astype(np.int64) + np.where(tiles == 0, room, 0)
    excess = needed / budget.tokens
    if budget.tiles is not None:
        excess = np.maximum(excess, tiles / max(budget.tiles, 1))
    worst = np.argsort(-excess, kind="stable")[:_LISTED]
    listed = ", ".join(f"row {rows[i]}: {tokens[i]} tokens, {tiles[i]} tiles" for i in worst)
    found = f"{len(rows)} of {len(index)} rows are over {budget} even alone; the worst: {listed}."
    if room:
        found += f" Beside a row without tiles, a dummy image needs {room} tokens."
    if settings.oversize == "drop":
        _warn_once(f"{found} They are left out (oversize='drop') and listed in `dropped`.")
        return
    again = f"--max-tokens {budget.tokens - room}"
    if (needed <= budget.tokens).all():
        again = "fewer tiles per image"
    need = f"tokens={max(budget.tokens, int(needed.max()))}"
    if budget.tiles is not None:
        need += f", tiles={max(budget.tiles, int(tiles.max()))}"
    raise ConfigError(
        f"every row must fit the budget: {found} Raise it to Budget({need}), leave such rows out "
        f"with oversize='drop', or preprocess with {again}."
    )


@functools.cache  # once a process: a plan is made for every epoch
def _warn_once(message: str) -> None:
    _LOG.warning(message)
