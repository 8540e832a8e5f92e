import numpy as np
import pytest

from omniload.errors import ConfigError, OmniloadError, SampleError
from omniload.types import Budget, Groups, Sample


def make_sample(**changes):
    fields = {
        "sample_id": 7,
        "input_ids": np.arange(5, dtype=np.int32),
        "labels": np.array([3, -100, 2, 3, -100], dtype=np.int32),
        "tiles": np.zeros((2, 3, 4, 4), dtype=np.uint8),
        "image_num_tiles": np.array([2], dtype=np.int32),
        "image_sizes": np.array([[8, 4]], dtype=np.int32),
        "image_grids": np.array([[2, 1]], dtype=np.int32),
        "image_spans": np.array([[1, 3]], dtype=np.int32),
    }
    return Sample(**(fields | changes))


def test_budget_takes_none_for_no_limit():
    budget = Budget(tokens=4096)
    assert (budget.tokens, budget.tiles, budget.samples) == (4096, None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": 0}, r"Budget.tokens must be between 1 .* got 0"),
        ({"tokens": 2.5}, r"Budget.tokens must be an integer, got 2.5"),
        ({"tokens": True}, r"must be an integer"),
        ({"tokens": None}, r"Budget.tokens must be an integer"),
        ({"tokens": 8, "tiles": -1}, r"Budget.tiles must be between 0"),
        ({"tokens": 8, "samples": 0}, r"Budget.samples must be between 1"),
        ({"tokens": 2**31}, r"got 2147483648"),
    ],
)
def test_budget_refuses_what_is_no_bound(settings, message):
    with pytest.raises(ConfigError, match=message):
        Budget(**settings)


def test_config_errors_are_value_errors_and_ours():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, OmniloadError)


def test_groups_slice_and_sum_even_where_a_group_is_empty():
    groups = Groups(rows=np.array([4, 0, 2]), offsets=np.array([0, 2, 2, 3]))
    assert [group.tolist() for group in groups] == [[4, 0], [], [2]]
    assert groups.sums([1, 10, 100, 1000, 10000]).tolist() == [10001, 0, 100]
    with pytest.raises(IndexError):
        groups[3]


def test_group_sums_do_not_overflow_int32():
    groups = Groups(rows=np.array([0, 1]), offsets=np.array([0, 2]))
    sizes = np.array([2**31 - 1, 2**31 - 1], dtype=np.int32)
    assert groups.sums(sizes).tolist() == [2**32 - 2]


@pytest.mark.parametrize("offsets", [[1, 3], [0, 2], [0, 3, 2, 3], []])
def test_groups_refuse_offsets_that_do_not_describe_the_rows(offsets):
    with pytest.raises(ConfigError):
        Groups(rows=np.arange(3), offsets=np.array(offsets, dtype=np.int64))


def test_sample_counts_loss_tokens_after_its_first_label():
    sample = make_sample()
    assert (sample.num_tokens, sample.num_tiles, sample.num_loss_tokens) == (5, 2, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": np.arange(5)}, r"input_ids must be .* int32 .* got int64"),
        ({"labels": np.zeros(4, np.int32)}, r"labels must be .*\(5,\), got int32 \(4,\)"),
        ({"image_num_tiles": np.array([3], np.int32)}, r"expected 2, got 3 \(sample_id=7\)"),
        (
            {"image_num_tiles": np.array([3, -1], np.int32)}
            | dict.fromkeys(
                ("image_sizes", "image_grids", "image_spans"), np.ones((2, 2), np.int32)
            ),
            r"image_num_tiles must not be negative, got \[3, -1\] \(sample_id=7\)",
        ),
        ({"image_spans": np.array([[1, 6]], np.int32)}, r"image_spans must lie in \[0, 5\]"),
        ({"image_spans": [[1, 3]]}, r"image_spans must be a NumPy array .* got list"),
        ({"tiles": np.zeros((2, 4, 4, 3), np.uint8)}, r"tiles must be"),
    ],
)
def test_sample_refuses_what_does_not_fit_together(changes, message):
    with pytest.raises(SampleError, match=message):
        make_sample(**changes)


def test_sample_must_have_a_token():
    none = np.zeros(0, np.int32)
    with pytest.raises(SampleError, match="at least one token"):
        Sample(sample_id=1, input_ids=none, labels=none)
