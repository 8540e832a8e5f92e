import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import numpy as np
import pytest

from omniload.cache import Cache, Storage
from omniload.cache.url import join_url, shown_url
from omniload.errors import ConfigError, ShardError
from omniload.index import LengthIndex
from omniload.shards import open_shards, rows_per_window
from omniload.source import RowSource
from tests.http_server import (
    FaultyServer,
    change_etag,
    drip,
    flip,
    redirect,
    reset,
    slow,
    stall,
    status,
    truncate,
)
from tests.s3_server import KEYS, s3_server, upload
from tests.shard_makers import assert_same, make_shards

COUNT = 90
QUICK = Storage(timeout_s=0.4, retries=2, backoff_s=0.01)
PATIENT = Storage(timeout_s=0.4, retries=5, backoff_s=0.01)


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


def assert_all_the_same(shards, records):
    for row, record in enumerate(records):
        found = shards.read(row)
        assert found.row == row
        assert_same(found, record)


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


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([status(503), status(429)], id="busy"),
        pytest.param([truncate(900), truncate(700), truncate(100)], id="truncated"),
        pytest.param([stall(800), stall(0)], id="stalled"),
        pytest.param([reset(1000), reset(0)], id="reset"),
        pytest.param([truncate(900), change_etag("b")], id="etag changed in the middle"),
        pytest.param([flip(40)], id="a wrong bit"),
        pytest.param([truncate(1200), flip(1)], id="a wrong bit after a part"),
        pytest.param([truncate(1000), status(503), reset(20), stall(5), truncate(9)], id="all"),
    ],
)
def test_what_comes_over_a_bad_connection_is_right(server, data, cache, faults):
    server.faults = list(faults)
    assert_all_the_same(open_shards(server.url, cache=cache, storage=PATIENT), data[1])
    assert server.faults == []


