"""A plan feeds each row once, in equal steps, and goes on from anywhere."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.grouping import GROUPINGS
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.plan.order import _warn_once
from omniload.types import Budget
from tests.plan_cases import BUDGET, Reversed, make_index, rows_of, slots
from tests.strategies import problems


@pytest.fixture(autouse=True)
def warns_anew():
    _warn_once.cache_clear()


@settings(deadline=None)
@given(
    problem=problems(),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    dp_world_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    window_rows=st.one_of(st.none(), st.integers(1, 70)),
    shuffle=st.booleans(),
)
def test_each_row_is_fed_once_in_equal_steps_of_emission_order(
    problem, grouping, dp_world_size, accumulation, window_rows, shuffle
):
    budget, tokens, tiles = problem
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)
    same = {"budget": budget, "grouping": grouping, "window_rows": window_rows, "shuffle": shuffle,
            "sync": None}  # fmt: skip
    plan = make_plan(index, dp_world_size=dp_world_size, accumulation=accumulation, **same)
    fed = slots(plan)
    assert sorted(row for rows in fed for row in rows) == list(range(len(index)))

    per_step = dp_world_size * accumulation
    assert len(fed) == plan.num_steps * per_step
    emission = slots(make_plan(index, **same))
    assert fed == emission + [[]] * (len(fed) - len(emission))
    assert len(fed) - len(emission) < per_step
    fillers = [fed[rank::dp_world_size].count([]) for rank in range(dp_world_size)]
    assert max(fillers) - min(fillers) <= 1

    loss = [plan.num_loss_tokens(step) for step in range(plan.num_steps)]
    assert loss == [
        sum(int(index.num_loss_tokens[rows].sum()) for rows in fed[at : at + per_step])
        for at in range(0, len(fed), per_step)
    ]


HARD = {
    "empty index": ([], 0),
    "one sample": ([100], 1),
    "fewer groups than ranks": ([60, 60, 60], 1),
    "all equal": ([50] * 64, 4),
    "one giant": ([1] * 300 + [100], 1),
}


@pytest.mark.parametrize("case", HARD)
def test_hard_inputs_are_planned(case):
    tokens, num_steps = HARD[case]
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=[0] * len(tokens))
    plan = make_plan(index, budget=Budget(tokens=100), dp_world_size=8)
    assert plan.num_steps == num_steps
    assert sorted(rows_of(plan)) == list(range(len(tokens)))
    assert plan.has_step(0) == (num_steps > 0)
    assert not plan.has_step(num_steps)


def test_loss_tokens_of_a_step_may_pass_int32():
    most = 2**31 - 1
    index = LengthIndex.from_arrays(num_tokens=[most] * 4, num_tiles=[0] * 4)
    plan = make_plan(index, budget=Budget(tokens=most), dp_world_size=4)
    assert plan.num_loss_tokens(0) == 4 * (most - 1)


def test_order_without_shuffle_is_that_of_the_index():
    index = make_index(200)
    plan = make_plan(
        index, budget=BUDGET, shuffle=False, dp_world_size=3, accumulation=2, window_rows=30
    )
    assert rows_of(plan) == list(range(200))


def test_grouping_that_shuffle_false_leaves_unused_is_reported_once(caplog):
    index = make_index(20)
    for epoch in range(2):
        make_plan(index, budget=BUDGET, shuffle=False, grouping="length", epoch=epoch)
    assert caplog.text.count("grouping='length' is unused") == 1


def test_epochs_and_seeds_give_other_groups():
    index = make_index(200)
    plans = [
        str(slots(make_plan(index, budget=BUDGET, seed=seed, epoch=epoch)))
        for seed in (0, 1, -1, 2**63)
        for epoch in (0, 1)
    ]
    assert len(set(plans)) == 8


def test_excluded_rows_are_left_out_and_change_the_fingerprint():
    index = make_index(100)
    whole = make_plan(index, budget=BUDGET)
    plan = make_plan(index, budget=BUDGET, exclude=[7, 3, 7])
    assert sorted(rows_of(plan)) == sorted({*range(100)} - {3, 7})
    assert plan.excluded.tolist() == plan.dropped.tolist() == [3, 7]
    assert plan.order_fingerprint != whole.order_fingerprint
    same = make_plan(index, budget=BUDGET, exclude=np.array([], np.int64))
    assert same.order_fingerprint == whole.order_fingerprint
    with pytest.raises(ConfigError, match="exclude must hold rows from 0 to 99, got 100"):
        make_plan(index, budget=BUDGET, exclude=[100])
    with pytest.raises(ConfigError, match=r"exclude must hold rows, integers \(n,\), got float64"):
        make_plan(index, budget=BUDGET, exclude=[1.5])


def test_a_row_over_budget_that_is_excluded_is_no_error():
    plan = make_plan(oversize_index(), budget=BUDGET, exclude=[5, 40, 41, 60, 2])
    assert plan.dropped.tolist() == [2, 5, 40, 41, 60]


# --- rows over the budget


def oversize_index():
    index = make_index(100)
    tokens, tiles = index.num_tokens.copy(), index.num_tiles.copy()
    tokens[[5, 40]] = 250, 101
    tiles[[41, 60]] = 9, 80
    return LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)


def test_rows_over_budget_are_an_error_that_names_the_worst_and_the_remedy():
    with pytest.raises(ConfigError) as caught:
        make_plan(oversize_index(), budget=BUDGET)
    text = str(caught.value)
    assert "4 of 100 rows are over Budget(tokens=100, tiles=8, samples=None)" in text
    places = [text.index(f"row {row}: ") for row in (60, 5, 41, 40)]
    assert places == sorted(places)
    assert "Raise it to Budget(tokens=250, tiles=80)" in text
    assert "oversize='drop'" in text
    assert "--max-tokens 100" in text


def test_error_lists_ten_rows_at_most():
    index = make_index(1000, most=300)
    with pytest.raises(ConfigError) as caught:
        make_plan(index, budget=BUDGET)
    assert str(caught.value).count(" tokens, ") == 10


def test_dropped_rows_are_listed_and_reported_once_and_all_others_are_fed(caplog):
    for epoch in range(2):
        plan = make_plan(
            oversize_index(), budget=BUDGET, oversize="drop", dp_world_size=3, window_rows=30,
            epoch=epoch,
        )  # fmt: skip
        assert plan.dropped.tolist() == [5, 40, 41, 60]
        assert plan.dropped.dtype == np.int64
        assert sorted(rows_of(plan)) == sorted({*range(100)} - {5, 40, 41, 60})
    assert caplog.text.count("4 of 100 rows are over") == 1
    assert "oversize='drop') and listed in `dropped`" in caplog.text


def test_plan_of_rows_that_are_all_dropped_is_empty():
    index = LengthIndex.from_arrays(num_tokens=[7, 8], num_tiles=[0, 0])
    plan = make_plan(index, budget=Budget(tokens=6), oversize="drop")
    assert plan.num_steps == 0
    assert plan.dropped.tolist() == [0, 1]


# --- fingerprints, settings, errors


def test_fingerprint_changes_with_everything_that_decides_the_plan():
    base = {"budget": BUDGET}
    others = [
        {"budget": Budget(tokens=100, tiles=9)},
        {"budget": Budget(tokens=100, tiles=8, samples=4)},
        {"dp_world_size": 2},
        {"accumulation": 2},
        {"grouping": "random"},
        {"seed": 1},
        {"epoch": 1},
        {"shuffle": False},
        {"oversize": "drop"},
        {"window_rows": 50},
        {"start": {"window": 0, "groups": 4}},
        {"balance": Reversed()},
        {"sync": None},
        {"sync": "micro-step"},
        {"cost": CostModel(tile=1.0)},
        {"uniform_modality": True},
        {"uniform_modality": True, "dummy_tokens": 5},
    ]
    index = make_index(100)
    found = [make_plan(index, **{**base, **other}).fingerprint for other in [{}, *others]]
    found.append(make_plan(make_index(100, seed=1), budget=BUDGET).fingerprint)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in found)
    assert len(set(found)) == len(found)
    assert found[0] == make_plan(make_index(100), budget=BUDGET).fingerprint


def test_order_fingerprint_is_the_same_on_other_ranks_only():
    index = make_index(100)
    base = make_plan(index, budget=BUDGET)
    ranks = make_plan(index, budget=BUDGET, dp_world_size=3, accumulation=2, balance=Reversed())
    assert ranks.order_fingerprint == base.order_fingerprint
    assert make_plan(index, budget=BUDGET, seed=1).order_fingerprint != base.order_fingerprint


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"dp_world_size": 0}, "dp_world_size must be at least 1 and at most 1048576, got 0"),
        ({"accumulation": 2**40}, "accumulation must be at least 1 and at most 1048576"),
        ({"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
        ({"shuffle": 1}, "shuffle must be True or False, got 1"),
        ({"oversize": ["drop"]}, r"oversize must be 'error' or 'drop', got \['drop'\]"),
        ({"oversize": np.array([1, 2])}, "oversize must be 'error' or 'drop'"),
        ({"sync": np.array([1, 2])}, "sync must be"),
        ({"balance": len}, "balance must be callable and have a fingerprint.*got builtin"),
        ({"balance": 3}, "balance must be callable and have a fingerprint.*got int"),
        ({"accumulation": 1.5}, "accumulation must be an integer, got 1.5"),
        ({"grouping": "best"}, "grouping must be one of buffered, isf"),
        ({"seed": "a"}, "seed must be an integer, got 'a'"),
        ({"epoch": -1}, "epoch must be at least 0, got -1"),
        ({"oversize": "truncate"}, "oversize must be 'error' or 'drop', got 'truncate'"),
        ({"window_rows": 0}, "window_rows must be at least 1, got 0"),
        ({"budget": 4096}, r"budget must be an omniload.Budget, got 4096"),
        ({"sync": "always"}, "sync must be 'step', 'micro-step' or None, got 'always'"),
        ({"cost": 3}, "cost must be an omniload.CostModel or None, got 3"),
        ({"uniform_modality": 1}, "uniform_modality must be True or False, got 1"),
        ({"uniform_modality": True, "dummy_tokens": -1}, "dummy_tokens must be .*at least 0"),
        ({"uniform_modality": True, "dummy_tokens": 100}, "fewer than 100 tokens, got 100"),
    ],
)
def test_wrong_settings_are_refused(wrong, match):
    with pytest.raises(ConfigError, match=match):
        make_plan(make_index(10), **{"budget": BUDGET, **wrong})


@pytest.mark.parametrize("value", [None, 0.0, "0", True, [0], np.float64(0)])
def test_steps_that_are_no_integers_are_refused(value):
    plan = make_plan(make_index(20), budget=BUDGET)
    for call in (
        plan.has_step,
        plan.step_groups,
        plan.num_loss_tokens,
        plan.position,
        lambda step: plan.micro_batch(step, 0, 0),
        lambda micro_step: plan.micro_batch(0, micro_step, 0),
        lambda dp_rank: plan.micro_batch(0, 0, dp_rank),
        lambda micro_step: plan.position(0, micro_step),
    ):
        with pytest.raises(ConfigError, match=r"(step|micro_step|dp_rank) must be an integer, got"):
            call(value)
    assert len(plan.micro_batch(np.int64(0), np.int32(0), np.uint8(0)))


def test_lengths_that_are_no_index_are_refused():
    with pytest.raises(ConfigError, match=r"expected LengthIndex.from_arrays\(.*got ndarray"):
        make_plan(np.ones(3, np.int32), budget=BUDGET)


def test_steps_micro_steps_and_ranks_that_do_not_exist_are_refused():
    plan = make_plan(make_index(100), budget=BUDGET, dp_world_size=2, accumulation=2)
    end = plan.num_steps
    for call, match in (
        (lambda: plan.micro_batch(end, 0, 0), f"step must be at least 0 and below {end}"),
        (lambda: plan.micro_batch(-1, 0, 0), "step must be at least 0"),
        (lambda: plan.micro_batch(0, 2, 0), "micro_step must be at least 0 and below 2, got 2"),
        (lambda: plan.micro_batch(0, 0, 2), "dp_rank must be at least 0 and below 2, got 2"),
        (lambda: plan.num_loss_tokens(end), "step must be at least 0"),
        (lambda: plan.position(end + 1), f"step must be between 0 and {end}, got {end + 1}"),
        (lambda: plan.position(end, 1), f"step must be between 0 and {end}"),
        (lambda: plan.position(0, 3), "micro_step must be between 0 and 2, got 3"),
    ):
        with pytest.raises(ConfigError, match=match):
            call()


def test_plan_travels_to_another_process():
    plan = make_plan(make_index(100), budget=BUDGET, dp_world_size=2)
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.fingerprint == plan.fingerprint
    assert slots(copy) == slots(plan)


# --- golden plans
GOLDEN = Path(__file__).parent / "golden" / "plans.json"


def golden_cases():
    plain = {"sync": None}
    cases = {name: {"grouping": name, **plain} for name in GROUPINGS}
    cases["default"] = {}
    cases["sync micro-step"] = {"sync": "micro-step"}
    cases["cost"] = {"cost": CostModel(tile=300.0, token=1.0, token_pair=0.001)}
    cases["uniform modality"] = {"uniform_modality": True, "dummy_tokens": 300}
    cases["isf, seed 1, epoch 2"] = {"grouping": "isf", "seed": 1, "epoch": 2, **plain}
    cases["isf, windows of 40"] = {"grouping": "isf", "window_rows": 40, **plain}
    cases["isf, tokens only"] = {"grouping": "isf", "budget": Budget(tokens=4096), **plain}
    cases["not shuffled"] = {"shuffle": False}
    return cases


def golden_plans():
    """Plans over lengths that are written out as a formula, so that no generator decides them."""
    rows = np.arange(130)
    tiles = np.array([0, 1, 1, 3, 5, 5, 4])[rows * rows % 7]
    index = LengthIndex.from_arrays(num_tokens=256 * tiles + 20 + rows * 37 % 411, num_tiles=tiles)
    plans = {}
    for name, case in golden_cases().items():
        plan = make_plan(
            index, **{"budget": Budget(tokens=4096, tiles=13), **case},
            dp_world_size=2, accumulation=2,
        )  # fmt: skip
        plans[name] = {"fingerprint": plan.fingerprint, "micro_batches": slots(plan)}
    return plans


def compare_with_golden(found):
    want = json.loads(GOLDEN.read_text())
    changed = [name for name in found if found[name] != want.get(name)]
    assert not changed, (
        f"other plans than before: {changed}. Runs in progress can't be resumed, so a changed "
        "order needs a CHANGELOG entry labelled sample-order and a higher version in GROUPINGS; "
        "then write the file anew with: python -m tests.test_plan --write"
    )
    assert list(found) == list(want)


def test_plans_are_those_of_the_golden_file():
    compare_with_golden(golden_plans())


def test_plans_without_compiled_code_are_those_of_the_golden_file():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.test_plan"],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=GOLDEN.parent.parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    compare_with_golden(json.loads(done.stdout))


if __name__ == "__main__":
    entries = [f"{json.dumps(name)}: {json.dumps(plan)}" for name, plan in golden_plans().items()]
    text = "{\n" + ",\n".join(entries) + "\n}\n"
    if "--write" in sys.argv:
        GOLDEN.write_text(text)
    else:
        print(text)
