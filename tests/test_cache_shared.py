"""One cache folder, many processes: killed, forked, at once, on a full disk."""

import contextlib
import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import xxhash

from omniload.cache.orders import read_orders
from omniload.errors import ShardError
from tests.cache_makers import SIZE, add, client_of, first_byte, here, used, wait_until
from tests.http_server import FaultyServer, slow


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    with FaultyServer(tmp_path / "files") as running:
        yield running


FETCH = """
import sys
from omniload.cache import Cache, CacheClient, Entry, Storage
url, folder, size, checksum = sys.argv[1:]
entry = Entry(url=url, num_bytes=int(size), xxh3_128=checksum)
storage = Storage(timeout_s=10.0)
client = CacheClient(url, cache=Cache(folder=folder), storage=storage)
print(client.get(entry, len), flush=True)
"""


def fetching_process(entry, folder):
    arguments = [entry.url, str(folder), str(entry.num_bytes), entry.xxh3_128]
    return subprocess.Popen(
        [sys.executable, "-c", FETCH, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )


def test_a_download_that_was_killed_is_resumed_by_the_next_process(tmp_path, server):
    size = 400_000
    entry = add(server, 9, size)
    folder = tmp_path / "cache"
    partial = folder / f"{entry.name}.partial"
    server.faults = [slow(10_000, 0.05)]
    child = fetching_process(entry, folder)
    wait_until(lambda: partial.exists() and partial.stat().st_size >= 50_000)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not (folder / f"{entry.name}.shard").exists()
    left = partial.stat().st_size
    assert 0 < left < size
    server.requests.clear()
    assert client_of(server, folder).get(entry, bytes) == b"\x09" * size
    etag = server.etag((server.folder / "9.arrow").read_bytes())
    assert server.requests == [("9.arrow", f"bytes={left}-", etag)]
    assert not partial.exists()
    assert not (folder / f"{entry.name}.origin").exists()


def test_bytes_that_a_power_cut_left_wrong_are_found_and_fetched_again(tmp_path, server):
    entry = add(server, 9)
    folder = tmp_path / "cache"
    client = client_of(server, folder)
    (folder / f"{entry.name}.partial").write_bytes(bytes(SIZE // 2))  # zeros, as after a crash
    assert client.get(entry, bytes) == b"\x09" * SIZE
    assert [wanted for _, wanted, _ in server.requests] == [f"bytes={SIZE // 2}-", None]


def test_processes_that_need_the_same_file_fetch_it_once(tmp_path, server):
    entry = add(server, 3, 200_000)
    server.faults = [slow(20_000, 0.05)]
    children = [fetching_process(entry, tmp_path / "cache") for _ in range(3)]
    assert [child.communicate()[0] for child in children] == ["200000\n"] * 3
    assert server.names() == ["3.arrow"]


def fill(client, entries, seed, result):
    wrong = 0
    rng = random.Random(seed)
    for _ in range(60):
        entry = rng.choice(entries)
        client.prefetch(rng.sample(entries, 3))
        data = bytes(client.get(entry, memoryview))  # which keeps the map, as a shard does
        time.sleep(0.005)
        wrong += xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128
    result.put(wrong)


def test_two_jobs_fill_one_small_cache_at_once_within_its_limit(tmp_path, server):
    entries = [add(server, i, 5_000 + 500 * i) for i in range(8)]
    folder, limit = tmp_path / "cache", 30_000
    client = client_of(server, folder, max_bytes=limit)
    first_byte(client, entries[0])  # a map, a thread and an order are there when it forks
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    jobs = [context.Process(target=fill, args=(client, entries, seed, result)) for seed in range(2)]
    for job in jobs:
        job.start()
    most = 0
    while any(job.is_alive() for job in jobs):
        most = max(most, used(folder))
        time.sleep(0.005)
    assert [result.get(timeout=5) for _ in jobs] == [0, 0]
    assert [job.exitcode for job in jobs] == [0, 0]
    assert 0 < most <= limit
    assert len(server.names()) > 20  # files came and went


READ_FOR_EVER = """
import pickle, random, sys
import xxhash
client, entries, seed = pickle.loads(sys.stdin.buffer.read())
rng = random.Random(seed)
print("ready", flush=True)
while True:
    entry = rng.choice(entries)
    client.prefetch(rng.sample(entries, 3))
    data = bytes(client.get(entry, memoryview))
    if xxhash.xxh3_128_hexdigest(data) != entry.xxh3_128:
        print("wrong", flush=True)
"""


def test_processes_killed_at_any_moment_leave_nothing_that_is_wrong(tmp_path, server):
    entries = [add(server, i, 20_000 + 1000 * i) for i in range(8)]
    folder, limit = tmp_path / "cache", 100_000
    client = client_of(server, folder, max_bytes=limit)
    server.faults = [slow(3_000, 0.002) for _ in range(10_000)]
    rng = random.Random(0)
    for seed in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", READ_FOR_EVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parent.parent,
        )
        child.stdin.write(pickle.dumps((client, entries, seed)))
        child.stdin.close()
        assert child.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.05, 0.4))
        child.kill()
        said = child.stdout.read()
        child.stdout.close()
        child.wait()
        assert said == b""
        for path in folder.glob("*.shard"):
            assert xxhash.xxh3_128_hexdigest(path.read_bytes()) == path.name[:32]
        assert used(folder) <= limit
    server.faults = []
    for entry in entries:  # what they left is taken up, and its room given back
        assert xxhash.xxh3_128_hexdigest(client.get(entry, bytes)) == entry.xxh3_128
    assert used(folder) <= limit
    assert not list(folder.glob("*.evicted"))


