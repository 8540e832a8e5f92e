"""Means over tokens, samples and square roots are those of one process, however a step is dealt.

The reference runs each sample alone in float64 and averages by the definition.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

import omniload
from omniload.errors import ConfigError
from omniload.loss import LossTotals
from omniload.packing import pack
from omniload.padding import Padding
from omniload.types import IGNORE_INDEX, Budget
from omniload.world import World
from tests import loss_steps
from tests.loader_data import write_data
from tests.loss_steps import (
    COUNTS,
    SAMPLES,
    TOTALS,
    Case,
    assert_equal,
    forward_alone,
    gradients,
    make_model,
    micro_batch,
    one_thread,
)
from tests.packing_samples import make_filler

__all__ = ["one_thread"]  # a fixture

KINDS = ["token", "sample", "sqrt"]
MEANS = KINDS[1:]  # weights of tokens are the loss scale: a test of its own
ONE_RANK = [Case(kind=kind, world=1, accumulation=a) for kind in MEANS for a in (1, 2, 4)]
ONE_RANK += [Case(kind=kind, world=1, accumulation=4, divides=True, pad_to=16) for kind in KINDS]
TWO_RANKS = [Case(kind=kind, world=2, accumulation=a) for kind in MEANS for a in (1, 2)]
TWO_RANKS += [
    Case(kind=kind, world=2, accumulation=2, ranks="sum", divides=True, pad_to=16) for kind in MEANS
]
TWO_RANKS += [Case(kind=kind, world=2, accumulation=2, divides=True) for kind in KINDS]


def reference(kind):
    """The mean by its definition, each sample alone."""
    model = make_model("sum")
    sums = [forward_alone(model, sample).loss for sample in SAMPLES]
    pairs = [(total, count) for total, count in zip(sums, COUNTS, strict=True) if count]
    if kind == "token":
        loss = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
    elif kind == "sample":
        loss = sum(total / count for total, count in pairs) / len(pairs)
    else:
        roots = sum(math.sqrt(count) for _, count in pairs)
        loss = sum(math.sqrt(count) * (total / count) for total, count in pairs) / roots
    loss.backward()
    return loss.item(), gradients(model)


def weighted_loss(model, batch, case):
    inputs = batch.model_inputs(dtype=torch.float64)
    del inputs["labels"]
    logits = model(**inputs).logits[0, :-1]
    losses = cross_entropy(logits, batch.labels[1:], reduction="none", ignore_index=IGNORE_INDEX)
    weights = batch.loss_weights(
        case.kind,
        ranks=case.ranks,
        engine_divides_accumulation=case.divides,
        dtype=torch.float64,
    )
    return (losses * weights[1:]).sum()


def run_step(case, rank):
    plain = make_model("sum")
    return loss_steps.run_step(
        case, rank, plain=plain, micro_batch=micro_batch, loss_of=weighted_loss
    )


@pytest.fixture(scope="module")
def expected():
    return {kind: reference(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return loss_steps.on_two_ranks(tmp_path_factory.mktemp("ranks"), run_step, TWO_RANKS)


def test_the_three_means_differ(expected):
    losses = [expected[kind][0] for kind in KINDS]
    assert min(abs(losses[i] - losses[j]) for i, j in ((0, 1), (0, 2), (1, 2))) > 1e-3


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_a_step_on_one_rank_is_the_mean_of_one_process(case, expected):
    assert_equal(run_step(case, rank=0), expected[case.kind])


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_a_step_on_two_ranks_is_the_mean_of_one_process(case, two_ranks, expected):
    for rank in range(2):
        assert_equal(two_ranks[rank][str(case)], expected[case.kind])


# -- the weights themselves -----------------------------------------------------------------------


@pytest.mark.parametrize("pad_to", [None, Padding(multiple=64, document_multiple=8)])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_a_whole_step_add_up_to_one(kind, pad_to):
    batch = pack(SAMPLES, pad_to=pad_to)
    weights = batch.loss_weights(kind, dtype=torch.float64)
    assert weights.shape == (batch.num_tokens,)
    assert float(weights.sum()) == pytest.approx(1, abs=1e-14)
    assert (weights[batch.labels == IGNORE_INDEX] == 0).all()
    assert (weights[batch.labels != IGNORE_INDEX] > 0).all()
    assert batch.loss_weights(kind).dtype == torch.float32


def test_token_weights_are_the_loss_scale():
    case = Case(kind="token", world=2, accumulation=2)
    for ranks in ("mean", "sum"):
        for divides in (False, True):
            batch = micro_batch(case, 0, 0)
            weights = batch.loss_weights(
                ranks=ranks, engine_divides_accumulation=divides, dtype=torch.float64
            )
            scale = batch.loss_scale("sum", ranks, engine_divides_accumulation=divides)
            given = weights[batch.labels != IGNORE_INDEX]
            torch.testing.assert_close(given, torch.full_like(given, scale), rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_without_loss_weigh_nothing(kind):
    for samples, is_filler in (([make_filler()], True), ([SAMPLES[4]], False), ([], False)):
        weights = pack(samples, is_filler=is_filler).loss_weights(kind)
        assert not weights.any()
        assert weights.isfinite().all()


@pytest.mark.parametrize("kind", ["sample", "sqrt"])
def test_a_batch_that_does_not_know_its_step_says_so(kind):
    batch = pack(SAMPLES, num_loss_tokens_step=TOTALS.num_tokens + 1)
    with pytest.raises(ConfigError, match=r"expected num_loss_samples_step|sqrt_loss_tokens_step"):
        batch.loss_weights(kind)
    assert batch.loss_weights("token").any()


def test_wrong_options_are_named():
    with pytest.raises(ConfigError, match="kind must be one of 'token', 'sample', 'sqrt'"):
        pack(SAMPLES).loss_weights("square")
    with pytest.raises(ConfigError, match="ranks must be one of"):
        pack(SAMPLES).loss_weights(ranks="max")


# -- totals ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1), max_size=50), st.randoms())
def test_totals_are_the_same_to_the_last_bit_in_any_order(counts, random):
    shuffled = random.sample(counts, len(counts))
    totals = LossTotals.of(np.array(counts, np.int32))
    assert totals == LossTotals.of(np.array(shuffled, np.int64))
    assert totals.num_tokens == sum(counts)
    assert totals.num_samples == sum(count > 0 for count in counts)
    assert totals.sqrt_tokens == math.fsum(map(math.sqrt, counts))


def test_the_loader_gives_every_rank_the_totals_of_the_step(tmp_path):
    shards = str(write_data(tmp_path / "shards", num_rows=20))
    loaders = [
        omniload.DataLoader(
            shards,
            budget=Budget(tokens=512),
            accumulation=2,
            world=World(dp_rank=rank, dp_world_size=2, rank=rank, world_size=2),
        )
        for rank in range(2)
    ]
    column = loaders[0].index.num_loss_tokens
    plan = loaders[0].plan
    seen = 0
    for batches in zip(*loaders, strict=True):
        rows = [plan.micro_batch(batches[0].step, m, r) for m in range(2) for r in range(2)]
        totals = LossTotals.of(column[np.concatenate(rows)])
        for batch in batches:
            assert batch.num_loss_tokens_step == totals.num_tokens
            assert batch.num_loss_samples_step == totals.num_samples
            assert batch.sqrt_loss_tokens_step == totals.sqrt_tokens
            seen += 1
    assert seen == 4 * plan.num_steps > 4
