"""Indexed tars as a source of rows: the same rows as preprocessing gives, read in place."""

import json
import multiprocessing
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, SampleError, ShardError
from omniload.shards import open_shards
from omniload.source import RowSource
from omniload.tars import damaged_rows, is_tar_set, open_tars, verify_tars
from omniload.tars.manifest import ENCODER_NAME, LENGTHS_NAME, SET_NAME
from omniload.tools.index_run import index_tars
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe, RunOptions
from omniload.transforms import transform_from_settings
from tests.data_makers import write_tar
from tests.shard_makers import assert_same
from tests.tar_makers import (
    RECIPE,
    flipped,
    header_of,
    indexed,
    lengths_of,
    overwrite,
    tar_bytes,
    tar_folder,
    tar_members,
)


def test_rows_are_those_that_preprocess_gives(tmp_path):
    folder = indexed(tmp_path / "tars")
    preprocess_data(
        folder, tmp_path / "shards", recipe=RECIPE, options=RunOptions(keep_order=True),
        format_name="webdataset",
    )  # fmt: skip
    tars, shards = open_tars(folder), open_shards(tmp_path / "shards")
    assert lengths_of(tars) == lengths_of(shards)
    for row in range(len(shards)):
        found = tars.read(row)
        assert_same(found, shards.read(row))
        assert found.row == row
        assert found.shard == tars.shard_names[tars.locate(row)[0]]
    assert {name: dict(tars.settings)[name] for name in tars.settings} == {
        name: shards.settings[name] for name in tars.settings
    }


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(template="vicuna", loss="all", tiling="square", tile_size=28),
        Recipe(template="qwen-vl", tiling="qwen", min_pixels=784, max_pixels=3136),
        Recipe(tile_size=28, max_tokens=80, tokens_per_tile=4, oversize="fewer-tiles"),
    ],
    ids=["square", "qwen", "fewer-tiles"],
)
def test_any_tiling_and_template_is_stored_with_the_index(tmp_path, recipe):
    folder = tar_folder(tmp_path, (12,))
    index_tars([folder], recipe=recipe)
    tars = open_tars(folder)
    transform = transform_from_settings(dict(tars.settings))
    for row in range(len(tars)):
        sample = transform(tars.read(row), np.random.default_rng(0))
        assert (sample.num_tokens, sample.num_tiles, sample.num_loss_tokens) == tuple(
            lengths_of(tars)[row]
        )


def test_a_template_and_a_tokenizer_from_files_need_not_be_there_any_more(tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    folder = tar_folder(tmp_path / "tars", (12,))
    recipe = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4, template=os.fspath(template))
    index_tars([folder], recipe=recipe)
    template.unlink()
    tars = open_tars(folder)
    assert [len(tars.read(row).input_ids) for row in range(len(tars))] == [
        tokens for tokens, _, _ in lengths_of(tars)
    ]


def test_a_tar_set_is_a_row_source(tmp_path):
    folder = indexed(tmp_path)
    tars = open_tars(folder)
    assert isinstance(tars, RowSource)
    assert is_tar_set(folder)
    assert not is_tar_set(tmp_path / "none")
    assert tars.sources == {tmp_path.name: 32}
    assert tars.location == os.fspath(folder)
    assert tars.shard_names == ["00000.tar", "00001.tar"]
    assert tars.locate(20) == (1, 0)
    assert tars.at_epoch(3) is tars
    tars.prefetch([1, 0])
    for row in (-1, 32):
        with pytest.raises(ConfigError, match="row must be between 0 and 31"):
            tars.read(row)


def test_the_fingerprint_is_over_content_and_settings_and_not_over_places(tmp_path):
    one = open_tars(indexed(tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert open_tars(tmp_path / "copy").fingerprint == one.fingerprint
    index_tars([tar_folder(tmp_path / "two")], recipe=RECIPE, out=tmp_path / "out")
    assert open_tars(tmp_path / "out").manifest.fingerprint == one.manifest.fingerprint
    index_tars([tmp_path / "one"], recipe=Recipe(tile_size=28, max_tiles=2, tokens_per_tile=4))
    assert open_tars(tmp_path / "one").fingerprint != one.fingerprint


def rows_read(source, rows):
    return [source.read(row).key for row in rows]


def test_it_can_be_forked_spawned_and_shared_by_threads(tmp_path):
    tars = open_tars(indexed(tmp_path))
    expected = rows_read(tars, range(32))
    assert rows_read(pickle.loads(pickle.dumps(tars)), range(32)) == expected
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda row: tars.read(row).key, list(range(32)) * 4)) == expected * 4
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.starmap(rows_read, [(tars, range(16)), (tars, range(16, 32))]) == [
            expected[:16], expected[16:]
        ]  # fmt: skip


def test_a_tar_that_was_changed_is_noticed_and_named(tmp_path):
    folder = indexed(tmp_path)
    path = folder / "00000.tar"
    tars = open_tars(folder)
    at = header_of(path, "0004.jpg") + 512 + 300
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 1]))
    match = r"changed since it was indexed.*checksum of '0004.jpg'.*00000.tar, key='0004'.*index"
    with pytest.raises(SampleError, match=match):
        tars.read(4)
    assert tars.read(3).key == "0003"
    path.write_bytes(path.read_bytes()[:-512])
    with pytest.raises(ShardError, match=r"00000.tar must have \d+ bytes, got \d+.*index"):
        open_tars(folder)
    with pytest.raises(ShardError, match=r"00000.tar must have"):
        pickle.loads(pickle.dumps(tars))
    path.unlink()
    with pytest.raises(ShardError, match=r"00000.tar can't be read: No such file.*root="):
        open_tars(folder)


