"""A step of a few samples, on one rank or on two real ones, for the proofs about losses."""

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel

from examples.tiny_vlm import TinyVLM
from omniload.kernels.reference import IMAGENET_MEAN, IMAGENET_STD
from omniload.loss import LossTotals
from omniload.packing import pack
from omniload.types import IGNORE_INDEX
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
COUNTS = [sample.num_loss_tokens for sample in SAMPLES]
TOTALS = LossTotals.of(COUNTS)

# how the groups of a step are dealt: GROUPS[micro-batches of the step][slot], empty = filler
GROUPS = {
    1: [[0, 1, 2, 3, 4, 5, 6, 7]],
    2: [[5, 0, 4], [1, 2, 7, 3, 6]],
    4: [[2, 6], [], [0, 3, 4, 1, 5], [7]],  # a filler, and a group without loss
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    # the model is so small that threads only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train: loss or mean, how the step is cut, what the engine does, the padding."""

    kind: str
    world: int
    accumulation: int
    ranks: str = "mean"
    divides: bool = False
    pad_to: int | None = None

    def __str__(self):
        divides = "-divides" if self.divides else ""
        padded = "-padded" if self.pad_to else ""
        return f"{self.kind}-{self.world}x{self.accumulation}-{self.ranks}{divides}{padded}"


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


def micro_batch(case, rank, micro_step):
    rows = GROUPS[case.world * case.accumulation][micro_step * case.world + rank]
    return pack(
        [SAMPLES[row] for row in rows] or [make_filler()],
        micro_step=micro_step,
        is_last_micro_step=micro_step == case.accumulation - 1,
        num_loss_tokens_step=TOTALS.num_tokens,
        num_loss_samples_step=TOTALS.num_samples,
        sqrt_loss_tokens_step=TOTALS.sqrt_tokens,
        is_filler=not rows,
        dp_world_size=case.world,
        accumulation=case.accumulation,
        pad_to=case.pad_to,
    )


def assert_equal(found, expected):
    loss, grads = found
    assert abs(loss - expected[0]) <= TOLERANCE
    assert grads.keys() == expected[1].keys()
    for name, gradient in grads.items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=0, atol=TOLERANCE, msg=name)


def run_step(case, rank, *, plain, micro_batch, loss_of):
    """Run one step as the engine that the case describes runs it.

    Args:
        case: has world, accumulation, ranks and divides.
        rank: this one.
        plain: the model.
        micro_batch: case, rank, micro-step -> batch.
        loss_of: model, batch, case -> what is added up, before an engine divides.

    Returns:
        The loss of the step, and its gradients by name.
    """
    parallel = case.world > 1 and case.ranks == "mean"
    model = DistributedDataParallel(plain) if parallel else plain
    total = torch.zeros((), dtype=torch.float64)
    for micro_step in range(case.accumulation):
        batch = micro_batch(case, rank, micro_step)
        with nullcontext() if batch.is_last_micro_step or not parallel else model.no_sync():
            loss = loss_of(model, batch, case) / (case.accumulation if case.divides else 1)
            loss.backward()
        total += loss.detach()
    if case.world > 1:
        dist.all_reduce(total)
        if case.ranks == "mean":
            total /= case.world
        else:
            for weight in plain.parameters():
                dist.all_reduce(weight.grad)
    return total.item(), gradients(plain)


def on_two_ranks(folder, run, cases):
    """Call run(case, rank) for each case in two processes; return for each rank name -> result."""
    multiprocessing.spawn(_work, (str(folder), run, cases), nprocs=2)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


def _work(rank, folder, run, cases):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.save({str(case): run(case, rank) for case in cases}, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()
