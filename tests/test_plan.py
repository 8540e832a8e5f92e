"""A plan feeds each row once, in equal steps, and goes on from anywhere."""

import json
import os
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.costs import CostModel
from omniload.errors import ConfigError, StateError
from omniload.grouping import GROUPINGS
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.plan.order import _warn_once
from omniload.plan.windows import Windows
from omniload.types import Budget, Groups
from tests.strategies import problems

BUDGET = Budget(tokens=100, tiles=8)


@pytest.fixture(autouse=True)
def warns_anew():
    _warn_once.cache_clear()


def make_index(count, *, seed=0, most=60):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(2, most, size=count)
    return LengthIndex.from_arrays(
        num_tokens=tokens,
        num_tiles=generator.integers(0, 6, size=count),
        num_loss_tokens=generator.integers(0, tokens),
    )


def slots(plan, first_step=0, last_step=None):
    """Rows by (step, micro-step, rank), from where the plan begins."""
    return [
        plan.micro_batch(step, micro_step, rank).tolist()
        for step in range(first_step, plan.num_steps if last_step is None else last_step)
        for micro_step in range(plan.first_micro_step if step == 0 else 0, plan.accumulation)
        for rank in range(plan.dp_world_size)
    ]


def rows_of(plan, first_step=0, last_step=None):
    return [row for rows in slots(plan, first_step, last_step) for row in rows]


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


