"""The order of an epoch: all its groups one after the other, planned a window of rows at a time.

The next window is planned in a thread while one is used, so that no step waits for it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections import OrderedDict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.grouping import DEFAULT_GROUPING, get_grouping
from omniload.index import LengthIndex
from omniload.plan.ahead import Ahead
from omniload.plan.dealt import DealtWindows
from omniload.plan.windows import Windows
from omniload.types import Budget, Groups

__all__ = ["EpochOrder", "OrderSettings", "check_integer", "find_oversize"]

Int64Array = npt.NDArray[np.int64]

_LOG = logging.getLogger(__name__)
_VERSION = 2  # raised when the order of the same groups changes; of one window it is still 1
_WINDOW_ROWS = 250_000  # rows of a window unless told otherwise: 0.2 s and 15 MB to plan one
_ROWS_AT_ONCE = 2**18  # rows that are looked through at once
_LEAST_ROWS_AHEAD = 20_000  # smaller windows are planned sooner than a thread is started
_WINDOWS_KEPT = 2  # a step may begin in one window and end in the next
_LISTED = 10  # rows over the budget that a message names
_TAG_GROUPS = 2  # keeps this use of (seed, epoch) apart from others


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
        window_rows: rows that are planned together; None: a quarter of a million at most.
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

    The rows are cut into windows; see `omniload.plan.windows`. A window is planned when it is asked
    for, or a little ahead, and the last two are kept, so memory doesn't grow with the data.

    Args:
        index: lengths of all rows.
        settings: what decides the order.
        shard_starts: integers (num_shards + 1,), first row of each shard, then `len(index)`: a
            window reads from few shards. None: not known.
        set_starts: integers (num_sets + 1,), first row of each set of a mixture, then
            `len(index)`: every window has the same share of each. None: one set.
        exclude: integers (n,), rows that are left out, whatever their lengths.

    Raises:
        ConfigError: rows over the budget, with `oversize="error"`; rows to leave out, or shards or
            sets, that the index doesn't have.
    """

    def __init__(
        self,
        index: LengthIndex,
        settings: OrderSettings,
        *,
        shard_starts: npt.ArrayLike | None = None,
        set_starts: npt.ArrayLike | None = None,
        exclude: npt.ArrayLike | None = None,
    ) -> None:
        self.index = index
        self.settings = settings
        self._room = settings.dummy_tokens if index.num_tiles.any() else 0
        self.excluded = _as_rows("exclude", exclude, most=len(index) - 1)
        over = find_oversize(index, settings.budget, dummy_tokens=self._room)
        self.oversize = over[~np.isin(over, self.excluded)] if len(self.excluded) else over
        if len(self.oversize):
            _report_oversize(index, settings, self.oversize, self._room)
        self.left_out = np.union1d(self.oversize, self.excluded)
        self._grouping = get_grouping(settings.grouping if settings.shuffle else "sequential")
        rows = settings.window_rows
        self._window_rows = _even_share(len(index), _WINDOW_ROWS) if rows is None else rows
        self._starts = _as_starts("shard_starts", shard_starts, len(index))
        self._sets = _as_starts("set_starts", set_starts, len(index))
        self.windows = self._make_windows()
        self.num_windows = self.windows.count
        self._kept: OrderedDict[int, Groups] = OrderedDict()
        self._counts: dict[int, int] = {}
        self._ahead: tuple[int, Ahead[Groups]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ahead": None}  # a thread can't be copied, and needn't be

    def _make_windows(self) -> Windows | DealtWindows:
        settings, num_rows = self.settings, len(self.index)
        key = (settings.seed, settings.epoch) if settings.shuffle else None
        if self._sets is None or len(self._sets) < 3:
            return Windows(
                num_rows,
                window_rows=self._window_rows,
                starts=self._starts,
                key=key,
                left_out=self.left_out,
            )
        return DealtWindows(
            num_rows,
            window_rows=self._window_rows,
            sets=self._sets,
            starts=self._starts,
            key=key,
            left_out=self.left_out,
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, other ones for another index or setting; plans no window."""
        facts = {
            **asdict(self.settings),
            "grouping": [self._grouping.name, self._grouping.version],
            "window_rows": self._window_rows,
            "index": self.index.fingerprint,
            "version": _VERSION if self.num_windows > 1 else 1,
        }
        if not self._room:
            del facts["dummy_tokens"]  # it decides nothing
        for name, rows, decides in (
            ("exclude", self.excluded, True),
            ("shards", self._starts, self.num_windows > 1),  # with one window it is no matter
            ("sets", self._sets, True),
        ):
            if rows is not None and len(rows) and decides:
                facts[name] = hashlib.blake2b(rows.astype("<i8").tobytes()).hexdigest()
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
        if self._ahead is not None and self._ahead[0] == window:
            groups = self._ahead[1].result()
            self._ahead = None
        else:
            groups = self._plan(window)
        self._kept[window] = groups
        self._counts[window] = len(groups)
        return groups

    def plan_ahead(self, window: int) -> None:
        """Begin to plan a window in a thread, where that is worth it and it isn't known."""
        known = window in self._kept or (self._ahead is not None and self._ahead[0] == window)
        is_large = self._window_rows >= _LEAST_ROWS_AHEAD
        if is_large and not known and 0 <= window < self.num_windows:
            self._ahead = (window, Ahead(functools.partial(self._plan, window)))

    def _plan(self, window: int) -> Groups:
        rows = self.windows.rows(window)
        settings = self.settings
        key = (settings.seed, settings.epoch, _TAG_GROUPS, window)
        groups = self._grouping(
            self.index.num_tokens[rows],
            self.index.num_tiles[rows],
            budget=settings.budget,
            key=key,
            dummy_tokens=self._room,
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


def _as_rows(name: str, given: npt.ArrayLike | None, *, most: int) -> Int64Array:
    """Return rows as int64 (n,), rising, each once."""
    array = np.asarray([] if given is None else given)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ConfigError(f"{name} must hold rows, integers (n,), got {array.dtype} {array.shape}.")
    rows: Int64Array = np.unique(array.astype(np.int64))
    if rows[0] < 0 or rows[-1] > most:
        wrong = rows[0] if rows[0] < 0 else rows[-1]
        raise ConfigError(f"{name} must hold rows from 0 to {most}, got {wrong}.")
    return rows


def _as_starts(name: str, given: npt.ArrayLike | None, num_rows: int) -> Int64Array | None:
    if given is None:
        return None
    starts = _as_rows(name, given, most=num_rows)
    if num_rows and (starts[0] != 0 or starts[-1] != num_rows):
        raise ConfigError(
            f"{name} must begin with 0 and end with {num_rows}, got {starts[0]} and {starts[-1]}."
        )
    return starts


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
