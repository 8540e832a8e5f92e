"""Randomness figures: 1, 0, 0 for a plain shuffle, and what sorting does to them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import rng
from omniload.errors import ConfigError
from omniload.randomness import randomness
from omniload.types import Groups

COUNT, SIZE, STEP = 40_000, 4, 10


def values():
    return (rng.random_u64(COUNT, 1) % np.uint64(1000)).astype(np.int64)


def groups_of(order):
    return Groups(rows=order, offsets=np.arange(0, COUNT + 1, SIZE))


def test_plain_shuffle_has_ratio_1_and_no_correlation():
    found = randomness(groups_of(rng.permutation(COUNT, 2)), values(), groups_per_step=STEP)
    assert found.num_steps == COUNT // SIZE // STEP
    assert found.variance_ratio == pytest.approx(1, abs=0.12)
    assert found.lag1 == pytest.approx(0, abs=0.08)
    assert found.intra_group == pytest.approx(0, abs=0.02)


def test_sorted_order_is_far_from_random_in_every_figure():
    column = values()
    found = randomness(groups_of(np.argsort(column, kind="stable")), column, groups_per_step=STEP)
    assert found.variance_ratio == pytest.approx(SIZE * STEP, rel=0.01)
    assert found.lag1 > 0.99
    assert found.intra_group > 0.99


def test_like_samples_in_a_group_multiply_the_variance_of_steps():
    column = values()
    groups = np.argsort(column, kind="stable").reshape(-1, SIZE)
    order = groups[rng.permutation(len(groups), 3)].ravel()
    found = randomness(groups_of(order), column, groups_per_step=STEP)
    assert found.variance_ratio == pytest.approx(SIZE, rel=0.15)
    assert found.lag1 == pytest.approx(0, abs=0.08)
    assert found.intra_group > 0.99


def test_opposites_in_a_group_correlate_negatively():
    rank = np.argsort(values(), kind="stable")
    order = np.stack([rank[: COUNT // 2], rank[: COUNT // 2 - 1 : -1]], axis=1).ravel()
    groups = Groups(rows=order, offsets=np.arange(0, COUNT + 1, 2))
    found = randomness(groups, values(), groups_per_step=STEP)
    assert found.intra_group < -0.9
    assert found.variance_ratio < 0.1


def test_agrees_with_a_computation_by_hand():
    groups = Groups(rows=np.arange(7), offsets=np.array([0, 2, 3, 5, 6, 7]))
    column = np.array([1.0, 3.0, 5.0, 2.0, 2.0, 8.0, 99.0])
    found = randomness(groups, column, groups_per_step=1)
    means, sizes = np.array([2.0, 5, 2, 8, 99]), np.array([2, 1, 2, 1, 1])
    expected = means.var(ddof=1) / (column.var() * (1 / sizes).mean())
    assert found.variance_ratio == pytest.approx(expected)
    apart = means - means.mean()
    assert found.lag1 == pytest.approx((apart[1:] * apart[:-1]).sum() / (apart**2).sum())


@given(
    sizes=st.lists(st.integers(0, 3), max_size=12),
    step=st.integers(1, 4),
    data=st.data(),
)
def test_figures_are_always_finite(sizes, step, data):
    offsets = np.cumsum([0, *sizes])
    column = data.draw(
        st.lists(st.integers(-5, 5), min_size=int(offsets[-1]), max_size=int(offsets[-1]))
    )
    groups = Groups(rows=np.arange(offsets[-1]), offsets=offsets)
    found = randomness(groups, np.array(column, np.int64), groups_per_step=step)
    assert np.isfinite([found.variance_ratio, found.lag1, found.intra_group]).all()
    assert -1 <= found.lag1 <= 1
    assert found.num_steps == len(sizes) // step


def test_equal_values_and_few_steps_count_as_random():
    groups = Groups(rows=np.arange(9), offsets=np.arange(0, 10, 3))
    found = randomness(groups, np.ones(9), groups_per_step=1)
    assert (found.variance_ratio, found.lag1, found.intra_group) == (1, 0, 0)
    found = randomness(groups, np.arange(9), groups_per_step=2)
    assert (found.variance_ratio, found.lag1, found.num_steps) == (1, 0, 1)


def test_wrong_values_are_refused():
    groups = Groups(rows=np.arange(2), offsets=np.array([0, 1, 2]))
    with pytest.raises(ConfigError, match="values must be finite, got nan"):
        randomness(groups, [1.0, float("nan")], groups_per_step=1)
    with pytest.raises(ConfigError, match="groups_per_step must be at least 1, got 0"):
        randomness(groups, [1.0, 2.0], groups_per_step=0)
