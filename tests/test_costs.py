"""Costs: counted from the sizes of a model as torch counts them, fitted to times, in integers."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from omniload.costs import REFERENCE_COST, CostModel
from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel

# --- from the sizes of a model


class Block(torch.nn.Module):
    """The matrix products of a transformer layer, and no more."""

    def __init__(self, width, queries, keys, mlp, *, gated):
        super().__init__()
        sizes = [(width, queries), (width, keys), (width, keys), (queries, width), (width, mlp)]
        sizes += [(width, mlp), (mlp, width)] if gated else [(mlp, width)]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(a, b, bias=False) for a, b in sizes)
        self.gated = gated

    def forward(self, x):
        query, key, value, out, up, *rest = self.layers
        copies = query.out_features // key.out_features
        k, v = key(x).repeat(1, copies), value(x).repeat(1, copies)
        x = out(query(x) @ k.T @ v)
        hidden = up(x) * rest[0](x) if self.gated else up(x)
        return rest[-1](hidden)


def counted(model, num_tokens, width, *, backward):
    x = torch.randn(num_tokens, width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = model(x)
        if backward:
            y.sum().backward()
    return counter.get_total_flops()


def encoder(**changes):
    return VisionModel(**{"layers": 3, "width": 24, "patches": 10, "mlp_ratio": 3.0, **changes})


def decoder(**changes):
    sizes = {"layers": 2, "width": 32, "vocabulary": 50, "heads": 4, "kv_heads": 2, "head_dim": 6,
             "mlp_ratio": 2.5}  # fmt: skip
    return LanguageModel(**{**sizes, **changes})


def torch_encoder():
    return torch.nn.Sequential(*(Block(24, 24, 24, 72, gated=False) for _ in range(3)))


def torch_decoder():
    blocks = (Block(32, 24, 12, 80, gated=True) for _ in range(2))
    return torch.nn.Sequential(*blocks, torch.nn.Linear(32, 50, bias=False))


def test_forward_passes_are_counted_as_torch_counts_them():
    model = CostModel.from_model(
        vision=encoder(trained=False), language=decoder(trained=False), projector_trained=False
    )
    assert model.tile == counted(torch_encoder(), 10, 24, backward=False)
    # torch's attention here is not causal: twice the pairs
    whole = model.token * 7 + 2 * model.token_pair * 49
    assert whole == counted(torch_decoder(), 7, 32, backward=False)


def test_backward_passes_are_counted_as_torch_counts_them():
    # products of attention cost two and a half passes here, where torch's plain ones cost two
    trained = CostModel.from_model(vision=encoder(), language=decoder())
    scores = 2 * 2 * 10 * 10 * 24 * 3
    assert trained.tile - 0.5 * scores == counted(torch_encoder(), 10, 24, backward=True)
    pairs = 2 * 2 * 7 * 7 * 24 * 2
    whole = trained.token * 7 + 2 * trained.token_pair * 49
    assert whole - 0.5 * pairs == counted(torch_decoder(), 7, 32, backward=True)

    frozen = CostModel.from_model(vision=encoder(), language=decoder(trained=False))
    whole = frozen.token * 7 + 2 * frozen.token_pair * 49
    model = torch_decoder().requires_grad_(False)
    assert whole - 0.5 * pairs == counted(model, 7, 32, backward=True)


def test_frozen_parts_go_back_only_as_far_as_gradients_are_needed():
    def costs(*, vision, language, projector):
        return CostModel.from_model(
            vision=encoder(trained=vision),
            language=decoder(trained=language),
            projector_trained=projector,
        )

    forward = costs(vision=False, language=False, projector=False)
    for vision, language, projector in itertools.product((False, True), repeat=3):
        model = costs(vision=vision, language=language, projector=projector)
        assert (model.tile > forward.tile) == vision
        passes = 3 if language else 2 if vision or projector else 1
        assert model.token == passes * forward.token
        assert model.token_pair == (3.5 if passes > 1 else 1) * forward.token_pair


def test_recomputation_runs_forward_once_more_where_there_is_a_backward_pass():
    plain = CostModel.from_model(vision=encoder(), language=decoder())
    again = CostModel.from_model(vision=encoder(recompute=True), language=decoder(recompute=True))
    assert again.token == pytest.approx(plain.token * 4 / 3)
    assert again.token_pair == pytest.approx(plain.token_pair * 4.5 / 3.5)
    frozen = CostModel.from_model(vision=encoder(recompute=True, trained=False), language=decoder())
    assert frozen.tile == CostModel.from_model(
        vision=encoder(trained=False), language=decoder()
    ).tile  # fmt: skip


def test_rates_turn_operations_into_seconds():
    model = CostModel.from_model(vision=encoder(), language=decoder())
    timed = CostModel.from_model(
        vision=encoder(), language=decoder(), flops_per_s=4.0, vision_flops_per_s=2.0
    )
    assert (timed.tile, timed.token) == (model.tile / 2, model.token / 4)
    assert timed.token_pair == model.token_pair / 4
    text = CostModel.from_model(vision=None, language=decoder(), flops_per_s=4.0)
    assert (text.tile, text.token) == (0.0, timed.token)


def test_reference_model_has_the_size_that_its_name_says():
    assert REFERENCE_COST.token / 6 == pytest.approx(20e9, rel=0.05)
    assert REFERENCE_COST.tile / 6 / 1025 == pytest.approx(5.5e9, rel=0.1)
    assert 0.7 < REFERENCE_COST.tile * 3 / (REFERENCE_COST.token * 1000) < 1.3


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: encoder(layers=0), "VisionModel.layers must be above 0, got 0"),
        (lambda: encoder(mlp_ratio=float("nan")), "VisionModel.mlp_ratio must be above 0, got nan"),
        (lambda: decoder(heads=True), "LanguageModel.heads must be above 0, got True"),
        (lambda: decoder(kv_heads=-1), "LanguageModel.kv_heads must be above 0, got -1"),
        (
            lambda: CostModel.from_model(vision=None, language=decoder(), flops_per_s=0),
            "flops_per_s must be finite and above 0, got 0",
        ),
    ],
)
def test_sizes_that_no_model_has_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()


# --- from measured times


def profile(count, *, seed=0):
    generator = np.random.default_rng(seed)
    tokens = generator.integers(100, 5000, count)
    return generator.integers(0, 15, count), tokens, tokens * generator.integers(50, 100, count)


@settings(deadline=None, max_examples=50)
@given(
    coefficients=st.tuples(*[st.sampled_from([0.0, 1.0, 2.5, 7.0])] * 4).filter(
        lambda found: any(found[:3])
    ),
    count=st.integers(6, 40),
    seed=st.integers(0, 1000),
)
def test_fit_finds_the_coefficients_that_made_the_times(coefficients, count, seed):
    scales = (1e-2, 1e-5, 1e-8, 1e-2)
    wanted = [value * scale for value, scale in zip(coefficients, scales, strict=True)]
    tiles, tokens, squares = profile(count, seed=seed)
    times = wanted[0] * tiles + wanted[1] * tokens + wanted[2] * squares + wanted[3]
    model = CostModel.fit(tiles, tokens, squares, times + 1e-12)
    found = (model.tile, model.token, model.token_pair, model.fixed)
    for value, want, scale in zip(found, wanted, scales, strict=True):
        assert abs(value - want) < 1e-6 * scale


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10_000), count=st.integers(5, 40))
def test_fit_to_noisy_times_is_the_best_that_is_not_negative(seed, count):
    tiles, tokens, squares = profile(count, seed=seed)
    # tiles seem to save time, and so does a longer text: the plain optimum is negative there
    times = 2 + np.random.default_rng(seed + 1).random(count) - 0.05 * tiles + 1e-4 * tokens
    try:
        model = CostModel.fit(tiles, tokens, squares, times)
    except ConfigError:
        reject()  # few micro-batches may seem to take the same time whatever they hold
    design = np.stack([tiles, tokens, squares, np.ones(count)], axis=1)
    found = np.array([model.tile, model.token, model.token_pair, model.fixed])
    design, found = design / np.linalg.norm(design, axis=0), found * np.linalg.norm(design, axis=0)
    gradient = design.T @ (design @ found - times)
    assert (found >= 0).all()
    assert gradient.min() > -1e-8
    np.testing.assert_allclose(gradient[found > 0], 0, atol=1e-8)


def test_fit_leaves_out_what_was_not_measured():
    _, tokens, squares = profile(20)
    text = CostModel.fit(np.zeros(20), tokens, squares, 1e-5 * tokens + 1e-9 * squares)
    assert text.tile == 0
    assert text.token == pytest.approx(1e-5)
    assert text.token_pair == pytest.approx(1e-9)
    tiles, tokens, _ = profile(20)
    assert CostModel.fit(tiles, tokens, None, 1e-2 * tiles + 1e-5 * tokens).token_pair == 0


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"seconds": [1.0, 2.0]}, r"expected num_tiles of shape \(2,\).*got \(6,\) and \(2,\)"),
        ({"seconds": 1.0}, "one entry a micro-batch"),
        ({"seconds": [1, 2, 3, 4, 5, 0]}, "seconds of a profile must be finite and above 0"),
        ({"seconds": [1, 2, 3, 4, 5, np.nan]}, "seconds of a profile must be finite"),
        ({"num_tiles": [1, 2, 3, 4, 5, -1]}, "num_tiles of a profile must be .* not negative"),
        ({"num_tokens": [1, 2, 3, 4, 5, np.inf]}, "num_tokens of a profile must be finite"),
        ({"sum_squares": [1] * 6}, r"got 1 for 10 tokens \(micro-batch 0\)"),
        ({"sum_squares": [10**6] * 6}, "between the tokens of a micro-batch and their square"),
        ({"num_tiles": [2, 4, 6, 8, 10, 12]}, "must tell tiles, tokens, .* a constant apart"),
        ({"seconds": [6.0, 5, 4, 3, 2, 1]}, "times of a profile must grow .* constant of 3.5 s"),
    ],
)
def test_impossible_profiles_are_refused(changes, match):
    good = {
        "num_tiles": [0, 3, 1, 5, 2, 9],
        "num_tokens": [10, 20, 30, 40, 50, 60],
        "sum_squares": [60, 400, 500, 1000, 2000, 3600],
        "seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    }
    CostModel.fit(**good)
    with pytest.raises(ConfigError, match=match):
        CostModel.fit(**{**good, **changes})


def test_profile_of_too_few_micro_batches_is_refused():
    with pytest.raises(ConfigError, match="got 3 micro-batches in which some of them vary only"):
        CostModel.fit([1, 2, 5], [10, 11, 30], [50, 60, 200], [1.0, 2.0, 3.0])


# --- in integers


def test_units_of_samples_are_the_same_everywhere():
    units = REFERENCE_COST.quantised(
        [0, 1, 5, 13], [1, 300, 1700, 4096], max_tiles=13, max_tokens=4096
    )
    assert units.dtype == np.int64
    assert units.tolist() == [110392, 67745712, 365610276, 933057373]


@settings(deadline=None)
@given(
    tile=st.sampled_from([0.0, 3e-3, 1e12]),
    token=st.sampled_from([1e-7, 1.0, 1e11]),
    token_pair=st.sampled_from([0.0, 1e-9, 1e4]),
    max_tokens=st.sampled_from([1, 4096, 2**20, 2**31 - 1]),
    lengths=st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=8),
)
def test_units_are_those_of_the_cost_to_within_rounding(
    tile, token, token_pair, max_tokens, lengths
):
    model = CostModel(tile=tile, token=token, token_pair=token_pair, fixed=1.0)
    tokens = np.minimum(lengths, max_tokens)
    tiles = tokens % 7
    units = model.quantised(tiles, tokens, max_tiles=6, max_tokens=max_tokens)
    largest = model.quantised(6, max_tokens, max_tiles=6, max_tokens=max_tokens)
    assert 2**29 <= largest <= 2**30
    share = model.cost(tiles, tokens, tokens.astype(float) ** 2) - 1
    share /= model.cost(6, max_tokens, float(max_tokens) ** 2) - 1
    np.testing.assert_allclose(units / largest, share, atol=2e-9, rtol=1e-6)


def test_units_of_work_that_costs_nothing_are_refused():
    with pytest.raises(ConfigError, match=r"must cost more than 0, got 0\.0"):
        CostModel(tile=1.0, token=0.0).quantised([0], [5], max_tiles=0, max_tokens=100)
