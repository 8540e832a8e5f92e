import gc
import json
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, ShardError
from omniload.shards import ShardWriter, open_shards, write_index, write_shards
from omniload.source import RowSource
from omniload.types import IGNORE_INDEX
from tests.shard_makers import assert_same, make_record, make_shards

ROOT = Path(__file__).resolve().parent.parent


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 80), seed=st.integers(0, 1000), max_bytes=st.integers(1, 50_000))
def test_rows_come_back_as_they_were_written(tmp_path_factory, count, seed, max_bytes):
    folder = tmp_path_factory.mktemp("shards")
    records = make_shards(folder, count, seed=seed, max_bytes=max_bytes)
    shards = open_shards(folder)
    assert len(shards) == count
    for row in np.random.default_rng(seed).permutation(count):
        found = shards.read(row)
        assert found.row == row
        assert found.shard == shards.manifest.shards[shards.locate(row)[0]].name
        assert_same(found, records[row])


def test_a_set_is_a_source_of_rows_whose_fingerprint_does_not_depend_on_its_place(tmp_path):
    for name in ("a", "b"):
        make_shards(tmp_path / name, 70, max_bytes=40_000)
    one, other = open_shards(tmp_path / "a"), open_shards(tmp_path / "b")
    assert isinstance(one, RowSource)
    # states saved by earlier versions hold this value
    assert one.fingerprint == other.fingerprint == "dc3f9ba163a53ecf27068c45939622eb"
    assert one.settings == {"tiles": 12, "loss": "assistant"}
    assert one.sources == {"even": 35, "odd": 35}
    assert one.location == str(tmp_path / "a")
    assert one.shard_names[one.locate(69)[0]] == one.read(69).shard
    assert one.at_epoch(3) is one
    one.prefetch([1, 0])


def test_the_index_holds_the_lengths_of_each_row(tmp_path):
    records = make_shards(tmp_path, 50, max_bytes=20_000)
    index = open_shards(tmp_path).index
    assert index.num_tokens.tolist() == [len(r.input_ids) for r in records]
    assert index.num_tiles.tolist() == [int(r.image_num_tiles.sum()) for r in records]
    expected = [int((r.labels[1:] != IGNORE_INDEX).sum()) for r in records]
    assert index.num_loss_tokens.tolist() == expected


def test_index_and_token_arrays_are_views_of_the_memory_map(tmp_path):
    make_shards(tmp_path, 40)
    shards = open_shards(tmp_path)
    for array in (shards.index.num_tokens, shards.read(3).input_ids, shards.read(3).labels):
        assert not array.flags.owndata
        assert not array.flags.writeable


def test_shards_are_closed_at_the_size_asked_for(tmp_path):
    make_shards(tmp_path / "small", 200, max_bytes=30_000)
    infos = open_shards(tmp_path / "small").manifest.shards
    assert len(infos) > 5
    assert max(info.num_bytes for info in infos) < 30_000 + 3000 + 20_000  # + a row + Arrow's own
    make_shards(tmp_path / "large", 200)
    assert len(open_shards(tmp_path / "large").manifest.shards) == 1


def test_the_same_records_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        make_shards(tmp_path / name, 90, max_bytes=30_000)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_shards_without_text_have_no_messages(tmp_path):
    make_shards(tmp_path, 10, with_messages=False)
    assert open_shards(tmp_path).read(4).messages is None


def test_a_record_without_images_and_with_one_token_is_stored(tmp_path):
    record = make_record(0, num_images=0, num_tokens=1)
    write_shards(tmp_path, [record], settings={})
    found = open_shards(tmp_path).read(0)
    assert_same(found, record)
    assert found.image_sizes.shape == (0, 2)
    assert found.image_spans.shape == (0, 2)


def test_a_row_that_is_not_there_is_named(tmp_path):
    make_shards(tmp_path, 10)
    shards = open_shards(tmp_path)
    for row in (-1, 10):
        with pytest.raises(ConfigError, match=f"row must be between 0 and 9, got {row}"):
            shards.read(row)


def test_no_record_at_all_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="at least one row"):
        write_shards(tmp_path, [], settings={})


def test_an_error_while_writing_leaves_no_partial_file(tmp_path):
    def write():
        with ShardWriter(tmp_path, prefix="s", max_bytes=10**6) as writer:
            for i in range(40):
                writer.add(make_record(i))
            assert list(tmp_path.iterdir())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert list(tmp_path.iterdir()) == []


