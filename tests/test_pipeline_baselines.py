"""Other partitions: DeepSpeed's bit for bit, OmniBal's search, and how ours compares with them."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.baselines import (
    compare,
    greedy_anchor,
    omnibal_candidates,
    partition_balanced,
    partition_minmax,
    partition_parameters,
    partition_uniform,
)
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.presets import PUBLISHED_PAIRS, preset

weights_and_stages = st.tuples(
    st.lists(st.integers(0, 30), min_size=1, max_size=24), st.integers(1, 8)
).filter(lambda both: len(both[0]) >= both[1])


@settings(deadline=None, max_examples=300)
@given(weights_and_stages)
@example(([0, 0, 0, 5], 3))
@example(([1.5e9, 3.1e7, 1.5e9, 2.2e9, 2.2e9, 9e8], 4))
def test_balanced_and_uniform_are_those_of_deepspeed(both):
    utils = pytest.importorskip("deepspeed.runtime.utils")
    weights, stages = both
    assert list(partition_balanced(weights, stages)) == utils.partition_balanced(weights, stages)
    expected = utils.partition_uniform(len(weights), stages)
    assert list(partition_uniform(len(weights), stages)) == expected


def test_parameters_of_published_pairs_are_cut_as_deepspeed_cuts_them():
    utils = pytest.importorskip("deepspeed.runtime.utils")
    for name in PUBLISHED_PAIRS:
        for model in (preset(name), preset(name).freeze("vision")):
            table = cost_table(model, tensor_parallel=2)
            weights = [int(p) * bool(t) for p, t in zip(table.params, table.trainable, strict=True)]
            for stages in (2, 4):
                expected = utils.partition_balanced(weights, stages)
                assert list(partition_parameters(table, stages)) == expected


@settings(deadline=None, max_examples=100)
@given(weights_and_stages)
def test_minmax_makes_the_largest_stage_as_small_as_can_be(both):
    weights, stages = both[0][:10], both[1]
    if len(weights) < stages:
        return
    ends = np.concatenate([[0], np.cumsum(weights)])

    def largest(parts):
        return max(ends[high] - ends[low] for low, high in itertools.pairwise(parts))

    every = itertools.combinations(range(1, len(weights)), stages - 1)
    best = min(largest((0, *cuts, len(weights))) for cuts in every)
    found = partition_minmax(weights, stages)
    assert list(found) == sorted(set(found))
    assert largest(found) == best


def test_omnibal_moves_every_bound_of_its_anchor():
    times, sent = np.arange(1.0, 21.0), np.ones(20)
    anchor = greedy_anchor(times, 4)
    found = omnibal_candidates(times, sent, 4, radius=1, top=100)
    assert len(found) == len(set(found)) == 27
    moved = np.array(found)[:, 1:-1] - np.array(anchor)[1:-1]
    assert (np.abs(moved) <= 1).all()
    ends = np.concatenate([[0.0], np.cumsum(times)])
    variance = [np.diff(ends[list(parts)]).var() for parts in found]
    assert variance == sorted(variance)  # what is sent is the same for all
    assert omnibal_candidates(times, sent, 4, top=3) == found[:3]


def test_what_is_sent_decides_between_candidates_of_equal_variance():
    times = np.ones(6)
    sent = np.array([9.0, 9.0, 1.0, 9.0, 9.0, 9.0])
    assert omnibal_candidates(times, sent, 2, top=1) == [(0, 3, 6)]
    sent = np.array([9.0, 1.0, 9.0, 2.0, 9.0, 9.0])
    uneven = omnibal_candidates(times, sent, 2, top=3)
    assert set(uneven) == {(0, 2, 6), (0, 3, 6), (0, 4, 6)}
    assert uneven.index((0, 2, 6)) < uneven.index((0, 4, 6))


def test_many_stages_move_few_bounds_at_once():
    found = omnibal_candidates(np.ones(131), np.ones(131), 16, top=20_000)
    assert 3000 < len(found) < 5000
    anchor = greedy_anchor(np.ones(131), 16)
    moved = (np.array(found) != np.array(anchor)).sum(axis=1)
    assert moved.max() == 3


def test_stages_without_layers_are_refused():
    with pytest.raises(ConfigError, match="got 3 stages for 2 layers"):
        partition_balanced([1, 2], 3)
    with pytest.raises(ConfigError, match="got 0 stages for 2 layers"):
        partition_uniform(2, 0)


def packs(number):
    rng = np.random.default_rng(0)
    tokens = rng.integers(3500, 4097, number).astype(float)
    return Shapes(
        num_tiles=rng.integers(7, 12, number).astype(float),
        num_tokens=tokens,
        sum_squares=tokens * tokens / 6,
    )


@pytest.fixture(scope="module")
def comparisons():
    """The nine published pairs with ample memory, with little, and without ZeRO-1."""
    shapes = packs(16 * 4 * 4)
    found = {}
    for zero_stage, memory in ((1, 80), (1, 48), (0, 80)):
        for name, tensor_parallel in PUBLISHED_PAIRS.items():
            table = cost_table(
                preset(name),
                tensor_parallel=tensor_parallel,
                data_parallel=4,
                zero_stage=zero_stage,
            )
            found[zero_stage, memory, name] = compare(
                table, shapes, num_stages=4, num_micro_batches=16, memory_gb=memory
            )
    return found


def test_ours_is_never_slower_than_what_the_search_of_omnibal_finds(comparisons):
    better = 0
    for (zero_stage, memory, name), found in comparisons.items():
        ours, other = found["ours"], found["omnibal"]
        assert ours.fits
        if not other.fits:
            better += 1
            continue
        ratio = other.plan.step_ms / ours.plan.step_ms
        assert ratio >= 0.995, (zero_stage, memory, name)
        better += (zero_stage, memory) != (1, 80) and ratio > 1.005
    assert better >= 6


def test_plans_of_all_ways_are_complete_and_say_if_they_fit(comparisons):
    for (_, memory, _), found in comparisons.items():
        assert list(found) == ["parameters-recomputed", "parameters", "uniform", "profile",
                               "omnibal", "exact", "ours"]  # fmt: skip
        for one in found.values():
            assert one.plan.num_stages == 4
            assert one.fits == all(stage.memory_gb <= memory for stage in one.plan.stages)
        recomputed = found["parameters-recomputed"].plan
        assert found["parameters"].plan.step_ms <= recomputed.step_ms
        assert found["ours"].plan.step_ms <= found["exact"].plan.step_ms


def test_where_nothing_fits_ours_is_missing():
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=1)
    found = compare(table, packs(8), num_stages=4, num_micro_batches=8, memory_gb=20)
    assert "ours" not in found
    assert not any(one.fits for one in found.values())