def test_small_windows_are_contiguous_and_come_in_a_seeded_order():
    index = make_index(1000)
    orders = []
    for epoch in range(2):
        plan = make_plan(index, budget=BUDGET, epoch=epoch, window_rows=90)
        windows = [plan._order.windows.rows(window) for window in range(12)]
        assert all((np.diff(rows) == 1).all() and 83 <= len(rows) <= 84 for rows in windows)
        orders.append([int(rows[0]) for rows in windows])
        assert sorted(np.concatenate(windows).tolist()) == list(range(1000))
        fed = np.array(rows_of(plan))
        assert set(fed[:83].tolist()) <= set(np.concatenate(windows[:2]).tolist())
    assert orders[0] != orders[1]
    assert orders[0] != sorted(orders[0])


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(0, 700), max_size=30),
    window_rows=st.integers(1, 2000),
    epoch=st.integers(0, 3),
    with_shards=st.booleans(),
    left_out=st.sets(st.integers(0, 5000)),
)
def test_windows_hold_each_row_once_and_none_is_empty(
    sizes, window_rows, epoch, with_shards, left_out
):
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))])
    count = int(starts[-1])
    left = np.array(sorted(row for row in left_out if row < count), np.int64)
    windows = Windows(
        count,
        window_rows=window_rows,
        starts=starts if with_shards else None,
        key=(7, epoch),
        left_out=left,
    )
    assert windows.count == -(-count // window_rows)
    parts = [windows.rows(window) for window in range(windows.count)]
    assert all((np.diff(rows) > 0).all() for rows in parts)
    whole = Windows(
        count, window_rows=window_rows, starts=starts if with_shards else None, key=(7, epoch),
        left_out=np.zeros(0, np.int64),
    )  # fmt: skip
    assert all(len(whole.rows(window)) for window in range(windows.count))
    rows = np.concatenate([np.zeros(0, np.int64), *parts])
    assert sorted(rows.tolist() + left.tolist()) == list(range(count))


def test_large_windows_are_samples_of_the_whole_data_and_read_few_shards():
    # data written set after set: every window must have its share of each
    windows = Windows(
        1_000_000, window_rows=250_000, starts=None, key=(0, 0), left_out=np.zeros(0, np.int64)
    )
    for window in range(4):
        rows = windows.rows(window)
        assert 0.2 < np.mean(rows < 300_000) < 0.4
        assert 240_000 < len(rows) < 260_000
    starts = np.arange(0, 1_000_001, 10_000)
    windows = Windows(
        1_000_000, window_rows=250_000, starts=starts, key=(0, 0), left_out=np.zeros(0, np.int64)
    )
    assert [len(np.unique(windows.rows(window) // 10_000)) for window in range(4)] == [25] * 4


def test_a_window_is_planned_in_a_thread_while_the_one_before_is_used():
    index = make_index(60_000)
    small = make_plan(index, budget=BUDGET, window_rows=1000)
    small.step_groups(0)
    assert small._order._ahead is None
    plan = make_plan(index, budget=BUDGET, window_rows=20_000)
    order = plan._order
    plan.step_groups(0)
    assert order._ahead[0] == 1
    expected = make_plan(index, budget=BUDGET, window_rows=20_000)._order.groups(1)
    found = order.groups(1)
    assert found.rows.tolist() == expected.rows.tolist()
    assert order._ahead is None
    pickle.loads(pickle.dumps(plan)).step_groups(0)


def test_a_fault_in_the_thread_is_raised_where_the_window_is_asked_for():
    plan = make_plan(make_index(60_000), budget=BUDGET, window_rows=20_000)
    order = plan._order
    rows_of_window = order.windows.rows
    order.windows.rows = lambda window: rows_of_window(0) if window == 0 else 1 // 0
    plan.step_groups(0)
    with pytest.raises(ZeroDivisionError):
        order.groups(1)


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


def test_shards_that_are_not_those_of_the_index_are_refused():
    with pytest.raises(ConfigError, match="shard_starts must begin with 0 and end with 100"):
        make_plan(make_index(100), budget=BUDGET, shard_starts=[0, 50])


def test_windows_are_planned_when_needed_and_two_are_kept():
    index = make_index(2000)
    plan = make_plan(index, budget=BUDGET, dp_world_size=4, accumulation=2, window_rows=100)
    order = plan._order
    assert plan.fingerprint
    assert not order._counts
    assert plan.has_step(0)
    assert len(order._counts) == 1
    step = 0
    while plan.has_step(step):
        plan.micro_batch(step, 1, 3)
        assert len(order._kept) <= 2
        assert len(order._counts) <= 2 + step * 8 // 25
        step += 1
    assert step == plan.num_steps


def test_memory_of_a_walk_does_not_grow_with_the_data():
    def peak(count):
        index = make_index(count)
        plan = make_plan(index, budget=BUDGET, dp_world_size=8, window_rows=2_000)
        tracemalloc.start()
        step = 0
        while plan.has_step(step):
            plan.micro_batch(step, 0, 7)
            step += 1
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(4_000)  # imports and compiled code count in the first walk only
    assert peak(40_000) < 1.2 * peak(8_000)


def test_by_default_a_quarter_of_a_million_rows_are_planned_together():
    many = LengthIndex.from_arrays(
        num_tokens=np.ones(9_000_000, np.int32), num_tiles=np.zeros(9_000_000, np.int32)
    )
    assert make_plan(many, budget=BUDGET)._order.num_windows == 36
    assert make_plan(make_index(10), budget=BUDGET)._order.num_windows == 1


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


# --- going on


@pytest.mark.parametrize("window_rows", [None, 17])
@pytest.mark.parametrize("grouping", ["buffered", "isf", "random"])
@pytest.mark.parametrize("sync", ["step", "micro-step"])
def test_start_at_every_step_and_micro_step_is_exact(window_rows, grouping, sync):
    index = make_index(150)
    same = {"budget": BUDGET, "dp_world_size": 3, "accumulation": 2, "grouping": grouping,
            "window_rows": window_rows, "seed": 5, "epoch": 2, "sync": sync}  # fmt: skip
    whole = make_plan(index, **same)
    all_slots = slots(whole)
    for step in range(whole.num_steps + 1):
        for micro_step in range(2 if step < whole.num_steps else 1):
            position = json.loads(json.dumps(whole.position(step, micro_step)))
            rest = make_plan(index, start=position, **same)
            assert rest.first_micro_step == micro_step
            assert rest.num_steps == whole.num_steps - step
            assert slots(rest) == all_slots[(step * 2 + micro_step) * 3 :]
            assert rest.position(0, micro_step) == whole.position(step, micro_step)
            assert rest.position(rest.num_steps) == whole.position(whole.num_steps)
            if step < whole.num_steps:
                assert rest.num_loss_tokens(0) == whole.num_loss_tokens(step)
                assert rest.position(0, 2) == whole.position(step + 1)


def test_position_counts_groups_in_emission_order():
    plan = make_plan(make_index(150), budget=BUDGET, dp_world_size=3, accumulation=2)
    assert plan.position(0) == {"window": 0, "groups": 0}
    assert plan.position(4) == {"window": 0, "groups": 24}
    assert plan.position(4, 1)["groups"] == 27
    num_groups = len([rows for rows in slots(plan) if rows])
    assert plan.position(plan.num_steps) == {"window": 0, "groups": num_groups}


@settings(deadline=None, max_examples=40)
@given(
    runs=st.lists(
        st.tuples(st.sampled_from([8, 6, 16, 1]), st.integers(1, 3), st.integers(0, 5)),
        max_size=5,
    ),
    window_rows=st.one_of(st.none(), st.integers(20, 300)),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    sync=st.sampled_from([None, "step", "micro-step"]),
)
def test_epoch_continued_on_other_ranks_and_accumulation_feeds_each_row_once(
    runs, window_rows, grouping, sync
):
    index = make_index(700)
    same = {"budget": BUDGET, "window_rows": window_rows, "grouping": grouping, "epoch": 3,
            "sync": sync}  # fmt: skip
    fed, start = [], None
    for dp_world_size, accumulation, num_steps in [*runs, (4, 1, None)]:
        plan = make_plan(
            index, start=start, dp_world_size=dp_world_size, accumulation=accumulation, **same
        )
        last = plan.num_steps if num_steps is None else min(num_steps, plan.num_steps)
        fed += rows_of(plan, 0, last)
        start = plan.position(last)
    assert sorted(fed) == list(range(len(index)))
    if sync is None:
        assert fed == rows_of(make_plan(index, **same))


def test_epoch_goes_from_8_over_6_to_16_ranks_at_arbitrary_steps():
    index = make_index(3000)
    eight = make_plan(index, budget=BUDGET, dp_world_size=8, accumulation=2, window_rows=700)
    six = make_plan(
        index, budget=BUDGET, dp_world_size=6, window_rows=700, start=eight.position(11)
    )
    sixteen = make_plan(
        index, budget=BUDGET, dp_world_size=16, window_rows=700, start=six.position(37)
    )
    fed = [*rows_of(eight, 0, 11), *rows_of(six, 0, 37), *rows_of(sixteen)]
    assert sorted(fed) == list(range(3000))
    assert len({plan.order_fingerprint for plan in (eight, six, sixteen)}) == 1
    assert len({plan.fingerprint for plan in (eight, six, sixteen)}) == 3


def test_position_inside_a_step_does_not_fit_other_ranks():
    index = make_index(100)
    position = make_plan(index, budget=BUDGET, dp_world_size=4, accumulation=3).position(1, 2)
    match = r"saved at micro-step 2 of 3 on 4 ranks, now accumulation 3 on 2 ranks"
    with pytest.raises(StateError, match=match):
        make_plan(index, budget=BUDGET, dp_world_size=2, accumulation=3, start=position)


@pytest.mark.parametrize(
    ("start", "match"),
    [
        ({"window": 0}, "must be a position that StepPlan.position gave"),
        ({"window": 0, "groups": -1}, "must be a position"),
        ({"window": 0, "groups": 1.0}, "must be a position"),
        ({"window": 0, "groups": True}, "must be a position"),
        ({"window": 0, "groups": 1, "epoch": 0}, "must be a position"),
        ([0, 1], "must be a position"),
        ({"window": 1, "groups": 0}, "must lie in this epoch of 1 windows: got window 1"),
        ({"window": 0, "groups": 10**6}, "got window 0, group 1000000 of"),
    ],
)
def test_start_that_is_no_position_is_refused(start, match):
    with pytest.raises(StateError, match=match):
        make_plan(make_index(100), budget=BUDGET, start=start)


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


# --- balancing inside a step


class Reversed:
    """Gives the groups of a step to the ranks in reverse."""

    fingerprint = "reversed 1"

    def __init__(self):
        self.calls = 0

    def __call__(self, step, *, num_tokens, num_tiles, budget, dp_world_size, accumulation):
        self.calls += 1
        assert budget == BUDGET
        assert len(step) == dp_world_size * accumulation
        assert len(num_tokens) == len(num_tiles) == len(step.rows)
        order = [group.tolist() for group in step][::-1]
        return Groups(
            rows=np.array([row for group in order for row in group], np.int64),
            offsets=np.cumsum([0, *map(len, order)]),
        )


def test_balance_rearranges_only_the_steps_that_are_asked_for():
    index, balance = make_index(200), Reversed()
    same = {"budget": BUDGET, "dp_world_size": 3, "accumulation": 2}
    plain, plan = make_plan(index, sync=None, **same), make_plan(index, balance=balance, **same)
    assert plan.num_steps == plain.num_steps
    assert balance.calls == 0
    assert slots(plan, 4, 5) == slots(plain, 4, 5)[::-1]
    assert balance.calls == 1
    assert plan.num_loss_tokens(4) == plain.num_loss_tokens(4)
    assert plan.position(5) == plain.position(5)
    rest = make_plan(index, balance=balance, start=plan.position(5, 1), **same)
    assert slots(rest) == slots(plan)[5 * 6 + 3 :]


@settings(deadline=None, max_examples=40)
@given(
    problem=problems(),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    dp_world_size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    sync=st.sampled_from(["step", "micro-step"]),
    uniform=st.booleans(),
)
def test_sync_keeps_steps_their_rows_and_places(
    problem, grouping, dp_world_size, accumulation, sync, uniform
):
    budget, tokens, tiles = problem
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)
    same = {"budget": budget, "grouping": grouping, "dp_world_size": dp_world_size,
            "accumulation": accumulation}  # fmt: skip
    plain = make_plan(index, sync=None, **same)
    plan = make_plan(index, sync=sync, uniform_modality=uniform, **same)
    assert plan.num_steps == plain.num_steps
    assert plan.order_fingerprint == plain.order_fingerprint
    for step in range(plan.num_steps):
        groups, emitted = plan.step_groups(step), plain.step_groups(step)
        assert sorted(groups.rows) == sorted(emitted.rows)
        assert ((np.diff(groups.offsets) > 0) == (np.diff(emitted.offsets) > 0)).all()
        assert (groups.sums(tokens) <= budget.tokens).all()
        assert plan.num_loss_tokens(step) == plain.num_loss_tokens(step)
        assert plan.position(step) == plain.position(step)


def test_balanced_ranks_wait_less_by_default():
    index = make_index(3000)
    ratios = []
    for sync in ("step", None):
        figures = make_plan(
            index, budget=BUDGET, dp_world_size=8, accumulation=4, sync=sync
        ).figures()
        ratios.append((figures.dist_tokens_step, figures.dist_tiles_step))
    assert ratios[0][0] < 0.3 * ratios[1][0]
    assert ratios[0][1] < 0.3 * ratios[1][1]


def test_shuffle_false_keeps_the_order_whatever_the_balance():
    plan = make_plan(make_index(60), budget=BUDGET, dp_world_size=2, shuffle=False)
    assert plan.balance is None


def test_position_inside_a_step_fits_the_same_balance_only():
    index = make_index(100)
    plan = make_plan(index, budget=BUDGET, dp_world_size=2, accumulation=2, sync="step")
    same = {"budget": BUDGET, "dp_world_size": 2, "accumulation": 2, "sync": None}
    make_plan(index, start=plan.position(1), **same)
    with pytest.raises(StateError, match=r"saved with step-balance-\d+ .*, now none.*same sync"):
        make_plan(index, start=plan.position(1, 1), **same)


@pytest.mark.parametrize("grouping", sorted(GROUPINGS))
@pytest.mark.parametrize("sync", [None, "step", "micro-step"])
def test_groups_without_tiles_keep_room_for_a_dummy(grouping, sync):
    index = make_index(600)
    index = LengthIndex.from_arrays(  # two thirds text
        num_tokens=index.num_tokens, num_tiles=index.num_tiles * (np.arange(600) % 3 == 0)
    )
    plan = make_plan(
        index, budget=BUDGET, grouping=grouping, dp_world_size=3, accumulation=2, sync=sync,
        uniform_modality=True, dummy_tokens=30,
    )  # fmt: skip
    assert sorted(rows_of(plan)) == list(range(600))
    bare = 0
    for step in range(plan.num_steps):
        groups = plan.step_groups(step)
        tokens, tiles = groups.sums(index.num_tokens), groups.sums(index.num_tiles)
        assert (tokens[tiles == 0] <= BUDGET.tokens - 30).all()
        bare += int((tiles == 0).sum())
    assert bare > 10


def test_row_that_leaves_no_room_for_a_dummy_is_over_the_budget():
    index = LengthIndex.from_arrays(num_tokens=[95, 95, 20], num_tiles=[0, 1, 0])
    same = {"budget": BUDGET, "uniform_modality": True, "dummy_tokens": 30}
    with pytest.raises(ConfigError) as caught:
        make_plan(index, **same)
    text = str(caught.value)
    assert "1 of 3 rows" in text
    assert "Beside a row without tiles, a dummy image needs 30 tokens" in text
    assert "Budget(tokens=125, tiles=8)" in text
    assert "--max-tokens 70" in text
    assert make_plan(index, oversize="drop", **same).dropped.tolist() == [0]
    text_only = LengthIndex.from_arrays(num_tokens=[95, 20], num_tiles=[0, 0])
    assert make_plan(text_only, **same).num_steps == 2


def test_balance_that_loses_rows_is_refused():
    class Losing(Reversed):
        fingerprint = "losing 1"

        def __call__(self, step, **facts):
            return Groups(rows=step.rows[:0], offsets=np.zeros(len(step) + 1))

    plan = make_plan(make_index(50), budget=BUDGET, balance=Losing())
    with pytest.raises(ConfigError, match="balance losing 1 must keep the rows of a step"):
        plan.micro_batch(0, 0, 0)


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
