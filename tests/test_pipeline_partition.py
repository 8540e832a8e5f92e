"""The planner is exact, keeps every constraint, and says what an impossible plan would need."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.baselines import partition_minmax
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.partition import Planner, plan_pipeline
from omniload.pipeline.predict import stage_bytes, stage_times, step_places
from omniload.pipeline.presets import PUBLISHED_PAIRS, preset
from omniload.pipeline.simulate import simulate
from omniload.pipeline.stage_costs import StageCosts, memory_limits, worst_shape
from tests.pipeline_tables import ONE, brute_force, stage_memory, tables


def planner_of(table, num_stages, num_micro_batches, limit=None, **settings_):
    costs = StageCosts(
        table=table,
        shapes=ONE,
        worst=ONE,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
    )
    return Planner(costs=costs, memory_gb=None if limit is None else limit / 1e9, **settings_)


def between(planner, share):
    """A limit from what the first plan needs at the least to what it needs without recomputing."""
    parts = np.linspace(0, planner.costs.table.num_layers, planner.costs.num_stages + 1)
    parts = np.rint(parts).astype(int)
    stages = np.arange(planner.costs.num_stages)
    least = planner.costs.least_memory[stages, parts[:-1], parts[1:]].max()
    most = planner.costs.memory(parts, [0] * planner.costs.table.num_layers).max()
    return int(least + share * (most - least))


@settings(deadline=None, max_examples=120)
@given(tables(), st.integers(1, 3), st.integers(1, 4), st.floats(-0.2, 1.1))
def test_exact_plan_equals_brute_force_over_all_cuts_and_choices(table, stages, micro, share):
    num_stages = min(stages, table.num_layers)
    limit = between(planner_of(table, num_stages, micro), share)
    expected = brute_force(table, num_stages=num_stages, num_micro_batches=micro, limit=limit)
    planner = planner_of(table, num_stages, micro, limit)
    assert planner.feasible == (expected is not None)
    if expected is None:
        with pytest.raises(ConfigError, match="fits into the memory"):
            planner.plan()
        return
    assert planner.cuts()[0][0] == expected
    assert planner.cuts(keep=4)[0][0] == expected


@settings(deadline=None, max_examples=120)
@given(tables(most_layers=9), st.integers(1, 4), st.integers(1, 6), st.floats(0, 1))
def test_plans_are_complete_and_never_over_the_limit(table, stages, micro, share):
    num_stages = min(stages, table.num_layers)
    limit = between(planner_of(table, num_stages, micro), share)
    planner = planner_of(table, num_stages, micro, limit)
    for plan in (planner.plan(), planner.plan(simulated=0)):
        assert plan.parts[0] == 0
        assert plan.parts[-1] == table.num_layers == len(plan.recompute)
        assert list(plan.parts) == sorted(set(plan.parts))
        for stage, (low, high) in enumerate(itertools.pairwise(plan.parts)):
            layers = list(range(low, high))
            in_flight = min(num_stages - stage, micro)
            held = stage_memory(table, layers, plan.recompute[low:high], in_flight)
            assert held <= limit
            assert plan.stages[stage].memory_gb == pytest.approx(held / 1e9)
            assert plan.stages[stage].headroom_gb == pytest.approx((limit - held) / 1e9, abs=1e-12)
    assert planner.plan().step_ms <= planner.plan(simulated=0).step_ms


@settings(deadline=None, max_examples=60)
@given(
    tables(most_layers=9), st.integers(1, 4), st.integers(1, 6), st.floats(0, 1), st.floats(0, 1)
)
def test_more_memory_never_costs_time(table, stages, micro, one, two):
    num_stages = min(stages, table.num_layers)
    less, more = (
        planner_of(table, num_stages, micro, between(planner_of(table, num_stages, micro), share))
        for share in sorted((one, two))
    )
    assert more.cuts()[0][0] <= less.cuts()[0][0]


@settings(deadline=None, max_examples=80)
@given(tables(most_layers=8), st.integers(2, 4), st.data())
def test_pins_and_trainable_stages_are_kept(table, stages, data):
    num_stages = min(stages, table.num_layers)
    layer = data.draw(st.integers(0, table.num_layers - 1))
    stage = data.draw(st.integers(0, num_stages - 1))
    pinned = replace(table, pinned={layer: stage})
    frozen_stages = data.draw(st.booleans())
    planner = planner_of(pinned, num_stages, 4, frozen_stages=frozen_stages)
    kept = [
        bounds
        for cuts in itertools.combinations(range(1, table.num_layers), num_stages - 1)
        for bounds in [(0, *cuts, table.num_layers)]
        if bounds[stage] <= layer < bounds[stage + 1]
        and (
            frozen_stages
            or all(table.trainable[low:high].any() for low, high in itertools.pairwise(bounds))
        )
    ]
    if not kept:
        with pytest.raises(ConfigError, match="keeps the pins"):
            planner.plan()
        return
    assert planner.plan().parts in kept


def test_impossible_plans_say_what_they_would_need():
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    shapes = packs(64)
    arguments = {"num_stages": 4, "num_micro_batches": 16, "selective": False}
    with pytest.raises(ConfigError, match=r"4 stages fits.*best one needs") as error:
        plan_pipeline(table, shapes, memory_gb=30, **arguments)
    needed = float(re.search(r"needs ([\d.]+) GB", str(error.value))[1])
    with pytest.raises(ConfigError, match="fits into the memory"):
        plan_pipeline(table, shapes, memory_gb=needed - 0.02, **arguments)
    plan = plan_pipeline(table, shapes, memory_gb=needed + 0.02, **arguments)
    assert max(stage.memory_gb for stage in plan.stages) <= needed + 0.02
    fitting = int(re.search(r"would fit with (\d+) stages", str(error.value))[1])
    assert plan_pipeline(table, shapes, memory_gb=30, **{**arguments, "num_stages": fitting})
    with pytest.raises(ConfigError, match="fits into the memory"):
        plan_pipeline(table, shapes, memory_gb=30, **{**arguments, "num_stages": fitting - 1})
    shares = int(re.search(r"or with tensor parallelism (\d+)", str(error.value))[1])
    shared = cost_table(preset("internvl-6b-20b"), tensor_parallel=shares, data_parallel=4)
    assert plan_pipeline(shared, shapes, memory_gb=30, **arguments)
    with pytest.raises(ConfigError, match="tensor parallelism 16 would fit by itself: use both"):
        plan_pipeline(table, shapes, memory_gb=7, **arguments)
    with pytest.raises(ConfigError, match="reserve alone takes that"):
        plan_pipeline(table, shapes, memory_gb=5, **arguments)
    with pytest.raises(ConfigError, match=r"into 9 stages gives each .* \(0 of the layers"):
        planner_of(
            cost_table(preset("internvl2-2b").freeze("vision", "projector", "language")),
            9,
            4,
            frozen_stages=False,
        ).plan()
    with pytest.raises(ConfigError, match=r"200 stages for 96 layers. Use 96 stages or fewer"):
        plan_pipeline(table, shapes, num_stages=200, num_micro_batches=16)
    with pytest.raises(ConfigError, match=r"one a stage \(4\)"):
        plan_pipeline(table, shapes, memory_gb=[80, 80], **arguments)
    with pytest.raises(ConfigError, match="memory_gb must be finite and above 0, got -1"):
        plan_pipeline(table, shapes, memory_gb=-1, **arguments)
    with pytest.raises(ConfigError, match="num_micro_batches must be an integer of at least 1"):
        plan_pipeline(table, shapes, num_stages=4, num_micro_batches=0)
    with pytest.raises(ConfigError, match="worst must be one micro-batch, got 64"):
        plan_pipeline(table, shapes, worst=shapes, **arguments)


def packs(number, seed=0):
    """Packs as iterative sampling and filtering makes them: full of tiles or of tokens."""
    rng = np.random.default_rng(seed)
    tiles = rng.integers(7, 12, number).astype(float)
    tokens = rng.integers(3500, 4097, number).astype(float)
    squares = tokens * tokens / rng.integers(3, 9, number)
    return Shapes(num_tiles=tiles, num_tokens=tokens, sum_squares=squares)


def test_limits_of_single_stages_are_kept():
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    limits = [60.0, 80.0, 45.0, 80.0]
    plan = plan_pipeline(table, packs(128), num_stages=4, num_micro_batches=16, memory_gb=limits)
    assert all(stage.memory_gb <= limit for stage, limit in zip(plan.stages, limits, strict=True))
    assert memory_limits(None, 2).min() > 1e18


def test_a_plan_is_the_same_each_time_and_stands_in_json():
    table = cost_table(preset("eva-e-34b"), tensor_parallel=4, data_parallel=4)
    arguments = {"num_stages": 4, "num_micro_batches": 16, "memory_gb": 48}
    one, two = (plan_pipeline(table, packs(512), **arguments) for _ in range(2))
    assert one == two
    assert type(one).from_json(one.to_json()) == one
    assert one.table_fingerprint == table.fingerprint


def test_predicted_step_is_that_of_the_simulator():
    table = cost_table(preset("internvl-6b-8b"), tensor_parallel=2, data_parallel=2)
    shapes = packs(3 * 2 * 8)
    plan = plan_pipeline(table, shapes, num_stages=4, num_micro_batches=8, memory_gb=48)
    places = step_places(len(shapes), 8, 2)
    assert sorted(places.reshape(-1)) == list(range(len(shapes)))
    assert places[1, 1].tolist() == list(range(17, 33, 2))
    steps = []
    for step in places:
        ranks = [stage_times(table, shapes.take(rank), plan) for rank in step]
        steps.append(simulate(ranks).step_ns / 1e6)
    assert plan.step_ms == pytest.approx(np.mean(steps))


@pytest.mark.parametrize("freeze", [(), ("vision",)])
def test_simulated_memory_stays_below_what_the_plan_says(freeze):
    table = cost_table(
        preset("internvl-6b-20b").freeze(*freeze), tensor_parallel=2, data_parallel=4
    )
    shapes = packs(64)
    plan = plan_pipeline(table, shapes, num_stages=4, num_micro_batches=16, memory_gb=48)
    step = shapes.take(range(16))
    kept, static, working = stage_bytes(table, step, plan)
    curves = simulate(stage_times(table, step, plan)).memory(kept, static=static, working=working)
    for stage, (_, held) in zip(plan.stages, curves, strict=True):
        assert held.max() / 1e9 <= stage.memory_gb
        assert held.max() / 1e9 > 0.75 * stage.memory_gb
        assert held[0] == held[-1] == held.min()


def test_a_single_shape_stands_for_all_micro_batches():
    table = cost_table(preset("internvl-6b-8b"), tensor_parallel=2, data_parallel=2)
    one = packs(1)
    plan = plan_pipeline(table, one, num_stages=4, num_micro_batches=8)
    stages = [stage.forward_ms + stage.backward_ms for stage in plan.stages]
    assert plan.step_ms == pytest.approx(7 * max(stages) + sum(stages), rel=0.02)


def test_recomputation_in_part_is_never_slower_than_in_full_alone():
    shapes = packs(128)
    for name in ("internvl-6b-20b", "eva-8b-8b"):
        table = cost_table(preset(name), tensor_parallel=2, data_parallel=4)
        values = []
        for selective in (False, True):
            costs = StageCosts(
                table=table,
                shapes=shapes,
                worst=worst_shape(shapes),
                num_stages=4,
                num_micro_batches=16,
                selective=selective,
            )
            values.append(Planner(costs=costs, memory_gb=44).cuts()[0][0])
        assert values[1] <= values[0]


@pytest.mark.parametrize("name", ["internvl-6b-20b", "eva-18b-70b"])
def test_a_frozen_encoder_is_planned_faster_than_by_forward_time(name):
    table = cost_table(
        preset(name).freeze("vision"),
        tensor_parallel=PUBLISHED_PAIRS[name],
        data_parallel=4,
    )
    shapes = packs(512)
    costs = StageCosts(
        table=table,
        shapes=shapes,
        worst=worst_shape(shapes),
        num_stages=4,
        num_micro_batches=16,
    )
    planner = Planner(costs=costs, memory_gb=80)
    forward = np.rint(table.forward(shapes).mean(axis=1) * 1e9).astype(np.int64)
    parts = partition_minmax(forward, 4)
    by_forward = planner.predict(parts, planner.recompute(parts))
    assert by_forward.step_ms / planner.plan().step_ms >= 1.15
