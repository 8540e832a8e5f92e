import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import omniload
from omniload.errors import ConfigError
from omniload.images import (
    POLICIES,
    AnyResTiles,
    InternVLTiles,
    NaViTPatches,
    QwenPatches,
    SquarePad,
)
from omniload.shards import open_shards
from omniload.tools.cli import app
from omniload.tools.preprocess import Tiling
from omniload.tools.recipe import Recipe, make_encoder
from omniload.tools.tilings import TILINGS, make_policy, parse_pinpoints
from omniload.transforms import family_transform
from tests.images_corpus import encode, photo


def test_the_command_the_tool_and_the_library_know_the_same_policies():
    assert [tiling.value for tiling in Tiling] == list(TILINGS) == list(POLICIES)
    for name, options in TILINGS.items():
        assert set(options.values()) <= {field.name for field in fields(POLICIES[name])}


@pytest.mark.parametrize(
    ("recipe", "policy", "tokens_per_tile"),
    [
        (Recipe(), InternVLTiles(), 256),
        (Recipe(tile_size=224, thumbnail=False), InternVLTiles(size=224, thumbnail=False), 64),
        (Recipe(tile_size=14, tokens_per_tile=3), InternVLTiles(size=14), 3),
        (Recipe(tiling="square"), SquarePad(), 576),
        (Recipe(tiling="square", tile_size=224), SquarePad(size=224), 256),
        (Recipe(tiling="square", tokens_per_tile=9), SquarePad(), 9),
        (Recipe(tiling="anyres"), AnyResTiles(), 1),
        (Recipe(tiling="anyres", max_crops=9), AnyResTiles(max_crops=9), 1),
        (
            Recipe(tiling="anyres", pinpoints="336x672, 672X672"),
            AnyResTiles(pinpoints=((336, 672), (672, 672))),
            1,
        ),
        (Recipe(tiling="qwen", patch_size=16), QwenPatches(patch_size=16), 1),
        (Recipe(tiling="qwen", oversize="fewer-tiles"), QwenPatches(), 1),
        (Recipe(tiling="navit", max_patches=9), NaViTPatches(max_patches=9), 1),
    ],
)
def test_a_recipe_makes_the_policy_that_its_options_say(recipe, policy, tokens_per_tile):
    assert recipe.policy() == policy
    assert make_encoder(recipe).tokens_per_tile == tokens_per_tile


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tiling": "other"}, "--tiling must be one of internvl, anyres, .* got 'other'"),
        ({"tiling": "qwen", "tile_size": 28}, "--tile-size is not an option of --tiling qwen"),
        ({"max_pixels": 5}, "--max-pixels is not an option of --tiling internvl, which has --tile"),
        ({"tiling": "qwen", "tokens_per_tile": 4}, "--tokens-per-tile is not an option of .* qwen"),
        ({"tiling": "anyres", "pinpoints": "336"}, "--pinpoints must be HEIGHTxWIDTH, .* '336'"),
        ({"tiling": "anyres", "pinpoints": "axb"}, "--pinpoints must be HEIGHTxWIDTH"),
        (
            {"tiling": "square", "oversize": "fewer-tiles"},
            "fewer-tiles does nothing with .* square",
        ),
        (
            {"tiling": "anyres", "oversize": "fewer-tiles"},
            "fewer-tiles does nothing with .* anyres",
        ),
    ],
)
def test_options_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings).settings()


def test_a_tile_smaller_than_a_token_needs_its_number_of_tokens():
    with pytest.raises(ConfigError, match=r"must be given for --tile-size 14: .* 28 x 28 pixels"):
        make_encoder(Recipe(tile_size=14))


def test_pinpoints_are_height_first():
    assert parse_pinpoints("1x2,3x4") == ((1, 2), (3, 4))
    assert make_policy("anyres", {"pinpoints": "336x672"}).grid(10, 10) == (2, 1)


OPTIONS = {
    "internvl": ["--tile-size", "28", "--max-tiles", "4", "--tokens-per-tile", "4"],
    "anyres": ["--tile-size", "28", "--pinpoints", "28x56,56x28,56x56", "--template", "vicuna"],
    "square": ["--tile-size", "28", "--template", "vicuna"],
    "qwen": ["--template", "qwen-vl", "--max-pixels", "20000"],
    "navit": ["--max-side", "64"],
}


@pytest.mark.parametrize("tiling", TILINGS)
def test_from_raw_data_to_the_arguments_of_a_model(tiling, tmp_path):
    sizes = [(40, 30), (100, 70), (30, 120), (56, 56)]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.png").write_bytes(encode(photo(*size), "PNG"))
    rows = [
        {
            "id": str(number),
            "image": f"{number}.png",
            "conversations": [
                {"from": "human", "value": "<image>\nWhat is it?"},
                {"from": "gpt", "value": "A picture."},
            ],
        }
        for number in range(len(sizes))
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    arguments = ["preprocess", str(tmp_path / "data.json"), str(tmp_path / "shards"), "--json"]
    options = [*OPTIONS[tiling], "--tiling", tiling, "--keep-order", "--workers", "1"]
    done = CliRunner().invoke(app, [*arguments, *options])
    assert done.exit_code == 0, done.output
    shards = open_shards(tmp_path / "shards")
    transform = family_transform(dict(shards.manifest.settings))
    policy = transform.policy
    assert shards.index.num_tiles.tolist() == [policy.num_tiles(*size) for size in sizes]
    budget = omniload.Budget(tokens=1000, tiles=int(shards.index.num_tiles.max()) + 1)
    world = omniload.World(dp_rank=0, dp_world_size=1)
    seen = []
    for batch in omniload.DataLoader(shards, budget=budget, world=world):
        inputs = transform.model_inputs(batch)
        pixels = inputs["pixel_values"]
        assert torch.isfinite(pixels).all()
        assert len(pixels) == batch.num_tiles
        per_image = batch.image_spans[:, 1] - batch.image_spans[:, 0]
        image_token = transform.image_token_id
        assert (batch.input_ids == image_token).sum() == per_image.sum()
        seen += batch.sample_ids.tolist()
    assert np.sort(seen).tolist() == [0, 1, 2, 3]
