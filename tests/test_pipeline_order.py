"""Orders of a step lose no micro-batch, never slow a step down, and are the same everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.balance import StepBalance
from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.order import PipelineOrder, arrange_micro_batches
from omniload.pipeline.partition import plan_pipeline
from omniload.pipeline.predict import stage_times
from omniload.pipeline.presets import preset
from omniload.pipeline.simulate import StageTimes, simulate
from omniload.plan import make_plan
from omniload.plan.balance import balance_name
from omniload.types import Budget, Groups

ROOT = Path(__file__).resolve().parent.parent
BUDGET = Budget(tokens=4096, tiles=11)


@st.composite
def steps(draw):
    num_stages, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    number = ranks * draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    still = np.zeros((num_stages - 1, number), np.int64)
    times = StageTimes(
        forward=rng.integers(0, 100, (num_stages, number)),
        backward=rng.integers(0, 200, (num_stages, number)),
        transfer=still,
        gradient_transfer=still,
    )
    return times, ranks


def step_ns(times, orders):
    return simulate([times.take(order) for order in orders]).step_ns


@settings(deadline=None)
@given(steps(), st.integers(0, 60), st.integers(0, 3))
def test_every_micro_batch_runs_once_and_trials_never_slow_a_step_down(step, trials, seed):
    times, ranks = step
    dealt = arrange_micro_batches(times, data_parallel=ranks, trials=0)
    found = arrange_micro_batches(times, data_parallel=ranks, trials=trials, seed=seed)
    assert found.shape == (ranks, times.num_micro_batches // ranks)
    assert sorted(found.reshape(-1)) == list(range(times.num_micro_batches))
    assert step_ns(times, found) <= step_ns(times, dealt)
    again = arrange_micro_batches(times, data_parallel=ranks, trials=trials, seed=seed)
    assert (found == again).all()


@settings(deadline=None)
@given(steps(), st.data())
def test_fixed_micro_batches_stay_in_their_slots(step, data):
    times, ranks = step
    number = times.num_micro_batches
    fixed = np.array(data.draw(st.lists(st.booleans(), min_size=number, max_size=number)))
    found = arrange_micro_batches(times, data_parallel=ranks, trials=40, fixed=fixed)
    slots = np.arange(number).reshape(-1, ranks).T
    assert (found[fixed[slots]] == slots[fixed[slots]]).all()
    assert sorted(found.reshape(-1)) == list(range(number))


def test_small_micro_batches_run_first_and_last():
    sizes = np.arange(1, 9) * 100
    times = StageTimes.from_seconds([sizes * 1e-9] * 2, [sizes * 1e-9] * 2)
    assert arrange_micro_batches(times, trials=0).tolist() == [[0, 2, 4, 6, 7, 5, 3, 1]]


def test_ranks_get_loads_as_even_as_longest_first_makes_them():
    sizes = np.array([9, 8, 7, 6, 5, 4, 3, 2]) * 1e-6
    times = StageTimes.from_seconds([sizes], [sizes])
    found = arrange_micro_batches(times, data_parallel=2, trials=0)
    assert sizes[found].sum(axis=1).tolist() == pytest.approx([22e-6, 22e-6])


@pytest.fixture(scope="module")
def table_and_plan():
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    one = Shapes(num_tiles=[11], num_tokens=[4096], sum_squares=[4e6])
    return table, plan_pipeline(table, one, num_stages=4, num_micro_batches=8, memory_gb=80)


def make_index(number=600, seed=0):
    rng = np.random.default_rng(seed)
    tiles = rng.choice([0, 1, 1, 4, 6], number)
    tokens = tiles * 256 + rng.integers(30, 900, number)
    return LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)


def make_steps(index, balance, **more):
    arguments = {"budget": BUDGET, "dp_world_size": 4, "accumulation": 8, "seed": 1, **more}
    plan = make_plan(index, balance=balance, **arguments)
    return plan, [plan.step_groups(number) for number in range(plan.num_steps)]


def test_a_plan_of_the_loader_takes_the_order_and_keeps_its_groups(table_and_plan):
    table, plan = table_and_plan
    order = PipelineOrder(table=table, plan=plan)
    index = make_index()
    ordered, found = make_steps(index, order)
    plain, emitted = make_steps(index, AsEmitted())
    assert ordered.position(0, 3)["balance"] == balance_name(order)
    assert plain.position(0, 3)["balance"] == "as-emitted"
    gains = []
    for one, other in zip(found, emitted, strict=True):
        assert sorted(map(tuple, one)) == sorted(map(tuple, other))
        empty = [[len(group) == 0 for group in step] for step in (one, other)]
        assert empty[0] == empty[1]
        gains.append(simulated(index, one, *table_and_plan) / simulated(index, other, table, plan))
    assert max(gains) <= 1
    assert np.mean(gains) < 0.97


class AsEmitted:
    fingerprint = "as-emitted"

    def __call__(self, step, **_):
        return step


def simulated(index, step, table, plan):
    shapes = Shapes.from_groups(step, num_tiles=index.num_tiles, num_tokens=index.num_tokens)
    times = stage_times(table, shapes, plan)
    return step_ns(times, np.arange(len(step)).reshape(-1, 4).T)


def test_samples_may_be_balanced_before(table_and_plan):
    table, plan = table_and_plan
    index = make_index()
    order = PipelineOrder(table=table, plan=plan, before=StepBalance())
    _, found = make_steps(index, order)
    _, balanced = make_steps(index, StepBalance())
    for one, other in zip(found, balanced, strict=True):
        assert sorted(map(tuple, one)) == sorted(map(tuple, other))
    assert "step-balance" in order.fingerprint


class Reversed:
    fingerprint = "reversed"

    def __call__(self, step, **_):
        groups = list(step)[::-1]
        offsets = np.cumsum([0, *map(len, groups)])
        return Groups(rows=np.concatenate(groups), offsets=offsets)


def test_what_comes_before_is_ordered_by_its_own_sizes(table_and_plan):
    table, plan = table_and_plan
    rng = np.random.default_rng(0)
    sizes = np.array([2, 1, 3, 1, 2, 2, 1, 1, 3, 1, 2, 1, 1, 1, 2, 2])
    step = Groups(rows=rng.permutation(100)[: sizes.sum()], offsets=[0, *np.cumsum(sizes)])
    tiles = rng.integers(0, 5, 100).astype(np.int32)
    tokens = (tiles * 256 + rng.integers(9, 99, 100)).astype(np.int32)
    arguments = {"budget": BUDGET, "dp_world_size": 2, "accumulation": 8}

    def run(order, step):
        columns = {"num_tokens": tokens[step.rows], "num_tiles": tiles[step.rows]}
        return [group.tolist() for group in order(step, **columns, **arguments)]

    both = PipelineOrder(table=table, plan=plan, before=Reversed())
    found = run(both, step)
    assert found == run(PipelineOrder(table=table, plan=plan), Reversed()(step))


def test_fingerprints_name_all_that_the_order_depends_on(table_and_plan):
    table, plan = table_and_plan
    one = Shapes(num_tiles=[11], num_tokens=[4096], sum_squares=[4e6])
    other = plan_pipeline(table, one, num_stages=4, num_micro_batches=8, memory_gb=45)
    orders = [
        PipelineOrder(table=table, plan=plan),
        PipelineOrder(table=table, plan=plan, seed=1),
        PipelineOrder(table=table, plan=plan, trials=10),
        PipelineOrder(table=table, plan=other),
        PipelineOrder(table=table, plan=plan, before=StepBalance()),
    ]
    assert len({order.fingerprint for order in orders}) == len(orders)
    same = PipelineOrder(table=type(table).from_json(table.to_json()), plan=plan)
    assert same.fingerprint == orders[0].fingerprint


PROGRAM = """
import numpy as np
from omniload.pipeline.order import arrange_micro_batches
from omniload.pipeline.simulate import StageTimes
rng = np.random.default_rng(0)
times = StageTimes(
    forward=rng.integers(0, 100, (3, 12)), backward=rng.integers(0, 200, (3, 12)),
    transfer=rng.integers(0, 9, (2, 12)), gradient_transfer=rng.integers(0, 9, (2, 12)),
)
print(arrange_micro_batches(times, data_parallel=2, trials=60, seed=5).tolist())
"""


def test_compiled_and_plain_code_find_the_same_order():
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "NUMBA_DISABLE_JIT": plain},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ).stdout
        for plain in ("0", "1")
    ]
    assert found[0] == found[1]
    assert found[0].startswith("[[")


def test_wrong_arguments_are_refused(table_and_plan):
    table, plan = table_and_plan
    times = StageTimes.from_seconds([[1.0] * 6], [[1.0] * 6])
    with pytest.raises(ConfigError, match="multiple of the data-parallel ranks: got 6 for 4"):
        arrange_micro_batches(times, data_parallel=4)
    with pytest.raises(ConfigError, match="trials must be None or an integer of at least 0"):
        arrange_micro_batches(times, trials=-1)
    with pytest.raises(ConfigError, match=r"one entry a micro-batch, got \(2,\)"):
        arrange_micro_batches(times, fixed=[True, False])
    smaller = cost_table(preset("internvl-6b-8b"))
    with pytest.raises(ConfigError, match="for the layers of the table: expected 80, got 96"):
        PipelineOrder(table=smaller, plan=plan)
    with pytest.raises(ConfigError, match="before must rearrange steps"):
        PipelineOrder(table=table, plan=plan, before="step")
    order = PipelineOrder(table=table, plan=plan)
    step = Groups(rows=np.arange(3), offsets=[0, 1, 2, 3])
    sizes = np.ones(3, np.int32)
    with pytest.raises(ConfigError, match="expected 4 groups and 3 sizes, got 3 and 3"):
        order(step, num_tokens=sizes, num_tiles=sizes, budget=BUDGET, dp_world_size=2,
              accumulation=2)  # fmt: skip