def test_a_download_goes_on_where_it_was_cut(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [truncate(5000), truncate(3000)]
    shards.read(0)
    etag = server.etag((server.folder / shards.shard_names[0]).read_bytes())
    name = shards.shard_names[0]
    assert server.requests == [
        (name, None, None),
        (name, "bytes=5000-", etag),
        (name, "bytes=8000-", etag),
    ]


def test_a_file_that_changes_in_the_middle_is_fetched_from_its_beginning(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [truncate(5000), change_etag("other"), truncate(6000)]
    shards.read(0)
    assert [wanted for _, wanted, _ in server.requests] == [None, "bytes=5000-"]
    server.requests.clear()
    server.faults = [truncate(5000), truncate(10)]
    shards.read(COUNT - 1)
    assert [wanted for _, wanted, _ in server.requests] == [None, "bytes=5000-", "bytes=5010-"]


@pytest.mark.parametrize("options", [{"with_ranges": False}, {"with_etag": False}])
def test_servers_without_ranges_or_etags_will_do(data, cache, options):
    with FaultyServer(data[0], **options) as server:
        server.faults = [truncate(2000), status(503), truncate(4000)]
        assert_all_the_same(open_shards(server.url, cache=cache, storage=QUICK), data[1])


def test_a_server_that_never_gets_further_ends_with_the_numbers_and_a_remedy(server, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [truncate(5000), *[stall(0)] * 20]
    name = shards.shard_names[0]
    with pytest.raises(
        ShardError,
        match=rf"{server.url}/{name} could not be fetched: no byte came in time. 5000 bytes of "
        r"it came, at \d+\.\d bytes/s, and less than 65536 more in each of 3 tries with a time "
        r"limit of 0.4 s.*raise timeout_s",
    ):
        shards.read(0)
    server.faults = []
    assert shards.read(0).row == 0  # and goes on when the server does


def test_a_server_that_starts_over_each_time_is_given_up(data, cache):
    with FaultyServer(data[0], with_ranges=False) as server:
        shards = open_shards(server.url, cache=cache, storage=QUICK)
        server.faults = [truncate(5000)] * 20
        with pytest.raises(ShardError, match="5000 bytes of it came"):
            shards.read(0)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        pytest.param(
            drip(1, 0.05), r"only \d+ bytes came in [\d.]+ s, of at least 1024", id="bytes"
        ),
        pytest.param(drip(1, 0, head_s=0.05), r"only \d+ bytes, of headers", id="headers"),
        pytest.param(drip(1, 0, most=1), "the connection ended", id="a byte a connection"),
    ],
)
def test_a_server_that_drips_is_given_up_with_its_rate(server, cache, fault, reason):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.requests.clear()
    server.faults = [fault] * 20
    with pytest.raises(
        ShardError,
        match=rf"{server.url}/{shards.shard_names[0]} could not be fetched: {reason}.*\. \d+ bytes "
        r"of it came, at \d+\.\d bytes/s, .* 3 tries .*raise timeout_s",
    ):
        shards.read(0)
    assert len(server.requests) == 3
    server.faults = []
    assert shards.read(0).row == 0


@pytest.mark.parametrize("fault", [drip(1, 0.05), drip(1, 0, head_s=0.05)])
def test_a_manifest_that_drips_is_given_up(data, cache, fault):
    with FaultyServer(data[0], only=".json") as server:
        server.faults = [fault] * 20
        with pytest.raises(ShardError, match=r"manifest.json could not be fetched: only \d+ bytes"):
            open_shards(server.url, cache=cache, storage=QUICK)
        assert len(server.requests) == 3


def test_tries_that_bring_much_of_a_file_are_not_counted(tmp_path, cache):
    records = make_shards(tmp_path / "set", COUNT, max_bytes=10_000_000)
    with FaultyServer(tmp_path / "set") as server:
        shards = open_shards(server.url, cache=cache, storage=Storage(retries=0, backoff_s=0.01))
        size = shards.manifest.shards[0].num_bytes
        assert size > 2 << 16
        server.faults = [truncate(1 << 16), truncate(1 << 16)]
        assert_same(shards.read(0), records[0])
        assert server.faults == []


@pytest.mark.parametrize("target", ["", "ftp://127.0.0.1:9/x", "file:///etc/hostname"])
def test_redirects_that_lead_nowhere_end_with_the_url(server, cache, target):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [redirect(target)] * 50
    with pytest.raises(ShardError, match=rf"{shards.shard_names[0]} can't be had: 302 .*Check the"):
        shards.read(0)
    assert len(server.faults) > 30


def test_a_file_that_is_always_wrong_is_named_and_never_trusted(server, data, cache):
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    server.faults = [flip(500), flip(500)]
    with pytest.raises(ShardError, match=r"is not the file that its manifest names.*Upload"):
        shards.read(0)
    assert_same(shards.read(0), data[1][0])


def test_a_file_of_another_size_is_refused_before_it_comes(data, tmp_path, cache):
    folder = tmp_path / "copy"
    make_shards(folder, COUNT, max_bytes=30_000)
    with FaultyServer(folder) as server:
        shards = open_shards(server.url, cache=cache, storage=QUICK)
        path = folder / shards.shard_names[0]
        path.write_bytes(path.read_bytes() + b"more")
        with pytest.raises(ShardError, match=r"is not the file .* got \d+ bytes there"):
            shards.read(0)


def test_a_missing_file_is_named_at_once(data, tmp_path, cache):
    folder = tmp_path / "copy"
    make_shards(folder, COUNT, max_bytes=30_000)
    with FaultyServer(folder) as server:
        shards = open_shards(server.url, cache=cache, storage=QUICK)
        (folder / shards.shard_names[0]).unlink()
        server.requests.clear()
        with pytest.raises(ShardError, match=rf"{shards.shard_names[0]} can't be had: 404"):
            shards.read(0)
        assert len(server.requests) == 1
        (folder / "manifest.json").unlink()
        with pytest.raises(ShardError, match=r"nowhere/manifest.json can't be had: 404"):
            open_shards(f"{server.url}/nowhere", cache=cache, storage=QUICK)


def test_a_manifest_is_checked_wherever_it_comes_from(tmp_path, cache):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "manifest.json").write_text("[1]")
    with (
        FaultyServer(tmp_path / "src") as server,
        pytest.raises(ShardError, match=rf"{server.url}/manifest.json is not a manifest"),
    ):
        open_shards(server.url, cache=cache)


