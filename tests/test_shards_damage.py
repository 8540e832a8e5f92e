"""Every region of a shard and of an index, changed or cut: our error or the same rows, no crash."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from omniload.shards import open_shards, verify_shards
from tests.shard_makers import make_shards

ROOT = Path(__file__).resolve().parent.parent

# in a process of its own, with little memory: a crash or a claim of size is seen there
DAMAGE = """
    import dataclasses, json, resource, sys
    from pathlib import Path
    import xxhash
    from omniload.errors import ShardError
    from omniload.shards import read_manifest
    from omniload.shards.index_file import read_index
    from omniload.shards.views import OpenedShard, map_file

    folder, name, places = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    path = folder / name
    clean = path.read_bytes()
    manifest = read_manifest(folder)
    info = next(i for i in (*manifest.shards, manifest.index) if i.name == name)

    def rows(data):
        # size and checksum made right, as for a file that was damaged before they were taken
        changed = dataclasses.replace(
            info, num_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data)
        )
        path.write_bytes(data)
        mapped = map_file(path, changed)
        if name.startswith("index"):
            index = read_index(path, changed, mapped)
            return [index.num_tokens.tolist(), index.num_tiles.tolist()]
        shard = OpenedShard(path, changed, mapped)
        return [facts(shard.record(row, row=row)) for row in range(0, info.num_rows, 3)]

    def facts(record):
        names = ("image_sizes", "image_num_tiles", "image_spans", "input_ids", "labels")
        arrays = [getattr(record, array).tobytes() for array in names]
        return record.key, record.source, record.images, record.messages, arrays

    expected = rows(clean)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + (256 << 20),) * 2)
    outcomes = {"error": 0, "same": 0, "other": 0}
    for number, at in enumerate(places):
        for kind in range(5):
            data = bytearray(clean)
            word = data[at : at + 8]
            if kind == 0:
                data[at] ^= 1 << (number % 8)
            elif kind == 1:
                data[at : at + 8] = bytes(len(word))
            elif kind == 2:
                data[at : at + 8] = b"\\xff" * len(word)
            elif kind == 3:
                data[at : at + 8] = (b"\\xff" * 3 + b"\\x7f" + b"\\xff" * 3 + b"\\x7f")[: len(word)]
            else:
                del data[at:]
            try:
                found = rows(bytes(data))
            except ShardError as error:
                assert name in str(error)
                outcomes["error"] += 1
            else:
                outcomes["same" if found == expected else "other"] += 1
    path.write_bytes(clean)
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
    print(json.dumps({**outcomes, "more_kb": more}))
"""


def damage(folder, name, places):
    arguments = [str(folder), name, json.dumps(list(places))]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DAMAGE), *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout)
    assert outcomes["more_kb"] < 64_000
    return outcomes


@pytest.fixture
def folder(tmp_path):
    make_shards(tmp_path, 34)
    return tmp_path


SHARD = "shard-00000-000.arrow"


def regions(path):
    """Places of the metadata: schema, each batch's, footer."""
    data = path.read_bytes()
    footer = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    marks = []
    at = 8
    while data[at : at + 4] == b"\xff\xff\xff\xff" and data[at + 4 : at + 8] != bytes(4):
        size = 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        marks.append((at, at + size))
        at += size
        nxt = data.find(b"\xff\xff\xff\xff", at)
        while nxt % 8:
            nxt = data.find(b"\xff\xff\xff\xff", nxt + 1)
        at = nxt
    return [(0, 8), *marks, (footer, len(data))]


@pytest.mark.parametrize("step", [40, pytest.param(8, marks=pytest.mark.slow)])
def test_damaged_metadata_is_our_error_or_harmless_and_claims_no_memory(folder, step):
    parts = regions(folder / SHARD)
    assert len(parts) >= 4
    places = [at for first, last in parts for at in range(first, last, step)]
    outcomes = damage(folder, SHARD, places)
    assert outcomes["error"] > len(places)
    # a buffer that seems to start elsewhere in the file gives other bytes of it; verify finds that
    assert outcomes["other"] < len(places) // 2


def test_damaged_contents_are_our_error_or_found_by_verify(folder):
    outcomes = damage(folder, SHARD, range(0, size_of_shard(folder), 997))
    assert outcomes["error"] > 25
    clean = (folder / SHARD).read_bytes()
    for at in range(0, len(clean), len(clean) // 20):
        data = bytearray(clean)
        data[at] ^= 4
        (folder / SHARD).write_bytes(bytes(data))
        assert SHARD in verify_shards(folder)


def size_of_shard(folder):
    return json.loads((folder / "manifest.json").read_text())["shards"][0]["num_bytes"]


def test_a_damaged_index_is_our_error_or_harmless(folder):
    size = (folder / "index.arrow").stat().st_size
    outcomes = damage(folder, "index.arrow", range(0, size, 8))
    assert outcomes["error"] > 50


def test_the_helper_that_damages_changes_rows_at_all(folder):
    # a test of the test: without damage everything is the same
    outcomes = damage(folder, SHARD, [])
    assert outcomes == {"error": 0, "same": 0, "other": 0, "more_kb": outcomes["more_kb"]}
    assert len(open_shards(folder)) == 34
