"""Rows are planned a window at a time: which rows, when, and in what memory."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.plan.windows import Windows
from tests.plan_cases import BUDGET, make_index, rows_of


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


def test_by_default_a_quarter_of_a_million_rows_are_planned_together():
    many = LengthIndex.from_arrays(
        num_tokens=np.ones(9_000_000, np.int32), num_tiles=np.zeros(9_000_000, np.int32)
    )
    assert make_plan(many, budget=BUDGET)._order.num_windows == 36
    assert make_plan(make_index(10), budget=BUDGET)._order.num_windows == 1