def test_a_manifest_is_asked_for_again_too(data, cache):
    with FaultyServer(data[0], only=".json") as server:
        server.faults = [status(503), truncate(50)]
        assert len(open_shards(server.url, cache=cache, storage=QUICK)) == COUNT
        assert server.faults == []


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
    storage = Storage(options={"headers": {"Authorization": "Bearer x"}})
    assert len(open_shards(server.url, cache=cache, storage=storage)) == COUNT


def test_urls_keep_their_query_and_hide_their_secrets():
    assert join_url("https://host/a/?sig=1", "x y.arrow") == "https://host/a/x%20y.arrow?sig=1"
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


@pytest.fixture(scope="module")
def bucket(data):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3_server() as options:
        yield upload(data[0], "bucket", options), options


READ = """
import pickle, sys
shards, rows = pickle.loads(sys.stdin.buffer.read())
print([shards.read(row).key for row in rows])
"""


def test_shards_come_from_s3(bucket, data, cache):
    url, options = bucket
    shards = open_shards(url, cache=cache, storage=Storage(options=options))
    assert shards.location == url == f"s3://bucket/{data[0].name}"
    assert_all_the_same(shards, data[1])
    assert_all_the_same(open_shards(url, cache=cache, storage=Storage(options=options)), data[1])


def test_forked_and_spawned_processes_read_from_s3(bucket, data, cache):
    url, options = bucket
    shards = open_shards(url, cache=cache, storage=Storage(options=options))
    shards.read(0)  # s3fs runs its thread here by now
    context = multiprocessing.get_context("fork")
    result = context.Queue()
    workers = [
        context.Process(target=keys, args=(shards, range(worker, COUNT, 2), result))
        for worker in range(2)
    ]
    for worker in workers:
        worker.start()
    found = dict(result.get(timeout=60) for _ in workers)
    for number, worker in enumerate(workers):
        worker.join(timeout=20)
        assert found[worker.pid] == [data[1][row].key for row in range(number, COUNT, 2)]
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=pickle.dumps((shards, [5, 80])),
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().strip() == str([data[1][5].key, data[1][80].key])


def test_what_is_not_in_the_bucket_is_named(bucket, cache):
    _, options = bucket
    with pytest.raises(ShardError, match=r"s3://bucket/nowhere/manifest.json is not there"):
        open_shards("s3://bucket/nowhere", cache=cache, storage=Storage(options=options))


def test_a_bucket_that_does_not_answer_ends_with_a_message(cache):
    options = {**KEYS, "endpoint_url": "http://127.0.0.1:9"}
    options["config_kwargs"] = {"retries": {"max_attempts": 1}}
    storage = Storage(timeout_s=0.3, retries=0, options=options)
    with pytest.raises(ShardError, match=r"s3://bucket/set/manifest.json could not be fetched"):
        open_shards("s3://bucket/set", cache=cache, storage=storage)


def test_options_that_would_change_how_threads_run_are_refused(cache):
    storage = Storage(options={"asynchronous": True})
    with pytest.raises(ConfigError, match=r"s3:// must not set asynchronous"):
        open_shards("s3://bucket/set", cache=cache, storage=storage)


def test_a_network_folder_is_copied_by_a_file_url(data, cache):
    shards = open_shards(f"file://{data[0]}", cache=cache)
    assert_all_the_same(shards, data[1])


def test_slow_servers_are_waited_for(server, data, cache):
    server.faults = [slow(400, 0.01)]
    shards = open_shards(server.url, cache=cache, storage=QUICK)
    assert len(shards) == COUNT
