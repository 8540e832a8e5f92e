"""A small vision-language model as layers, trained in a DeepSpeed pipeline on packed rows.

    omniload preprocess raw/annotations.json shards --tile-size 112 --tokens-per-tile 16
    torchrun --nproc-per-node 2 examples/pipeline_vlm.py shards --tokens 1024 --tiles 40

Without a folder it makes a small set of documents first. A plan comes from `omniload plan-pipeline`
(`--plan plan.json`); without one the layers are dealt evenly. It runs on CPUs, over gloo, too.

The layers show how a packed row travels through a pipeline: one float tensor, the hidden state,
comes first in a tuple, and after it the integers that later layers need.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import omniload


class Attention(nn.Module):
    """Each document of the row attends to itself alone."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, bounds: Sequence[int] | None, causal: bool) -> torch.Tensor:
        """Take (rows, tokens, width); `bounds` cuts one row into documents."""
        rows, tokens, width = x.shape
        heads = self.qkv(x).view(rows, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        # on a GPU this loop is one call of flash_attn_varlen_func with cu_seqlens
        parts = [
            functional.scaled_dot_product_attention(*heads[..., start:end, :], is_causal=causal)
            for start, end in pairwise(bounds or [0, tokens])
        ]
        return self.out(torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, tokens, width))


class Block(nn.Module):
    """Attention and MLP, each normalised first and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor, bounds: Sequence[int] | None, causal: bool) -> torch.Tensor:
        """Take and return (rows, tokens, width)."""
        x = x + self.attention(self.norm_1(x), bounds, causal)
        return x + self.mlp(self.norm_2(x))


class Patches(nn.Module):
    """Tiles (num_tiles, 3, height, width) to patches (num_tiles, num_patches, width)."""

    def __init__(self, width: int, tile_size: int, patch_size: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.randn((tile_size // patch_size) ** 2, width) * 0.02)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        pixels, *rest = inputs
        return self.cut(pixels).flatten(2).transpose(1, 2) + self.positions, *rest


class VisionBlock(Block):
    """A block of the vision encoder; the integers pass it by."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x, *rest = inputs
        return super().forward(x, None, causal=False), *rest


class Projector(nn.Module):
    """Patches to visual tokens (num_visual_tokens, width)."""

    def __init__(self, width: int, tokens_per_tile: int) -> None:
        super().__init__()
        self.tokens_per_tile = tokens_per_tile
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *rest = inputs
        x = x.unflatten(1, (self.tokens_per_tile, -1)).mean(2)
        return self.out(self.norm(x)).flatten(0, 1), *rest


