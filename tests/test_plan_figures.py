"""The figures of a plan are those of their definitions, computed slowly from its micro-batches."""

import json
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.grouping import GROUPINGS
from omniload.index import LengthIndex
from omniload.metrics import dist_ratio, pad_ratio
from omniload.plan import make_plan
from omniload.randomness import randomness
from omniload.tools.lengths import make_lengths
from omniload.types import Budget, Groups
from tests.strategies import problems

COST = CostModel(tile=3.0, token=0.5, token_pair=1e-3, fixed=2.0)


class Turned:
    """Gives each group of a step to the next rank, and moves a sample to where none was."""

    fingerprint = "turned 1"

    def __call__(self, step, *, num_tokens, num_tiles, budget, dp_world_size, accumulation):
        groups = [group.tolist() for group in step]
        groups = groups[1:] + groups[:1]
        largest = max(range(len(groups)), key=lambda place: len(groups[place]))
        if [] in groups and len(groups[largest]) > 1:
            groups[groups.index([])] = [groups[largest].pop()]
        return Groups(
            rows=np.array([row for group in groups for row in group], np.int64),
            offsets=np.cumsum([0, *map(len, groups)]),
        )


def loads_of(plan, index, cost):
    """Tiles, tokens and time: lists (steps, micro-steps, ranks)."""
    found = {"tiles": [], "tokens": [], "time": []}
    for step in range(plan.num_steps):
        for values in found.values():
            values.append([[0] * plan.dp_world_size for _ in range(plan.accumulation)])
        for micro_step in range(plan.accumulation):
            for rank in range(plan.dp_world_size):
                rows = plan.micro_batch(step, micro_step, rank)
                tiles, tokens = index.num_tiles[rows], index.num_tokens[rows].astype(float)
                for name, value in (
                    ("tiles", tiles.sum()),
                    ("tokens", tokens.sum()),
                    ("time", cost.cost(tiles.sum(), tokens.sum(), (tokens**2).sum())),
                ):
                    found[name][step][micro_step][rank] = float(value)
    return found


def check_loads(found, loads):
    for step, slots in enumerate(loads):
        ranks = np.sum(slots, axis=0)
        assert found.least[step] == pytest.approx(min(ranks))
        assert found.mean[step] == pytest.approx(sum(ranks) / len(ranks))
        assert found.most[step] == pytest.approx(max(ranks))
        assert found.most_micro_step[step] == pytest.approx(sum(map(max, slots)))
        assert found.dist_step[step] == pytest.approx(dist_ratio(ranks))
        assert found.dist_micro_step[step] == pytest.approx(dist_ratio(slots))


@settings(deadline=None, max_examples=40)
@given(
    problem=problems(),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    dp_world_size=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    window_rows=st.one_of(st.none(), st.integers(5, 70)),
    balance=st.sampled_from([None, Turned()]),
)
def test_loads_and_sizes_of_every_step_are_those_of_its_micro_batches(
    problem, grouping, dp_world_size, accumulation, window_rows, balance
):
    budget, tokens, tiles = problem
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)
    plan = make_plan(
        index, budget=budget, dp_world_size=dp_world_size, accumulation=accumulation,
        grouping=grouping, window_rows=window_rows, balance=balance,
    )  # fmt: skip
    figures = plan.figures(cost=COST)
    assert figures.num_steps == plan.num_steps == len(figures.steps.num_tokens)
    loads = loads_of(plan, index, COST)
    for name, values in loads.items():
        check_loads(getattr(figures.steps, name), values)
    for step in range(plan.num_steps):
        rows = plan.step_groups(step).rows
        assert figures.steps.num_samples[step] == len(rows)
        assert figures.steps.num_tokens[step] == index.num_tokens[rows].sum()
        assert figures.steps.num_tiles[step] == index.num_tiles[rows].sum()
        assert figures.steps.num_loss_tokens[step] == plan.num_loss_tokens(step)
    assert figures.num_rows == len(index)
    assert figures.num_fillers == plan.num_steps * dp_world_size * accumulation - figures.num_groups
    assert figures.num_groups >= figures.size_bound
    assert json.loads(json.dumps(figures.as_dict(steps=True))) == figures.as_dict(steps=True)
    assert "steps" not in figures.as_dict()


