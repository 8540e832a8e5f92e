"""Damage of every kind is found by `omniload verify`, named, and stops nothing else."""

import json
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError, ShardError
from omniload.shards import open_shards, read_manifest, write_shards
from omniload.tools.cli import app
from omniload.tools.verify_run import verify
from tests.http_server import FaultyServer
from tests.loader_data import POLICY as TILES
from tests.loader_data import encoder, record, write_data
from tests.shard_makers import make_shards
from tests.tar_makers import indexed


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify")
    write_data(folder / "shards", num_rows=40)
    indexed(folder / "tars", counts=(12, 8))
    return folder


@pytest.fixture
def data(clean, tmp_path):
    """A copy to damage."""
    shutil.copytree(clean, tmp_path / "data")
    return tmp_path / "data"


def flip(path, at=-1):
    whole = bytearray(path.read_bytes())
    place = len(whole) // 2 if at < 0 else at
    whole[place] ^= 0x55
    path.write_bytes(whole)


def damaged(found):
    """(file name, row, kind) of each fault."""
    return [(fault.file.rsplit("/", 1)[-1], fault.row, fault.kind) for fault in found.faults]


@pytest.mark.parametrize("workers", [1, 2])
def test_clean_data_has_no_faults_and_is_read_in_full(clean, workers):
    seen = []
    for name, rows in (("shards", 40), ("tars", 20)):
        found = verify(
            str(clean / name),
            decode=None,
            workers=workers,
            tick=lambda done, total: seen.append((done, total)),
        )
        assert found.faults == []
        assert (found.rows, found.decoded) == (rows, rows)
        assert seen[-1][0] == seen[-1][1] > 0
    assert seen[0][0] < seen[0][1]


def test_a_sample_is_spread_over_all_shards_and_zero_decodes_nothing(clean):
    some = verify(str(clean / "shards"), decode=7)
    assert (some.rows, some.decoded) == (40, 7)
    none = verify(str(clean / "shards"), decode=0, rows=False)
    assert (none.rows, none.decoded) == (0, 0)
    assert none.files == len(read_manifest(clean / "shards").shards) + 1


def test_each_damaged_shard_is_named_and_the_others_are_read(data):
    folder = data / "shards"
    shards = open_shards(folder)
    first, second, third, *rest = sorted(folder.glob("shard-*.arrow"))
    flip(first)
    second.unlink()
    third.write_bytes(third.read_bytes()[:-1])
    (folder / "index.arrow").write_bytes(b"")
    found = verify(str(folder), decode=None)
    files = {fault.file for fault in found.faults}
    assert files == {str(path) for path in (first, second, third, folder / "index.arrow")}
    of_rest = sum(shards.manifest.shards[number].num_rows for number in range(3, 3 + len(rest)))
    assert found.rows >= of_rest
    kinds = {(fault.file, fault.kind) for fault in found.faults}
    assert {(str(first), "file"), (str(second), "file"), (str(second), "shard")} <= kinds


def test_a_byte_that_changed_in_an_image_is_found_by_its_row(data):
    folder = data / "shards"
    shards = open_shards(folder)
    row = next(row for row in range(40) if shards.read(row).images)
    image, name = shards.read(row).images[0], shards.read(row).shard
    path = folder / name
    whole = path.read_bytes()
    start = whole.index(image)
    path.write_bytes(whole[:start] + bytes(len(image)) + whole[start + len(image) :])
    found = verify(str(folder), decode=None)
    assert damaged(found) == [(name, -1, "file"), (name, row, "sample")]
    assert found.faults[1].key == shards.read(row).key
    assert "xxh3_128 must be" in found.faults[0].reason
    assert "image 1 of" in found.faults[1].reason


def test_images_that_were_damaged_before_they_were_stored_are_found(tmp_path):
    write_data(tmp_path / "set", num_rows=12, damage=4)
    assert damaged(verify(str(tmp_path / "set"), decode=None))[0][1:] == (4, "sample")
    assert verify(str(tmp_path / "set"), decode=0).num_faults == 0


def test_lengths_that_are_not_those_of_the_index_are_found(data):
    # an index of other rows, with a manifest that fits it: what a bug in a writer would give
    encode = encoder()
    settings = {"encoder": encode.settings(), "tiling": TILES.settings()}
    for name, words in (("one", 0), ("two", 1)):
        records = [
            record(i, encode, np.random.default_rng(i + words * (i == 3)), 0) for i in range(6)
        ]
        write_shards(data / name, records, settings=settings)
    shutil.copy(data / "two" / "index.arrow", data / "one" / "index.arrow")
    manifest = json.loads((data / "one" / "manifest.json").read_bytes())
    other = json.loads((data / "two" / "manifest.json").read_bytes())
    (data / "one" / "manifest.json").write_text(json.dumps({**manifest, "index": other["index"]}))
    found = verify(str(data / "one"), decode=0)
    assert [fault[1:] for fault in damaged(found)] == [(3, "length")]
    assert "must be (" in found.faults[0].reason


