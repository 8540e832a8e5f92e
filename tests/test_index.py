import pickle

import numpy as np
import pytest

from omniload.errors import ConfigError
from omniload.index import LengthIndex


def test_columns_become_int32_and_loss_defaults_to_all_that_can():
    index = LengthIndex.from_arrays(num_tokens=[5, 1], num_tiles=np.array([2, 0], np.uint8))
    assert index.num_tokens.dtype == index.num_tiles.dtype == np.int32
    assert index.num_loss_tokens.tolist() == [4, 0]
    assert len(index) == 2


def test_int32_columns_are_not_copied():
    tokens = np.array([3, 4], dtype=np.int32)
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=[0, 0])
    assert np.shares_memory(index.num_tokens, tokens)


def test_an_empty_index_is_an_index():
    assert len(LengthIndex.from_arrays(num_tokens=[], num_tiles=[])) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"num_tokens": [3, 0], "num_tiles": [0, 0]}, r"num_tokens must be between 1 .* \(row 1\)"),
        ({"num_tokens": [3], "num_tiles": [-1]}, r"num_tiles must be between 0"),
        ({"num_tokens": [3.0], "num_tiles": [0]}, r"must hold integers, got dtype float64"),
        (
            {"num_tokens": np.ma.array([3, 4], mask=[0, 1]), "num_tiles": [0, 0]},
            r"num_tokens must be a plain array, got a masked one",
        ),
        ({"num_tokens": [[3]], "num_tiles": [0]}, r"one-dimensional"),
        ({"num_tokens": [3], "num_tiles": [0, 1]}, r"expected 1, got 2"),
        ({"num_tokens": [2**31], "num_tiles": [0]}, r"got 2147483648"),
        (
            {"num_tokens": [3, 3], "num_tiles": [0, 0], "num_loss_tokens": [2, 3]},
            r"below num_tokens.*got 3 of 3 tokens \(row 1, 1 such rows\)",
        ),
    ],
)
def test_wrong_columns_are_named(columns, message):
    with pytest.raises(ConfigError, match=message):
        LengthIndex.from_arrays(**columns)


def test_fingerprint_follows_every_column_and_survives_pickling():
    base = LengthIndex.from_arrays(num_tokens=[5, 6], num_tiles=[1, 2])
    prints = {
        base.fingerprint,
        LengthIndex.from_arrays(num_tokens=[6, 5], num_tiles=[1, 2]).fingerprint,
        LengthIndex.from_arrays(num_tokens=[5, 6], num_tiles=[2, 1]).fingerprint,
        LengthIndex.from_arrays(
            num_tokens=[5, 6], num_tiles=[1, 2], num_loss_tokens=[0, 1]
        ).fingerprint,
    }
    assert len(prints) == 4
    assert pickle.loads(pickle.dumps(base)).fingerprint == base.fingerprint
