"""Plans whose steps are balanced: the same rows, less waiting, room for a dummy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.grouping import GROUPINGS
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.types import Groups
from tests.plan_cases import BUDGET, Reversed, make_index, rows_of, slots
from tests.strategies import problems


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
