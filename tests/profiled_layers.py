"""A small vision-language model in layers, and its profile."""

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from omniload.pipeline.kinds import Shapes
from omniload.pipeline.profile import ProfileBatch, kept_storages, profile_layers

WIDTH, PATCHES, TOKENS_PER_TILE, VOCABULARY = 16, 12, 3, 40
# (tiles, lengths of the samples): tiles, tokens and squares vary independently
MEASURED = [(2, (30, 20)), (5, (64,)), (1, (8, 8, 8)), (3, (50, 3, 3)), (7, (21, 40)), (4, (90,))]
HELD_OUT = [(6, (70, 10)), (9, (33,)), (1, (100, 50, 25))]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take longer than such small layers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class VisionBlock(nn.Module):
    """Attention among the patches of each tile, on a tuple that carries the tokens along."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, inputs):
        x, ids, segments = inputs
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = (q @ k.transpose(-1, -2)).softmax(dim=-1)
        x = x + self.out(scores @ v)
        return x + self.mlp(x), ids, segments


class Projector(nn.Module):
    """Patches to tokens of the language model."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH * PATCHES // TOKENS_PER_TILE, WIDTH)

    def forward(self, inputs):
        x, ids, segments = inputs
        return self.linear(x.reshape(len(x) * TOKENS_PER_TILE, -1)), ids, segments


class Embedding(nn.Module):
    """Text tokens, with the visual ones in front."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, inputs):
        seen, ids, segments = inputs
        text = self.table(ids)
        place = torch.arange(len(seen), device=seen.device) % len(text)
        return text.index_add(0, place, seen), segments


class LanguageBlock(nn.Module):
    """Causal attention inside each sample, over the whole row: costs grow with tokens squared."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH))

    def forward(self, inputs):
        x, segments = inputs
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        rows = []
        for begin, end in itertools.pairwise(segments.tolist()):
            part = slice(begin, end)
            rows.append((q[part] @ k[part].T).softmax(dim=-1) @ v[part])
        x = x + torch.cat(rows)
        return x + self.mlp(x), segments


class Head(nn.Module):
    """Logits."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs):
        x, _ = inputs
        return self.linear(x)


def model():
    torch.manual_seed(1)
    return [
        VisionBlock(), VisionBlock(), VisionBlock(), Projector(), Embedding(), LanguageBlock(),
        LanguageBlock(), Head(),
    ]  # fmt: skip


PARTS = ["vision"] * 3 + ["projector", "embedding"] + ["language"] * 2 + ["head"]


def micro_batch(tiles, lengths):
    tokens = sum(lengths)
    ids = torch.randint(0, VOCABULARY, (tokens,))
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()])
    inputs = torch.randn(tiles, PATCHES, WIDTH), ids, bounds
    return ProfileBatch.from_lengths(inputs, lengths=lengths, num_tiles=tiles, labels=ids.roll(1))


def cross_entropy(logits, labels):
    return nn.functional.cross_entropy(logits, labels)


def profile(layers, cases=MEASURED, **settings):
    batches = [micro_batch(*case) for case in cases]
    fields = {"parts": PARTS, "repeats": 1, "warmup": 0, **settings}
    return profile_layers(layers, batches, **fields)


def shapes(cases):
    batches = [micro_batch(*case) for case in cases]
    return Shapes(
        num_tiles=[each.num_tiles for each in batches],
        num_tokens=[each.num_tokens for each in batches],
        sum_squares=[each.sum_squares for each in batches],
    )


def whole_chain(layers, batch, *, loss_fn=None):
    """Bytes that autograd really keeps when all layers run as one graph."""
    weights = {weight.untyped_storage().data_ptr() for layer in layers
               for weight in layer.parameters()}  # fmt: skip

    def run():
        value = batch.inputs
        for layer in layers:
            value = layer(value)
        return value if loss_fn is None else loss_fn(value, batch.labels)

    _, saved = kept_storages(run)
    return sum(size for address, size in saved.items() if address not in weights)
