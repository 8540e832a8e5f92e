"""Sets of an InternVL meta file with limits of their own: index, shards and training agree."""

import json

import numpy as np
import pytest

from omniload import Budget, ConfigError, DataLoader, World
from omniload.images import InternVLTiles, QwenPatches, image_size, tiles
from omniload.shards import open_shards
from omniload.tools.recipe import Recipe
from omniload.transforms import InternVLTransform, TileTransform, family_transform
from tests.data_makers import image_bytes, turns, write_json, write_jsonl
from tests.family_data import make_encoder, settings_of
from tests.test_preprocess import content, rows, run

RECIPE = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)
SETS = {
    "few": {"max_dynamic_patch": 2},
    "many": {"max_dynamic_patch": 6, "min_dynamic_patch": 5},
    "as the run": {"max_dynamic_patch": 4, "min_dynamic_patch": 1},
    "silent": {},
}
POLICIES = {
    "few": InternVLTiles(size=28, max_tiles=2),
    "many": InternVLTiles(size=28, min_tiles=5, max_tiles=6),
    "as the run": InternVLTiles(size=28, max_tiles=4),
    "silent": InternVLTiles(size=28, max_tiles=4),
}


def meta_set(folder, sets=SETS, name="meta.json"):
    """A meta file of sets that all name the same four pictures."""
    folder.mkdir(exist_ok=True)
    records = []
    for i, size in enumerate([(320, 240), (30, 20), (200, 600), (800, 160)]):
        (folder / f"{i}.jpg").write_bytes(image_bytes(i, size))
        records.append({"id": i, "image": f"{i}.jpg", "conversations": turns("<image>?", "A")})
    write_jsonl(folder / "x.jsonl", records)
    entries = {key: {"annotation": "x.jsonl", **limits} for key, limits in sets.items()}
    return write_json(folder / name, entries)


def test_each_set_is_planned_and_cut_with_its_own_limits(tmp_path):
    src = meta_set(tmp_path / "raw")
    run(src, tmp_path / "out", recipe=RECIPE, workers=2)
    shards = open_shards(tmp_path / "out")
    assert shards.manifest.settings["source_tilings"] == {
        name: POLICIES[name].settings() for name in ("few", "many")
    }
    transform = family_transform(shards.manifest.settings)
    assert isinstance(transform, InternVLTransform)
    rng = np.random.default_rng(0)
    seen = set()
    for row, record in enumerate(rows(tmp_path / "out")):
        policy = POLICIES[record.source]
        expected = tiles(bytes(record.images[0]), policy)
        sample = transform(record, rng)
        assert np.array_equal(sample.tiles, expected)
        size = image_size(record.images[0])
        assert sample.image_grids.tolist() == [list(policy.grid(*size))]
        assert shards.index.num_tiles[row] == len(expected)
        assert shards.index.num_tokens[row] == sample.num_tokens
        seen.add((record.source, len(expected)))
    assert {("few", 3), ("many", 6), ("many", 7), ("silent", 5)} <= seen


def test_training_gives_the_tiles_of_each_set_alone(tmp_path):
    src = meta_set(tmp_path / "raw")
    run(src, tmp_path / "together", recipe=RECIPE)
    alone = {}
    for name in SETS:
        one = meta_set(tmp_path / "raw", {name: {}}, "one.json")
        policy = POLICIES[name]
        recipe = Recipe(
            tile_size=28,
            min_tiles=policy.min_tiles,
            max_tiles=policy.max_tiles,
            tokens_per_tile=4,
        )
        run(one, tmp_path / name, recipe=recipe)
        alone |= samples(tmp_path / name)
    together = samples(tmp_path / "together")
    assert together.keys() == alone.keys()
    for key, (ids, pixels) in together.items():
        assert np.array_equal(ids, alone[key][0])
        assert np.array_equal(pixels, alone[key][1])


def samples(folder):
    """(source, key) -> what a training loop gets of each row."""
    shards = open_shards(folder)
    budget = Budget(tokens=500, tiles=40, samples=1)
    found = {}
    for batch in DataLoader(folder, budget=budget, world=World(), num_workers=1):
        if batch.is_filler:
            continue
        record = shards.read(int(batch.sample_ids[0]))
        arrays = batch.input_ids.numpy().copy(), batch.tiles.numpy().copy()
        found[record.source, record.key] = arrays
    return found


def test_fewer_tiles_start_from_the_limits_of_the_set(tmp_path):
    src = meta_set(tmp_path / "raw", {"many": {"max_dynamic_patch": 6}})
    small = Recipe(
        tile_size=28, max_tiles=1, tokens_per_tile=16, max_tokens=140, oversize="fewer-tiles"
    )
    facts = run(src, tmp_path / "out", recipe=small).as_dict()
    assert facts["tiles_reduced"] > 0
    transform = family_transform(open_shards(tmp_path / "out").manifest.settings)
    for record in rows(tmp_path / "out"):
        sample = transform(record, np.random.default_rng(0))
        assert sample.num_tiles == record.image_num_tiles.sum()
    assert max(record.image_num_tiles[0] for record in rows(tmp_path / "out")) > 1


