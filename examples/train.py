"""Train the tiny model on shards: the loop of a real project, in miniature.

    omniload preprocess raw/annotations.json shards --tile-size 112 --tokens-per-tile 16
    torchrun --nproc-per-node 2 examples/train.py shards --tokens 1024 --tiles 40

Run it again with --resume after it was interrupted: it goes on with the next micro-batch.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from tiny_vlm import TinyVLM
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import omniload


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards")
    parser.add_argument("--tokens", type=int, default=1024, help="budget of a micro-batch")
    parser.add_argument("--tiles", type=int, default=40, help="budget of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--save", type=Path, default=Path("train-state.pt"))
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    distributed_run = "RANK" in os.environ
    if distributed_run:
        distributed.init_process_group("gloo")
    device = torch.device("cpu")

    loader = omniload.DataLoader(
        options.shards,
        budget=omniload.Budget(tokens=options.tokens, tiles=options.tiles),
        accumulation=options.accumulation,
        num_workers=options.workers,
    )
    torch.manual_seed(0)
    model = TinyVLM.for_shards(loader.manifest.settings).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if options.resume:
        saved = torch.load(options.save, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])  # one state serves all ranks
    trained = DistributedDataParallel(model) if distributed_run else model

    while loader.epoch < options.epochs:
        step_loss = 0.0
        for batch in loader:
            batch = batch.to(device, non_blocking=True)
            loss = trained(**batch.model_inputs()).loss * batch.loss_scale()
            loss.backward()
            step_loss += loss.item()
            if not batch.is_last_micro_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            if loader.world.rank == 0 and batch.step % options.save_every == 0:
                print(f"epoch {loader.epoch} step {batch.step} loss {step_loss:.3f} {batch}")
                torch.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "loader": loader.state_dict(),
                    },
                    options.save,
                )
            step_loss = 0.0
    if distributed_run:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
