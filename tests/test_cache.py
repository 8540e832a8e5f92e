import contextlib
import mmap
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import xxhash

from omniload.cache import Cache, CacheClient, Entry, Storage
from omniload.cache.folder import CacheFolder
from omniload.cache.orders import PublishedOrder, read_orders
from omniload.cache.room import reserve, try_reserve
from omniload.errors import ConfigError, ShardError
from tests.http_server import FaultyServer, slow

QUICK = Storage(timeout_s=2.0, retries=2, backoff_s=0.01)
SIZE = 10_000


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    with FaultyServer(tmp_path / "files") as running:
        yield running


def add(server, number, size=SIZE):
    """Put a file on the server."""
    data = bytes([number]) * size
    name = f"{number}.arrow"
    (server.folder / name).write_bytes(data)
    return Entry(
        url=f"{server.url}/{name}", num_bytes=size, xxh3_128=xxhash.xxh3_128_hexdigest(data)
    )


def client_of(server, folder, max_bytes=None):
    return CacheClient(server.url, cache=Cache(folder=folder, max_bytes=max_bytes), storage=QUICK)


def first_byte(client, entry):
    return client.get(entry, bytes)[0]


def here(folder, *entries):
    """Numbers of the files that the cache holds."""
    return [i for i, entry in enumerate(entries) if (folder / f"{entry.name}.shard").exists()]


def used(folder):
    cache = CacheFolder(Cache(folder=folder))
    with cache.space():  # else a file may be seen under two names
        return sum(found.num_bytes for found in cache.scan())


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_folder_with_files_of_others_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"must be empty or made by omniload.*thesis\.tex"):
        CacheFolder(Cache(folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_can_not_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be used: Not a directory"):
        CacheFolder(Cache(folder=tmp_path / "file" / "cache"))


def test_files_of_others_that_come_later_are_neither_counted_nor_deleted(tmp_path, server):
    entries = [add(server, i) for i in range(4)]
    client = client_of(server, tmp_path / "cache", max_bytes=2 * SIZE)
    first_byte(client, entries[0])
    strangers = [
        "notes.txt",
        f"{'a' * 32}-5.shard.bak",
        f"{'A' * 32}-5.shard",
        "order-1",
        "lock-file",
    ]
    for name in strangers:
        (tmp_path / "cache" / name).write_bytes(b"x" * 50_000)
    for entry in entries:
        first_byte(client, entry)
    assert all((tmp_path / "cache" / name).stat().st_size == 50_000 for name in strangers)
    client_of(server, tmp_path / "cache")  # the mark is there: it is ours still


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"folder": 3}, "folder must be a path"),
        ({"folder": "x", "max_bytes": 0}, "max_bytes must be a number of bytes"),
        ({"folder": "x", "max_bytes": 1.5}, "max_bytes must be a number of bytes"),
    ],
)
def test_wrong_settings_of_a_cache_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Cache(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timeout_s": 0}, "timeout_s must be seconds"),
        ({"timeout_s": float("nan")}, "timeout_s must be seconds"),
        ({"backoff_s": -1}, "backoff_s must be seconds"),
        ({"retries": -1}, "retries must be a count"),
        ({"options": [1]}, "options must be a mapping"),
    ],
)
def test_wrong_settings_of_storage_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Storage(**arguments)


def test_keys_in_options_are_not_shown(tmp_path):
    assert "secret" not in repr(Storage(options={"secret": "secret"}))


def test_a_checksum_that_could_be_a_path_is_refused():
    with pytest.raises(ShardError, match="must give size and xxh3_128"):
        Entry(url="http://x/y", num_bytes=5, xxh3_128="../../../etc/passwd")


def test_a_file_is_fetched_once(tmp_path, server):
    entry = add(server, 7)
    for _ in range(3):
        assert first_byte(client_of(server, tmp_path / "cache"), entry) == 7
    assert server.names() == ["7.arrow"]