def test_figures_of_a_plan_by_hand():
    # next fit in index order: [4, 6], [10], [2], [8], [5, 5] in steps of 2 ranks x 2
    index = LengthIndex.from_arrays(
        num_tokens=[4, 6, 10, 2, 8, 5, 5], num_tiles=[1, 1, 0, 3, 1, 0, 2],
        num_loss_tokens=[1, 1, 1, 1, 1, 2, 2],
    )  # fmt: skip
    plan = make_plan(
        index, budget=Budget(tokens=10, tiles=3), dp_world_size=2, accumulation=2, shuffle=False,
        oversize="drop",
    )  # fmt: skip
    assert [len(plan.step_groups(0)[slot]) for slot in range(4)] == [2, 1, 1, 1]
    found = plan.figures(cost=CostModel(token=1.0))
    assert found.grouping == "sequential"
    assert (found.num_groups, found.num_steps, found.num_fillers) == (5, 2, 3)
    assert (found.size_bound, found.groups_over_bound) == (4, 1.25)
    assert found.fill_tokens == 40 / 50
    assert found.fill_tiles == pytest.approx(8 / 15)
    assert found.pad_ratio == 0
    assert found.pad_ratio_unpacked == pytest.approx(pad_ratio([[4, 6], [10], [2], [8], [5, 5]]))
    # the first step alone is full: ranks hold 10 + 2 and 10 + 8 tokens, 2 + 3 and 0 + 1 tiles
    assert found.dist_tokens_step == pytest.approx(6 / 36)
    assert found.dist_tiles_step == pytest.approx(4 / 10)
    assert found.dist_tokens_micro_step == pytest.approx((0 + 6 / 16) / 2)
    assert found.dist_time_step == found.dist_tokens_step
    assert (found.samples_per_step, found.loss_tokens_per_step) == (5, 5)
    # time is lost in the last step too, where one of two ranks has nothing to do
    assert found.time_lost_step == pytest.approx(1 - (15 + 5) / (18 + 10))
    assert found.time_lost_micro_step == pytest.approx(1 - (15 + 5) / (10 + 8 + 10))
    assert (found.variance_ratio, found.lag1) == (1.0, 0.0)  # one full step says nothing


def test_bounds_count_samples_and_forgo_tiles_that_have_no_limit():
    index = make_lengths(200)
    by_samples = make_plan(index, budget=Budget(tokens=10**6, samples=3)).figures()
    assert by_samples.size_bound == by_samples.num_groups == math.ceil(200 / 3)
    assert by_samples.fill_tiles is None
    assert make_plan(index, budget=Budget(tokens=4096, tiles=9)).figures().size_bound == math.ceil(
        index.num_tiles.sum() / 9
    )


def test_linear_programme_gives_a_sharper_bound_where_it_is_asked_for():
    # three rows of 5 tiles don't fit 13, which the sums don't see
    index = LengthIndex.from_arrays(num_tokens=[10, 20, 30] * 40, num_tiles=[5] * 120)
    same = {"budget": Budget(tokens=4096, tiles=13), "window_rows": 50}
    plan = make_plan(index, **same)
    found = plan.figures(lp_bound=True)
    assert found.lp_bound == 60 > found.size_bound == math.ceil(600 / 13)
    assert found.groups_over_bound == found.num_groups / 60
    assert plan.figures().lp_bound is None
    assert plan.figures(lp_bound=61).groups_over_bound == found.num_groups / 61
    start = plan.position(10)
    rest = make_plan(index, start=start, **same).figures(lp_bound=True)
    assert rest.lp_bound == math.ceil(rest.num_rows / 2)


def test_dropped_rows_are_counted_and_left_out():
    index = make_lengths(300)
    budget = Budget(tokens=1000)
    figures = make_plan(index, budget=budget, oversize="drop").figures()
    over = index.num_tokens > 1000
    assert (figures.num_dropped, figures.num_rows) == (over.sum(), (~over).sum())
    assert figures.size_bound == math.ceil(index.num_tokens[~over].sum() / 1000)


