"""Analytic cost tables: against published figures, and against torch."""

import dataclasses
import functools
import importlib

import numpy as np
import pytest
import torch

from omniload.adapters.recompute import LayerRunner
from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.models import Encoder, Machine, ModelDescription
from omniload.pipeline.presets import (
    ENCODERS,
    LANGUAGE_MODELS,
    PAIRS,
    PUBLISHED_PAIRS,
    preset,
    projector_widths,
)
from omniload.pipeline.profile import kept_storages
from omniload.pipeline.table import Shapes

COUNTING = Machine(
    flops_per_s=1.0, vision_efficiency=1.0, language_efficiency=1.0, layer_overhead_s=0.0
)
ONE_TILE = Shapes(num_tiles=[1], num_tokens=[0], sum_squares=[0])
ONE_TOKEN = Shapes(num_tiles=[0], num_tokens=[1], sum_squares=[0])


def operations(model, shapes, **changes):
    """Forward and backward operations of each layer."""
    table = cost_table(model, machine=COUNTING, **changes)
    return table.forward(shapes)[:, 0], table.backward(shapes)[:, 0]


def tiny(**changes):
    vision = VisionModel(layers=3, width=24, patches=10, mlp_ratio=3.0)
    language = LanguageModel(
        layers=2, width=32, vocabulary=50, heads=4, kv_heads=2, head_dim=6, mlp_ratio=2.5
    )
    encoder = Encoder(sizes=vision, tokens_per_tile=3.0)
    fields = {"name": "tiny", "encoder": encoder, "projector": (24, 32, 32), "language": language}
    return ModelDescription(**{**fields, **changes})


# --- published figures


def test_the_larger_published_model_has_its_published_size_and_cost():
    model = preset("internvl-6b-20b")
    table = cost_table(model)
    assert table.num_layers == 96
    assert table.params[:45].sum() / 1e9 == pytest.approx(5.53, abs=0.005)
    assert table.params[45:].sum() / 1e9 == pytest.approx(19.98, abs=0.005)
    assert operations(model, ONE_TILE)[0][:45].sum() / 1e12 == pytest.approx(11.9, abs=0.05)
    assert operations(model, ONE_TOKEN)[0][47:95].sum() / 1e9 == pytest.approx(37.5, abs=0.06)


def test_balanced_parameters_of_the_frozen_encoder_give_the_known_cut():
    table = cost_table(preset("internvl-6b-20b").freeze("vision"))
    weights = np.where(table.trainable, table.params, 0)
    sums = [weights[low:high].sum() for low, high in ((0, 58), (58, 71), (71, 84), (84, 96))]
    # DeepSpeed cuts there: no bound can move without a larger stage
    assert max(sums) / min(sums) < 1.05
    for bound in (58, 71, 84):
        stage = (58, 71, 84).index(bound)
        assert sums[stage] + weights[bound] > max(sums)
        assert sums[stage + 1] + weights[bound - 1] > max(sums)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_have_the_size_that_their_authors_state(name):
    known = ENCODERS[name]
    table = cost_table(preset(f"{name}+qwen2.5-7b"))
    counted = table.params[np.array(table.layers) == "vision_block"].sum()
    if known.projector == "qwen":
        counted += table.params[list(table.layers).index("projector")]
    assert counted / 1e9 == pytest.approx(known.billions, rel=0.04)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models_have_the_size_that_their_authors_state(name):
    table = cost_table(preset(f"clip-l-336+{name}"))
    counted = table.params[list(table.layers).index("embedding") :].sum()
    assert counted / 1e9 == pytest.approx(LANGUAGE_MODELS[name].billions, rel=0.002)


def test_every_pair_makes_a_table():
    assert set(PUBLISHED_PAIRS) <= set(PAIRS)
    assert len(PUBLISHED_PAIRS) == 9
    for name in PAIRS:
        assert cost_table(preset(name), tensor_parallel=PUBLISHED_PAIRS.get(name, 1)).name == name
    assert preset("internvl-6b-20b").encoder.tokens_per_tile == 256
    assert preset("siglip-so400m+qwen3-8b").projector == (1152, 4096, 4096)
    assert preset("qwen2-vl-7b").projector == (5120, 5120, 3584)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("internvl", "model must be one of internvl-6b-20b, .*got 'internvl'"),
        ("vgg+llama3-8b", "encoder must be one of internvit-300m, .*got 'vgg'"),
        ("eva-g+gpt2", "language model must be one of internlm2-1.8b, .*got 'gpt2'"),
    ],
)
def test_unknown_models_are_refused_with_the_known_ones(name, match):
    with pytest.raises(ConfigError, match=match):
        preset(name)


