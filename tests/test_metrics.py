import numpy as np
import pytest

from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.metrics import dist_ratio, pad_ratio


def test_pad_ratio_of_one_micro_batch():
    assert pad_ratio([4, 2, 2]) == pytest.approx(4 / 12)
    assert pad_ratio([5]) == 0.0


def test_pad_ratio_is_the_mean_over_micro_batches_of_any_size():
    assert pad_ratio([[4, 2], [3, 3, 3]]) == pytest.approx((2 / 8 + 0) / 2)
    assert pad_ratio(np.array([[4, 2], [3, 3]])) == pytest.approx(0.125)
    assert pad_ratio([]) == 0.0


def test_dist_ratio_of_one_step_and_of_a_run():
    assert dist_ratio([10, 5, 5, 0]) == pytest.approx(20 / 40)
    assert dist_ratio([[10, 10], [10, 5]]) == pytest.approx(0.125)
    assert dist_ratio([[0, 0], [10, 5]]) == pytest.approx(0.125)


@pytest.mark.parametrize("loads", [[1, -1], [1.0, float("nan")], [float("inf")]])
def test_impossible_sizes_are_refused(loads):
    with pytest.raises(ConfigError, match="finite and not negative"):
        dist_ratio(loads)


def test_cost_is_linear_in_its_terms():
    model = CostModel(tile=2.0, token=0.5, token_pair=0.25, fixed=1.0)
    assert model.cost([1, 0], [4, 2], [16, 4]).tolist() == [9.0, 3.0]


@pytest.mark.parametrize(
    "settings", [{"tile": -1.0}, {"token": float("nan")}, {"token": 0.0, "fixed": 3.0}]
)
def test_impossible_costs_are_refused(settings):
    with pytest.raises(ConfigError, match="CostModel"):
        CostModel(**settings)
