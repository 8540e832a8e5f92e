"""The proof that packing never changes what a model learns.

A step is run in two ways: each sample alone, one forward each, losses summed and divided by the
number of loss tokens; and packed, dealt to ranks and micro-steps, some of them fillers, through
DistributedDataParallel between real processes. Loss and gradients must be equal in float64.
"""

import pytest
import torch

from omniload.packing import pack
from tests import loss_steps
from tests.loss_steps import (
    SAMPLES,
    TOLERANCE,
    TOTALS,
    Case,
    assert_equal,
    forward_alone,
    gradients,
    make_model,
    micro_batch,
    one_thread,
)
from tests.packing_samples import IMAGE_TOKEN, make_filler

__all__ = ["one_thread"]  # a fixture

LOSSES = ["sum", "mean", "step"]
ONE_RANK = [Case(kind=loss, world=1, accumulation=a) for loss in LOSSES for a in (1, 2, 4)]
ONE_RANK += [Case(kind="mean", world=1, accumulation=4, divides=True)]
TWO_RANKS = [Case(kind=loss, world=2, accumulation=a) for loss in LOSSES for a in (1, 2)]
TWO_RANKS += [
    Case(kind=loss, world=2, accumulation=2, ranks=ranks, divides=divides)
    for loss in LOSSES
    for ranks, divides in (("sum", False), ("mean", True), ("sum", True))
]


@pytest.fixture(scope="module")
def unpacked():
    model = make_model("sum")
    loss = sum(forward_alone(model, sample).loss for sample in SAMPLES) / TOTALS.num_tokens
    loss.backward()
    return loss.item(), gradients(model)


def scaled_loss(model, batch, case):
    inputs = batch.model_inputs(dtype=torch.float64, loss=case.kind)
    scale = batch.loss_scale(case.kind, case.ranks, engine_divides_accumulation=case.divides)
    return model(**inputs).loss * scale


def run_step(case, rank):
    plain = make_model(case.kind)
    return loss_steps.run_step(
        case, rank, plain=plain, micro_batch=micro_batch, loss_of=scaled_loss
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return loss_steps.on_two_ranks(tmp_path_factory.mktemp("ranks"), run_step, TWO_RANKS)


def test_the_step_has_gradients_worth_comparing(unpacked):
    assert unpacked[0] > 1
    assert min(gradient.abs().max() for gradient in unpacked[1].values()) > 1e-5


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_packed_equals_unpacked_on_one_rank(case, unpacked):
    assert_equal(run_step(case, rank=0), unpacked)


@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_packed_equals_unpacked_on_two_ranks(case, two_ranks, unpacked):
    for rank in range(2):
        assert_equal(two_ranks[rank][str(case)], unpacked)


def test_perturbing_one_sample_leaves_the_outputs_of_the_others_bit_for_bit():
    model = make_model("sum").float()
    batch = pack(SAMPLES)
    before = model(**batch.model_inputs()).logits[0]
    bounds = batch.cu_seqlens.tolist()
    first_tile = 0
    for index, sample in enumerate(SAMPLES):
        start, end = bounds[index : index + 2]
        changed = pack(SAMPLES)
        text = changed.input_ids[start:end] != IMAGE_TOKEN
        changed.input_ids[start:end][text] = 8 + (batch.input_ids[start:end][text] % 40)
        tiles = changed.tiles[first_tile : first_tile + sample.num_tiles]
        tiles += 1  # bytes wrap around
        first_tile += sample.num_tiles
        after = model(**changed.model_inputs()).logits[0]
        assert not torch.equal(after[start:end], before[start:end])
        assert torch.equal(after[:start], before[:start])
        assert torch.equal(after[end:], before[end:])


def train(loss, groups, steps=4):
    model = make_model(loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = 0.0
        tokens = sum(SAMPLES[row].num_loss_tokens for rows in groups for row in rows)
        for micro_step, rows in enumerate(groups):
            batch = pack(
                [SAMPLES[row] for row in rows] or [make_filler(tiles=micro_step % 2)],
                step=step,
                micro_step=micro_step,
                num_loss_tokens_step=tokens,
                is_filler=not rows,
                accumulation=len(groups),
            )
            inputs = batch.model_inputs(dtype=torch.float64, loss=loss)
            scaled = model(**inputs).loss * batch.loss_scale(loss)
            scaled.backward()
            total += scaled.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, torch.cat([weight.detach().flatten() for weight in model.parameters()])


@pytest.mark.parametrize("loss", LOSSES)
def test_a_model_trains_through_fillers_as_if_they_were_not_there(loss):
    losses, weights = train(loss, [[0, 1], [5, 6, 2]])
    filled_losses, filled_weights = train(loss, [[0, 1], [], [5, 6, 2], [7], []])
    assert filled_weights.isfinite().all()
    assert losses[-1] < losses[0]
    assert filled_losses == pytest.approx(losses, abs=TOLERANCE)
    torch.testing.assert_close(filled_weights, weights, rtol=0, atol=TOLERANCE)
