"""Feed a data set of your own: omniload plans, torch's DataLoader and your code do the rest.

    torchrun --nproc-per-node 2 examples/own_dataset.py

All that the planner needs is two arrays of lengths. Packing is three lines of the collate function.
"""

from __future__ import annotations

import os

import numpy as np
import torch
from tiny_vlm import TinyVLM
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import omniload

IMAGE_TOKEN, TOKENS_PER_TILE, TILE_SIZE = 99, 4, 28


class Pictures(Dataset):
    """Stands for your data set: sample i has some tiles and some text, and costs time to load."""

    def __init__(self, count: int) -> None:
        draw = np.random.default_rng(0)
        self.num_tiles = draw.integers(0, 6, count)
        self.num_text = draw.integers(5, 60, count)

    def __len__(self) -> int:
        return len(self.num_tiles)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        draw = torch.Generator().manual_seed(row)
        num_tiles, num_text = int(self.num_tiles[row]), int(self.num_text[row])
        text = torch.randint(0, IMAGE_TOKEN, (num_text,), generator=draw)
        image = torch.full((num_tiles * TOKENS_PER_TILE,), IMAGE_TOKEN)
        ids = torch.cat([image, text])
        labels = ids.masked_fill(ids == IMAGE_TOKEN, -100)
        labels[0] = -100  # nothing of this sample predicts its first token
        tiles = torch.rand(num_tiles, 3, TILE_SIZE, TILE_SIZE, generator=draw)
        return {"ids": ids, "labels": labels, "tiles": tiles}


def pack(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor | None]:
    lengths = torch.tensor([0, *(len(sample["ids"]) for sample in samples)])
    tiles = torch.cat([sample["tiles"] for sample in samples])
    return {
        "input_ids": torch.cat([sample["ids"] for sample in samples])[None],
        "labels": torch.cat([sample["labels"] for sample in samples])[None],
        "position_ids": torch.cat([torch.arange(int(n)) for n in lengths[1:]])[None],
        "cu_seq_lens_q": lengths.cumsum(0).to(torch.int32),
        "pixel_values": tiles if len(tiles) else None,
    }


def main() -> None:
    distributed_run = "RANK" in os.environ
    if distributed_run:
        distributed.init_process_group("gloo")

    data = Pictures(160)
    num_tokens = data.num_tiles * TOKENS_PER_TILE + data.num_text
    num_loss_tokens = data.num_text - (data.num_tiles == 0)
    sampler = omniload.PlanBatchSampler(
        num_tokens=num_tokens,
        num_tiles=data.num_tiles,
        num_loss_tokens=num_loss_tokens,
        budget=omniload.Budget(tokens=256, tiles=16),
        accumulation=2,
    )
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=pack, num_workers=1)

    torch.manual_seed(0)
    model = TinyVLM(vocab_size=IMAGE_TOKEN + 1, image_token_id=IMAGE_TOKEN, width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trained = DistributedDataParallel(model) if distributed_run else model
    ranks = sampler.world.dp_world_size
    for number, batch in enumerate(loader, start=sampler.start):
        step, micro_step = divmod(number, 2)
        # the sum over this batch by the loss tokens of the whole step; DDP takes the mean of ranks
        loss = trained(**batch).loss * ranks / sampler.num_loss_tokens(step)
        if sampler.is_filler(number):
            loss = loss * 0
        loss.backward()
        if micro_step == 1:
            optimizer.step()
            optimizer.zero_grad()
            state = sampler.state_dict(number + 1)  # save it with the model; the same on all ranks
    if sampler.world.rank == 0:
        figures = sampler.plan.figures()
        print(
            f"{figures.num_rows} rows in {figures.num_steps} steps of {ranks} ranks x 2, fill "
            f"{figures.fill_tokens:.3f}, dist ratio of tiles {figures.dist_tiles_step:.3f}; "
            f"next: epoch {state['epoch']}"
        )
    if distributed_run:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