# --- operations and bytes


@pytest.mark.parametrize(
    "frozen", [(), ("vision",), ("language",), ("vision", "projector"), ("vision", "language"),
               ("vision", "projector", "language")]
)  # fmt: skip
def test_operations_are_those_of_the_cost_model_of_the_planner(frozen):
    model = tiny().freeze(*frozen)
    whole = CostModel.from_model(
        vision=model.encoder.sizes,
        language=model.language,
        projector_trained=model.projector_trained,
    )
    shapes = Shapes(num_tiles=[3], num_tokens=[70], sum_squares=[900])
    forward, backward = operations(model, shapes)
    counted = np.delete(forward + backward, 3).sum()  # the projector is not in the cost model
    assert counted == pytest.approx(whole.cost(3, 70, 900))
    passes = 3 if model.projector_trained else 2 if not {"vision"} <= set(frozen) else 1
    assert forward[3] + backward[3] == passes * 2 * 3 * 3 * (24 * 32 + 32 * 32)


def test_frozen_blocks_form_no_gradients_of_weights():
    table = cost_table(tiny(), machine=COUNTING)
    shapes = Shapes(num_tiles=[3], num_tokens=[70], sum_squares=[900])
    for kind, positions in ((table.kind(0), 3 * 10), (table.kind(5), 70)):
        saved = [
            float(cost.at(shapes.num_tiles, shapes.num_tokens, shapes.sum_squares)[0])
            for cost in (kind.backward_s, kind.backward_frozen_s)
        ]
        assert saved[0] - saved[1] == pytest.approx(2 * positions * kind.params)


def test_patches_as_tiles_cost_what_their_image_costs():
    sizes = VisionModel(layers=2, width=24, patches=64)
    image = Encoder(sizes=sizes, tokens_per_tile=16.0, joined=4)
    single = dataclasses.replace(sizes, patches=1)
    patch = Encoder(sizes=single, tokens_per_tile=0.25, joined=4, attended=64)
    costs = [
        operations(tiny(encoder=each, projector=(96, 32)), shapes)
        for each, shapes in (
            (image, ONE_TILE),
            (patch, Shapes(num_tiles=[64], num_tokens=[0], sum_squares=[0])),
        )
    ]
    np.testing.assert_allclose(costs[0], costs[1])


def test_kept_bytes_are_the_formulas_of_flash_attention_in_bf16():
    table = cost_table(preset("eva-8b+internlm2-20b"))
    tile = table.kept(ONE_TILE)[0, 0]
    assert tile == 1025 * (16 * 4096 + 4 * 20480)
    block = table.layers.index("language_block")
    token = table.kept(ONE_TOKEN)[block, 0]
    assert token == pytest.approx(12 * 6144 + 4 * 6144 / 6 + 6 * 16384)
    assert table.kept(ONE_TOKEN)[-1, 0] == pytest.approx(6 * 92553, rel=0.05)
    assert table.kept(ONE_TILE, 1)[0, 0] == 2 * 1025 * 4096
    assert table.kept(ONE_TOKEN, 1)[block, 0] == 2 * 6144
    for name in ("attention", "mlp"):
        assert table.kept(ONE_TILE, 1)[0, 0] < table.kept(ONE_TILE, name)[0, 0] < tile
        assert table.kept(ONE_TOKEN, 1)[block, 0] < table.kept(ONE_TOKEN, name)[block, 0] < token


def test_recomputing_both_halves_takes_as_long_as_recomputing_the_block():
    table = cost_table(tiny(), machine=COUNTING)
    shapes = Shapes(num_tiles=[3], num_tokens=[70], sum_squares=[900])
    halves = table.recompute(shapes, "attention") + table.recompute(shapes, "mlp")
    whole = table.recompute(shapes, 1)
    both = np.isin(table.layers, ["vision_block", "language_block"])
    np.testing.assert_allclose(halves[both], whole[both])
    np.testing.assert_allclose(whole[both], table.forward(shapes)[both])