def test_without_hints_what_was_used_last_stays(tmp_path, server):
    entries = [add(server, i) for i in range(5)]
    folder = tmp_path / "cache"
    for i in (0, 1, 2, 0, 3, 4):
        # a client each: none holds a file open while another needs its room
        first_byte(client_of(server, folder, max_bytes=3 * SIZE), entries[i])
        time.sleep(0.02)  # clocks of file systems are coarse
        assert used(folder) <= 3 * SIZE
    assert here(folder, *entries) == [0, 3, 4]


def test_what_is_needed_last_goes_first(tmp_path, server):
    entries = [add(server, i) for i in range(5)]
    folder = tmp_path / "cache"
    for i in range(4):
        first_byte(client_of(server, folder, max_bytes=4 * SIZE), entries[i])
    soon, later = PublishedOrder(folder), PublishedOrder(folder)
    soon.write([entries[i].name for i in (3, 0)])
    later.write([entries[i].name for i in (0, 2, 1)])  # 1 is needed last, by anybody
    first_byte(client_of(server, folder, max_bytes=4 * SIZE), entries[4])
    assert here(folder, *entries) == [0, 2, 3, 4]
    # nobody names 4 itself, so it goes before 2
    cache = CacheFolder(Cache(folder=folder, max_bytes=4 * SIZE))
    reserve(cache, entries[1], patience_s=1.0)
    assert here(folder, *entries) == [0, 2, 3]
    soon.close()
    later.close()


def test_a_file_that_a_process_needs_always_never_goes(tmp_path, server):
    entries = [add(server, i) for i in range(4)]
    folder = tmp_path / "cache"
    client = client_of(server, folder, max_bytes=2 * SIZE)
    assert client.pin(entries[0], memoryview)[0] == 0
    for i in (1, 2, 3, 1):
        first_byte(client_of(server, folder, max_bytes=2 * SIZE), entries[i])
        assert here(folder, *entries) == [0, i]
    client.prefetch([entries[2]])
    wait_until(lambda: here(folder, *entries) == [0, 2])
    del client
    first_byte(client_of(server, folder, max_bytes=SIZE), entries[3])
    assert here(folder, *entries) == [3]


def test_nothing_goes_for_a_file_that_is_needed_later_than_it(tmp_path, server):
    entries = [add(server, i) for i in range(3)]
    folder = tmp_path / "cache"
    client = client_of(server, folder, max_bytes=2 * SIZE)
    order = PublishedOrder(folder)
    order.write([entry.name for entry in entries])
    for i in (0, 1):
        first_byte(client, entries[i])
    del client
    cache = CacheFolder(Cache(folder=folder, max_bytes=2 * SIZE))
    assert not try_reserve(cache, entries[2], place=2)
    assert here(folder, *entries) == [0, 1]
    order.write([entries[1].name, entries[2].name])  # 0 was used
    wait_until(lambda: try_reserve(cache, entries[2], place=1))
    assert here(folder, *entries) == [1]
    order.close()


