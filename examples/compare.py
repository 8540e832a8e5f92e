"""Train the tiny model with torch's DataLoader or with omniload, and write down what happened.

    torchrun --nproc-per-node 2 examples/compare.py SHARDS --loader torch --out torch.json
    torchrun --nproc-per-node 2 examples/compare.py SHARDS --loader omniload --out omniload.json

Both read the same shards through the same transform with as many workers, train the same model for
as many samples with steps of the same mean size, and take the mean over the loss tokens of a step.
They differ in how samples become batches: fixed-size batches of random samples, padded to the
longest; or groups that fill a budget of tokens and tiles, packed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tiny_vlm import TinyVLM
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import omniload
from omniload.batch import IMAGENET_MEAN, IMAGENET_STD
from omniload.kernels.reference import normalize_table, normalize_tiles
from omniload.metrics import dist_ratio, pad_ratio
from omniload.rng import sample_generator
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings


@dataclass
class Work:
    """One micro-batch, whichever loader it came from."""

    inputs: dict
    lengths: list[int]
    num_samples: int
    num_tiles: int
    num_tokens_computed: int  # padding included
    scale: float  # makes the sum of the losses a mean over the step, after DDP's mean over ranks


class Samples(Dataset):
    """The shards as a map-style dataset: what a project without omniload has."""

    def __init__(self, folder: str) -> None:
        self.shards = open_shards(folder)
        self.transform = transform_from_settings(self.shards.manifest.settings)

    def __len__(self) -> int:
        return len(self.shards)

    def __getitem__(self, row: int) -> omniload.Sample:
        return self.transform(self.shards.read(row), sample_generator(0, 0, row))


def pad(samples: list[omniload.Sample]) -> dict[str, torch.Tensor]:
    """Collate the usual way: rows padded to the longest."""
    longest = max(sample.num_tokens for sample in samples)
    input_ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full((len(samples), longest), -100)
    for row, sample in enumerate(samples):
        input_ids[row, : sample.num_tokens] = torch.tensor(sample.input_ids)
        labels[row, : sample.num_tokens] = torch.tensor(sample.labels)
    tiles = [torch.tensor(sample.tiles) for sample in samples if sample.num_tiles]
    return {
        "input_ids": input_ids,
        "labels": labels,
        "tiles": torch.cat(tiles) if tiles else torch.zeros(0, 3, 1, 1, dtype=torch.uint8),
        "lengths": torch.tensor([sample.num_tokens for sample in samples]),
    }


def torch_batches(folder: str, *, batch_size: int, epochs: int, workers: int) -> Iterator[Work]:
    samples = Samples(folder)
    sampler = DistributedSampler(samples, shuffle=True, seed=0, drop_last=False)
    loader = DataLoader(
        samples, batch_size, sampler=sampler, collate_fn=pad, num_workers=workers, drop_last=False
    )
    table = normalize_table(IMAGENET_MEAN, IMAGENET_STD)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            labels = batch["labels"]
            count = (labels[:, 1:] != -100).sum()
            distributed.all_reduce(count)  # omniload knows this number without asking
            yield Work(
                inputs={
                    "input_ids": batch["input_ids"],
                    "labels": labels,
                    "pixel_values": normalize_tiles(batch["tiles"], table)
                    if len(batch["tiles"])
                    else None,
                },
                lengths=batch["lengths"].tolist(),
                num_samples=len(labels),
                num_tiles=len(batch["tiles"]),
                num_tokens_computed=labels.numel(),
                scale=distributed.get_world_size() / max(float(count), 1.0),
            )


def omniload_batches(folder: str, *, budget: omniload.Budget, epochs: int, workers: int):
    loader = omniload.DataLoader(folder, budget=budget, num_workers=workers)
    for _ in range(epochs):
        for batch in loader:
            yield Work(
                inputs=batch.model_inputs(),
                lengths=batch.cu_seqlens.diff().tolist(),
                num_samples=len(batch.sample_ids),
                num_tiles=batch.num_tiles,
                num_tokens_computed=batch.num_tokens,
                scale=batch.loss_scale(),
            )


@torch.no_grad()
def evaluate(model: TinyVLM, folder: str, budget: omniload.Budget) -> float:
    """Mean loss over all loss tokens of the data set; each rank does a part."""
    loader = omniload.DataLoader(folder, budget=budget, shuffle=False, tail="empty")
    total = torch.zeros(2, dtype=torch.float64)
    for batch in loader:
        total += torch.tensor([float(model(**batch.model_inputs()).loss), batch.num_loss_tokens])
    distributed.all_reduce(total)
    return float(total[0] / total[1])


def train(works: Iterator[Work], model: torch.nn.Module) -> tuple[list[dict], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    log, begin = [], 0.0
    for number, work in enumerate(works):
        if number == 1:  # the first step waits for workers to start: not what is compared
            begin = time.perf_counter()
        loss = model(**work.inputs).loss * work.scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.append(
            {
                "loss": loss.item() / distributed.get_world_size(),
                "lengths": work.lengths,
                "samples": work.num_samples,
                "tiles": work.num_tiles,
                "computed": work.num_tokens_computed,
            }
        )
    return log, time.perf_counter() - begin


def figures(logs: list[list[dict]], seconds: float) -> dict:
    """Turn what each rank did in each step into the figures of the comparison."""
    steps = list(zip(*logs, strict=True))
    tokens = [[sum(rank["lengths"]) for rank in step] for step in steps]
    rows = [rank["lengths"] for step in steps for rank in step]
    padded = len(rows[0]) > 0 and steps[0][0]["computed"] != sum(steps[0][0]["lengths"])
    return {
        "pad_ratio": pad_ratio(rows) if padded else 0.0,
        "dist_ratio_tiles": dist_ratio([[rank["tiles"] for rank in step] for step in steps]),
        "dist_ratio_tokens": dist_ratio([[rank["computed"] for rank in step] for step in steps]),
        "tokens_per_s": int(np.sum(tokens[1:]) / seconds),
        "seconds": round(seconds, 2),
        "steps": len(steps),
        "samples": sum(rank["samples"] for step in steps for rank in step),
        "curve": {
            "samples": np.cumsum([sum(r["samples"] for r in step) for step in steps]).tolist(),
            "loss": [sum(rank["loss"] for rank in step) for step in steps],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards")
    parser.add_argument("--loader", choices=["torch", "omniload"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--tiles", type=int, default=42)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    shards = open_shards(options.shards)
    budget = omniload.Budget(tokens=options.tokens, tiles=options.tiles)
    plan = omniload.make_plan(shards.index, budget=budget)
    torch.manual_seed(0)
    model = TinyVLM.for_shards(shards.manifest.settings)
    if options.loader == "torch":
        works = torch_batches(
            options.shards,
            # as many samples as a group of omniload has in the mean: steps of the same size
            batch_size=max(1, round(len(shards) / plan.num_steps)),
            epochs=options.epochs,
            workers=options.workers,
        )
    else:
        works = omniload_batches(
            options.shards, budget=budget, epochs=options.epochs, workers=options.workers
        )
    log, seconds = train(works, DistributedDataParallel(model))
    final_loss = evaluate(model, options.shards, budget)
    logs: list = [None] * distributed.get_world_size()
    distributed.all_gather_object(logs, log)
    if distributed.get_rank() == 0:
        result = {**figures(logs, seconds), "final_loss": final_loss}
        options.out.write_text(json.dumps(result), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
