import json

import pytest

from omniload.errors import ShardError
from omniload.shards import SCHEMA_VERSION, open_shards, read_manifest, settings_fingerprint
from tests.shard_makers import make_shards


@pytest.fixture
def folder(tmp_path):
    make_shards(tmp_path / "shards", 70, max_bytes=40_000)
    return tmp_path / "shards"


def edit(folder, **changes):
    path = folder / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | changes))


def test_the_manifest_is_read_back_as_it_was_written(folder):
    manifest = read_manifest(folder)
    assert manifest.to_json() == (folder / "manifest.json").read_text()
    assert manifest.num_rows == sum(shard.num_rows for shard in manifest.shards) == 70
    assert len(manifest.shards) > 1
    assert manifest.sources == {"even": 35, "odd": 35}
    assert manifest.fingerprint == settings_fingerprint({"tiles": 12, "loss": "assistant"})


def test_the_fingerprint_does_not_depend_on_the_order_of_settings():
    one = settings_fingerprint({"a": 1, "b": {"c": 2, "d": 3}})
    assert one == settings_fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert one != settings_fingerprint({"b": {"d": 3, "c": 2}, "a": 2})


def test_another_schema_version_is_refused_and_both_are_named(folder):
    edit(folder, schema_version=99)
    with pytest.raises(ShardError, match=rf"must be {SCHEMA_VERSION}.* got 99"):
        open_shards(folder)


def test_a_missing_shard_is_named(folder):
    name = read_manifest(folder).shards[1].name
    (folder / name).unlink()
    with pytest.raises(ShardError, match=f"1 are missing, for example {name}"):
        open_shards(folder)


def test_a_shard_that_was_cut_short_is_named_when_the_set_is_opened(folder):
    name = read_manifest(folder).shards[0].name
    with (folder / name).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ShardError, match=rf"{name} must have \d+ bytes, got 1000"):
        open_shards(folder)


def test_edited_settings_are_noticed(folder):
    edit(folder, settings={"tiles": 6, "loss": "assistant"})
    with pytest.raises(ShardError, match="settings and fingerprint disagree"):
        open_shards(folder)


@pytest.mark.parametrize("name", ["../shard.arrow", "/etc/shard.arrow", "a\\b.arrow", "shard.txt"])
def test_a_manifest_can_not_make_us_read_outside_its_folder(folder, name):
    shards = json.loads((folder / "manifest.json").read_text())["shards"]
    edit(folder, shards=[shards[0] | {"name": name}, *shards[1:]])
    with pytest.raises(ShardError, match="plain file name"):
        open_shards(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_rows": -1},
        {"num_rows": "70"},
        {"shards": {}},
        {"shards": [1]},
        {"index": None},
        {"sources": {"a": None}},
    ],
)
def test_a_damaged_manifest_is_an_error_of_ours(folder, changes):
    edit(folder, **changes)
    with pytest.raises(ShardError, match="is damaged"):
        open_shards(folder)


def test_rows_that_do_not_sum_up_are_noticed(folder):
    edit(folder, num_rows=71)
    with pytest.raises(ShardError, match="must sum to num_rows: expected 71, got 70"):
        open_shards(folder)


def test_a_folder_without_manifest_says_what_it_is(tmp_path, folder):
    with pytest.raises(ShardError, match="is not a folder of shards"):
        open_shards(tmp_path)
    with pytest.raises(ShardError, match="is not a folder\\."):
        open_shards(tmp_path / "nowhere")
    (folder / "manifest.json").unlink()
    with pytest.raises(ShardError, match=r"did not end\. Run the same `omniload preprocess` again"):
        open_shards(folder)


def test_a_manifest_that_is_not_json_is_refused(folder):
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ShardError, match="must be JSON"):
        open_shards(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(ShardError, match="not a manifest of omniload"):
        open_shards(folder)