def test_an_index_in_a_folder_of_its_own_follows_moved_tars(tmp_path):
    index_tars([tar_folder(tmp_path / "tars")], recipe=RECIPE, out=tmp_path / "index")
    assert sorted(p.name for p in (tmp_path / "tars").iterdir()) == ["00000.tar", "00001.tar"]
    expected = rows_read(open_tars(tmp_path / "index"), range(32))
    (tmp_path / "tars").rename(tmp_path / "moved")
    with pytest.raises(ShardError, match="give root="):
        open_tars(tmp_path / "index")
    moved = open_tars(tmp_path / "index", root=tmp_path / "moved")
    assert rows_read(moved, range(32)) == expected
    assert rows_read(pickle.loads(pickle.dumps(moved)), range(32)) == expected


@pytest.mark.parametrize("name", [SET_NAME, LENGTHS_NAME, ENCODER_NAME, "00000.tar.omniload-index"])
def test_any_byte_of_the_index_that_changes_is_an_error_of_ours_or_no_matter(tmp_path, name):
    folder = indexed(tmp_path, (12,))
    expected = [record_of(open_tars(folder), row) for row in range(12)]
    whole = (folder / name).read_bytes()
    rng = np.random.default_rng(0)
    noticed = 0
    for _ in range(40):
        at = int(rng.integers(len(whole)))
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(8))
        (folder / name).write_bytes(bytes(data[: len(data) if rng.random() < 0.8 else at]))
        try:
            tars = open_tars(folder)
            assert [record_of(tars, row) for row in range(12)] == expected
        except (ShardError, SampleError):
            noticed += 1
    assert noticed > 5


def record_of(tars, row):
    record = tars.read(row)
    return (record.key, record.images, record.input_ids.tolist(), record.labels.tolist())


def test_no_index_is_an_error_with_the_remedy(tmp_path):
    with pytest.raises(ShardError, match=r"no folder of indexed tars.*omniload index TARS"):
        open_tars(tmp_path)
    (tmp_path / SET_NAME).write_text('{"format": "omniload-tars", "version": 2}')
    with pytest.raises(ShardError, match="version must be 1"):
        open_tars(tmp_path)


def test_verifying_names_the_file_and_the_rows_that_were_hit(tmp_path):
    folder = indexed(tmp_path)
    ticks = []
    assert verify_tars(folder, tick=lambda done, total: ticks.append((done, total))) == {}
    assert ticks[-1][0] == ticks[-1][1] > 0
    path = folder / "00001.tar"
    at = header_of(path, "0025.1.jpg") + 512 + 100
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 255]))
    faults = verify_tars(folder)
    assert list(faults) == ["00001.tar"]
    assert "xxh3_128" in faults["00001.tar"]
    assert damaged_rows(folder, "00001.tar") == [(25, "0025")]
    assert damaged_rows(folder, "00000.tar") == []
    path.write_bytes(path.read_bytes()[: at + 1])
    assert "must have" in verify_tars(folder)["00001.tar"]
    assert [row for row, _ in damaged_rows(folder, "00001.tar")] == list(range(25, 32))
    (folder / "00000.tar.omniload-index").unlink()
    assert "can't be read" in verify_tars(folder)["00000.tar.omniload-index"]
    with pytest.raises(ShardError, match="has no tar 'x'"):
        damaged_rows(folder, "x")


# --- damage ----------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_samples_away_from_the_damage_survive_and_what_is_missing_is_counted(
    tmp_path_factory, seed
):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("tar")
    members = [
        (name, content if isinstance(content, bytes) else json.dumps(content).encode())
        for name, content in tar_members(40)
    ]
    path = folder / "a.tar"
    path.write_bytes(tar_bytes(members))
    index_tars([path], recipe=RECIPE, out=folder / "whole")
    whole = open_tars(folder / "whole")
    kept = {whole.read(row).key: record_of(whole, row) for row in range(40)}
    spans = spans_of(path)
    data, places = flipped(path.read_bytes(), rng)
    path.write_bytes(data)
    try:
        summary = index_tars([path], recipe=RECIPE, out=folder / "index")
    except ConfigError as error:  # nothing is left
        said = str(error)
        summary = None
    if summary is None:
        assert "no sample can be used" in said or "is not a tar" in said
        return
    tars = open_tars(folder / "index")
    found = {tars.read(row).key: record_of(tars, row) for row in range(len(tars))}
    intact = [
        key for key, (start, stop) in spans.items()
        if not any(at < stop and end > start for at, end in places)
    ]  # fmt: skip
    for key in intact:
        assert found[key] == kept[key]
    if len(found) < 40:
        assert summary.manifest.counts["damaged"] + summary.manifest.counts["rejected"] > 0
    assert summary.manifest.counts["samples"] == len(tars) + summary.manifest.counts["rejected"]


def spans_of(path):
    """Key -> bytes of its sample, headers in front of it included."""
    from omniload.tars.archive import Archive
    from omniload.tars.samples import group_members

    with Archive(path) as archive:
        return {
            group[0].name.partition(".")[0]: (group[0].header, group[-1].stop)
            for group in group_members(archive.members())
        }


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_damage_after_indexing_gives_the_same_records_or_an_error(tmp_path_factory, seed):
    rng = np.random.default_rng(seed)
    folder = tmp_path_factory.mktemp("tar")
    write_tar(folder / "a.tar", tar_members(20))
    index_tars([folder], recipe=RECIPE)
    tars = open_tars(folder)
    expected = [record_of(tars, row) for row in range(20)]
    data, _ = flipped((folder / "a.tar").read_bytes(), rng)
    (folder / "a.tar").write_bytes(data)
    said = []
    for row in range(20):
        try:
            assert record_of(tars, row) == expected[row]
        except (SampleError, ShardError) as error:
            said.append(str(error))
    assert all("a.tar" in text and "omniload index" in text for text in said)
