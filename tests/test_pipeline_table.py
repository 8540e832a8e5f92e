"""Cost tables and pipeline plans: what they hold, what frozen layers cost, what JSON keeps."""

import copy
import dataclasses
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import pipeline
from omniload.errors import ConfigError
from omniload.pipeline.plan import PipelinePlan, StagePlan
from omniload.pipeline.table import CostTable, LayerKind, Linear, ParamBytes, Selective, Shapes
from omniload.types import Groups

SHAPES = Shapes(num_tiles=[1.0, 2.0, 0.0], num_tokens=[10.0, 7.0, 5.0], sum_squares=[60, 49, 13])


def vision(**changes):
    fields = {
        "name": "vision", "part": "vision", "params": 100,
        "forward_s": Linear(tile=1.0), "backward_s": Linear(tile=2.0),
        "recompute_s": Linear(tile=0.75), "kept_bytes": Linear(tile=40.0),
        "kept_bytes_recompute": Linear(tile=4.0), "output_bytes": Linear(tile=4.0),
        "selective": (
            Selective(name="mlp", recompute_s=Linear(tile=0.5), kept_bytes=Linear(tile=15.0)),
        ),
    }  # fmt: skip
    return LayerKind(**{**fields, **changes})


def language(**changes):
    fields = {
        "name": "language", "part": "language", "params": 300,
        "forward_s": Linear(token=1.0, token_pair=0.01, fixed=3.0),
        "backward_s": Linear(token=2.0, token_pair=0.025, fixed=6.0),
        "backward_frozen_s": Linear(token=1.0, token_pair=0.025, fixed=3.0),
        "recompute_s": Linear(token=1.0), "kept_bytes": Linear(token=30.0),
        "kept_frozen_bytes": Linear(token=20.0), "kept_bytes_recompute": Linear(token=2.0),
        "output_bytes": Linear(token=2.0),
    }  # fmt: skip
    return LayerKind(**{**fields, **changes})


def head():
    return LayerKind(
        name="head", part="head", params=50, forward_s=Linear(token=0.5),
        backward_s=Linear(token=1.0), kept_bytes=Linear(token=60.0),
        output_bytes=Linear(token=20.0), recomputable=False,
    )  # fmt: skip


def table(*, kinds=None, **changes):
    used = kinds or (vision(), language(), head())
    fields = {"kinds": used, "layers": ("vision",) * 2 + ("language",) * 2 + ("head",)}
    return CostTable(**{**fields, **changes})


# --- times and bytes


def test_rows_are_the_linear_costs_of_each_layer_at_each_micro_batch():
    made = table()
    forward = made.forward(SHAPES)
    assert forward.shape == (5, 3)
    assert forward.dtype == np.float64
    np.testing.assert_array_equal(forward[0], [1, 2, 0])
    np.testing.assert_allclose(forward[2], np.array([10, 7, 5]) + 0.01 * SHAPES.sum_squares + 3)
    np.testing.assert_array_equal(forward[3], language().forward_s.at(
        SHAPES.num_tiles, SHAPES.num_tokens, SHAPES.sum_squares))  # fmt: skip
    np.testing.assert_array_equal(made.output(SHAPES)[:, 0], [4, 4, 20, 20, 200])
    assert made.forward(SHAPES.take([])).shape == (5, 0)


def test_recomputation_costs_time_and_saves_bytes_where_a_layer_offers_it():
    made = table()
    np.testing.assert_array_equal(made.kept(SHAPES)[:, 0], [40, 40, 300, 300, 600])
    np.testing.assert_array_equal(made.kept(SHAPES, 1)[:, 0], [4, 4, 20, 20, 600])
    np.testing.assert_array_equal(made.kept(SHAPES, "mlp")[:, 0], [15, 15, 300, 300, 600])
    np.testing.assert_array_equal(made.recompute(SHAPES, 1)[:, 0], [0.75, 0.75, 10, 10, 0])
    mixed = (1, "mlp", 0, 1, 0)
    np.testing.assert_array_equal(made.kept(SHAPES, mixed)[:, 0], [4, 15, 300, 20, 600])
    np.testing.assert_array_equal(made.recompute(SHAPES, mixed)[:, 0], [0.75, 0.5, 0, 10, 0])
    assert made.kind(0).choices == (0, 1, "mlp")
    assert made.kind(4).choices == (0,)


