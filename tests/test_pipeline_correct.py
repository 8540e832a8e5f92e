"""Measured tables correct counted ones: the form of a cost stays, its size is the measured one."""

import dataclasses

import numpy as np
import pytest

from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.models import Encoder, ModelDescription
from omniload.pipeline.table import CostTable
from tests.profiled_layers import (
    HELD_OUT,
    PATCHES,
    TOKENS_PER_TILE,
    VOCABULARY,
    WIDTH,
    cross_entropy,
    model,
    one_thread,  # noqa: F401 - a fixture
    profile,
    shapes,
)


def test_a_measured_table_corrects_an_analytic_one():
    measured = profile(model())
    shape = shapes(HELD_OUT)
    twice = dataclasses.replace(
        measured,
        source="analytic",
        kinds=tuple(
            dataclasses.replace(
                kind,
                forward_s=kind.forward_s.scaled(2),
                backward_s=kind.backward_s.scaled(4),
                kept_bytes=kind.kept_bytes.scaled(0.5),
            )
            for kind in measured.kinds
        ),
    )
    found = twice.corrected_by(measured, shape)
    assert found.source == "corrected"
    np.testing.assert_allclose(found.forward(shape), measured.forward(shape))
    np.testing.assert_allclose(found.backward(shape), measured.backward(shape))
    np.testing.assert_allclose(found.kept(shape), measured.kept(shape))


def small_model():
    vision = VisionModel(layers=3, width=WIDTH, patches=PATCHES)
    language = LanguageModel(
        layers=2, width=WIDTH, vocabulary=VOCABULARY, heads=1, mlp_ratio=2, gated=False
    )
    return ModelDescription(
        name="small", encoder=Encoder(sizes=vision, tokens_per_tile=TOKENS_PER_TILE, joined=4),
        projector=(4 * WIDTH, WIDTH), language=language,
    )  # fmt: skip


def test_kinds_are_found_by_their_part_and_keep_the_form_of_their_costs():
    shape = shapes(HELD_OUT)
    analytic = cost_table(small_model(), tensor_parallel=1, data_parallel=4)
    measured = profile(model(), loss_fn=cross_entropy)
    found = analytic.corrected_by(measured, shape)
    assert found.layers == analytic.layers
    assert found.data_parallel == 4
    for name in ("forward", "backward", "kept"):
        rows = [getattr(each, name)(shape).sum(axis=1) for each in (found, measured)]
        np.testing.assert_allclose(*rows)
    # options that were not measured keep their share of the whole
    share = [table.kept(shape, "mlp")[0] / table.kept(shape)[0] for table in (found, analytic)]
    np.testing.assert_allclose(*share)
    assert CostTable.from_json(found.to_json()) == found


def test_kinds_that_were_not_measured_get_the_ratio_of_those_that_were():
    shape = shapes(HELD_OUT)
    analytic = cost_table(small_model())
    fast = dataclasses.replace(
        analytic,
        kinds=tuple(
            dataclasses.replace(kind, forward_s=kind.forward_s.scaled(0.5),
                                backward_s=kind.backward_s.scaled(0.5))
            for kind in analytic.kinds if kind.part in ("vision", "language")
        ),
        layers=("vision_block", "language_block"),
    )  # fmt: skip
    found = analytic.corrected_by(fast, shape)
    np.testing.assert_allclose(found.forward(shape), analytic.forward(shape) / 2)
    np.testing.assert_allclose(found.kept(shape), analytic.kept(shape))
    other = dataclasses.replace(
        fast, layers=("a",), kinds=(dataclasses.replace(fast.kinds[0], name="a", part="head"),)
    )
    found = analytic.corrected_by(other, shape, names={"vision_block": "a"})
    np.testing.assert_allclose(found.forward(shape), analytic.forward(shape) / 2)


def test_a_measured_frozen_layer_corrects_the_pass_that_it_has():
    shape = shapes(HELD_OUT)
    analytic = cost_table(small_model())
    block = analytic.kind(0)
    frozen = dataclasses.replace(
        block, trainable=False, backward_s=block.backward_frozen_s.scaled(3),
        backward_frozen_s=block.backward_frozen_s.scaled(3),
        kept_bytes=block.kept_frozen_bytes, params=1,
    )  # fmt: skip
    measured = dataclasses.replace(analytic, kinds=(frozen,), layers=("vision_block",))
    found = analytic.corrected_by(measured, shape).kind(0)
    assert found.backward_s.tile == pytest.approx(3 * block.backward_s.tile)
    assert found.kept_bytes == block.kept_bytes


def test_tables_that_do_not_belong_together_are_refused():
    shape = shapes(HELD_OUT)
    analytic = cost_table(small_model())
    with pytest.raises(ConfigError, match="of one tensor parallelism: expected 1, got 2"):
        analytic.corrected_by(cost_table(small_model(), tensor_parallel=2), shape)
    alone = dataclasses.replace(
        analytic, layers=("x",),
        kinds=(dataclasses.replace(analytic.kinds[0], name="x"),
               dataclasses.replace(analytic.kinds[0], name="y")),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"measured kinds must belong to .*: got x, y for"):
        analytic.corrected_by(alone, shape)
    with pytest.raises(ConfigError, match="got 'vision_block': 'z'"):
        analytic.corrected_by(alone, shape, names={"vision_block": "z"})
