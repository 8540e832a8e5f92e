"""A small vision-language model in plain torch: ViT, projector, decoder.

It shows what a model needs in order to train on packed rows, and the tests use it to prove that
packing changes nothing. One set of weights takes both forms of a batch:

- packed, samples end to end in one row: `model(**batch.model_inputs())`;
- padded, one row a sample: `model(input_ids, labels, pixel_values=...)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional


class Output(NamedTuple):
    """What the model returns: a scalar loss (None without labels) and the logits."""

    loss: torch.Tensor | None
    logits: torch.Tensor  # (rows, tokens, vocab_size)


class Block(nn.Module):
    """Attention and MLP, each normalised first and added to its input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: torch.Tensor, *, causal: bool, bounds: list[int] | None = None
    ) -> torch.Tensor:
        x = x + self.out(self.attend(self.norm_1(x), causal, bounds))
        return x + self.mlp(self.norm_2(x))

    def attend(self, x: torch.Tensor, causal: bool, bounds: list[int] | None) -> torch.Tensor:
        rows, tokens, width = x.shape
        heads = self.qkv(x).view(rows, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        # A packed row: each sample attends to itself alone. On a GPU this loop is one call of
        # flash_attn_varlen_func, or of torch.nn.attention.varlen, with cu_seqlens.
        parts = [
            functional.scaled_dot_product_attention(*heads[..., start:end, :], is_causal=causal)
            for start, end in pairwise(bounds or [0, tokens])
        ]
        return torch.cat(parts, dim=2).transpose(1, 2).reshape(rows, tokens, width)


class VisionTower(nn.Module):
    """Tiles to visual tokens: patches, a few blocks, then the mean over groups of patches."""

    def __init__(
        self,
        *,
        tile_size: int,
        patch_size: int,
        tokens_per_tile: int,
        width: int,
        num_heads: int,
        num_layers: int,
    ) -> None:
        super().__init__()
        num_patches = (tile_size // patch_size) ** 2
        if tile_size % patch_size or num_patches % tokens_per_tile:
            raise ValueError(
                f"tile_size={tile_size} must be a multiple of patch_size={patch_size}, and its "
                f"{num_patches} patches a multiple of tokens_per_tile={tokens_per_tile}."
            )
        self.tile_size, self.tokens_per_tile = tile_size, tokens_per_tile
        self.patches = nn.Conv2d(3, width, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.randn(num_patches, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.projector = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Turn (num_tiles, 3, height, width) into (num_tiles, tokens_per_tile, width)."""
        x = self.patches(pixels).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, causal=False)
        return self.projector(x.unflatten(1, (self.tokens_per_tile, -1)).mean(2))


class TinyVLM(nn.Module):
    """Predict the next token of text with images in it.

    Args:
        vocab_size: all token ids are below it, `image_token_id` too.
        image_token_id: stands where a visual token goes, `tokens_per_tile` times for each tile.
        tokens_per_tile: visual tokens of a tile.
        tile_size: height and width of a tile, pixels.
        patch_size: height and width of a patch, pixels.
        width: of both towers; even.
        num_heads: of both towers.
        num_layers: of each tower.
        loss: "sum" or "mean" over the loss tokens, or "step": the sum divided by
            `num_items_in_batch`, as Hugging Face models do. See `PackedBatch.loss_scale`.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        image_token_id: int,
        tokens_per_tile: int = 4,
        tile_size: int = 28,
        patch_size: int = 7,
        width: int = 64,
        num_heads: int = 4,
        num_layers: int = 2,
        loss: str = "sum",
    ) -> None:
        super().__init__()
        self.image_token_id, self.loss = image_token_id, loss
        self.vision = VisionTower(
            tile_size=tile_size,
            patch_size=patch_size,
            tokens_per_tile=tokens_per_tile,
            width=width,
            num_heads=num_heads,
            num_layers=num_layers,
        )
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab_size)

    @classmethod
    def for_shards(cls, settings: Mapping[str, Any], loss: str = "sum") -> TinyVLM:
        """Make a model for shards, from `loader.manifest.settings`; tiles of 8 x 8 patches or more.

        It takes tiles as `--tiling internvl` and `square` cut them, of as many tokens each.
        """
        encoder, tiling = settings["encoder"], settings["tiling"]
        if tiling["policy"] not in ("internvl", "square"):
            raise ValueError(
                f"the tiny model takes tiles of --tiling internvl or square, got "
                f"{tiling['policy']}: train the model that this tiling is for."
            )
        tile_size, tokens = tiling["size"], encoder["tokens_per_tile"]
        # patches in a row: those of a token are averaged
        fits = (n for n in range(8, tile_size + 1) if not tile_size % n and not n * n % tokens)
        return cls(
            vocab_size=encoder["vocab_size"],
            image_token_id=encoder["image_token_id"],
            tokens_per_tile=tokens,
            tile_size=tile_size,
            patch_size=tile_size // next(fits, 8),
            loss=loss,
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        num_items_in_batch: int | None = None,
        use_cache: bool = False,
    ) -> Output:
        """Run a packed row (with cu_seq_lens_q) or padded rows (without), ids (rows, tokens).

        Padding goes to the right, with labels of -100: attention is causal, so no real token sees
        it and no mask is needed. The loop over samples has no use for cu_seq_lens_k and the maximal
        lengths; a varlen kernel has. There is no cache.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        x = self.embed(input_ids) + sinusoids(position_ids, self.embed.weight)
        x = self.place_images(x, input_ids, pixel_values)
        bounds = None if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
        for block in self.blocks:
            x = block(x, causal=True, bounds=bounds)
        logits = self.head(self.norm(x))
        if labels is None:
            return Output(None, logits)
        # The output at t predicts token t + 1. In a packed row the last token of a sample would
        # predict the next sample's first: that label is -100.
        loss = functional.cross_entropy(
            logits[:, :-1].flatten(0, 1),
            labels[:, 1:].flatten(),
            reduction="mean" if self.loss == "mean" else "sum",
        )
        return Output(loss / num_items_in_batch if self.loss == "step" else loss, logits)

    def place_images(
        self, x: torch.Tensor, input_ids: torch.Tensor, pixels: torch.Tensor | None
    ) -> torch.Tensor:
        """Put visual tokens where the image token stands."""
        if pixels is None:
            # Text only: the tower still runs, on a blank tile that counts for nothing. Else this
            # rank alone would have no gradient for it, and DDP or ZeRO-3 would wait for ever.
            size = self.vision.tile_size
            return x + 0 * self.vision(x.new_zeros(1, 3, size, size)).sum()
        places = input_ids == self.image_token_id
        tokens = self.vision(pixels.to(x.dtype)).flatten(0, 1)
        if int(places.sum()) != len(tokens):
            raise ValueError(
                f"input_ids must hold the image token {self.image_token_id} once for each of the "
                f"{len(tokens)} visual tokens of {len(pixels)} tiles, got {int(places.sum())}."
            )
        return x.masked_scatter(places[..., None], tokens)


def sinusoids(position_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Encode positions by sines and cosines: (rows, tokens, width), width and dtype of `like`."""
    half = like.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, device=like.device, dtype=like.dtype) / half)
    angles = position_ids[..., None].to(like.dtype) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