def test_the_order_of_a_dead_process_does_not_count(tmp_path):
    folder = tmp_path / "cache"
    CacheFolder(Cache(folder=folder))
    code = (
        "import sys, time; from pathlib import Path\n"
        "from omniload.cache.orders import PublishedOrder\n"
        "PublishedOrder(Path(sys.argv[1])).write(['a', 'b'])\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    assert read_orders(folder) == {"a": 0, "b": 1}
    child.kill()
    child.wait()
    child.stdout.close()
    assert read_orders(folder) == {}
    assert list(folder.glob("order-*")) == []


def test_files_are_fetched_ahead_in_order_as_far_as_they_fit(tmp_path, server):
    entries = [add(server, i) for i in range(6)]
    folder = tmp_path / "cache"
    client = client_of(server, folder, max_bytes=3 * SIZE)
    client.prefetch([entries[i] for i in (4, 2, 0, 5, 1)])
    wait_until(lambda: len(here(folder, *entries)) == 3)
    time.sleep(0.3)
    assert here(folder, *entries) == [0, 2, 4]
    assert server.names() == ["4.arrow", "2.arrow", "0.arrow"]
    client.prefetch([entries[i] for i in (0, 5, 1)])
    wait_until(lambda: here(folder, *entries) == [0, 1, 5])
    assert used(folder) <= 3 * SIZE
    assert client.figures["fetched_files"] == 5


def test_an_evicted_file_stays_readable_and_counts_while_it_is_in_use(tmp_path, server):
    one, other = add(server, 1), add(server, 2)
    folder = tmp_path / "cache"
    cache = CacheFolder(Cache(folder=folder, max_bytes=SIZE))
    first_byte(client_of(server, folder, max_bytes=SIZE), one)
    descriptor = cache.open(one)
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    os.close(descriptor)
    assert not try_reserve(cache, other, place=0)
    assert cache.open(one) is None  # it went
    assert mapped[:] == b"\1" * SIZE
    assert used(folder) == SIZE
    with pytest.raises(ShardError, match=f"still in use {SIZE}. Raise Cache.max_bytes"):
        reserve(cache, other, patience_s=0.2)
    mapped.close()
    assert used(folder) == 0
    reserve(cache, other, patience_s=0.2)


def test_a_process_lets_go_of_what_another_evicts(tmp_path, server):
    one, other = add(server, 1), add(server, 2)
    folder = tmp_path / "cache"
    held = client_of(server, folder, max_bytes=SIZE)
    data = held.get(one, lambda mapped: mapped)
    assert data[0] == 1
    del data
    # it waits until the first client has let go
    assert first_byte(client_of(server, folder, max_bytes=SIZE), other) == 2
    assert used(folder) == SIZE
    assert first_byte(held, one) == 1  # fetched again


def test_a_limit_below_one_file_is_named(tmp_path, server):
    entry = add(server, 1)
    with pytest.raises(ConfigError, match=f"expected {SIZE}, got {SIZE - 1}"):
        first_byte(client_of(server, tmp_path / "cache", max_bytes=SIZE - 1), entry)


def test_a_stale_partial_file_goes_before_whole_ones(tmp_path, server):
    entries = [add(server, i) for i in range(3)]
    folder = tmp_path / "cache"
    client = client_of(server, folder, max_bytes=2 * SIZE)
    first_byte(client, entries[0])
    partial = folder / f"{entries[1].name}.partial"
    partial.write_bytes(b"\1" * 10)
    os.utime(partial, (0, 0))
    first_byte(client, entries[2])
    assert here(folder, *entries) == [0, 2]
    assert not partial.exists()


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


def test_threads_may_share_a_client(tmp_path, server):
    entries = [add(server, i) for i in range(6)]
    client = client_of(server, tmp_path / "cache", max_bytes=3 * SIZE)
    found = []

    def read(seed):
        for i in range(30):
            number = (i * (seed + 1)) % 6
            found.append(first_byte(client, entries[number]) == number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 120


def test_a_client_is_pickled_without_threads_and_locks(tmp_path, server):
    entry = add(server, 1)
    client = client_of(server, tmp_path / "cache")
    first_byte(client, entry)
    assert first_byte(pickle.loads(pickle.dumps(client)), entry) == 1


def test_threads_and_order_go_with_their_client(tmp_path, server):
    entry = add(server, 1)
    client = client_of(server, tmp_path / "cache")
    client.prefetch([entry])
    first_byte(client, entry)
    assert list((tmp_path / "cache").glob("order-*"))
    del client
    assert not list((tmp_path / "cache").glob("order-*"))
    wait_until(lambda: not any("omniload-cache" in t.name for t in threading.enumerate()))


def test_a_folder_that_goes_while_it_is_in_use_is_named(tmp_path, server):
    one, other = add(server, 1), add(server, 2)
    client = client_of(server, tmp_path / "cache")
    first_byte(client, one)
    shutil.rmtree(tmp_path / "cache")
    client.prefetch([other])  # the thread that fetches ahead says nothing, and lives on
    time.sleep(0.2)
    with pytest.raises(ShardError, match=r"cache folder .* can't be used: No such file"):
        first_byte(client, other)


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


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path, server):
    entry = add(server, 1)
    client = client_of(server, tmp_path / "cache")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cache" / f"{entry.name}.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(ShardError, match="can't be used: Too many levels of symbolic links"):
        first_byte(client, entry)
    assert (tmp_path / "victim").read_text() == "precious"


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