FORK_AND_WAIT = """
import os, pickle, sys, time
client, one, other = pickle.loads(sys.stdin.buffer.read())
client.prefetch([one])
client.get(one, memoryview)
child = os.fork()
if child == 0:
    client.prefetch([other])
    client.get(other, memoryview)
    print("ready", os.getpid(), flush=True)
time.sleep(60)
"""


def test_a_forked_process_does_not_keep_up_the_order_of_a_parent_that_died(tmp_path, server):
    one, other = add(server, 1), add(server, 2)
    folder = tmp_path / "cache"
    parent = subprocess.Popen(
        [sys.executable, "-c", FORK_AND_WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parent.parent,
    )
    parent.stdin.write(pickle.dumps((client_of(server, folder), one, other)))
    parent.stdin.close()
    child = int(parent.stdout.readline().split()[1])
    try:
        assert read_orders(folder) == {one.name: 0, other.name: 0}
        parent.kill()
        parent.wait()
        assert read_orders(folder) == {other.name: 0}
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        subprocess.run(["mount", *options], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_on_a_full_disk_files_make_room(small_disk, server):
    entries = [add(server, i, 300_000) for i in range(6)]
    folder = small_disk / "cache"
    for i, entry in enumerate(entries):
        assert first_byte(client_of(server, folder), entry) == i
    assert here(folder, *entries)[-1] == 5
    assert len(here(folder, *entries)) >= 2


def test_a_disk_that_is_full_of_other_things_is_named_with_numbers(small_disk, server):
    entry = add(server, 1, 600_000)
    folder = small_disk / "cache"
    client = client_of(server, folder)
    (small_disk / "other").write_bytes(bytes(700_000))
    with contextlib.suppress(OSError), (small_disk / "more").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    client.prefetch([entry])  # a hint is no reason to stop
    client.prefetch([])
    (small_disk / "more").unlink()
    with pytest.raises(
        ShardError, match=r"No space left on device. It needs 600000 bytes.* bytes of the disk"
    ):
        first_byte(client, entry)
    # what came doesn't keep the disk full
    assert sum(path.stat().st_size for path in folder.glob("*.partial")) == 0
    (small_disk / "other").unlink()
    assert first_byte(client, entry) == 1
