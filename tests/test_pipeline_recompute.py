"""Recomputation for given cuts: as little as fits, and the plan says what is used and left."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.by_size import recompute_by_size
from omniload.pipeline.kinds import LayerKind, Shapes
from omniload.pipeline.layer_bytes import static_bytes, working_bytes
from omniload.pipeline.presets import preset
from omniload.pipeline.recompute import plan_recompute
from omniload.pipeline.stage_costs import StageCosts
from omniload.pipeline.table import CostTable
from tests.pipeline_tables import ONE, ns, size, stage_memory, stage_time, tables

PACK = Shapes(
    num_tiles=np.full(1, 11.0), num_tokens=np.full(1, 4096.0), sum_squares=np.full(1, 4e6)
)


@settings(deadline=None, max_examples=120)
@given(tables(most_layers=7), st.integers(1, 3), st.integers(1, 4), st.floats(0, 1), st.data())
def test_choices_take_the_least_time_of_all_that_fit(table, stages, micro, share, data):
    num_stages = min(stages, table.num_layers)
    cuts = data.draw(
        st.sets(
            st.integers(1, table.num_layers - 1), min_size=num_stages - 1, max_size=num_stages - 1
        )
    )
    parts = (0, *sorted(cuts), table.num_layers)
    costs = StageCosts(
        table=table, shapes=ONE, worst=ONE, num_stages=num_stages, num_micro_batches=micro
    )
    least = costs.least_memory[np.arange(num_stages), parts[:-1], parts[1:]].max()
    most = costs.memory(parts, [0] * table.num_layers).max()
    limit = int(least + share * (most - least))
    plan = plan_recompute(
        table, ONE, parts, num_micro_batches=micro, memory_gb=limit / 1e9, worst=ONE
    )
    for stage, (low, high) in enumerate(itertools.pairwise(parts)):
        layers, in_flight = list(range(low, high)), min(num_stages - stage, micro)
        every = itertools.product(*(table.kind(layer).choices for layer in layers))
        fitting = [c for c in every if stage_memory(table, layers, c, in_flight) <= limit]
        best = min(stage_time(table, layers, c, table.num_layers) for c in fitting)
        chosen = plan.recompute[low:high]
        assert chosen in fitting
        assert stage_time(table, layers, chosen, table.num_layers) == best
    if share == 1:
        again = table.recompute(ONE, plan.recompute).sum()
        assert again == 0


def test_memory_that_is_used_and_left_is_said():
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    parts = (0, 25, 52, 74, 96)
    free = plan_recompute(table, PACK, parts, num_micro_batches=16)
    assert set(free.recompute) == {0}
    assert free.stages[0].headroom_gb is None
    tight = plan_recompute(table, PACK, parts, num_micro_batches=16, memory_gb=48, selective=False)
    assert 0 < sum(tight.recompute) < 96
    for stage in tight.stages:
        assert stage.memory_gb + stage.headroom_gb == pytest.approx(48)
    # no further layer of a stage could keep its activations
    for stage, (low, high) in enumerate(itertools.pairwise(parts)):
        if 1 in tight.recompute[low:high]:
            assert tight.stages[stage].headroom_gb < (4 - stage) * 2.5
    assert tight.step_ms > free.step_ms
    layers = [table.layers[n] for n in range(25) if tight.recompute[n]]
    assert layers == [table.layers[n] for n in range(len(layers))]  # the first of the stage


def test_a_recomputed_layer_is_there_in_full_once_while_its_backward_pass_runs():
    kind = LayerKind(
        name="block",
        part="language",
        forward_s=ns(10),
        backward_s=ns(20),
        recompute_s=ns(10),
        kept_bytes=size(100),
        kept_bytes_recompute=size(10),
        output_bytes=size(1),
        params=0,
    )
    table = CostTable(kinds=(kind,), layers=("block",) * 4, reserve_bytes=0)
    kept = plan_trained(table)
    # two micro-batches in flight: one layer recomputed holds 2 * (10 + 3 * 100) + 100
    for limit, number in ((800, 0), (799, 1), (720, 1), (719, 2), (540, 2), (180, 4)):
        plan = plan_recompute(
            kept, ONE, (0, 4, 5), num_micro_batches=2, memory_gb=limit / 1e9, worst=ONE
        )
        assert sum(plan.recompute[:4]) == number
        assert plan.stages[0].memory_gb * 1e9 <= limit
    with pytest.raises(ConfigError, match=r"stage 0 0.00 GB of 0.00 GB \(parts \[0, 4, 5\]\)"):
        plan_recompute(kept, ONE, (0, 4, 5), num_micro_batches=2, memory_gb=179 / 1e9, worst=ONE)


def plan_trained(table):
    """The same layers behind each other, the last one a head that keeps nothing."""
    head = LayerKind(
        name="head",
        part="head",
        forward_s=ns(1),
        backward_s=ns(1),
        kept_bytes=size(0),
        output_bytes=size(0),
        recomputable=False,
    )
    block = table.kinds[0]
    trained = LayerKind(**{**vars(block), "params": 1})
    free = type(table.param_bytes)(weight=0, gradient=0, optimizer=0)
    return CostTable(
        kinds=(trained, head),
        layers=(*table.layers, "head"),
        reserve_bytes=0,
        param_bytes=free,
    )


def test_bounds_that_cannot_be_are_refused():
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2)
    with pytest.raises(ConfigError, match="parts must start with 0 and rise"):
        plan_recompute(table, PACK, (0, 50, 50, 96), num_micro_batches=4)
    with pytest.raises(ConfigError, match="expected 96, got 90"):
        plan_recompute(table, PACK, (0, 50, 90), num_micro_batches=4)
    with pytest.raises(ConfigError, match="parts must start with 0"):
        plan_recompute(table, PACK, (), num_micro_batches=4)


@pytest.mark.parametrize("selective", [False, True])
def test_smaller_micro_batches_recompute_less_and_any_mixture_of_them_fits(selective):
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    parts, memory = (0, 25, 52, 74, 96), 52.0
    options = {"num_micro_batches": 16, "memory_gb": memory}
    plan = plan_recompute(table, PACK, parts, selective=selective, **options)
    sizes = recompute_by_size(table, PACK, plan, **options)
    assert sizes.choose(num_tiles=11, num_tokens=100) is None

    rng = np.random.default_rng(0)
    tokens = np.append(rng.integers(1, 4097, 60), 4096).astype(float)
    tiles = np.append(rng.integers(0, 12, 60), 11).astype(float)
    kept, working, times = [], [], []
    for tile, token in zip(tiles, tokens, strict=True):
        one = Shapes(num_tiles=[tile], num_tokens=[token], sum_squares=[token * 4e6 / 4096])
        chosen = sizes.choose(num_tiles=tile, num_tokens=token) or plan.recompute
        kept.append(table.kept(one, chosen)[:, 0])
        working.append(working_bytes(table, one, chosen)[:, 0])
        times.append([table.recompute(one, each).sum() for each in (chosen, plan.recompute)])
    less, planned = np.array(times).sum(axis=0)
    assert (np.array(times)[:, 0] <= np.array(times)[:, 1]).all()
    assert less < 0.85 * planned
    for stage, (low, high) in enumerate(itertools.pairwise(parts)):
        largest = np.sort([each[low:high].sum() for each in kept])[-(4 - stage) :].sum()
        anew = max(each[low:high].max() for each in working)
        assert static_bytes(table)[low, high] + largest + anew <= memory * 1e9
    with pytest.raises(ConfigError, match=r"stage \d needs [0-9.]+ GB of 30.00 GB"):
        recompute_by_size(table, PACK, plan, num_micro_batches=16, memory_gb=30)
