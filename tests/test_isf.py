"""Compiled ISF gives the groups of the slow reference, and the reported defects stay mended."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.grouping import get_grouping
from omniload.grouping.isf import _round, isf
from omniload.types import Budget
from tests import naive
from tests.strategies import listed, problems

KEY = (3, 1, 4)


def columns(tokens, tiles):
    return np.array(tokens, np.int32), np.array(tiles, np.int32)


@settings(deadline=None)  # the first call may compile
@given(
    problem=problems(),
    seed=st.integers(-(2**63), 2**63),
    rounds=st.integers(0, 4),
    token_floor=st.one_of(st.none(), st.integers(0, 300)),
    tile_floor=st.one_of(st.none(), st.integers(1, 14)),
)
def test_equals_the_plain_python_reference_group_for_group(
    problem, seed, rounds, token_floor, tile_floor
):
    budget, tokens, tiles = problem
    arguments = {
        "budget": budget,
        "key": (seed, 0),
        "rounds": rounds,
        "token_floor": token_floor,
        "tile_floor": tile_floor,
    }
    assert listed(isf(tokens, tiles, **arguments)) == naive.isf(tokens, tiles, **arguments)


def test_equals_the_reference_on_lengths_of_images_and_text():
    generator = np.random.default_rng(0)
    tiles = generator.choice([0, 1, 3, 5, 7], size=700).astype(np.int32)
    tokens = (256 * tiles + generator.integers(20, 900, size=700)).astype(np.int32)
    for budget in (Budget(tokens=4096, tiles=12), Budget(tokens=8192)):
        fast = listed(isf(tokens, tiles, budget=budget, key=KEY))
        assert fast == naive.isf(tokens, tiles, budget=budget, key=KEY)


def test_row_over_budget_is_an_error_and_not_dropped():
    tokens, tiles = columns([5, 9, 12, 3], [1, 1, 1, 1])
    with pytest.raises(ConfigError, match=r"at most 10 tokens, got 12 \(row 2\)"):
        get_grouping("isf")(tokens, tiles, budget=Budget(tokens=10), key=KEY)
    with pytest.raises(ConfigError, match=r"at most 0 tiles, got 1 \(row 0\)"):
        get_grouping("isf")(tokens, tiles, budget=Budget(tokens=20, tiles=0), key=KEY)


def test_group_that_is_open_at_the_end_of_a_walk_is_kept():
    # three rows make a full group; in one round two walks in three end with an open one
    tokens, tiles = columns([10] * 7, [0] * 7)
    for seed in range(20):
        groups = isf(tokens, tiles, budget=Budget(tokens=30), key=(seed,), token_floor=30)
        assert sorted(map(len, listed(groups))) == [1, 3, 3]


def test_every_round_and_the_last_grouping_have_their_own_permutation():
    tokens, tiles = columns([10] * 12, [0] * 12)
    results = {
        # no group reaches the floor: only the permutations tell the results apart
        str(listed(isf(tokens, tiles, budget=Budget(tokens=30), key=KEY, rounds=rounds,
                       token_floor=31)))
        for rounds in range(8)
    }  # fmt: skip
    assert len(results) == 8


def test_groups_come_in_random_order_and_not_in_filtering_order():
    generator = np.random.default_rng(1)
    tokens = generator.integers(100, 2000, size=3000).astype(np.int32)
    groups = isf(tokens, np.zeros_like(tokens), budget=Budget(tokens=4096), key=KEY, rounds=2)
    low = np.flatnonzero(groups.sums(tokens) < 4096 - 128)
    assert len(low) > 20
    half = len(groups) / 2
    assert 0.25 < (low < half).mean() < 0.75


def test_key_decides_the_groups():
    tokens, tiles = columns([10] * 30, [1] * 30)
    budget = Budget(tokens=30)
    first = listed(isf(tokens, tiles, budget=budget, key=(1, 0)))
    assert first == listed(isf(tokens, tiles, budget=budget, key=(1, 0)))
    assert first != listed(isf(tokens, tiles, budget=budget, key=(1, 1)))


def test_more_rounds_fill_groups_better_than_next_fit():
    generator = np.random.default_rng(2)
    tiles = generator.choice([1, 3, 5], size=4000).astype(np.int32)
    tokens = (256 * tiles + generator.integers(20, 200, size=4000)).astype(np.int32)
    budget = Budget(tokens=4096, tiles=15)
    num_groups = [
        len(isf(tokens, tiles, budget=budget, key=KEY, rounds=rounds)) for rounds in (0, 50)
    ]
    assert num_groups[1] < 0.93 * num_groups[0]


def test_negative_rounds_are_refused():
    tokens, tiles = columns([1], [0])
    with pytest.raises(ConfigError, match="rounds must not be negative, got -1"):
        isf(tokens, tiles, budget=Budget(tokens=1), key=KEY, rounds=-1)


def test_columns_of_a_memory_map_do_not_compile_again():
    tokens, tiles = columns([10] * 7, [0] * 7)
    isf(tokens, tiles, budget=Budget(tokens=30), key=KEY)
    for column in (tokens, tiles):
        column.flags.writeable = False
    isf(tokens, tiles, budget=Budget(tokens=30), key=KEY)
    assert len(getattr(_round, "signatures", [()])) == 1
