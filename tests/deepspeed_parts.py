"""A small model, its data and its training in one process: what pipelines are compared with."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.nn import functional

from examples.pipeline_vlm import Patches, VisionBlock, layers_for
from omniload import Budget, DataLoader, World
from omniload.shards import open_shards
from tests.loader_data import write_data

BUDGET = Budget(tokens=420, tiles=12)
NUM_LAYERS = 9  # patches, two vision blocks, projector, embedding, three text blocks, head
LEARNING_RATE = 0.2


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run."""

    parts: tuple[int, ...]
    recompute: tuple = (0,) * NUM_LAYERS
    frozen: bool = False
    dp: int = 1
    tp: int = 1
    accumulation: int = 3
    steps: int = 3
    clip: float = 0.0
    bf16: bool = False
    zero: int = 0
    workers: int = 0
    uneven: bool = False  # recompute by the size of the micro-batch
    data: str = ""  # "damaged": with a bad sample, to be skipped; "texts": one image in all rows
    pipeline: dict = field(default_factory=dict, hash=False)  # of DeepSpeed's config

    @property
    def skip(self):
        return self.data == "damaged"

    @property
    def plan(self):
        return {"parts": list(self.parts), "recompute": list(self.recompute)}


def write_rows(folder, **changes):
    """Rows of one to three hundred tokens; more than half have no image, so that packs of text
    alone come."""
    return write_data(folder, num_rows=48, num_images=(0, 0, 1, 0, 0, 2, 0), seed=3, **changes)


def make_layers(shards, *, frozen=False):
    torch.manual_seed(0)
    settings = dict(open_shards(shards).manifest.settings)
    layers = layers_for(settings, width=16, num_heads=2, patches_per_side=4, num_text_blocks=3)
    if frozen:
        for layer in layers:
            layer.requires_grad_(not isinstance(layer, (Patches, VisionBlock)))
    return layers


def write_other_rows(shards, *, damaged):
    """Beside the shards: the same rows with a damaged image, and rows of text with one image."""
    write_rows(shards.parent / "damaged", damage=damaged)
    write_data(shards.parent / "texts", num_rows=24, num_images=(1, *[0] * 23), seed=4)


def rows_for(shards, case):
    return Path(shards).parent / case.data if case.data else shards


def make_loader(shards, *, world, accumulation, workers=0, skip=False):
    return DataLoader(
        shards,
        budget=BUDGET,
        world=world,
        accumulation=accumulation,
        num_workers=workers,
        sync="micro-step",
        on_bad_sample="skip" if skip else "raise",
    )


def make_optimizer(weights):
    # momentum is a state that must be resumed; no normalisation that blows rounding up
    return torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=0.9)


def train_alone(shards, case, *, accumulations=()):
    """Train in this process, all data-parallel ranks one after another.

    accumulations: micro-batches of each step; the case's own where it ends.

    Returns the losses, the weights by layer after each step, and the tiles of each micro-batch.
    """
    layers = make_layers(shards, frozen=case.frozen)
    weights = [w for layer in layers for w in layer.parameters() if w.requires_grad]
    optimizer = make_optimizer(weights)
    losses, states, tiles, skipped, state = [], [], [], [], None
    for step in range(case.steps):
        accumulation = accumulations[step] if step < len(accumulations) else case.accumulation
        total = 0.0
        for dp_rank in range(case.dp):
            world = World(dp_rank=dp_rank, dp_world_size=case.dp)
            loader = make_loader(
                rows_for(shards, case), world=world, accumulation=accumulation, skip=case.skip
            )
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            for _ in range(accumulation):
                batch = next(batches)
                tiles.append(batch.num_tiles)
                skipped.extend(batch.skipped.tolist())
                loss = loss_alone(layers, batch)
                loss.backward()
                total += loss.item()
        state = loader.state_dict()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(weights, case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        states.append([clone(layer.state_dict()) for layer in layers])
    assert bool(skipped) == case.skip
    return losses, states, tiles


def loss_alone(layers, batch):
    """The part of the step's mean that a batch has; written apart from the product's own loss."""
    pixels = batch.model_inputs()["pixel_values"]
    if pixels is None:
        pixels = torch.zeros(1, 3, 28, 28)
    x = pixels, batch.input_ids, batch.position_ids, batch.cu_seqlens
    for layer in layers:
        x = layer(x)
    total = functional.cross_entropy(x[:-1], batch.labels[1:], reduction="sum")
    return total / batch.num_loss_tokens_step


def clone(state):
    return {name: value.detach().clone() for name, value in state.items()}
