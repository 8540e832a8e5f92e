"""A plan goes on from any step or micro-step, on other ranks too."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import StateError
from omniload.grouping import GROUPINGS
from omniload.plan import make_plan
from tests.plan_cases import BUDGET, make_index, rows_of, slots


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


def test_position_inside_a_step_fits_the_same_balance_only():
    index = make_index(100)
    plan = make_plan(index, budget=BUDGET, dp_world_size=2, accumulation=2, sync="step")
    same = {"budget": BUDGET, "dp_world_size": 2, "accumulation": 2, "sync": None}
    make_plan(index, start=plan.position(1), **same)
    with pytest.raises(StateError, match=r"saved with step-balance-\d+ .*, now none.*same sync"):
        make_plan(index, start=plan.position(1, 1), **same)