class Block(torch.nn.Module):
    """A transformer block whose norms, activations and attention keep what the formulas count."""

    def __init__(self, width, mlp):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, mlp), torch.nn.Linear(mlp, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 8)).unbind(-3)
        q, k, v = (each.transpose(-2, -3) for each in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(-2, -3).flatten(-2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))


@pytest.mark.parametrize("trained", [True, False])
def test_kept_bytes_of_a_real_block_are_those_of_the_formula(trained):
    tiles, patches, width, mlp = 3, 64, 32, 128
    block = Block(width, mlp).to(torch.bfloat16).requires_grad_(trained)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(tiles, patches, width, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x)
    sizes = VisionModel(layers=1, width=width, patches=patches, mlp_ratio=4.0, trained=trained)
    model = tiny(encoder=Encoder(sizes=sizes, tokens_per_tile=3.0), projector=(width, 32, 32))
    kind = cost_table(model).kind(0)
    formula = (kind.kept_bytes if trained else kind.kept_frozen_bytes).at(tiles, 0)
    assert out.requires_grad
    # beyond it: statistics of norms and of attention, a few numbers a position
    assert float(formula) <= sum(kept.values()) <= float(formula) * 1.1


def kept_by(layer, run, part=None):
    """Bytes that a layer of transformers keeps in a forward pass, while a part is recomputed."""
    inputs = []  # of the part: torch's checkpoint holds them, and hooks don't see them
    watched = layer.get_submodule(part) if part else torch.nn.Identity()
    watched.register_forward_pre_hook(
        lambda _module, args, kwargs: inputs.append((args or tuple(kwargs.values()))[0]),
        with_kwargs=True,
    )
    owned = {each.untyped_storage().data_ptr() for each in (*layer.parameters(), *layer.buffers())}
    _, saved = kept_storages(run)
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in inputs}
    return sum(size for address, size in {**saved, **held}.items() if address not in owned)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(
    "kind", ["siglip", "internvl", "internvl with norms", "qwen2", "qwen3 with norms"]
)
def test_kept_bytes_are_those_of_real_layers_of_transformers(kind, trained):
    transformers = pytest.importorskip("transformers")
    width, mlp, tokens = 512, 1536, 256
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_attention_heads": 8}
    x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    inputs = {}
    decoder = "qwen" in kind
    if decoder:
        name = kind[:5]
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = transformers.AutoConfig.for_model(
            name, num_key_value_heads=2, head_dim=64, num_hidden_layers=1, **sizes
        )
        rotary = getattr(module, f"{name.capitalize()}RotaryEmbedding")(config)
        inputs["position_embeddings"] = rotary(x, torch.arange(tokens)[None])
        inputs["attention_mask"] = None
        make = functools.partial(getattr(module, f"{name.capitalize()}DecoderLayer"), layer_idx=0)
    elif kind == "siglip":
        config = transformers.SiglipVisionConfig(**sizes)
        inputs["attention_mask"] = None
        make = transformers.models.siglip.modeling_siglip.SiglipEncoderLayer
    else:
        config = transformers.InternVLVisionConfig(use_qk_norm="norms" in kind, **sizes)
        make = transformers.models.internvl.modeling_internvl.InternVLVisionLayer
    config._attn_implementation = "sdpa"
    layer = make(config).to(torch.bfloat16).requires_grad_(trained)
    layer.forward = functools.partial(layer.forward, **inputs)
    real = kept_by(layer, lambda: layer(x))

    scale, norm = "internvl" in kind, "norms" in kind
    model = ModelDescription(
        name=kind, projector=(width, width),
        encoder=Encoder(
            sizes=VisionModel(layers=1, width=width, patches=tokens, mlp_ratio=mlp / width,
                              trained=trained),
            tokens_per_tile=1, layer_scale=scale, qk_norm=norm,
        ),
        language=LanguageModel(layers=1, width=width, vocabulary=50, heads=8, kv_heads=2,
                               mlp_ratio=mlp / width, trained=trained),
        qk_norm=norm,
    )  # fmt: skip
    block = cost_table(model, fused=False).kind(3 if decoder else 0)
    cost = block.kept_bytes if trained else block.kept_frozen_bytes
    assert real == pytest.approx(float(cost.at(1, tokens)), rel=0.02)
    for option in block.selective if trained else ():
        part = {"attention": "attention" if scale else "self_attn", "mlp": "mlp"}[option.name]
        kept = kept_by(layer, lambda name=option.name: LayerRunner(layer)(x, name), part)
        assert kept == pytest.approx(float(option.kept_bytes.at(1, tokens)), rel=0.04), option.name
    if decoder:
        fused = cost_table(model).kind(3)
        assert (fused.kept_bytes if trained else fused.kept_frozen_bytes).at(1, tokens) < real


