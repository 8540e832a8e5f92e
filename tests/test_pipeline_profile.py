"""Profiles of real layers: kept bytes are exact, kinds and gradients are found, times are there."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from omniload.errors import ConfigError
from omniload.pipeline.kinds import Linear, ParamBytes, Shapes
from omniload.pipeline.profile import ProfileBatch, kept_storages, profile_layers
from omniload.pipeline.profile_fit import design_of, fit_linear
from tests.profiled_layers import (
    HELD_OUT,
    MEASURED,
    PATCHES,
    VOCABULARY,
    WIDTH,
    cross_entropy,
    micro_batch,
    model,
    one_thread,  # noqa: F401 - a fixture
    profile,
    shapes,
    whole_chain,
)

# --- bytes


def test_kept_bytes_of_shapes_never_measured_are_exact():
    layers = model()
    table = profile(layers)
    kept = table.kept(shapes(HELD_OUT)).sum(axis=0)
    for place, case in enumerate(HELD_OUT):
        real = whole_chain(layers, micro_batch(*case))
        # bounds of samples and indices: a few bytes a sample, which no coefficient knows
        assert kept[place] == pytest.approx(real, rel=0.02)
    blocks = np.isin(table.layers, ["VisionBlock"])
    exact = table.kept(shapes(HELD_OUT))[blocks]
    again = profile(layers, cases=[*MEASURED[:3], *HELD_OUT]).kept(shapes(HELD_OUT))[blocks]
    np.testing.assert_allclose(exact, again, atol=1.0)


def test_a_row_of_one_kind_of_layer_keeps_to_the_byte_what_is_predicted():
    torch.manual_seed(2)
    layers = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)]

    def batch(tokens, squares):
        return ProfileBatch(inputs=torch.randn(tokens, 8, requires_grad=True), num_tiles=0,
                            num_tokens=tokens, sum_squares=squares)  # fmt: skip

    measured = [batch(10, 50), batch(33, 80), batch(21, 400)]
    table = profile_layers(layers, measured, repeats=1, warmup=0)
    assert table.layers == ("Linear", "GELU", "Linear", "GELU", "Linear")
    found = table.kept(Shapes(num_tiles=[0], num_tokens=[77], sum_squares=[900]))[:, 0]
    # each keeps its input: what one gives is what the next one keeps
    np.testing.assert_allclose(found, 77 * 8 * 4, atol=1e-6)
    assert found.sum() == pytest.approx(whole_chain(layers, batch(77, 900)), abs=1e-6)
    assert table.kind(1).recomputable is False  # nothing to save: it keeps its input only


def test_a_storage_that_travels_on_is_kept_once():
    class Gate(nn.Module):
        def forward(self, inputs):
            x, gate = inputs
            return x * gate, gate

    batches = [
        ProfileBatch(inputs=(torch.randn(n, 8, requires_grad=True),
                             torch.randn(n, 8, requires_grad=True)),
                     num_tiles=0, num_tokens=n, sum_squares=s)
        for n, s in ((10, 50), (33, 80), (21, 400))
    ]  # fmt: skip
    layers = [Gate(), Gate(), Gate()]
    table = profile_layers(layers, batches, repeats=1, warmup=0,
                           kinds=["first", "second", "third"])  # fmt: skip
    kept = table.kept(Shapes(num_tiles=[0], num_tokens=[10], sum_squares=[50]))
    assert not kept.any()  # without parameters there is no backward pass
    bytes_of = [table.kind(layer).kept_bytes.at(0, 10, 50) for layer in range(3)]
    np.testing.assert_allclose(bytes_of, [0, 640, 320], atol=1e-6)


def test_output_of_a_layer_that_keeps_it_is_not_counted_twice():
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    batches = [
        ProfileBatch(inputs=torch.randn(n, 8), num_tiles=0, num_tokens=n, sum_squares=s)
        for n, s in ((10, 50), (33, 80), (21, 400))
    ]
    table = profile_layers(layers, batches, repeats=1, warmup=0)
    one = Shapes(num_tiles=[0], num_tokens=[10], sum_squares=[50])
    # the second of each kind is measured: a linear layer behind a tanh keeps nothing of its own
    np.testing.assert_allclose(table.kept(one)[1:3, 0], [320, 0], atol=1e-6)


def test_recomputed_layers_keep_what_they_were_given():
    table = profile(model())
    shape = shapes([(6, (70, 10))])
    kept = table.kept(shape, 1)[:, 0]
    assert kept[1] == pytest.approx(6 * PATCHES * WIDTH * 4)  # ids and bounds pass by
    assert kept[5] == pytest.approx(80 * WIDTH * 4)
    assert (kept <= table.kept(shape)[:, 0]).all()


@pytest.mark.parametrize("choice", [(1, 1, 1, 0, 0, 0, 0, 0), (0, 1, 1, 0, 0, 1, 1, 0)])
def test_bytes_of_a_plan_are_those_that_torch_keeps_with_its_recomputation(choice):
    layers = model()
    table = profile(layers)
    owned = {weight.untyped_storage().data_ptr() for layer in layers
             for weight in layer.parameters()}  # fmt: skip
    for case in HELD_OUT:
        batch = micro_batch(*case)
        batch.inputs[0].requires_grad_()
        kept = {}
        value = batch.inputs
        for layer, again in zip(layers, choice, strict=True):
            if again:
                # what the recomputation holds: its inputs; each once, and with what others keep
                given = [each for each in value if isinstance(each, torch.Tensor)]
                kept.update((each.untyped_storage().data_ptr(), each.untyped_storage().nbytes())
                            for each in given)  # fmt: skip
                value, inner = kept_storages(
                    functools.partial(checkpoint, layer, value, use_reentrant=False)
                )
            else:
                value, inner = kept_storages(functools.partial(layer, value))
            kept.update(inner)
        real = sum(size for address, size in kept.items() if address not in owned)
        predicted = table.kept(shapes([case]), choice).sum()
        assert predicted == pytest.approx(real, rel=0.03)


def test_outputs_are_what_is_sent():
    table = profile(model())
    sent = table.output(shapes([(6, (70, 10))]))[:, 0]
    ids, bounds = 80 * 8, 3 * 8
    assert sent[0] == pytest.approx(6 * PATCHES * WIDTH * 4 + ids + bounds, abs=16)
    assert sent[5] == pytest.approx(80 * WIDTH * 4 + bounds, abs=16)
    assert sent[-1] == pytest.approx(80 * VOCABULARY * 4)


def test_the_loss_is_counted_to_the_last_layer():
    layers = model()
    plain, lossy = profile(layers), profile(layers, loss_fn=cross_entropy)
    shape = shapes(HELD_OUT)
    more = lossy.kept(shape)[-1] - plain.kept(shape)[-1]
    assert (more >= shape.num_tokens * VOCABULARY * 4).all()
    assert lossy.kind(len(layers) - 1).choices == (0,)
    assert not lossy.output(shape)[-1].any()
    np.testing.assert_allclose(lossy.kept(shape)[:-1], plain.kept(shape)[:-1], atol=1.0)


# --- kinds


def test_equal_layers_are_of_one_kind():
    layers = model()
    layers[1].requires_grad_(False)
    table = profile(layers)
    assert table.layers == (
        "VisionBlock", "VisionBlock-2", "VisionBlock", "Projector", "Embedding", "LanguageBlock",
        "LanguageBlock", "Head",
    )  # fmt: skip
    assert [kind.part for kind in table.kinds] == [
        "vision", "vision", "projector", "embedding", "language", "head"
    ]  # fmt: skip
    assert table.source == "measured"
    assert table.params.tolist() == [
        sum(weight.numel() for weight in layer.parameters()) for layer in layers
    ]
    assert table.param_bytes == ParamBytes(weight=4, gradient=4, optimizer=8)


def test_frozen_layers_are_measured_as_such():
    layers = model()
    for layer in layers[:3]:
        layer.requires_grad_(False)
    frozen, trained = profile(layers), profile(model())
    shape = shapes(HELD_OUT)
    assert not frozen.kept(shape)[:3].any()
    assert not frozen.backward(shape)[:3].any()
    # behind a trained layer, a frozen one keeps no inputs of its linear layers
    assert frozen.kind(0).kept_frozen_bytes.tile < trained.kind(0).kept_bytes.tile
    np.testing.assert_allclose(frozen.kept(shape)[3:], trained.kept(shape)[3:], atol=1.0)


def test_layers_that_share_weights_are_tied():
    layers = model()
    layers[-1].linear.weight = layers[4].table.weight
    assert profile(layers).tied == ((4, 7),)
    shared = [nn.Linear(4, 4), nn.Tanh()]
    batches = [
        ProfileBatch(inputs=torch.randn(n, 4), num_tiles=0, num_tokens=n, sum_squares=s)
        for n, s in ((10, 50), (33, 80), (21, 400))
    ]
    table = profile_layers([*shared, *shared], batches, repeats=1, warmup=0)
    assert table.tied == ((0, 2),)


def test_functions_are_layers_too():
    def double(x):
        return x * 2

    batches = [
        ProfileBatch(inputs=torch.randn(n, 4), num_tiles=0, num_tokens=n, sum_squares=s)
        for n, s in ((10, 50), (33, 80), (21, 400))
    ]
    table = profile_layers([nn.Linear(4, 4), double], batches, repeats=1, warmup=0)
    assert table.layers == ("Linear", "double")
    assert table.kind(1).params == 0


# --- times, and what is left behind


def test_every_pass_takes_time():
    table = profile(model(), repeats=3, warmup=1)
    shape = shapes(HELD_OUT)
    assert (table.forward(shape) > 0).all()
    assert (table.backward(shape) > 0).all()
    assert (table.recompute(shape) >= 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_keeps_the_same_bytes_and_takes_time():
    layers = [layer.cuda() for layer in model()]
    table = profile(layers, loss_fn=cross_entropy, repeats=3, warmup=1)
    shape = shapes(HELD_OUT)
    assert (table.forward(shape) > 0).all()
    assert (table.backward(shape) > 0).all()
    on_cpu = profile(model(), loss_fn=cross_entropy)
    np.testing.assert_allclose(table.kept(shape), on_cpu.kept(shape), rtol=0.05)


def test_gradients_and_weights_are_left_as_they_were():
    layers = model()
    layers[0].norm.weight.grad = torch.full((WIDTH,), 3.0)
    before = {name: weight.clone() for name, weight in layers[5].state_dict().items()}
    profile(layers)
    assert (layers[0].norm.weight.grad == 3.0).all()
    assert layers[5].qkv.weight.grad is None
    for name, weight in layers[5].state_dict().items():
        assert torch.equal(weight, before[name])


def test_gradients_are_given_back_after_an_error():
    class Broken(nn.Module):
        def forward(self, inputs):
            raise RuntimeError("broken layer")

    layers = [nn.Linear(4, 4), Broken()]
    layers[0].weight.grad = torch.ones(4, 4)
    batches = [
        ProfileBatch(inputs=torch.randn(n, 4), num_tiles=0, num_tokens=n, sum_squares=s)
        for n, s in ((10, 50), (33, 80), (21, 400))
    ]
    with pytest.raises(RuntimeError, match="broken layer"):
        profile_layers(layers, batches, repeats=1, warmup=0)
    assert (layers[0].weight.grad == 1).all()


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: profile([*model()[:3], object()]),
            r"layers must be modules or functions, got object \(layer 3\). Build",
        ),
        (lambda: profile([]), "a profile needs at least one layer"),
        (lambda: profile(model(), parts=["vision"]), "parts must have one entry a layer: exp.* 8"),
        (lambda: profile(model(), kinds=["a"]), "kinds must have one entry a layer: expected 8"),
        (lambda: profile(model(), parts=["tail"] * 8), "parts must be of vision, .* got 'tail'"),
        (lambda: profile(model(), repeats=0), "repeats must be at least 1, warmup 0: got 0"),
        (
            lambda: profile(model(), kinds=["a"] * 8, loss_fn=cross_entropy),
            "its kind must be its own: got 8 layers of kind 'a'",
        ),
        (lambda: profile(model(), cases=[]), "must tell .* apart: got 0 micro-batches"),
        (
            lambda: profile(model(), cases=[(n, (10 * n,)) for n in range(1, 6)]),
            "must tell tiles, tokens, sum of squared lengths, a constant apart: got 5",
        ),
    ],
)
def test_profiles_that_say_nothing_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_lengths_give_the_shape_of_a_batch():
    batch = micro_batch(3, (4, 5))
    assert (batch.num_tiles, batch.num_tokens, batch.sum_squares) == (3, 9, 41)


def test_exact_values_give_exact_coefficients():
    design = design_of(shapes(MEASURED))
    truth = Linear(tile=123_456.0, token=64.0, token_pair=8.0)
    found = fit_linear(design, design @ [123_456.0, 64.0, 8.0, 0.0])
    for name in ("tile", "token", "token_pair", "fixed"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-9)
    assert fit_linear(design, np.zeros(len(design))) == Linear()
