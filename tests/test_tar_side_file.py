"""An index of tars that comes from elsewhere: nothing in it is taken for granted."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from omniload.errors import ShardError
from omniload.shards.arrow import index_schema
from omniload.tars import open_tars
from omniload.tars.facts import TarFacts
from omniload.tars.manifest import LENGTHS_NAME, SET_NAME
from omniload.tars.members import Member
from omniload.tars.side_file import SideFile, TableWriter
from omniload.tools.index_run import index_tars
from tests.tar_makers import RECIPE, indexed, raw_tar, tar_folder


@pytest.mark.parametrize("name", ["../a.tar", "/etc/passwd", "", "a/../../b.tar", "x\0y"])
def test_an_index_from_elsewhere_can_not_lead_outside_its_root(tmp_path, name):
    folder = indexed(tmp_path, (12,))
    data = json.loads((folder / SET_NAME).read_text())
    data["tars"][0]["name"] = name
    (folder / SET_NAME).write_text(json.dumps(data))
    with pytest.raises(ShardError, match=r"must be a (path below the root|text)"):
        open_tars(folder)


def side_file(*members):
    """The bytes of a side file of one sample."""
    table = TableWriter()
    table.add(members, [0] * len(members), key="a", lengths=(3, 0, 1))
    return table.finish(
        TarFacts(
            num_bytes=5000, changed_ns=0, xxh3_128="", source="", settings_fingerprint="",
            num_members=1, num_samples=1, num_rows=1, bytes_skipped=0, damage=(), num_damaged=0,
        )
    )[1]  # fmt: skip


@pytest.mark.parametrize(
    ("start", "num_bytes"), [(1 << 62, 10), (-5, 10), (0, 1 << 62), (0, -1), (1 << 62, 1 << 62)]
)
def test_a_side_file_can_not_ask_for_bytes_that_no_tar_has(start, num_bytes):
    data = side_file(Member("a.jpg", 0, start, num_bytes))
    with pytest.raises(ShardError, match="must lie in the 5000 bytes of the tar"):
        SideFile(data, "x")


def test_members_of_a_side_file_can_not_share_bytes(tmp_path):
    side = SideFile(side_file(Member("a.jpg", 0, 512, 1000), Member("b.jpg", 0, 1512, 10)), "x")
    assert len(side.group(0)[0]) == 2
    for start in (512, 1511):
        data = side_file(Member("a.jpg", 0, 512, 1000), Member("b.jpg", 0, start, 10))
        with pytest.raises(ShardError, match="its members must lie one behind the other"):
            SideFile(data, "x")


@pytest.mark.parametrize(
    "facts", [b"5", b"null", b'"x"', b"[" * 100_000, b"{}", b'{"version": 1, "num_rows": "1"}']
)
def test_facts_of_a_side_file_are_checked(facts):
    reader = pa.ipc.open_file(side_file(Member("a.jpg", 0, 0, 10)))
    schema = reader.schema.with_metadata({b"omniload.tar_index": facts})
    batch = pa.RecordBatch.from_arrays(reader.get_batch(0).columns, schema=schema)
    with pytest.raises(ShardError, match="x is damaged or of another version"):
        SideFile(arrow_file(batch), "x")


@pytest.mark.parametrize("name", ["num_bytes", "source", "totals"])
def test_facts_of_a_tar_check_themselves(name):
    for wrong in (None, -1, 1.5, True, {"tokens": "x"}, "\ud800"):
        with pytest.raises(ValueError, match=rf"{name} must be a|surrogates not allowed"):
            dataclasses.replace(
                SideFile(side_file(Member("a", 0, 0, 9)), "x").facts, **{name: wrong}
            )


def arrow_file(batch, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_a_tar_without_samples_has_a_side_file_too(tmp_path):
    tar_folder(tmp_path, (4,))
    raw_tar(tmp_path / "empty.tar")
    assert index_tars([tmp_path], recipe=RECIPE).manifest.num_rows == 4
    assert len(open_tars(tmp_path)) == 4


def test_what_is_compressed_is_refused_before_it_is_unpacked(tmp_path):
    batch = pa.ipc.open_file(side_file(Member("a.jpg", 0, 0, 10))).get_batch(0)
    with pytest.raises(ShardError, match="must not be compressed"):
        SideFile(arrow_file(batch, compression="zstd"), "x")
    folder = indexed(tmp_path, (4,))
    lengths = folder / LENGTHS_NAME
    zeros = pa.array(np.zeros(1 << 20, np.int32))
    columns = pa.RecordBatch.from_arrays([zeros] * 3, schema=index_schema())
    lengths.write_bytes(arrow_file(columns, compression="zstd"))
    assert lengths.stat().st_size < 1 << 16
    described = json.loads((folder / SET_NAME).read_text())
    described["lengths"]["xxh3_128"] = xxhash.xxh3_128_hexdigest(lengths.read_bytes())
    (folder / SET_NAME).write_text(json.dumps(described))
    with pytest.raises(ShardError, match=r"lengths.arrow is damaged: .* not compressed.*index"):
        open_tars(folder)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("root",), "a\0b"),
        (("root",), 5),
        (("tars", 0, "name"), "\ud800"),
        (("tars", 0, "num_rows"), 1.5),
        (("lengths", "num_rows"), 3),
        (("sources",), [1]),
        (("settings",), None),
    ],
)
def test_a_description_with_a_wrong_value_is_damaged(tmp_path, place, value):
    folder = indexed(tmp_path, (4,))
    data = json.loads((folder / SET_NAME).read_text())
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    (folder / SET_NAME).write_text(json.dumps(data))
    with pytest.raises(ShardError, match=rf"{SET_NAME} is damaged: .* Run `omniload index` again"):
        open_tars(folder)