def test_a_frozen_encoder_has_no_backward_pass_and_keeps_nothing():
    made = table(kinds=(vision(trainable=False), language(), head()))
    assert made.has_backward.tolist() == [False, False, True, True, True]
    assert not made.backward(SHAPES)[:2].any()
    assert not made.kept(SHAPES)[:2].any()
    assert not made.recompute(SHAPES, 1)[:2].any()
    assert not made.gradient(SHAPES)[:2].any()
    np.testing.assert_array_equal(made.backward(SHAPES)[2:], table().backward(SHAPES)[2:])
    np.testing.assert_array_equal(made.forward(SHAPES), table().forward(SHAPES))


def test_a_frozen_layer_behind_a_trained_one_passes_gradients_on_only():
    made = table(kinds=(vision(), language(trainable=False), head()))
    assert made.has_backward.all()
    frozen = language().backward_frozen_s.at(*(getattr(SHAPES, name) for name in (
        "num_tiles", "num_tokens", "sum_squares")))  # fmt: skip
    np.testing.assert_allclose(made.backward(SHAPES)[2], frozen)
    np.testing.assert_array_equal(made.kept(SHAPES)[2], 20 * SHAPES.num_tokens)
    np.testing.assert_array_equal(made.kept(SHAPES, 1)[2], 2 * SHAPES.num_tokens)
    # nothing said of it: half of the time, all of the bytes
    plain = language(trainable=False, backward_frozen_s=None, kept_frozen_bytes=None)
    made = table(kinds=(vision(), plain, head()))
    np.testing.assert_allclose(made.backward(SHAPES)[2], table().backward(SHAPES)[2] / 2)
    np.testing.assert_array_equal(made.kept(SHAPES), table().kept(SHAPES))


def test_recomputing_a_part_never_keeps_more_than_recomputing_nothing():
    option = Selective(name="mlp", recompute_s=Linear(tile=0.5), kept_bytes=Linear(tile=35.0))
    frozen = vision(name="frozen", trainable=False, kept_frozen_bytes=Linear(tile=30.0),
                    selective=(option,))  # fmt: skip
    made = table(kinds=(vision(), frozen), layers=("vision", "frozen"))
    assert made.kept(SHAPES, (0, "mlp"))[1, 0] == 30


def test_layers_without_parameters_train_nothing():
    made = table(kinds=(vision(params=0), language(), head()))
    assert made.trainable.tolist() == [False, False, True, True, True]
    assert not made.kept(SHAPES)[:2].any()


def test_parameters_take_what_zero_leaves_of_them():
    def bytes_of(**changes):
        return table(**changes).static_bytes.tolist()

    assert bytes_of(zero_stage=0) == [1800, 1800, 5400, 5400, 900]
    assert bytes_of(zero_stage=0, data_parallel=4) == bytes_of(zero_stage=0)
    assert bytes_of(zero_stage=1, data_parallel=4) == [900, 900, 2700, 2700, 450]
    frozen = (vision(trainable=False), language(), head())
    assert bytes_of(kinds=frozen, zero_stage=0)[:3] == [200, 200, 5400]
    fp32 = ParamBytes(weight=4, gradient=4, optimizer=8)
    assert bytes_of(param_bytes=fp32, zero_stage=0)[0] == 1600


def test_shapes_are_the_sums_over_groups():
    groups = Groups(rows=np.array([2, 0, 1]), offsets=np.array([0, 2, 3]))
    shapes = Shapes.from_groups(groups, num_tiles=[1, 0, 4], num_tokens=[5, 6, 70_000])
    assert shapes.num_tiles.tolist() == [5, 0]
    assert shapes.num_tokens.tolist() == [70_005, 6]
    assert shapes.sum_squares.tolist() == [70_000**2 + 25, 36]
    assert shapes.take([1]).num_tokens.tolist() == [6]


# --- JSON


