import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import rng


def test_first_values_never_change():
    # golden: a change here is a change of sample order for every user
    assert rng.derive(0) == 7960286522194355700
    assert rng.permutation(8, 0, 0).tolist() == [2, 7, 0, 5, 1, 4, 3, 6]
    assert rng.random_u64(2, 1, 2).tolist() == [10862319279611346536, 8483905606346736062]


@given(st.integers(0, 300), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_permutation_holds_each_number_once(count, seed, epoch):
    order = rng.permutation(count, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(count))


def test_keys_that_differ_give_other_orders():
    keys = [(0,), (1,), (0, 0), (0, 1), (1, 0), (-1,), (2**63,)]
    orders = {tuple(rng.permutation(50, *key).tolist()) for key in keys}
    assert len(orders) == len(keys)


def test_uniform_to_the_eye_of_a_chi_square():
    counts = np.bincount((rng.random_u64(64_000, 3) >> np.uint64(58)).astype(int), minlength=64)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 120  # 63 degrees of freedom


@pytest.mark.parametrize("row", [0, 5])
def test_sample_generator_is_a_function_of_seed_epoch_and_row(row):
    first = rng.sample_generator(1, 2, row).integers(0, 2**60, 4).tolist()
    assert first == rng.sample_generator(1, 2, row).integers(0, 2**60, 4).tolist()
    assert first != rng.sample_generator(1, 2, row + 1).integers(0, 2**60, 4).tolist()
    assert first != rng.sample_generator(1, 3, row).integers(0, 2**60, 4).tolist()
