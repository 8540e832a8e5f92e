"""What every grouping must hold, and what tells the baselines apart."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import rng
from omniload.errors import ConfigError
from omniload.grouping import GROUPINGS, get_grouping
from omniload.metrics import dist_ratio
from omniload.types import Budget
from tests import naive
from tests.strategies import listed, problems

KEY = (7, 0)
MAX = 2**31 - 1


@pytest.mark.parametrize("name", GROUPINGS)
@settings(deadline=None)  # the first call may compile
@given(problem=problems(), seed=st.integers(0, 2**64))
def test_each_row_is_in_one_group_that_keeps_the_budget(name, problem, seed):
    budget, tokens, tiles = problem
    groups = get_grouping(name)(tokens, tiles, budget=budget, key=(seed,))
    assert sorted(groups.rows.tolist()) == list(range(len(tokens)))
    assert all(len(rows) and naive.fits(rows, tokens, tiles, budget) for rows in groups)


HARD = {
    "empty": ([], [], Budget(tokens=5)),
    "one sample": ([5], [0], Budget(tokens=5, tiles=0)),
    "all equal": ([4] * 50, [1] * 50, Budget(tokens=16, tiles=4)),
    "one giant": ([1] * 40 + [1000] + [1] * 40, [0] * 81, Budget(tokens=1000, tiles=3)),
    "all text": ([3, 4, 5] * 20, [0] * 60, Budget(tokens=10, tiles=5)),
    "tiles 0": ([3, 4, 5] * 20, [0] * 60, Budget(tokens=10, tiles=0)),
    "lengths at the cap": ([16] * 9, [4] * 9, Budget(tokens=16, tiles=4)),
    "int32 limits": ([MAX, 1, MAX, MAX - 1, 1], [MAX, 0, MAX, 1, MAX], Budget(tokens=MAX)),
    "tiles at int32": ([1] * 6, [MAX] * 6, Budget(tokens=MAX, tiles=MAX, samples=MAX)),
}


@pytest.mark.parametrize("name", GROUPINGS)
@pytest.mark.parametrize("case", HARD)
def test_hard_inputs_are_grouped(name, case):
    tokens, tiles, budget = HARD[case]
    tokens, tiles = np.array(tokens, np.int32), np.array(tiles, np.int32)
    groups = get_grouping(name)(tokens, tiles, budget=budget, key=KEY)
    assert sorted(groups.rows.tolist()) == list(range(len(tokens)))
    assert all(naive.fits(rows, tokens, tiles, budget) for rows in groups)


@settings(deadline=None)
@given(problem=problems())
def test_sequential_is_next_fit_in_index_order(problem):
    budget, tokens, tiles = problem
    groups = get_grouping("sequential")(tokens, tiles, budget=budget, key=KEY)
    assert listed(groups) == naive.next_fit(range(len(tokens)), tokens, tiles, budget)


@settings(deadline=None)
@given(problem=problems())
def test_random_is_next_fit_over_a_permutation(problem):
    budget, tokens, tiles = problem
    groups = get_grouping("random")(tokens, tiles, budget=budget, key=KEY)
    order = rng.permutation(len(tokens), *KEY, 1).tolist()
    assert listed(groups) == naive.next_fit(order, tokens, tiles, budget)


@settings(deadline=None)
@given(problem=problems())
def test_length_is_next_fit_over_falling_lengths_in_shuffled_groups(problem):
    budget, tokens, tiles = problem
    groups = listed(get_grouping("length")(tokens, tiles, budget=budget, key=KEY))
    ties = {row: place for place, row in enumerate(rng.permutation(len(tokens), *KEY, 1).tolist())}
    order = sorted(range(len(tokens)), key=lambda row: (-int(tokens[row]), ties[row]))
    assert sorted(groups) == sorted(naive.next_fit(order, tokens, tiles, budget))


@pytest.fixture(scope="module")
def mixed():
    generator = np.random.default_rng(3)
    tokens = generator.integers(50, 2000, size=20_000).astype(np.int32)
    budget = Budget(tokens=4096)
    return tokens, {
        name: get_grouping(name)(tokens, np.zeros_like(tokens), budget=budget, key=KEY)
        for name in ("random", "length", "device")
    }


def spread_inside(groups, tokens):
    """Mean spread of the lengths in a group."""
    return np.mean([np.std(tokens[rows]) for rows in groups if len(rows) > 1])


def test_length_groups_are_alike_inside_and_device_groups_are_alike_across_ranks(mixed):
    tokens, groups = mixed
    inside = {name: spread_inside(found, tokens) for name, found in groups.items()}
    assert inside["length"] < 0.05 * inside["random"] < 0.05 * inside["device"] * 1.5

    def dist(name):
        counts = np.diff(groups[name].offsets)
        return dist_ratio(counts[: len(counts) // 8 * 8].reshape(-1, 8))

    assert dist("device") < 0.3 * dist("random") < dist("length")


def test_length_and_device_groups_are_fed_in_another_order_with_every_key(mixed):
    tokens, groups = mixed
    for name in ("length", "device"):
        other = get_grouping(name)(tokens, np.zeros_like(tokens), budget=Budget(tokens=4096),
                                   key=(8, 0))  # fmt: skip
        assert listed(other)[:50] != listed(groups[name])[:50]


def test_unknown_grouping_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"must be one of .*isf, .*random.*, got 'ifs'"):
        get_grouping("ifs")


def test_registry_does_not_import_numba():
    code = "import sys, omniload.grouping, omniload.plan; print('numba' in sys.modules)"
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