def test_a_table_survives_json_and_its_fingerprint_names_its_figures():
    made = table(
        tied=((0, 4),), pinned={0: 0, 4: 3}, tensor_parallel=2, data_parallel=4, name="tiny",
        p2p_latency_s=1e-5, source="measured",
    )  # fmt: skip
    again = CostTable.from_json(made.to_json())
    assert again == made
    assert again.fingerprint == made.fingerprint
    assert len(made.fingerprint) == 16
    other = dataclasses.replace(made, data_parallel=8)
    assert other.fingerprint != made.fingerprint
    slower = table(kinds=(vision(forward_s=Linear(tile=1.0000001)), language(), head()))
    assert slower.fingerprint != table().fingerprint


def test_a_table_crosses_into_other_processes():
    made = table(pinned={0: 0}, tied=((0, 4),))
    made.forward(SHAPES)
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert copy.deepcopy(made).fingerprint == made.fingerprint
    np.testing.assert_array_equal(again.kept(SHAPES), made.kept(SHAPES))


finite = st.floats(0, 1e12, allow_nan=False)


@given(st.lists(finite, min_size=4, max_size=4), st.booleans())
def test_every_figure_survives_json(values, trainable):
    tile, token, pair, fixed = values
    cost = Linear(tile=tile, token=token, token_pair=pair, fixed=fixed)
    made = table(kinds=(vision(forward_s=cost, trainable=trainable), language(), head()))
    assert CostTable.from_json(made.to_json()) == made


def broken(**changes):
    found = json.loads(table().to_json())
    found.update(changes)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "a cost table must be JSON"),
        ("[]", "must be an object of format 'omniload.cost_table', got 'list'"),
        (broken(format="other"), "format 'omniload.cost_table', got 'other'"),
        (broken(version=2), "must be of version 1, got 2"),
        (broken(extra=1), r"missing \[\], unknown \['extra'\]"),
        (
            broken(kinds=[{"name": "x"}]),
            r"LayerKind must have the fields .* missing \['backward_s'",
        ),
        (broken(kinds=3), "wrong type"),
        (broken(pinned={"a": 0}), "wrong type"),
        (broken(layers=["nothing"]), "layer 0 must be of a known kind .*got 'nothing'"),
    ],
)
def test_other_json_is_refused_as_a_table(text, match):
    with pytest.raises(ConfigError, match=match):
        CostTable.from_json(text)


# --- what can't be


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Linear(tile=-1.0), "Linear.tile must be finite and not negative, got -1.0"),
        (lambda: Linear(token=float("nan")), "Linear.token must be finite"),
        (lambda: Linear(fixed="3"), "Linear.fixed must be finite and not negative, got '3'"),
        (lambda: vision(part="tail"), "must be one of vision, .* got 'tail'"),
        (lambda: vision(params=1.5), "LayerKind.params must be an integer"),
        (lambda: vision(recomputable=False), "the layer be recomputable"),
        (lambda: ParamBytes(weight=-2), "ParamBytes.weight must be finite"),
        (lambda: table(kinds=(vision(), vision())), "kinds of a cost table must have different"),
        (lambda: table(layers=()), "at least one layer"),
        (lambda: table(tied=((0,),)), r"tied group must name two or more of 5 layers, got \[0\]"),
        (lambda: table(pinned={9: 0}), "got layer 9 on stage 0"),
        (lambda: table(tensor_parallel=0), "CostTable.tensor_parallel must be an integer"),
        (lambda: table(zero_stage=2), "CostTable.zero_stage must be 0 or 1"),
        (lambda: table(p2p_bytes_per_s=0), "CostTable.p2p_bytes_per_s must be finite and above 0"),
        (lambda: table(source="guess"), "CostTable.source must be one of analytic"),
        (lambda: table().kept(SHAPES, (0, 0)), "one entry a layer: expected 5, got 2"),
        (lambda: table().kept(SHAPES, (0, 0, 0, 0, 1)), r"recompute of layer 4 \(head\) must be"),
        (lambda: table().kept(SHAPES, ("mlp", 0, "mlp", 0, 0)), r"layer 2 \(language\)"),
        (
            lambda: Shapes(num_tiles=[1], num_tokens=[1, 2], sum_squares=[1, 2]),
            r"columns of Shapes must have one length, got \[1, 2, 2\]",
        ),
        (
            lambda: Shapes(num_tiles=[-1], num_tokens=[1], sum_squares=[1]),
            "Shapes.num_tiles must be one finite number of at least 0",
        ),
    ],
)
def test_figures_that_no_layer_has_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