def test_tensor_parallelism_divides_work_parameters_and_bytes_but_not_what_is_sent():
    model = preset("internvl-6b-34b")
    shapes = Shapes(num_tiles=[9], num_tokens=[4096], sum_squares=[4e6])
    whole, shared = (cost_table(model, machine=COUNTING, tensor_parallel=n) for n in (1, 4))
    np.testing.assert_allclose(whole.forward(shapes), 4 * shared.forward(shapes))
    np.testing.assert_allclose(whole.backward(shapes), 4 * shared.backward(shapes))
    inner = np.array(whole.layers) != "embedding"
    np.testing.assert_allclose(whole.kept(shapes)[inner], 4 * shared.kept(shapes)[inner])
    np.testing.assert_allclose(whole.static_bytes, 4 * shared.static_bytes, rtol=1e-6)
    np.testing.assert_array_equal(whole.output(shapes), shared.output(shapes))


def test_a_cut_behind_the_projector_sends_the_visual_tokens_only():
    table = cost_table(preset("internvl-6b-20b"))
    sent = table.output(ONE_TILE)[:, 0]
    assert sent[0] == 2 * 1025 * 3200
    assert sent[table.layers.index("projector")] / 1e6 == pytest.approx(3.1, abs=0.05)
    assert table.output(ONE_TOKEN)[table.layers.index("embedding"), 0] == 2 * 6144


def test_cuts_send_what_was_worked_out_for_the_published_model():
    table = cost_table(preset("internvl-6b-20b"))
    pack = Shapes(num_tiles=[9.74], num_tokens=[3717], sum_squares=[3717.0**2])
    sent = table.output(pack)[:, 0] / 1e6
    by_parameters, balanced = (56, 71, 84), (25, 52, 74)
    assert sum(sent[cut - 1] for cut in by_parameters) == pytest.approx(137.0, abs=0.1)
    assert sum(sent[cut - 1] for cut in balanced) == pytest.approx(155.2, abs=0.1)


def test_tied_embeddings_are_a_tied_group():
    table = cost_table(tiny(tied_embeddings=True))
    assert [table.layers[layer] for layer in table.tied[0]] == ["embedding", "head"]
    assert cost_table(tiny()).tied == ()


def test_every_layer_pays_for_its_launches():
    slow = cost_table(tiny(), machine=Machine(layer_overhead_s=0.5))
    nothing = Shapes(num_tiles=[0], num_tokens=[0], sum_squares=[0])
    assert set(slow.forward(nothing)[:, 0]) == {0.5}
    assert slow.backward(nothing)[0, 0] == 1.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tiny().freeze("tail"), "parts to freeze are vision, .*got 'tail'"),
        (lambda: tiny(projector=(24,)), r"two or more widths above 0, got \[24\]"),
        (lambda: tiny(projector=(24, 33)), "end at the width .* expected 32, got 33"),
        (lambda: Machine(flops_per_s=0), "Machine.flops_per_s must be finite and above 0"),
        (
            lambda: Encoder(sizes=tiny().encoder.sizes, tokens_per_tile=0),
            "Encoder.tokens_per_tile must be above 0",
        ),
        (lambda: cost_table(tiny(), tensor_parallel=0), "tensor_parallel must be an integer"),
        (lambda: cost_table(tiny(), zero_stage=3), "zero_stage must be 0 or 1"),
    ],
)
def test_models_that_can_not_be_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


def test_projectors_have_the_hidden_layers_of_their_family():
    encoder = tiny().encoder
    assert projector_widths("internvl", encoder, 32) == (24, 32, 32)
    assert projector_widths("qwen", encoder, 32) == (24, 24, 32)
    assert projector_widths("mistral3", encoder, 32) == (24, 24, 32, 32)
