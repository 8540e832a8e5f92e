"""A balance of one's own in the loader: it arranges steps, and states belong to it."""

import json

import numpy as np
import pytest

from omniload import Budget, ConfigError, DataLoader, Groups, StateError, World
from omniload.pipeline import cost_table, preset
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.order import PipelineOrder
from omniload.pipeline.partition import plan_pipeline
from tests.loader_data import write_data

BUDGET = Budget(tokens=800, tiles=12)


class Backwards:
    """Turns the micro-batches of a step round."""

    def __init__(self, fingerprint="backwards-1"):
        self.fingerprint = fingerprint

    def __call__(self, step, **facts):
        groups = [rows for rows in step if len(rows)][::-1]
        empty = [np.zeros(0, np.int64)] * (len(step) - len(groups))
        sizes = [len(rows) for rows in (*groups, *empty)]
        rows = np.concatenate([*groups, *empty])
        return Groups(rows=rows, offsets=np.concatenate([[0], np.cumsum(sizes)]))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("balance") / "shards", num_rows=24)


def loader(data, **arguments):
    given = {"budget": BUDGET, "world": World(), "accumulation": 3, **arguments}
    return DataLoader(data, **given)


def rows_of(batches):
    return [batch.sample_ids.tolist() for batch in batches]


def test_the_loader_hands_out_steps_as_its_balance_arranges_them(data):
    plain = rows_of(loader(data, sync=None))
    turned = rows_of(loader(data, balance=Backwards()))
    assert turned[:3] == plain[:3][::-1]
    assert sorted(row for rows in turned for row in rows) == list(range(24))


def test_a_state_inside_a_step_belongs_to_its_balance(data):
    loading = loader(data, balance=Backwards("x" * 5000))
    batches = iter(loading)
    next(batches)
    state = json.loads(json.dumps(loading.state_dict()))
    assert len(json.dumps(state)) < 1024
    rest = rows_of(batches)
    again = loader(data, balance=Backwards("x" * 5000))
    again.load_state_dict(state)
    assert rows_of(again) == rest
    with pytest.raises(StateError, match="balance"):
        loader(data, balance=Backwards("x" * 4999 + "y")).load_state_dict(state)


def test_pipeline_order_deals_the_same_rows(data):
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2)
    shapes = Shapes(num_tiles=[10, 12], num_tokens=[700, 800], sum_squares=[200_000, 250_000])
    plan = plan_pipeline(table, shapes, num_stages=2, num_micro_batches=3)
    loading = loader(data, balance=PipelineOrder(table=table, plan=plan, trials=20))
    ordered, plain = rows_of(loading), rows_of(loader(data, sync=None))
    assert len(plain) >= 6
    for first in range(0, len(plain), 3):
        assert sorted(ordered[first : first + 3]) == sorted(plain[first : first + 3])
    assert len(json.dumps(loading.state_dict())) < 1024


def test_a_wrong_balance_is_refused(data):
    with pytest.raises(ConfigError, match="balance must be callable and have a fingerprint"):
        loader(data, balance="lpt")
    with pytest.raises(ConfigError, match="balance replaces the one that uniform_modality"):
        loader(data, balance=Backwards(), uniform_modality=True)
