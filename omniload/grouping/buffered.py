"""Target fit through a bounded buffer: the grouping that omniload uses unless told otherwise.

The same code groups a whole window (`buffered`) and a stream that comes in pieces
(`BufferedPacker`): for the same order of samples both give the same groups.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from omniload import rng
from omniload.errors import ConfigError
from omniload.grouping.classes import class_bounds
from omniload.grouping.fit import fit_groups
from omniload.grouping.fit_state import make_state
from omniload.types import Budget, Groups

__all__ = ["BufferedPacker", "BufferedSettings", "buffered"]

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_NO_LIMIT = 2**62
_TAG_ROWS = 1  # keeps the permutation apart from other uses of the key
_MOST = 32767  # slots are numbered in 16 bits


@dataclass(frozen=True, kw_only=True)
class BufferedSettings:
    """Constants of the packer; the defaults suit groups of few samples and of many.

    Args:
        buffer: samples that are held back to choose from. More gives fuller groups, and more
            likeness between successive steps: 1,024 has nearly all of the first.
        retries: chains that are tried for each group.
        reach: samples that a chain may skip because they don't fit.
        slack_weight: weight of the resource with more slack, in 64ths of that with less.
        dummy_tokens: room that a group without tiles keeps for a dummy document, unless it is a
            single sample; see `omniload.balance.StepBalance(uniform_modality=True)`.

    Raises:
        ConfigError: not an integer, or out of range.
    """

    buffer: int = 1024
    retries: int = 6
    reach: int = 32
    slack_weight: int = 32
    dummy_tokens: int = 0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            least = 0 if entry.name in ("slack_weight", "dummy_tokens") else 1
            most = 2**31 - 1 if entry.name == "dummy_tokens" else _MOST
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ConfigError(f"{entry.name} must be an integer, got {value!r}.")
            if not least <= value <= most:
                raise ConfigError(f"{entry.name} must be between {least} and {most}, got {value}.")


def buffered(
    num_tokens: Int32Array,
    num_tiles: Int32Array,
    *,
    budget: Budget,
    key: tuple[int, ...],
    dummy_tokens: int = 0,
    settings: BufferedSettings | None = None,
) -> Groups:
    """Group rows by target fit over a random order; see `BufferedPacker` for the method.

    Args:
        num_tokens: int32 (n,), tokens per row, none above `budget.tokens`.
        num_tiles: int32 (n,), tiles per row, none above `budget.tiles`.
        budget: upper bounds of a group.
        key: integers that seed all randomness.
        dummy_tokens: that of the settings, where they are the defaults.
        settings: None: the defaults.

    Returns:
        Groups of the rows 0 .. n-1, none empty, in the order in which they were closed.

    Cost: O(n) time, O(n) memory; 1.2 million rows take about a second.
    """
    order = rng.permutation(len(num_tokens), *key, _TAG_ROWS)
    packer = BufferedPacker(
        budget=budget, settings=settings or BufferedSettings(dummy_tokens=dummy_tokens)
    )
    pushed = packer.push(num_tokens[order], num_tiles[order])
    rest = packer.flush()
    return Groups(
        rows=order[np.concatenate([pushed.rows, rest.rows])],
        offsets=np.concatenate([pushed.offsets, len(pushed.rows) + rest.offsets[1:]]),
    )


class BufferedPacker:
    """Groups a stream of samples through a first-in-first-out buffer of bounded size.

    When the buffer is full, or at the end, a group is made. It starts with the oldest sample and
    takes each following one that fits: the chain. The chain as it is, and without its last sample
    or its last two, is closed by the sample of the whole buffer that leaves least slack. The same
    is tried from a few later samples on, and the best group of all is taken. As each group takes
    the oldest sample, none waits longer than `buffer` groups.

    Slack is measured in shares of the budget: the score of a group is `min + weight * max` over the
    slack of tokens and of tiles. The lookup goes through the tile classes; inside one the sample
    with most tokens up to a bound is found by two steps through a bitmap, in constant time.
    All is decided in integers, and by arrival alone: the same stream gives the same groups, however
    it is cut into pieces.

    Args:
        budget: upper bounds of a group.
        settings: None: the defaults.
    """

    def __init__(self, *, budget: Budget, settings: BufferedSettings | None = None) -> None:
        self.budget = budget
        self.settings = settings or BufferedSettings()
        self._bounds = class_bounds(budget.tiles)
        self._state = make_state(
            caps=(
                budget.tokens,
                _NO_LIMIT if budget.tiles is None else budget.tiles,
                _NO_LIMIT if budget.samples is None else budget.samples,
            ),
            bounds=self._bounds,
            **asdict(self.settings),
        )

    def push(self, num_tokens: npt.ArrayLike, num_tiles: npt.ArrayLike) -> Groups:
        """Take samples in, and give the groups that are due.

        Args:
            num_tokens: integers (n,), tokens of each, between 1 and `budget.tokens`.
            num_tiles: integers (n,), tiles of each, not above `budget.tiles`.

        Returns:
            Groups of arrival numbers: the first sample ever pushed is 0, the next one 1.

        Raises:
            ConfigError: columns of different lengths, or a sample that fits no group.
        """
        tokens = _checked("tokens", num_tokens, 1, self.budget.tokens)
        tiles = _checked("tiles", num_tiles, 0, self.budget.tiles)
        if len(tokens) != len(tiles):
            raise ConfigError(
                f"num_tiles must have one entry a sample: expected {len(tokens)}, got {len(tiles)}."
            )
        if self.budget.tiles is None:
            tiles = np.zeros_like(tiles)
        last = len(self._bounds) - 1
        classes = (last - np.searchsorted(self._bounds, tiles)).astype(np.int32)
        return self._run(tokens, tiles, classes, at_end=False)

    def flush(self) -> Groups:
        """Group what is left in the buffer; the packer is empty afterwards and can go on.

        Returns:
            Groups of arrival numbers.
        """
        none = np.zeros(0, np.int32)
        return self._run(none, none, none, at_end=True)

    def pending(self) -> Int64Array:
        """List the samples that are in the buffer, in order of arrival.

        To go on from here later, push these samples to a new packer first.

        Returns:
            int64 (num_buffered,), arrival numbers; fewer than `settings.buffer`.
        """
        return self._state.pending()

    def _run(
        self, tokens: Int32Array, tiles: Int32Array, classes: Int32Array, *, at_end: bool
    ) -> Groups:
        most = len(tokens) + self._state.num_buffered
        rows, offsets = np.empty(most, np.int64), np.zeros(most + 1, np.int64)
        num_groups = fit_groups(self._state, tokens, tiles, classes, at_end, rows, offsets)
        offsets = offsets[: num_groups + 1].copy()
        return Groups(rows=rows[: offsets[-1]].copy(), offsets=offsets)


def _checked(name: str, values: npt.ArrayLike, least: int, cap: int | None) -> Int32Array:
    """Return a writable int32 copy, for which Numba has one compiled version."""
    column = np.asarray(values)
    if column.ndim != 1 or (column.size and not np.issubdtype(column.dtype, np.integer)):
        raise ConfigError(
            f"num_{name} must be a column of integers, got {column.dtype} {column.shape}."
        )
    most = 2**31 - 1 if cap is None else cap
    if column.size and not (column.min() >= least and column.max() <= most):
        wrong = int(((column < least) | (column > most)).argmax())
        raise ConfigError(
            f"every sample must fit the budget: expected {least} to {most} {name}, got "
            f"{int(column[wrong])} (sample {wrong} of those pushed). Raise Budget.{name} or leave "
            "such samples out."
        )
    return np.array(column, np.int32)
