"""The budget that is chosen from the data, and what it says of itself."""

import numpy as np
import pytest

from omniload.errors import ConfigError
from omniload.grouping.budgets import auto_budget
from omniload.index import LengthIndex
from omniload.types import Budget
from tests.test_balance import lengths


def index_of(tokens, tiles):
    return LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)


def test_budget_is_the_best_of_those_around_the_matched_one():
    tokens, tiles = lengths(6000)
    choice = auto_budget(index_of(tokens, tiles), tokens=4096)
    matched = -(-4096 * int(tiles.sum()) // int(tokens.sum()))
    tried = [trial.budget.tiles for trial in choice.trials]
    assert tried == list(range(matched - 2, matched + 3))
    times = {trial.budget.tiles: trial.time for trial in choice.trials}
    assert times[choice.budget.tiles] <= min(times.values()) + 0.001
    assert min(times.values()) >= 1
    assert choice.budget.tokens == 4096


def test_choice_is_a_function_of_the_data_and_draws_some_rows_only():
    tokens, tiles = lengths(6000)
    index = index_of(tokens, tiles)
    first, again = (auto_budget(index, tokens=4096, rows=1500) for _ in range(2))
    assert first == again
    assert all(trial.groups < 600 for trial in first.trials)


def test_choice_says_what_it_costs_to_be_one_off():
    tokens, tiles = lengths(3000)
    choice = auto_budget(index_of(tokens, tiles), tokens=4096)
    cap = choice.budget.tiles
    text = str(choice)
    assert text.startswith(f"budget of 4096 tokens: {cap} tiles, estimated time lost ")
    if cap < choice.trials[-1].budget.tiles:
        assert f"{cap + 1} tiles +" in text


def test_every_image_fits_the_chosen_budget():
    tokens, tiles = np.array([100] * 50 + [300]), np.array([0] * 50 + [12])
    choice = auto_budget(index_of(tokens, tiles), tokens=300)
    assert choice.budget.tiles >= 12
    tokens[-1] = 301  # over the budget: not counted
    assert auto_budget(index_of(tokens, tiles), tokens=300).budget.tiles == 0


def test_more_accumulation_never_makes_a_trial_slower_than_it_was():
    tokens, tiles = lengths(6000)
    once, four = (
        auto_budget(index_of(tokens, tiles), tokens=4096, accumulation=times).trials
        for times in (1, 4)
    )
    assert all(later.time <= first.time for first, later in zip(once, four, strict=True))


@pytest.mark.parametrize("count", [1, 2, 70])
def test_few_rows_are_enough(count):
    tokens, tiles = lengths(count)
    choice = auto_budget(index_of(tokens, tiles), tokens=5000, accumulation=3, samples=2)
    assert choice.budget.samples == 2


def test_wrong_arguments_are_refused():
    index = index_of(np.array([10]), np.array([1]))
    with pytest.raises(ConfigError, match="at most 5 tokens, got 10 at least, in 1 rows"):
        auto_budget(index, tokens=5)
    with pytest.raises(ConfigError, match="got no rows at least"):
        auto_budget(index_of([], []), tokens=5)
    for name, value in (("scan", -1), ("rows", 0), ("accumulation", 0)):
        with pytest.raises(ConfigError, match=f"{name} must be at least"):
            auto_budget(index, tokens=50, **{name: value})


def test_budget_auto_prints_what_it_chose(capsys):
    index = LengthIndex.from_arrays(
        num_tokens=np.arange(3000) % 700 + 300, num_tiles=np.arange(3000) % 5 + 1
    )
    budget = Budget.auto(index, tokens=4096)
    assert budget == auto_budget(index, tokens=4096).budget
    assert f"budget of 4096 tokens: {budget.tiles} tiles" in capsys.readouterr().out
    Budget.auto(index, tokens=4096, verbose=False)
    assert capsys.readouterr().out == ""
