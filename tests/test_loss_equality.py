"""The proof that packing never changes what a model learns.

A step is run in two ways: each sample alone, one forward each, losses summed and divided by the
number of loss tokens; and packed, dealt to ranks and micro-steps, some of them fillers, through
DistributedDataParallel between real processes. Loss and gradients must be equal in float64.
"""

from dataclasses import dataclass

import pytest
import torch

from examples.tiny_vlm import TinyVLM
from omniload.kernels.reference import IMAGENET_MEAN, IMAGENET_STD
from omniload.packing import pack
from omniload.types import IGNORE_INDEX
from tests import loss_steps
from tests.packing_samples import IMAGE_TOKEN, VOCAB, make_filler, make_sample

TOLERANCE = 1e-10

SAMPLES = [
    make_sample(0, text=9, tiles_per_image=(2,)),
    make_sample(1, text=24),
    make_sample(2, text=5, tiles_per_image=(1, 3)),
    make_sample(3, text=2),
    make_sample(4, text=1),  # no loss at all: its only label is the first
    make_sample(5, text=30, tiles_per_image=(1, 1, 1), labelled=0.9),
    make_sample(6, text=7, labelled=1.0),  # the first label is set, and must be ignored
    make_sample(7, text=12, tiles_per_image=(4,), labelled=0),
]
NUM_LOSS_TOKENS = sum(sample.num_loss_tokens for sample in SAMPLES)

# how the groups of a step are dealt: GROUPS[micro-batches of the step][slot], empty = filler
GROUPS = {
    1: [[0, 1, 2, 3, 4, 5, 6, 7]],
    2: [[5, 0, 4], [1, 2, 7, 3, 6]],
    4: [[2, 6], [], [0, 3, 4, 1, 5], [7]],  # a filler, and a group without loss
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # the model is so small that threads only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train: what the model returns, how the step is cut, what the engine does."""

    loss: str
    world: int
    accumulation: int
    ranks: str = "mean"
    divides: bool = False

    def __str__(self):
        divides = "-divides" if self.divides else ""
        return f"{self.loss}-{self.world}x{self.accumulation}-{self.ranks}{divides}"


LOSSES = ["sum", "mean", "step"]
ONE_RANK = [Case(loss=loss, world=1, accumulation=a) for loss in LOSSES for a in (1, 2, 4)]
ONE_RANK += [Case(loss="mean", world=1, accumulation=4, divides=True)]
TWO_RANKS = [Case(loss=loss, world=2, accumulation=a) for loss in LOSSES for a in (1, 2)]
TWO_RANKS += [
    Case(loss=loss, world=2, accumulation=2, ranks=ranks, divides=divides)
    for loss in LOSSES
    for ranks, divides in (("sum", False), ("mean", True), ("sum", True))
]


def make_model(loss):
    torch.manual_seed(0)
    model = TinyVLM(
        vocab_size=VOCAB,
        image_token_id=IMAGE_TOKEN,
        width=16,
        num_heads=2,
        num_layers=2,
        loss=loss,
    )
    return model.double()


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def forward_alone(model, sample):
    """Run one sample as a row of its own, made without any of omniload's packing."""
    labels = torch.from_numpy(sample.labels).long()[None].clone()
    labels[0, 0] = IGNORE_INDEX
    pixels = None
    if sample.num_tiles:
        mean, std = (torch.tensor(v)[:, None, None] for v in (IMAGENET_MEAN, IMAGENET_STD))
        pixels = ((torch.from_numpy(sample.tiles).float() / 255 - mean) / std).double()
    return model(torch.from_numpy(sample.input_ids).long()[None], labels, pixel_values=pixels)


@pytest.fixture(scope="module")
def unpacked():
    model = make_model("sum")
    loss = sum(forward_alone(model, sample).loss for sample in SAMPLES) / NUM_LOSS_TOKENS
    loss.backward()
    return loss.item(), gradients(model)


def micro_batch(case, rank, micro_step):
    rows = GROUPS[case.world * case.accumulation][micro_step * case.world + rank]
    return pack(
        [SAMPLES[row] for row in rows] or [make_filler()],
        micro_step=micro_step,
        is_last_micro_step=micro_step == case.accumulation - 1,
        num_loss_tokens_step=NUM_LOSS_TOKENS,
        is_filler=not rows,
        dp_world_size=case.world,
        accumulation=case.accumulation,
    )


def scaled_loss(model, batch, case):
    inputs = batch.model_inputs(dtype=torch.float64, loss=case.loss)
    scale = batch.loss_scale(case.loss, case.ranks, engine_divides_accumulation=case.divides)
    return model(**inputs).loss * scale


def run_step(case, rank):
    total, model = loss_steps.run_step(
        case, rank, plain=make_model(case.loss), micro_batch=micro_batch, loss_of=scaled_loss
    )
    return total, gradients(model)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    return loss_steps.on_two_ranks(tmp_path_factory.mktemp("ranks"), run_step, TWO_RANKS)


def assert_equal(found, expected):
    loss, grads = found
    assert abs(loss - expected[0]) <= TOLERANCE
    assert grads.keys() == expected[1].keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=0, atol=TOLERANCE, msg=name)


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
