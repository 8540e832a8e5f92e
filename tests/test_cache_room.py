"""What goes when a cache is full, and what is fetched ahead."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from omniload.cache import Cache
from omniload.cache.folder import CacheFolder
from omniload.cache.orders import PublishedOrder, read_orders
from omniload.cache.room import reserve, try_reserve
from omniload.errors import ConfigError, ShardError
from tests.cache_makers import SIZE, add, client_of, first_byte, here, used, wait_until
from tests.http_server import FaultyServer


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    with FaultyServer(tmp_path / "files") as running:
        yield running


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
