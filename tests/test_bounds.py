"""Lower bounds hold for every packing, and the pattern bound is exact where it can be checked."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.bounds import pattern_bound, size_bound
from omniload.errors import ConfigError
from omniload.grouping.buffered import buffered
from omniload.types import Budget
from tests.strategies import problems


def fewest_groups(rows, budget):
    """Try every packing of a few rows: each row into every open group or into a new one."""
    best = len(rows)

    def place(number, groups):
        nonlocal best
        if len(groups) >= best and number < len(rows):
            return
        if number == len(rows):
            best = min(best, len(groups))
            return
        tokens, tiles = rows[number]
        for index, (used, shown, count) in enumerate(groups):
            grown = (used + tokens, shown + tiles, count + 1)
            fits = grown[0] <= budget.tokens
            fits &= budget.tiles is None or grown[1] <= budget.tiles
            if fits and (budget.samples is None or grown[2] <= budget.samples):
                place(number + 1, [*groups[:index], grown, *groups[index + 1 :]])
        place(number + 1, [*groups, (tokens, tiles, 1)])

    place(0, [])
    return best


@settings(deadline=None)  # the first call compiles
@given(problem=problems(max_rows=7), kinds=st.sampled_from([1, 5, 400]))
def test_no_packing_has_fewer_groups_than_the_bounds(problem, kinds):
    budget, tokens, tiles = problem
    rows = list(zip(tokens.tolist(), tiles.tolist(), strict=True))
    best = fewest_groups(rows, budget)
    sizes = size_bound(tokens, tiles, budget)
    patterns = pattern_bound(tokens, tiles, budget, kinds=kinds)
    assert sizes <= patterns <= best


@settings(deadline=None, max_examples=30)
@given(problem=problems(max_rows=60), rounds=st.integers(1, 30))
def test_bound_holds_however_early_the_search_stops(problem, rounds):
    budget, tokens, tiles = problem
    groups = buffered(tokens, tiles, budget=budget, key=(0,))
    assert pattern_bound(tokens, tiles, budget, rounds=rounds) <= len(groups)


def test_pattern_bound_sees_what_does_not_fill_a_budget():
    tokens, tiles = np.full(600, 1300), np.full(600, 5)
    budget = Budget(tokens=9000, tiles=13)  # two rows a group, though 13 / 5 is 2.6
    assert size_bound(tokens, tiles, budget) == 231
    assert pattern_bound(tokens, tiles, budget) == 300


def test_pattern_bound_of_a_mix_that_can_be_worked_out():
    # 5 + 3 tiles fill 8; of 300 fives and 100 threes, 200 fives stay alone
    tiles = np.array([5] * 300 + [3] * 100)
    budget = Budget(tokens=10_000, tiles=8)
    assert pattern_bound(10 * tiles, tiles, budget) == 300
    assert size_bound(10 * tiles, tiles, budget) == 225


def test_rows_far_smaller_than_the_budget_are_no_error():
    assert pattern_bound([1], [0], Budget(tokens=4096)) == 1
    assert pattern_bound([1] * 5000, [0] * 5000, Budget(tokens=4096)) == 2
    assert pattern_bound([1, 4096], [0, 0], Budget(tokens=4096, tiles=9000)) == 2


def test_samples_count_too():
    assert size_bound([1] * 10, [0] * 10, Budget(tokens=100, samples=3)) == 4
    assert pattern_bound([1] * 10, [0] * 10, Budget(tokens=100, samples=3)) == 4


def test_no_rows_need_no_groups():
    assert size_bound([], [], Budget(tokens=1, tiles=0)) == 0
    assert pattern_bound([], [], Budget(tokens=1, tiles=0)) == 0


def test_wrong_arguments_are_refused():
    with pytest.raises(ConfigError, match="every row must fit the budget"):
        pattern_bound([5], [0], Budget(tokens=4))
    with pytest.raises(ConfigError, match="kinds must be at least 1, got 0"):
        pattern_bound([5], [0], Budget(tokens=9), kinds=0)