def read_keys(shards, rows):
    return [shards.read(row).key for row in rows]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_set_can_be_used_in_other_processes(tmp_path, method):
    if method == "fork" and sys.platform == "darwin":
        pytest.skip("fork is unsafe on macOS")
    records = make_shards(tmp_path, 60, max_bytes=20_000)
    shards = open_shards(tmp_path)
    shards.read(0)  # maps are open when it forks
    with multiprocessing.get_context(method).Pool(1) as pool:
        keys = pool.apply(read_keys, (shards, range(60)))
    assert keys == [record.key for record in records]


def test_a_pickled_set_is_small_and_notices_another_manifest(tmp_path):
    make_shards(tmp_path, 2000)
    data = pickle.dumps(open_shards(tmp_path))
    assert len(data) < 5000
    assert len(pickle.loads(data)) == 2000
    make_shards(tmp_path, 2000, seed=1)
    with pytest.raises(ShardError, match="was written again while it was in use"):
        pickle.loads(data)


def test_the_maps_of_a_set_go_when_it_goes(tmp_path):
    make_shards(tmp_path, 60, max_bytes=20_000)
    gc.disable()
    try:
        shards = open_shards(tmp_path)
        gone = weakref.ref(shards._open(0))
        shards.read(0)
        assert gone() is not None
        del shards
        assert gone() is None
    finally:
        gc.enable()


def test_an_index_of_another_content_is_refused(tmp_path):
    make_shards(tmp_path, 10)
    path = tmp_path / "index.arrow"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(ShardError, match=r"index.arrow is damaged: its xxh3_128 must be"):
        open_shards(tmp_path)


def test_the_index_costs_twelve_bytes_a_row(tmp_path):
    count = 1_000_000
    ones = np.ones(count, np.int32)
    info = write_index(tmp_path, num_tokens=ones * 9, num_tiles=ones, num_loss_tokens=ones)
    assert info.num_rows == count
    assert info.num_bytes < 12 * count + 2000


def test_a_shard_that_disagrees_with_the_index_is_named(tmp_path):
    make_shards(tmp_path / "a", 10)
    other = [make_record(i, seed=5) for i in range(10)]
    with ShardWriter(tmp_path / "a", prefix="shard-00000", max_bytes=1 << 20) as writer:
        for record in other:
            writer.add(record)
    # a file of the right name from another run; sizes made equal, so that it is opened
    manifest = tmp_path / "a" / "manifest.json"
    text = manifest.read_text()
    size = json.loads(text)["shards"][0]["num_bytes"]
    manifest.write_text(text.replace(str(size), str(writer.finished[0].info.num_bytes), 1))
    shards = open_shards(tmp_path / "a")
    with pytest.raises(ShardError, match=r"shard-00000-000.arrow is damaged: row 0 must have"):
        shards.read(0)


FUZZ = """
    import sys
    from pathlib import Path
    import numpy as np
    from omniload.errors import ShardError
    from omniload.shards import open_shards

    folder, seed = Path(sys.argv[1]), int(sys.argv[2])
    path = folder / "shard-00000-000.arrow"
    clean = path.read_bytes()
    rng = np.random.default_rng(seed)
    errors = 0
    for trial in range(int(sys.argv[3])):
        data = bytearray(clean)
        where = int(rng.integers(len(data)))
        if trial % 3 == 0:
            data[where] ^= 1 << int(rng.integers(8))
        elif trial % 3 == 1:
            data[where : where + 8] = rng.bytes(len(data[where : where + 8]))
        else:
            width = int(rng.integers(1, 4096))
            data[where : where + width] = bytes(len(data[where : where + width]))
        path.write_bytes(bytes(data))
        shards = open_shards(folder)
        for row in range(len(shards)):
            try:
                shards.read(row)
            except ShardError as error:
                assert path.name in str(error)
                errors += 1
                break
    print(errors)
"""


def test_damage_anywhere_in_a_shard_is_our_error_or_harmless_never_a_crash(tmp_path):
    make_shards(tmp_path, 40)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ), str(tmp_path), "0", "300"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


@pytest.mark.parametrize("value", [2**31 - 8, -4, 10**6])
def test_a_damaged_offset_is_found_before_it_is_followed(tmp_path, value):
    make_shards(tmp_path, 40)
    path = tmp_path / "shard-00000-000.arrow"
    shards = open_shards(tmp_path)
    lengths = np.cumsum([0, *shards.index.num_tokens[:32]]).astype(np.int32).tobytes()
    data = path.read_bytes()
    at = data.index(lengths)
    path.write_bytes(data[: at + 8] + value.to_bytes(4, "little", signed=True) + data[at + 12 :])
    shards = open_shards(tmp_path)
    for row in (1, 2):  # the row that it ends, and the one that it starts
        with pytest.raises(ShardError, match=f"shard-00000-000.arrow is damaged: row {row}: off"):
            shards.read(row)
    assert shards.read(35).row == 35  # others are untouched
    assert shards.read(3).row == 3
