"""The loader over a URL: the same batches as from disk, through a cache that is too small."""

import contextlib
import shutil
from pathlib import Path

import pytest

from omniload import Budget, Cache, DataLoader, Storage, World
from omniload.errors import ConfigError, ShardError
from omniload.mixture import Mixture, MixtureSet
from omniload.shards import open_shards
from omniload.tars import open_tars
from tests.http_server import FaultyServer, reset, status, truncate
from tests.loader_data import Wrapped, assert_same_run, rows_of, write_data
from tests.tar_makers import indexed

BUDGET = Budget(tokens=600, tiles=16)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "set", num_rows=120)


@pytest.fixture
def server(data):
    with FaultyServer(data) as running:
        yield running


def bytes_in(folder):
    total = 0
    for path in folder.glob("*.shard"):
        with contextlib.suppress(FileNotFoundError):  # evicted since it was listed
            total += path.stat().st_size
    return total


def loader(source, **arguments):
    arguments = {"world": World(dp_rank=0, dp_world_size=1), "seed": 3, **arguments}
    return DataLoader(source, budget=BUDGET, **arguments)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_from_a_url_are_those_from_disk(server, data, tmp_path, workers):
    server.faults = [status(503), truncate(900), reset(100)]
    remote = loader(
        server.url,
        cache=Cache(folder=tmp_path / "cache"),
        storage=Storage(timeout_s=5.0, backoff_s=0.01),
        num_workers=workers,
    )
    local = loader(data)
    for _ in range(2):
        assert_same_run(remote, local)


def test_a_state_from_disk_goes_on_at_a_url(server, data, tmp_path):
    local = loader(data)
    whole = list(local)
    local.set_epoch(0)
    iterator = iter(local)
    for _ in range(4):
        next(iterator)
    remote = loader(server.url, cache=Cache(folder=tmp_path / "cache"))
    remote.load_state_dict(local.state_dict())
    assert_same_run(remote, whole[4:])


def test_an_epoch_through_a_small_cache_has_each_row_once_within_the_limit(server, data, tmp_path):
    manifest = open_shards(data).manifest
    sizes = [info.num_bytes for info in manifest.shards]
    limit = manifest.index.num_bytes + 3 * max(sizes)
    assert sum(sizes) > 2 * limit
    folder = tmp_path / "cache"
    remote = loader(server.url, cache=Cache(folder=folder, max_bytes=limit), num_workers=2)
    rows = []
    for batch in remote:
        rows += batch.sample_ids.tolist()
        assert bytes_in(folder) <= limit
    assert sorted(row for row in rows if row >= 0) == list(range(120))
    assert remote.state_dict()["window_rows"] is not None


def test_windows_are_the_planners_where_the_cache_holds_everything(server, data, tmp_path):
    remote = loader(server.url, cache=Cache(folder=tmp_path / "cache", max_bytes=1 << 30))
    assert remote.state_dict()["window_rows"] is None
    given = loader(
        server.url, cache=Cache(folder=tmp_path / "cache", max_bytes=100_000), window_rows=50
    )
    assert given.state_dict()["window_rows"] == 50
    assert len(rows_of(given)) >= 120


def test_a_cache_goes_with_a_url_only(server, data, tmp_path):
    cache = Cache(folder=tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"give cache=Cache"):
        loader(server.url)
    with pytest.raises(ConfigError, match=r"two slashes .*Give 's3://bucket/set', as a str"):
        loader(Path("s3://bucket/set"))
    with pytest.raises(ConfigError, match=r"the protocol of a URL must be one of http.*'htp://x'"):
        loader("htp://x")
    with pytest.raises(ConfigError, match="pipe: runs a program"):
        loader("pipe:cat x")
    with pytest.raises(ConfigError, match="read in place"):
        loader(data, cache=cache)
    with pytest.raises(ConfigError, match="this source is open already"):
        loader(open_shards(data), cache=cache)


def test_a_start_fetches_one_shard_at_most(server, data, tmp_path):
    transform = Wrapped(loader(data)._transform)
    loader(server.url, cache=Cache(folder=tmp_path / "cache"), transform=transform)
    shards = [name for name in server.names() if name.startswith("shard")]
    assert len(open_shards(data).shard_names) > 5
    assert len(shards) == 1


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    return indexed(tmp_path_factory.mktemp("tars") / "set", (12, 8, 8, 12, 8))


@pytest.mark.parametrize("workers", [0, 2])
def test_tars_at_a_url_are_loaded_as_those_on_disk(tars, tmp_path, workers):
    with FaultyServer(tars, only=".tar") as server:
        server.faults = [status(503), truncate(900)]
        remote = loader(
            server.url,
            cache=Cache(folder=tmp_path / "cache"),
            storage=Storage(timeout_s=5.0, backoff_s=0.01),
            num_workers=workers,
        )
        local = loader(tars)
        for _ in range(2):
            assert_same_run(remote, local)


def test_windows_of_tars_fit_a_small_cache(tars, tmp_path):
    largest = max(path.stat().st_size for path in tars.iterdir())
    with FaultyServer(tars) as server:
        cache = Cache(folder=tmp_path / "cache", max_bytes=3 * largest)
        remote = loader(server.url, cache=cache)
        assert 1 <= remote.state_dict()["window_rows"] < 48
        assert sorted(row for row in rows_of(remote) if row >= 0) == list(range(48))


def test_a_set_of_a_mixture_can_be_tars_at_a_url(tars, tmp_path):
    with FaultyServer(tars) as server:
        mixture = Mixture(
            [MixtureSet(name="far", source=server.url, cache=Cache(folder=tmp_path / "cache"))]
        )
        assert len(mixture) == len(open_tars(tars))


def test_a_url_with_neither_shards_nor_tars_says_so(tmp_path):
    (tmp_path / "empty").mkdir()
    cache = Cache(folder=tmp_path / "cache")
    with (
        FaultyServer(tmp_path / "empty") as server,
        pytest.raises(ShardError, match=r"has neither: .*manifest\.json can't be had: 404"),
    ):
        loader(server.url, cache=cache)


def test_a_missing_file_of_shards_is_named_and_no_tars_are_looked_for(data, tmp_path):
    folder = shutil.copytree(data, tmp_path / "data")
    (folder / "index.arrow").unlink()
    cache = Cache(folder=tmp_path / "cache")
    with FaultyServer(folder) as server:
        with pytest.raises(ShardError, match=r"index\.arrow can't be had: 404"):
            loader(server.url, cache=cache)
        assert not server.names("omniload-tars.json")
