"""Counter-based random integers: the same on every machine, platform and NumPy version.

Every rank plans by itself, so the plan may not depend on a generator whose stream a library may
change. The mixer is the finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["derive", "permutation", "random_u64", "sample_generator"]

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def _mix(word: int) -> int:
    word &= _MASK
    word = ((word ^ (word >> 30)) * _MUL_1) & _MASK
    word = ((word ^ (word >> 27)) * _MUL_2) & _MASK
    return word ^ (word >> 31)


def derive(*key: int) -> int:
    """Fold integers into one 64-bit key; order matters.

    Args:
        key: any integers, for example (seed, epoch, round).

    Returns:
        An integer in [0, 2**64).
    """
    state = _GOLDEN
    for word in key:
        state = _mix(state + _GOLDEN + _mix(word & _MASK))
    return state


def random_u64(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """Draw `count` uniform 64-bit integers, a pure function of `key`.

    Returns:
        uint64 (count,).
    """
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(derive(*key))
    word = (word ^ (word >> np.uint64(30))) * np.uint64(_MUL_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(_MUL_2)
    return word ^ (word >> np.uint64(31))


def permutation(count: int, *key: int) -> npt.NDArray[np.int64]:
    """Shuffle 0 .. count-1, a pure function of `key`.

    Returns:
        int64 (count,).

    Cost: one stable sort, O(n log n).
    """
    return np.argsort(random_u64(count, *key), kind="stable").astype(np.int64, copy=False)


def sample_generator(seed: int, epoch: int, row: int) -> np.random.Generator:
    """Make the generator a transform draws from: a function of (seed, epoch, row) alone."""
    return np.random.Generator(np.random.Philox(key=[derive(seed, epoch), derive(row)]))