def test_a_shard_full_of_faults_lists_some_and_counts_all(tmp_path):
    make_shards(tmp_path / "set", 60)  # settings that no transform is for: nothing is decoded
    found = verify(str(tmp_path / "set"), decode=None)
    assert (found.rows, found.decoded, found.num_faults) == (60, 0, 0)
    write_data(tmp_path / "bad", num_rows=30, num_images=(1,))
    for path in (tmp_path / "bad").glob("shard-*"):
        shutil.copy(next((tmp_path / "set").glob("shard-*")), path)
    found = verify(str(tmp_path / "bad"), decode=None)
    assert found.num_faults >= 2
    assert {fault.kind for fault in found.faults} <= {"file", "shard"}


def test_damage_in_a_tar_is_named_with_its_samples(data):
    folder = data / "tars"
    tars = sorted(folder.glob("*.tar"))
    whole = tars[0].read_bytes()
    at = whole.index(b"JFIF")
    flip(tars[0], at + 200)
    found = verify(str(folder), decode=None)
    kinds = damaged(found)
    assert (tars[0].name, -1, "file") in kinds
    assert sum(kind == "row" and row >= 0 for _, row, kind in kinds) >= 1
    assert all(name == tars[0].name for name, _, _ in kinds)
    assert found.rows >= 18
    tars[0].unlink()
    found = verify(str(folder), decode=None)
    assert (tars[0].name, -1, "file") in damaged(found)
    assert found.files == 5


def test_a_mixture_is_checked_set_by_set(data):
    text = "sets: [{source: shards}, {source: tars}, {source: shards, name: again}, {source: lost}]"
    (data / "mix.yaml").write_text(text)
    flip(sorted((data / "shards").glob("shard-*"))[1])
    done = CliRunner().invoke(app, ["verify", str(data / "mix.yaml"), "--json"])
    assert done.exit_code == 1
    facts = json.loads(done.stdout)
    assert {fault["set_name"] for fault in facts["faults"]} == {"shards", "lost"}
    assert set(facts["damaged"]) == {
        str(data / "lost"),
        str(sorted((data / "shards").glob("shard-*"))[1]),
    }


def test_sets_that_do_not_go_together_are_a_fault_of_the_mixture(data):
    manifest = open_shards(data / "shards").manifest
    settings = json.loads(json.dumps(dict(manifest.settings)))
    settings["encoder"]["template"] = "llava"
    write_shards(data / "other", [open_shards(data / "shards").read(0)], settings=settings)
    (data / "mix.yaml").write_text("sets: [{source: shards}, {source: other}]")
    found = verify(str(data / "mix.yaml"))
    assert [fault.kind for fault in found.faults] == ["settings"]
    assert "template: 'chatml' in 'shards'" in found.faults[0].reason


def test_shards_at_a_url_are_read_through_the_cache(data, tmp_path):
    with FaultyServer(data / "shards") as server:
        command = ["verify", server.url, "--cache", str(tmp_path / "cache"), "--decode", "all"]
        done = CliRunner().invoke(app, [*command, "--json", "--workers", "2"])
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)
        assert (facts["rows"], facts["decoded"]) == (40, 40)


def test_the_page_for_people_lists_what_is_damaged(data):
    done = CliRunner().invoke(app, ["verify", str(data / "shards")])
    assert done.exit_code == 0
    assert "40 rows read, 40 decoded: all as it was written" in done.stdout
    path = sorted((data / "shards").glob("shard-*"))[0]
    flip(path, 100)
    done = CliRunner().invoke(app, ["verify", str(data / "shards"), "--checksums-only"])
    assert done.exit_code == 1
    assert f"damaged: {path}: its xxh3_128 must be" in done.output
    assert "1 faults, in 1 files" in done.output


def test_errors_are_ours(data, tmp_path):
    for arguments, kind in (
        ([str(tmp_path / "no")], ShardError),
        ([str(data / "shards"), "--decode", "some"], ConfigError),
        ([str(data / "shards"), "--decode", "-3"], ConfigError),
        (["s3://bucket/x"], ConfigError),
        ([str(tmp_path / "no.yaml")], ConfigError),
    ):
        done = CliRunner().invoke(app, ["verify", *arguments])
        assert isinstance(done.exception, kind), done.exception
