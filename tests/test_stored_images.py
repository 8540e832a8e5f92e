"""Images stored at their final size: the same tiles without loss, nearly the same with it."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError, SampleError
from omniload.images import (
    AnyResTiles,
    InternVLTiles,
    QwenPatches,
    check_stored,
    cut_stored,
    decode,
    image_kind,
    image_size,
    is_stored,
    store_tiles,
    tiles,
)
from omniload.shards import open_shards
from omniload.tools.cli import app
from omniload.tools.recipe import Recipe
from omniload.transforms import transform_from_settings
from tests.data_makers import image_bytes, turns, write_jsonl
from tests.images_corpus import encode, exif, photo
from tests.test_preprocess import content, rows, run

POLICY = InternVLTiles(size=28, max_tiles=4)
RECIPE = Recipe(
    tile_size=28, max_tiles=4, tokens_per_tile=4, store="resized", store_quality="lossless"
)


def cut(data, policy=POLICY):
    out = np.zeros((policy.num_tiles(*image_size(data)), 3, policy.size, policy.size), np.uint8)
    cut_stored(data, policy, out=out)
    return out


@pytest.mark.parametrize("size", [(200, 100), (100, 200), (90, 91), (400, 30), (61, 300)])
@pytest.mark.parametrize("policy", [POLICY, InternVLTiles(size=28, max_tiles=3, thumbnail=False)])
def test_without_loss_the_tiles_are_those_of_the_original(size, policy):
    data = encode(photo(*size), "JPEG", exif=exif(6).tobytes())
    if policy.num_tiles(*image_size(data)) * 28 * 28 >= size[0] * size[1]:
        pytest.skip("the grid is larger than the image")
    stored = store_tiles(data, policy, quality=None)
    assert is_stored(stored)
    assert image_kind(stored) == "tiles"
    assert image_size(stored) == image_size(data) == size[::-1]
    assert np.array_equal(cut(stored, policy), tiles(data, policy))
    assert store_tiles(stored, policy) is stored


def test_with_loss_the_tiles_are_nearly_those_and_better_with_a_higher_quality():
    data = encode(photo(300, 200), "PNG")
    expected = tiles(data, POLICY).astype(int)
    errors, sizes = [], []
    for quality in (50, 80, 95, 100):
        stored = store_tiles(data, POLICY, quality=quality)
        errors.append(np.abs(cut(stored) - expected).mean())
        sizes.append(len(stored))
    assert errors == sorted(errors, reverse=True)
    assert errors[2] < 2
    assert sizes == sorted(sizes)
    assert store_tiles(data, POLICY, quality=95) == store_tiles(data, POLICY)


@pytest.mark.parametrize("size", [(56, 28), (27, 28), (40, 40), (1, 300)])
def test_an_image_that_the_grid_would_enlarge_stays_as_it_is(size):
    data = encode(photo(*size), "PNG")
    assert store_tiles(data, POLICY) is data
    assert not is_stored(data)


def test_memory_is_read_where_it_lies():
    stored = store_tiles(encode(photo(200, 100), "PNG"), POLICY)
    assert np.array_equal(cut(memoryview(stored)), cut(stored))


def test_the_original_is_not_there_any_more_and_decode_says_so():
    stored = store_tiles(encode(photo(200, 100), "PNG"), POLICY)
    with pytest.raises(SampleError, match="stored as tiles of their final size"):
        decode(stored)


@pytest.mark.parametrize(
    ("other", "num_tiles", "message"),
    [
        (InternVLTiles(size=14, max_tiles=4), 3, r"another tiling: expected tiles of 14 pixels"),
        (InternVLTiles(size=28, max_tiles=1), 1, r"in 1x1, got 28 in 2x1"),
        (QwenPatches(patch_size=28), 3, r"stored resized for another tiling"),
        (InternVLTiles(size=28, max_tiles=4, thumbnail=False), 2, r"bytes for 2 tiles"),
    ],
)
def test_another_tiling_is_refused(other, num_tiles, message):
    stored = store_tiles(encode(photo(200, 100), "PNG"), POLICY)
    with pytest.raises(SampleError, match=message):
        check_stored(stored, other, num_tiles)


def test_damage_gives_tiles_or_a_sample_error_and_nothing_else():
    stored = store_tiles(encode(photo(200, 100), "PNG"), POLICY)
    for length in range(0, len(stored), 7):
        with pytest.raises(SampleError):
            cut(stored[:length] if length > 16 else stored[:8])
    with pytest.raises(SampleError, match="bytes for 3 tiles"):
        cut(stored + b"x")
    rng = np.random.default_rng(0)
    for turn in range(300):
        damaged = bytearray(stored)
        for at in rng.integers(0, len(stored) if turn % 2 else 60, 1 + turn % 3):
            damaged[at] = rng.integers(0, 256)
        try:
            if is_stored(damaged) and max(image_size(bytes(damaged))) < 5000:
                cut(bytes(damaged))
        except SampleError as error:
            assert str(error)  # noqa: PT017


@pytest.mark.parametrize("quality", [0, 101])
def test_a_quality_out_of_range_is_refused(quality):
    with pytest.raises(ConfigError, match=f"1 to 100, or None for no loss, got {quality}"):
        store_tiles(encode(photo(200, 100), "PNG"), POLICY, quality=quality)


def test_a_policy_that_is_no_plain_grid_is_refused():
    with pytest.raises(ConfigError, match="not a plain grid"):
        store_tiles(encode(photo(200, 100), "PNG"), AnyResTiles())


# preprocessing


def raw_set(folder):
    folder.mkdir()
    records = []
    for i, size in enumerate([(320, 240), (30, 20), (200, 600), (28, 28), (800, 160)]):
        (folder / f"{i}.jpg").write_bytes(image_bytes(i, size))
        records.append({"id": f"{i}", "image": f"{i}.jpg", "conversations": turns("<image>?", "A")})
    two = {"id": "two", "image": ["0.jpg", "3.jpg"], "conversations": turns("<image><image>", "B")}
    return write_jsonl(folder / "data.jsonl", [*records, two])


def samples(folder):
    transform = transform_from_settings(open_shards(folder).manifest.settings)
    rng = np.random.default_rng(0)
    return {record.key: transform(record, rng) for record in rows(folder)}


def test_shards_of_resized_images_give_the_same_samples(tmp_path):
    src = raw_set(tmp_path / "raw")
    run(src, tmp_path / "plain", recipe=Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4))
    facts = run(src, tmp_path / "resized", recipe=RECIPE, workers=2).as_dict()
    run(src, tmp_path / "again", recipe=RECIPE)
    assert content(tmp_path / "resized") == content(tmp_path / "again")
    kinds = {r.key: [image_kind(i) for i in r.images] for r in rows(tmp_path / "resized")}
    assert kinds == {
        "0": ["tiles"], "1": ["jpeg"], "2": ["tiles"], "3": ["jpeg"], "4": ["tiles"],
        "two": ["tiles", "jpeg"],
    }  # fmt: skip
    assert facts["images_resized"] == 4
    stored = sum(len(image) for record in rows(tmp_path / "resized") for image in record.images)
    original = sum(len(image) for record in rows(tmp_path / "plain") for image in record.images)
    assert (facts["image_bytes"], facts["image_bytes_saved"]) == (stored, original - stored)
    plain, resized = samples(tmp_path / "plain"), samples(tmp_path / "resized")
    assert plain.keys() == resized.keys()
    for key, sample in plain.items():
        for name in ("tiles", "input_ids", "image_grids", "image_sizes", "image_spans"):
            assert np.array_equal(getattr(sample, name), getattr(resized[key], name))
    manifest = open_shards(tmp_path / "resized").manifest
    assert manifest.settings["store"] == {"images": "resized", "quality": None, "resize": "torch"}
    assert "store" not in open_shards(tmp_path / "plain").manifest.settings
    assert manifest.fingerprint != open_shards(tmp_path / "plain").manifest.fingerprint


def test_fewer_tiles_are_stored_as_fewer_tiles(tmp_path):
    src = raw_set(tmp_path / "raw")
    few = {"tile_size": 28, "max_tiles": 4, "tokens_per_tile": 16, "max_tokens": 90,
           "oversize": "fewer-tiles"}  # fmt: skip
    lossless = {"store": "resized", "store_quality": "lossless"}
    run(src, tmp_path / "plain", recipe=Recipe(**few))
    facts = run(src, tmp_path / "resized", recipe=Recipe(**few, **lossless)).as_dict()
    assert facts["tiles_reduced"] > 0
    plain, resized = samples(tmp_path / "plain"), samples(tmp_path / "resized")
    for key, sample in plain.items():
        assert np.array_equal(sample.tiles, resized[key].tiles)


def test_shards_of_resized_images_are_encoded_again_for_the_same_tiling_only(tmp_path):
    src = raw_set(tmp_path / "raw")
    run(src, tmp_path / "one", recipe=RECIPE)
    for number, recipe in enumerate((RECIPE, Recipe(tile_size=28, max_tiles=4, tokens_per_tile=9))):
        run(tmp_path / "one", tmp_path / f"{number}", recipe=recipe, check_images=True)
        first = {r.key: [bytes(image) for image in r.images] for r in rows(tmp_path / "one")}
        again = {r.key: [bytes(i) for i in r.images] for r in rows(tmp_path / f"{number}")}
        assert first == again
    other = Recipe(tile_size=14, max_tiles=4, tokens_per_tile=4)
    message = r"stored resized for their tiling.*: expected \{.*'size': 28.* got \{.*'size': 14"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path / "one", tmp_path / "other", recipe=other)
    assert not (tmp_path / "other").exists()


def test_another_way_to_make_pixels_needs_the_originals(tmp_path):
    src = raw_set(tmp_path / "raw")
    run(src, tmp_path / "out", recipe=RECIPE)
    transform = transform_from_settings(open_shards(tmp_path / "out").manifest.settings)
    other = transform.with_pixels(lambda image, policy, *, out: None, fingerprint="other")
    record = next(r for r in rows(tmp_path / "out") if r.key == "0")
    with pytest.raises(SampleError, match="--store original"):
        other(record, np.random.default_rng(0))


def test_the_command_reports_what_it_saved(tmp_path):
    src = raw_set(tmp_path / "raw")
    small = ["--tile-size", "28", "--max-tiles", "4", "--workers", "1"]
    arguments = ["preprocess", str(src), str(tmp_path / "out"), *small]
    done = CliRunner().invoke(app, [*arguments, "--store", "resized", "--store-quality", "80"])
    assert done.exit_code == 0, done.output
    assert "resized     4 images; " in done.output
    settings = json.loads((tmp_path / "out" / "manifest.json").read_text())["settings"]
    assert settings["store"]["quality"] == 80


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"store": "small"}, r"--store must be one of original, resized, got 'small'"),
        ({"store": "resized", "tiling": "qwen"}, r"is for --tiling internvl, got qwen"),
        ({"store": "resized", "store_quality": "0"}, r"1 to 100 or 'lossless', got '0'"),
        ({"store": "resized", "store_quality": "best"}, r"got 'best'"),
        ({"store_quality": "80"}, r"--store-quality 80 is for --store resized, got original"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings)