# --- plans


def plan(**changes):
    fields = {"parts": (0, 2, 5), "recompute": (1, 0, "mlp", 0, 0)}
    return PipelinePlan(**{**fields, **changes})


def stage(layers, **changes):
    fields = {"layers": layers, "forward_ms": 1.5, "backward_ms": 3.0, "memory_gb": 60.5}
    return StagePlan(**{**fields, **changes})


def read(**changes):
    return PipelinePlan.from_json(json.dumps({**plan().to_dict(), **changes}))


def test_a_plan_survives_json_and_keeps_the_promised_names():
    made = plan(
        stages=(stage(2, headroom_gb=-1.0), stage(3)), step_ms=17.25, memory_limit_gb=80.0,
        table_fingerprint=table().fingerprint,
    )  # fmt: skip
    found = json.loads(made.to_json())
    assert found["parts"] == [0, 2, 5]
    assert found["recompute"] == [1, 0, 1, 0, 0]
    assert found["selective"] == {"2": "mlp"}
    assert found["stages"][0].keys() >= {"layers", "forward_ms", "backward_ms", "memory_gb"}
    assert found["step_ms"] == 17.25
    assert PipelinePlan.from_json(made.to_json()) == made
    found["gpu_days"] = 3.5  # what a command adds
    assert PipelinePlan.from_json(json.dumps(found)) == made


def test_a_plan_says_where_a_layer_is():
    assert plan().layers_per_stage == (2, 3)
    assert plan().num_stages == 2
    assert [plan().stage_of(layer) for layer in range(5)] == [0, 0, 1, 1, 1]
    with pytest.raises(ConfigError, match="layer must be below 5, got 5"):
        plan().stage_of(5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: plan(parts=(0,)), "start with 0 and rise"),
        (lambda: plan(parts=(1, 5)), "start with 0 and rise"),
        (lambda: plan(parts=(0, 2, 2, 5)), "start with 0 and rise"),
        (lambda: plan(parts=(0, 2.5, 5)), "parts must be integers, got 2.5"),
        (lambda: plan(recompute=(0, 0)), "one entry a layer: expected 5, got 2"),
        (lambda: plan(recompute=(0, 0, 0, 0, 2)), "recompute of layer 4 must be 0, 1 or the name"),
        (lambda: plan(recompute=(0, 0, 0, 0, True)), "recompute of layer 4 .*got True"),
        (lambda: plan(stages=(stage(5),)), r"layers that parts say: expected \(2, 3\), got \(5,\)"),
        (lambda: plan(step_ms=float("inf")), "PipelinePlan.step_ms must be a finite number"),
        (lambda: stage(0), "at least one layer, got 0"),
        (lambda: stage(1, memory_gb=-1), "StagePlan.memory_gb must be a finite number"),
        (lambda: PipelinePlan.from_json("{}"), "format 'omniload.pipeline_plan', got None"),
        (
            lambda: PipelinePlan.from_json('{"format": "omniload.pipeline_plan", "version": 1}'),
            r"must have parts and recompute: missing \['parts', 'recompute'\]",
        ),
        (lambda: read(parts=3), "parts must be a list of layer numbers, .* got 3"),
        (lambda: read(recompute="01000"), "0 or 1 for each of 5 layers: got '01000'"),
        (lambda: read(selective={"-1": "mlp"}), "from 0 to below 5 to names: got '-1'"),
        (lambda: read(stages=[{"layers": 2}, 3]), "stages must be a list of objects with backward"),
        (lambda: read(step_ms="fast"), "PipelinePlan.step_ms must be a finite number"),
    ],
)
def test_plans_that_no_pipeline_has_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


# --- the package


def test_every_name_of_the_package_resolves_and_only_profiles_load_torch():
    code = (
        "import sys, omniload.pipeline as pipeline\n"
        "for name in pipeline.__all__:\n"
        "    if name not in ('ProfileBatch', 'profile_layers'):\n"
        "        assert getattr(pipeline, name).__name__ == name\n"
        "assert 'torch' not in sys.modules\n"
        "assert pipeline.profile_layers.__name__ == 'profile_layers'\n"
        "assert set(pipeline.__all__) <= set(dir(pipeline))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pipeline.nothing  # noqa: B018