def test_empty_plan_has_figures():
    index = LengthIndex.from_arrays(num_tokens=[], num_tiles=[])
    figures = make_plan(index, budget=Budget(tokens=10, tiles=2), dp_world_size=4).figures()
    assert (figures.num_groups, figures.num_steps, figures.num_fillers) == (0, 0, 0)
    assert (figures.groups_over_bound, figures.dist_time_step) == (1.0, 0.0)
    json.dumps(figures.as_dict(steps=True))
    assert make_plan(index, budget=Budget(tokens=10)).figures(max_steps=3).num_steps == 0


def test_rest_of_an_epoch_has_the_figures_of_its_steps():
    index = make_lengths(3000)
    same = {"budget": Budget(tokens=4096, tiles=13), "dp_world_size": 4, "window_rows": 700}
    whole = make_plan(index, **same)
    rest = make_plan(index, start=whole.position(50), **same).figures().steps
    assert rest.num_loss_tokens.tolist() == whole.figures().steps.num_loss_tokens[50:].tolist()


def test_loads_of_a_few_steps_stand_for_all():
    index = make_lengths(5000)
    same = {"budget": Budget(tokens=4096, tiles=13), "dp_world_size": 4}
    plan = make_plan(index, balance=Turned(), **same)
    whole, some = plan.figures(), plan.figures(max_steps=5)
    last = whole.num_steps - 1
    assert some.steps.measured.tolist() == [round(k * last / 4) for k in range(5)]
    for name in ("tiles", "tokens", "time"):
        few, all_of_them = getattr(some.steps, name), getattr(whole.steps, name)
        assert few.most.tolist() == all_of_them.most[some.steps.measured].tolist()
    assert some.steps.num_tokens.tolist() == whole.steps.num_tokens.tolist()
    assert some.variance_ratio == whole.variance_ratio
    assert plan.figures(max_steps=10**6).dist_time_step == whole.dist_time_step
    with pytest.raises(ConfigError, match="max_steps must be at least 1, got 0"):
        plan.figures(max_steps=0)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("window_rows", [None, 5000])
def test_randomness_is_that_of_the_groups_as_they_are_fed(grouping, window_rows):
    index = make_lengths(20_000)
    plan = make_plan(
        index, budget=Budget(tokens=4096, tiles=13), dp_world_size=4, accumulation=2,
        grouping=grouping, window_rows=window_rows, sync=None,
    )  # fmt: skip
    steps = [plan.step_groups(step) for step in range(plan.num_steps)]
    fed = Groups(
        rows=np.concatenate([step.rows for step in steps]),
        offsets=np.cumsum([0, *np.concatenate([np.diff(step.offsets) for step in steps])]),
    )
    whole = fed.offsets[: plan.figures().num_groups + 1]
    wanted = randomness(Groups(rows=fed.rows, offsets=whole), index.num_tokens, groups_per_step=8)
    found = plan.figures()
    assert found.variance_ratio == pytest.approx(wanted.variance_ratio, rel=1e-9)
    assert found.lag1 == pytest.approx(wanted.lag1, abs=1e-9)
    assert found.intra_group == pytest.approx(wanted.intra_group, abs=1e-9)


def test_randomness_tells_a_shuffle_from_sorted_rows():
    index = make_lengths(20_000)
    budget = Budget(tokens=4096, tiles=13)
    found = {
        name: make_plan(index, budget=budget, dp_world_size=8, grouping=name, sync=None).figures()
        for name in ("random", "device")
    }
    assert 0.75 < found["random"].variance_ratio < 1.3
    assert abs(found["random"].lag1) < 0.1
    assert found["device"].variance_ratio > 5
    assert found["device"].lag1 > 0.5


def test_steps_are_measured_many_at_once():
    index = make_lengths(100_000)
    same = {"budget": Budget(tokens=4096, tiles=13), "dp_world_size": 4, "grouping": "random"}
    plan = make_plan(index, sync=None, **same)
    assert plan.num_steps > 7000
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    plan.figures()
    sys.setprofile(None)
    assert calls < 3000  # Python calls; a loop over the steps makes some for each
