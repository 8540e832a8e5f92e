"""Shards in a bucket, from a server on loopback."""

import multiprocessing
import os
import pickle
import subprocess
import sys
import time

import pytest

from omniload.cache import Cache, Storage
from omniload.cache.download import fetch_bytes
from omniload.cache.s3 import S3Transport
from omniload.errors import ConfigError, ShardError
from omniload.shards import open_shards
from tests.s3_server import (
    KEYS,
    Between,
    drip_bytes,
    endless,
    put,
    refuse,
    s3_server,
    upload,
)
from tests.shard_makers import assert_all_the_same, assert_same, make_shards

COUNT = 90


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of several shards, and its records."""
    folder = tmp_path_factory.mktemp("data") / "set"
    return folder, make_shards(folder, COUNT, max_bytes=30_000)


@pytest.fixture
def cache(tmp_path):
    return Cache(folder=tmp_path / "cache")


@pytest.fixture(scope="module")
def bucket(data):
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with s3_server() as options:
        yield upload(data[0], "bucket", options), options


def keys(shards, rows, result):
    result.put((os.getpid(), [shards.read(row).key for row in rows]))


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config_kwargs": 3}, "don't go with s3://: TypeError"),
        ({"no_such_option": 1}, "don't go with s3://: TypeError: .*no_such_option"),
        ({"endpoint_url": "here"}, "don't go with s3://: ValueError: Invalid endpoint: here"),
        ({"profile": "of nobody"}, r"don't go with s3://: ProfileNotFound: .*\(of nobody\)"),
    ],
)
def test_wrong_options_are_named_at_once(cache, options, message):
    storage = Storage(backoff_s=1000.0, options={**KEYS, **options})
    with pytest.raises(ConfigError, match=message):
        open_shards("s3://bucket/set", cache=cache, storage=storage)


@pytest.fixture(scope="module")
def between(bucket):
    with Between(bucket[1]) as running:
        yield running


@pytest.fixture(scope="module")
def shards(bucket, between, tmp_path_factory):
    """A set of which each test reads another shard, or fails to."""
    cache = Cache(folder=tmp_path_factory.mktemp("shared") / "cache")
    storage = Storage(timeout_s=20.0, retries=1, backoff_s=0.01, options=between.options)
    return open_shards(bucket[0], cache=cache, storage=storage)


@pytest.mark.parametrize("of_head", [False, True])
def test_a_bucket_that_drips_is_given_up(bucket, between, shards, of_head):
    between.faults = [drip_bytes(between, of_head=of_head)]
    storage = Storage(timeout_s=1.0, retries=0, options=between.options)
    url = f"{bucket[0]}/{shards.shard_names[0]}"
    reason = "no byte came in time" if of_head else r"only \d+ bytes came in [\d.]+ s"
    with pytest.raises(ShardError, match=f"{url} could not be fetched: {reason}"):
        fetch_bytes(S3Transport(storage), url, most=1 << 20, storage=storage, sleep=time.sleep)


def test_a_bucket_that_never_ends_is_not_waited_for(shards, between):
    between.faults = [endless]
    with pytest.raises(ShardError, match=r"is not the file .* got more bytes there"):
        shards.read(0)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", r"can't be had: .*\(AccessDenied\).*because\. Give a key in Storage"),
        (404, "NoSuchKey", "is not there. Check the URL"),
        (404, "NoSuchBucket", "is not there. Check the URL"),
    ],
)
def test_what_a_bucket_refuses_is_named_at_once(shards, between, status, code, message):
    between.faults = [refuse(status, code)]
    with pytest.raises(ShardError, match=rf"{shards.shard_names[0]} {message}"):
        shards.read(0)


def cut_after(num_bytes, shards, then=lambda: None):
    """Promise everything, and end when so many bytes have arrived in the cache."""

    def fault(client, head, body):
        client.sendall(head + body[:num_bytes])
        while num_bytes not in [path.stat().st_size for path in shards.path.glob("*.partial")]:
            time.sleep(0.01)
        then()

    return fault


def test_a_download_from_a_bucket_goes_on_where_it_was_cut(shards, between, data):
    between.faults = [cut_after(5000, shards)]
    assert_same(shards.read(40), data[1][40])
    assert between.faults == []
    assert "range: bytes=5000-" in between.requests[-1].lower()


def test_an_object_that_changes_in_the_middle_is_noticed_and_named(bucket, shards, between, data):
    folder, records = data
    name = shards.shard_names[-1]
    url, options = bucket

    def replace():
        put(f"{url}/{name}", bytes(30_000), options)

    between.faults = [cut_after(5000, shards, then=replace)]
    with pytest.raises(ShardError, match=rf"{name} is not the file .* got 30000 bytes there"):
        shards.read(COUNT - 1)
    put(f"{url}/{name}", (folder / name).read_bytes(), options)
    assert_same(shards.read(COUNT - 1), records[-1])