def test_images_stored_resized_have_the_grid_of_their_set(tmp_path):
    src = meta_set(tmp_path / "raw")
    run(src, tmp_path / "plain", recipe=RECIPE)
    lossless = Recipe(
        tile_size=28, max_tiles=4, tokens_per_tile=4, store="resized", store_quality="lossless"
    )
    run(src, tmp_path / "stored", recipe=lossless)
    settings = open_shards(tmp_path / "stored").manifest.settings
    transform, rng = family_transform(settings), np.random.default_rng(0)
    plain = {(r.source, r.key): transform(r, rng).tiles for r in rows(tmp_path / "plain")}
    for record in rows(tmp_path / "stored"):
        expected = plain[record.source, record.key]
        assert np.array_equal(transform(record, rng).tiles, expected)
    with pytest.raises(ConfigError, match=r"expected \{.*'max_tiles': 2.* got \{.*'max_tiles': 4"):
        run(tmp_path / "stored", tmp_path / "again", recipe=lossless)


def test_limits_that_are_those_of_the_run_change_nothing(tmp_path):
    src = meta_set(tmp_path / "raw", {"s": {}})
    run(src, tmp_path / "silent", recipe=RECIPE)
    meta_set(tmp_path / "raw", {"s": {"max_dynamic_patch": 4}})
    run(src, tmp_path / "said", recipe=RECIPE)
    silent, said = content(tmp_path / "silent"), content(tmp_path / "said")
    assert silent.pop(".run.json") != said.pop(".run.json")  # the meta file is another
    assert silent == said
    assert "source_tilings" not in open_shards(tmp_path / "said").manifest.settings


def test_a_changed_limit_is_another_run(tmp_path):
    src = meta_set(tmp_path / "raw", {"s": {"max_dynamic_patch": 2}})
    run(src, tmp_path / "out", recipe=RECIPE)
    first = open_shards(tmp_path / "out").manifest.fingerprint
    meta_set(tmp_path / "raw", {"s": {"max_dynamic_patch": 3}})
    with pytest.raises(ConfigError, match=r"--overwrite"):
        run(src, tmp_path / "out", recipe=RECIPE)
    run(src, tmp_path / "out", recipe=RECIPE, overwrite=True)
    assert open_shards(tmp_path / "out").manifest.fingerprint != first


def test_two_sets_of_one_name_must_agree(tmp_path):
    folder = tmp_path / "raw"
    meta_set(folder, {"s": {"max_dynamic_patch": 2}}, "a.json")
    meta_set(folder, {"s": {"max_dynamic_patch": 3}}, "b.json")
    with pytest.raises(ConfigError, match=r"sets of one name .*max_tiles=2.*max_tiles=3.* for 's'"):
        run(folder / "?.json", tmp_path / "out", recipe=RECIPE)
    write_json(folder / "b.json", json.loads((folder / "a.json").read_bytes()))
    run(folder / "?.json", tmp_path / "out", recipe=RECIPE)


def test_the_transform_knows_the_policies_by_name_and_by_fingerprint():
    settings = settings_of(make_encoder("chatml"), POLICIES["silent"])
    plain = TileTransform.from_settings(settings)
    own = {"source_tilings": {"few": POLICIES["few"].settings()}}
    other = TileTransform.from_settings({**settings, **own})
    assert other.source_policies == {"few": POLICIES["few"]}
    assert plain.fingerprint != other.fingerprint
    for wrong in (InternVLTiles(size=14), QwenPatches(patch_size=28)):
        with pytest.raises(ConfigError, match="tiles of one kind and size: expected those of Inte"):
            TileTransform.from_settings({**settings, "source_tilings": {"x": wrong.settings()}})
    with pytest.raises(ConfigError, match="lack what the transform needs"):
        TileTransform.from_settings({**settings, "source_tilings": ["x"]})


@pytest.mark.parametrize(
    ("tiling", "template", "note"),
    [
        ("qwen", "chatml", "--tiling qwen with --template chatml"),
        ("internvl", "qwen-vl", "--template qwen-vl with --tiling internvl"),
        ("qwen", "qwen-vl", None),
        ("internvl", "chatml", None),
    ],
)
def test_a_template_of_another_family_is_noted(tmp_path, tiling, template, note):
    src = meta_set(tmp_path / "raw", {"s": {}})
    notes = []
    run(src, tmp_path / "out", recipe=Recipe(tiling=tiling, template=template), note=notes.append)
    found = [text for text in notes if "--tiling" in text]
    assert [text.partition(":")[0] for text in found] == ([note] if note else [])


def test_limits_of_a_set_are_told(tmp_path):
    src = meta_set(tmp_path / "raw", {"s": {"max_dynamic_patch": 2}})
    notes = []
    run(src, tmp_path / "out", recipe=RECIPE, note=notes.append)
    assert "set 's' of the meta file has its own limits: min_tiles 1, max_tiles 2" in notes
