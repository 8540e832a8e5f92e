"""Indexed tars at a URL, through a cache folder: the rows that the folder gives."""

import multiprocessing
import pickle

import pytest

from omniload.cache import Cache, Storage
from omniload.errors import ConfigError, ShardError
from omniload.source import RowSource
from omniload.tars import open_tars
from omniload.tars.manifest import SET_NAME
from omniload.tools.index_run import index_tars
from tests.http_server import FaultyServer, flip, truncate
from tests.shard_makers import assert_same
from tests.tar_makers import RECIPE, indexed, lengths_of, tar_folder

QUICK = Storage(timeout_s=2.0, retries=2, backoff_s=0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("tars"), (12, 8, 8))


@pytest.fixture
def server(folder):
    with FaultyServer(folder, only=".tar") as running:
        yield running


@pytest.fixture
def tars(server, tmp_path):
    return open_tars(server.url, cache=Cache(folder=tmp_path / "cache"), storage=QUICK)


def keys(source, rows):
    return [source.read(row).key for row in rows]


def test_rows_come_over_http_as_they_are_on_disk(server, tars, folder):
    local = open_tars(folder)
    assert isinstance(tars, RowSource)
    assert (tars.fingerprint, tars.location) == (local.fingerprint, server.url)
    assert lengths_of(tars) == lengths_of(local)
    for row in range(len(local)):
        assert_same(tars.read(row), local.read(row))
    assert sorted(server.names(".tar")) == ["00000.tar", "00001.tar", "00002.tar"]


def test_only_the_tars_of_the_rows_are_fetched(server, tars):
    assert tars.read(15).key == "0015"
    assert server.names(".tar") == ["00001.tar"]
    tars.prefetch([2, 0])


def test_it_is_pickled_and_forked(tars):
    expected = keys(tars, range(28))
    assert keys(pickle.loads(pickle.dumps(tars)), range(28)) == expected
    with multiprocessing.get_context("fork").Pool(2) as pool:
        found = pool.starmap(keys, [(tars, range(14)), (tars, range(14, 28))])
    assert found[0] + found[1] == expected


@pytest.mark.parametrize("fault", [truncate(4000), flip(5000)])
def test_bad_connections_are_survived(server, tars, folder, fault):
    server.faults = [fault]
    assert_same(tars.read(0), open_tars(folder).read(0))


def test_what_can_not_be_is_refused(server, folder, tmp_path):
    cache = Cache(folder=tmp_path / "cache")
    with pytest.raises(ConfigError, match="give cache=Cache"):
        open_tars(server.url)
    with pytest.raises(ConfigError, match="cache and storage are for URLs"):
        open_tars(folder, cache=cache)
    with pytest.raises(ConfigError, match="root= is for local tars"):
        open_tars(server.url, root=folder, cache=cache)
    with pytest.raises(ConfigError, match="at least the lengths and the largest file"):
        open_tars(server.url, cache=Cache(folder=tmp_path / "small", max_bytes=1000))
    (tmp_path / "empty").mkdir()
    with (
        FaultyServer(tmp_path / "empty") as empty,
        pytest.raises(ShardError, match=SET_NAME),
    ):
        open_tars(empty.url, cache=cache, storage=QUICK)


def test_an_index_apart_from_its_tars_is_refused_at_a_url(tmp_path):
    index_tars([tar_folder(tmp_path / "t", (4,))], recipe=RECIPE, out=tmp_path / "o")
    with (
        FaultyServer(tmp_path / "o") as server,
        pytest.raises(ShardError, match="must lie beside its tars"),
    ):
        open_tars(server.url, cache=Cache(folder=tmp_path / "cache"), storage=QUICK)