class Embedding(nn.Module):
    """Text tokens embedded, visual tokens put where the image token stands."""

    def __init__(self, vocab_size: int, width: int, image_token_id: int) -> None:
        super().__init__()
        self.image_token_id = image_token_id
        self.embed = nn.Embedding(vocab_size, width)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        visual, input_ids, position_ids, cu_seqlens = inputs
        x = self.embed(input_ids)
        places = (input_ids == self.image_token_id).nonzero().flatten()
        # A text-only row comes with one blank tile, whose tokens stand nowhere. Taking none of them
        # keeps the vision encoder in the graph, with gradients of zero.
        x = x.index_copy(0, places, visual[: len(places)].to(x.dtype))
        rates = 10_000.0 ** (-torch.arange(x.shape[-1] // 2, device=x.device) * 2 / x.shape[-1])
        angles = position_ids[:, None] * rates
        return x + torch.cat([angles.sin(), angles.cos()], dim=-1).to(x.dtype), cu_seqlens


class TextBlock(Block):
    """A block of the decoder, causal inside each document."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        x, cu_seqlens = inputs
        return super().forward(x[None], cu_seqlens.tolist(), causal=True)[0], cu_seqlens


class Head(nn.Module):
    """Hidden states to logits (num_tokens, vocab_size)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.out(self.norm(inputs[0]))


def vlm_layers(
    *,
    vocab_size: int,
    image_token_id: int,
    tokens_per_tile: int,
    tile_size: int,
    width: int = 64,
    num_heads: int = 4,
    patches_per_side: int = 8,
    num_vision_blocks: int = 2,
    num_text_blocks: int = 2,
) -> list[nn.Module]:
    """List the layers in order: patches, vision blocks, projector, embedding, text blocks, head."""
    return [
        Patches(width, tile_size, tile_size // patches_per_side),
        *(VisionBlock(width, num_heads) for _ in range(num_vision_blocks)),
        Projector(width, tokens_per_tile),
        Embedding(vocab_size, width, image_token_id),
        *(TextBlock(width, num_heads) for _ in range(num_text_blocks)),
        Head(vocab_size, width),
    ]


def layers_for(settings: dict[str, Any], **sizes: int) -> list[nn.Module]:
    """Make layers for shards, from `loader.manifest.settings`."""
    encoder = settings["encoder"]
    return vlm_layers(
        vocab_size=encoder["vocab_size"],
        image_token_id=encoder["image_token_id"],
        tokens_per_tile=encoder["tokens_per_tile"],
        tile_size=settings["tiling"]["size"],
        **sizes,
    )


def even_plan(num_layers: int, num_stages: int) -> dict[str, Any]:
    """Deal layers evenly, and recompute none."""
    bounds = [num_layers * stage // num_stages for stage in range(num_stages + 1)]
    return {"parts": bounds, "recompute": [0] * num_layers}


def main() -> None:
    import deepspeed

    from omniload.adapters.deepspeed import (
        BalancedPipelineModule,
        load_checkpoint,
        pipeline_batches,
        save_checkpoint,
    )

    options = read_options()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        # DeepSpeed would compile an operator for shared memory first, which takes minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", verbose=False)
    world_size = torch.distributed.get_world_size()
    shards = options.shards or make_documents()
    settings = dict(omniload.shards.open_shards(shards).manifest.settings)

    torch.manual_seed(0)
    layers = layers_for(settings)
    plan = options.plan or even_plan(len(layers), options.stages or world_size)
    model = BalancedPipelineModule(layers, plan=plan)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(trained, lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": options.accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": options.bf16},
            "zero_optimization": {"stage": 1 if options.bf16 else 0},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    loader = omniload.DataLoader(
        shards,
        budget=omniload.Budget(tokens=options.tokens, tiles=options.tiles),
        world=model.world,
        accumulation=options.accumulation,
        num_workers=options.workers,
        sync="micro-step",
    )
    if options.resume:
        load_checkpoint(engine, loader, options.save)
    batches = pipeline_batches(loader, engine)
    while loader.epoch < options.epochs:
        epoch = loader.epoch
        for step in batches.steps():
            loss = engine.train_batch(batches)
            if torch.distributed.get_rank() == 0:
                print(json.dumps({"epoch": epoch, "step": step, "loss": float(loss)}), flush=True)
        if options.save:
            save_checkpoint(engine, loader, options.save)
    torch.distributed.destroy_process_group()


def make_documents() -> str:
    """Render a few documents and preprocess them, on rank 0; the others wait."""
    folder = Path("pipeline-data")
    if torch.distributed.get_rank() == 0 and not (folder / "shards").exists():
        folder.mkdir(exist_ok=True)
        here = Path(__file__).resolve().parent
        alone = {name: value for name, value in os.environ.items() if "RANK" not in name}
        alone.pop("WORLD_SIZE", None)
        alone["PYTHONPATH"] = str(here.parent)
        words = ["raw/annotations.json", "shards", "--tile-size", "56", "--tokens-per-tile", "4"]
        for command in (
            [str(here / "render_documents.py"), "raw", "--samples", "48"],
            ["-m", "omniload", "preprocess", *words, "--max-tokens", "768", "--workers", "1"],
        ):
            subprocess.run([sys.executable, *command], cwd=folder, env=alone, check=True)
    torch.distributed.barrier()
    return str(folder / "shards")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shards", nargs="?", help="folder of shards; made where it is left out")
    parser.add_argument("--plan", help="JSON of omniload plan-pipeline")
    parser.add_argument("--stages", type=int, help="without a plan; all processes")
    parser.add_argument("--tokens", type=int, default=1024, help="budget of a micro-batch")
    parser.add_argument("--tiles", type=int, default=40, help="budget of a micro-batch")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--save", help="folder for the state after each epoch")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    return parser.parse_args()


if __name__ == "__main__":
    main()
