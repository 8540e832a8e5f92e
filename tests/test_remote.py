"""Shards at a URL are shards: the same rows, from any process, through a cache."""

import multiprocessing
import os
import pickle
import threading

import numpy as np
import pytest

from omniload.cache import Cache, Storage
from omniload.cache.url import join_url, shown_url
from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.shards import open_shards, rows_per_window
from omniload.source import RowSource
from tests.http_server import (
    FaultyServer,
    status,
)
from tests.shard_makers import assert_all_the_same, assert_same, make_shards

COUNT = 90
QUICK = Storage(timeout_s=0.4, retries=2, backoff_s=0.01)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of several shards, and its records."""
    folder = tmp_path_factory.mktemp("data") / "set"
    return folder, make_shards(folder, COUNT, max_bytes=30_000)


@pytest.fixture
def server(data):
    with FaultyServer(data[0]) as running:
        yield running


@pytest.fixture
def cache(tmp_path):
    return Cache(folder=tmp_path / "cache")


def test_shards_come_over_http_as_they_are_on_disk(server, data, cache):
    folder, records = data
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    local = open_shards(folder)
    assert isinstance(shards, RowSource)
    assert shards.fingerprint == local.fingerprint
    assert shards.shard_names == local.shard_names
    assert shards.location == server.url
    assert shards.index.num_tokens.tolist() == local.index.num_tokens.tolist()
    assert_all_the_same(shards, records)
    assert len(server.names()) == len(shards.shard_names) + 1
    server.requests.clear()
    assert_all_the_same(open_shards(server.url, cache=cache), records)
    assert server.names("") == ["manifest.json"]  # all else was in the cache


def test_records_from_a_cache_own_their_bytes(server, cache):
    # a view would keep the room of an evicted file
    record = open_shards(server.url, cache=cache).read(3)
    for array in (record.input_ids, record.labels, record.image_sizes):
        while isinstance(array.base, np.ndarray):
            array = array.base
        assert isinstance(array.base, bytes)
        assert not array.flags.writeable  # as from a local folder


def test_a_url_needs_a_cache_and_a_path_must_not_have_one(data, cache):
    with pytest.raises(ConfigError, match=r"give cache=Cache\(folder=..., max_bytes=...\), got N"):
        open_shards("http://127.0.0.1:9/set")
    with pytest.raises(ConfigError, match="read in place"):
        open_shards(data[0], cache=cache)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("pipe:cat /etc/passwd", "pipe: runs a program"),
        ("ftp://host/set", r"must be one of http, https, s3, .*, got 'ftp://host/set'"),
        ("simplecache::s3://bucket/set", "protocol of a URL must be one of"),
        ("s3:///set", "must name a host or bucket"),
        ("https://me:word@host/set", r"password must not be in the URL \(https://host/set\)"),
        ("http://[::1/set", r"a URL must be one, got 'http://\[::1/set': Invalid IPv6"),
        ("http://host:port/set", "a URL must be one, got 'http://host:port/set': Port could not"),
    ],
)
def test_protocols_that_are_not_read_are_named(url, message, cache):
    with pytest.raises(ConfigError, match=message):
        open_shards(url, cache=cache)


def test_a_cache_that_can_not_hold_the_largest_file_is_refused_when_the_set_is_opened(
    server, tmp_path
):
    with pytest.raises(ConfigError, match=r"the lengths and the largest file of .*got 5000"):
        open_shards(server.url, cache=Cache(folder=tmp_path / "cache", max_bytes=5000))


def test_headers_are_sent_and_other_options_refused(server, cache):
    with pytest.raises(ConfigError, match=r"must be \{'headers': .*got the names \['anon'\]"):
        open_shards(server.url, cache=cache, storage=Storage(options={"anon": True}))
    for headers in ({"X": "secret\nY: z"}, {"X": "\u6f22"}, {"X Y": "secret"}, {"": "secret"}):
        with pytest.raises(ConfigError, match="a header must be a name and") as raised:
            open_shards(server.url, cache=cache, storage=Storage(options={"headers": headers}))
        assert "secret" not in str(raised.value)
    storage = Storage(options={"headers": {"Authorization": "Bearer x"}})
    assert len(open_shards(server.url, cache=cache, storage=storage)) == COUNT


def test_urls_keep_their_query_and_hide_their_secrets():
    assert join_url("https://host/a/?sig=1", "x y.arrow") == "https://host/a/x%20y.arrow?sig=1"
    assert join_url("https://host/ü b/%20c", "x") == "https://host/%C3%BC%20b/%20c/x"
    assert join_url("s3://bucket/a/", "x.arrow") == "s3://bucket/a/x.arrow"
    assert shown_url("https://me:word@host/a?sig=1") == "https://host/a?..."


def test_shards_are_fetched_ahead_by_a_hint(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    order = list(range(len(shards.shard_names)))[::-1]
    shards.prefetch(order)
    figures = shards.remote.client.figures
    for _ in range(500):
        figures = shards.remote.client.figures
        if figures["fetched_files"] == len(order) + 1:  # the index came before
            break
        threading.Event().wait(0.01)
    assert server.names() == [shards.shard_names[shard] for shard in order]
    shards.read(0)
    figures = shards.remote.client.figures
    assert (figures["hits"], figures["misses"]) == (1, 1)


def test_an_error_ahead_is_no_error_until_the_row_is_read(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [status(404)]
    shards.prefetch([0])
    while server.faults:
        threading.Event().wait(0.01)
    assert shards.read(0).row == 0


def keys(shards, rows, result):
    result.put((os.getpid(), [shards.read(row).key for row in rows]))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_read_a_set_that_the_main_process_has_opened_and_used(
    server, data, tmp_path, method
):
    cache = Cache(folder=tmp_path / "cache", max_bytes=150_000)
    shards = open_shards(server.url, cache=cache, storage=Storage(timeout_s=5.0))
    shards.prefetch([2, 1])  # threads run, locks may be held
    shards.read(0)
    context = multiprocessing.get_context(method)
    result = context.Queue()
    rows = [list(range(worker, COUNT, 2)) for worker in range(2)]
    workers = [context.Process(target=keys, args=(shards, part, result)) for part in rows]
    for worker in workers:
        worker.start()
    found = dict(result.get(timeout=60) for _ in workers)
    for worker, part in zip(workers, rows, strict=True):
        worker.join(timeout=20)
        assert worker.exitcode == 0
        assert found[worker.pid] == [data[1][row].key for row in part]


def test_a_pickled_set_asks_the_network_for_nothing(server, data, cache):
    shards = open_shards(server.url, cache=cache)
    assert_all_the_same(shards, data[1])
    server.requests.clear()
    assert_all_the_same(pickle.loads(pickle.dumps(shards)), data[1])
    assert server.requests == []


def test_reading_through_a_cache_of_two_shards_is_slow_but_right(server, data, tmp_path):
    sizes = [info.num_bytes for info in open_shards(data[0]).manifest.shards]
    index = open_shards(data[0]).manifest.index.num_bytes
    limit = index + 2 * max(sizes)
    assert len(sizes) > 2
    shards = open_shards(server.url, cache=Cache(folder=tmp_path / "cache", max_bytes=limit))
    records = [shards.read(row) for row in np.random.default_rng(0).permutation(COUNT)[:25]]
    for record in records:  # none of them keeps a map
        assert_same(record, data[1][record.row])


def test_windows_of_remote_data_fit_half_the_cache(server, data, tmp_path):
    folder = tmp_path / "cache"
    assert rows_per_window(open_shards(data[0]), 1000) == 1000
    unlimited = open_shards(server.url, cache=Cache(folder=folder))
    assert rows_per_window(unlimited, 1000) == 1000
    size = sum(info.num_bytes for info in unlimited.manifest.shards)
    small = open_shards(server.url, cache=Cache(folder=folder, max_bytes=size))
    assert rows_per_window(small, 1000) == COUNT // 2
    assert rows_per_window(small, 10) == 10


def test_the_index_of_a_remote_set_stays_while_it_is_in_use(server, data, tmp_path):
    limit = open_shards(data[0]).manifest.index.num_bytes + 60_000
    shards = open_shards(server.url, cache=Cache(folder=tmp_path / "cache", max_bytes=limit))
    for row in range(0, COUNT, 7):
        shards.read(row)
    assert isinstance(shards.index, LengthIndex)
    name = f"{shards.manifest.index.xxh3_128}-{shards.manifest.index.num_bytes}.shard"
    assert (tmp_path / "cache" / name).exists()


def test_a_network_folder_is_copied_by_a_file_url(data, cache):
    shards = open_shards(f"file://{data[0]}", cache=cache)
    assert_all_the_same(shards, data[1])
