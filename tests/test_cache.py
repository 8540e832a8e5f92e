"""The folder of a cache, and clients that get files through it."""

import os
import pickle
import shutil
import threading
import time

import pytest

from omniload.cache import Cache, Entry, Storage
from omniload.cache.folder import CacheFolder
from omniload.errors import ConfigError, ShardError
from tests.cache_makers import SIZE, add, client_of, first_byte, wait_until
from tests.http_server import FaultyServer


@pytest.fixture
def server(tmp_path):
    (tmp_path / "files").mkdir()
    with FaultyServer(tmp_path / "files") as running:
        yield running


def test_a_folder_with_files_of_others_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"must be empty or made by omniload.*thesis\.tex"):
        CacheFolder(Cache(folder=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_folder_that_can_not_be_made_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be used: Not a directory"):
        CacheFolder(Cache(folder=tmp_path / "file" / "cache"))


@pytest.mark.parametrize("mark", ["", "of mine", '{"format": "omniload-cache", "version": 2}'])
def test_a_mark_of_something_else_is_no_mark(tmp_path, mark):
    (tmp_path / "omniload-cache.json").write_text(mark)
    with pytest.raises(ConfigError, match="must be the mark of a cache that this omniload reads"):
        CacheFolder(Cache(folder=tmp_path))
    assert (tmp_path / "omniload-cache.json").read_text() == mark


@pytest.mark.parametrize("target", ["mark", "nothing"])
def test_a_mark_that_is_a_link_is_no_mark(tmp_path, target):
    CacheFolder(Cache(folder=tmp_path / "cache"))
    (tmp_path / "cache" / "omniload-cache.json").rename(tmp_path / "mark")
    (tmp_path / "cache" / "omniload-cache.json").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="can't be used: Too many levels of symbolic links"):
        CacheFolder(Cache(folder=tmp_path / "cache"))
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("kind", ["shard", "partial", "order"])
def test_a_pipe_under_a_name_of_ours_stops_nobody(tmp_path, server, kind):
    entry = add(server, 1)
    client = client_of(server, tmp_path / "cache")
    names = {"order": f"order-{'0' * 16}"}
    os.mkfifo(tmp_path / "cache" / names.get(kind, f"{entry.name}.{kind}"))
    if kind == "order":
        assert first_byte(client, entry) == 1
    else:
        with pytest.raises(ShardError, match=rf"can't be used: No.*{entry.name}\.{kind}\)"):
            first_byte(client, entry)


@pytest.mark.parametrize("version", ['"x\\r\\nX: y"', '"\u6f22"', "5", "null", "[" * 30_000])
def test_where_a_part_came_from_is_not_trusted(tmp_path, server, version):
    entry = add(server, 1)
    client = client_of(server, tmp_path / "cache")
    (tmp_path / "cache" / f"{entry.name}.partial").write_bytes(b"\1" * 100)
    origin = f'{{"url": "{entry.url}", "version": {version}}}'
    (tmp_path / "cache" / f"{entry.name}.origin").write_text(origin)
    assert first_byte(client, entry) == 1


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
        ({"folder": ""}, "folder must be a path, got ''"),
        ({"folder": "a\0b"}, "folder must be a path"),
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


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path, server):
    entry = add(server, 1)
    client = client_of(server, tmp_path / "cache")
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "cache" / f"{entry.name}.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(ShardError, match="can't be used: Too many levels of symbolic links"):
        first_byte(client, entry)
    assert (tmp_path / "victim").read_text() == "precious"
