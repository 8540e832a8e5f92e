"""Figures while training: what `DataLoader.stats` counts, against the batches themselves."""

import json

import numpy as np
import pytest

from omniload import Budget, Cache, DataLoader, World
from omniload.metrics import dist_ratio, pad_ratio
from omniload.mixture import Mixture, MixtureSet
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.http_server import FaultyServer
from tests.loader_data import Failing, MemoryRows, write_data

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("stats") / "shards", num_rows=NUM_ROWS)


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def stored_bytes(data):
    shards = open_shards(data)
    records = [shards.read(row) for row in range(len(shards))]
    return sum(
        sum(map(len, record.images)) + record.input_ids.nbytes + record.labels.nbytes
        for record in records
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "worker_type": "thread"},
    ],
)
def test_figures_are_those_of_the_batches_handed_out(data, arguments):
    loading = loader(data, pad_to=32, **arguments)
    num_batches = 0
    for epoch in range(2):
        batches = list(loading)
        num_batches += len(batches)
        span = loading.stats().this_epoch
        assert loading.stats().epoch == epoch
        assert (span.batches, span.samples) == (len(batches), NUM_ROWS)
        assert span.tokens == sum(sum(batch.sample_lengths) for batch in batches)
        assert span.padding_tokens == sum(batch.num_padding_tokens for batch in batches) > 0
        assert span.loss_tokens == sum(batch.num_loss_tokens for batch in batches)
        assert span.tiles == sum(batch.num_tiles for batch in batches)
        assert span.bytes_read == stored_bytes(data)
        tokens = [sum(batch.sample_lengths) for batch in batches]
        assert span.fill_tokens == pytest.approx(np.mean(tokens) / BUDGET.tokens)
        lengths = [batch.sample_lengths for batch in batches]
        assert span.pad_ratio_unpacked == pytest.approx(pad_ratio(lengths))
        assert span.wait_s > 0
        assert len(span.busy) == max(arguments.get("num_workers", 0), 1)
        assert 0 < span.busy_share <= 1
        assert span.cache is None
    stats = loading.stats()
    assert stats.since_start.batches == num_batches
    assert stats.since_start.samples == 2 * NUM_ROWS
    assert 0 <= stats.slowest.row < NUM_ROWS
    found = json.loads(json.dumps(stats.as_dict()))
    assert found["this_epoch"]["samples"] == NUM_ROWS
    assert "24 samples" in str(stats)


def test_figures_begin_anew_with_each_iteration_and_lose_nothing_of_the_whole(data):
    loading = loader(data, num_workers=2)
    batches = iter(loading)
    for count in range(1, 4):
        next(batches)
        assert loading.stats().this_epoch.batches == count
    list(loading)
    assert loading.stats().this_epoch.samples == NUM_ROWS
    assert loading.stats().since_start.batches == loading.stats().this_epoch.batches + 3


def test_figures_after_a_state_was_loaded_are_those_of_the_rest(data):
    world = World(dp_rank=1, dp_world_size=2)
    first = loader(data, world=world, accumulation=2)
    batches, state = [], None
    for batch in first:
        batches.append(batch)
        state = state or first.state_dict()  # inside the first step
    rest = loader(data, world=world, accumulation=2)
    rest.load_state_dict(state)
    list(rest)
    list(rest)  # over the border of an epoch
    whole, after = first.stats().this_epoch, rest.stats()
    list(first)
    second = first.stats().this_epoch
    assert after.epoch == 1
    for name in ("batches", "samples", "tokens", "dist_tokens"):
        assert getattr(after.this_epoch, name) == pytest.approx(getattr(second, name))
    assert after.since_start.batches == whole.batches + second.batches - 1
    left_out = len(batches[0].sample_ids)
    assert after.since_start.samples == whole.samples + second.samples - left_out


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cache_is_seen_by_what_was_fetched_and_what_lay_there(data, tmp_path, num_workers):
    sizes = [path.stat().st_size for path in data.glob("shard-*.arrow")]
    with FaultyServer(data) as server:
        cache = Cache(folder=tmp_path / "cache")
        loading = loader(server.url, cache=cache, num_workers=num_workers)
        # where PIL lacks kinds of images, rows are looked at before the start: that isn't counted
        here = {int(path.stem.split("-")[1]) for path in (tmp_path / "cache").rglob("*.shard")}
        fetched = [size for size in sizes if size not in here]
        list(loading)
        first = loading.stats()
        list(loading)
        second = loading.stats()
    assert len(fetched) >= len(sizes) - 1
    assert first.since_start.cache.fetched_files == len(fetched)
    assert first.since_start.cache.fetched_bytes == sum(fetched)
    assert second.this_epoch.cache.fetched_files == second.this_epoch.cache.misses == 0
    # files stay open in a process, and workers are new in each epoch
    assert (second.this_epoch.cache.hits > 0) == (num_workers > 0)
    assert second.since_start.cache.fetched_bytes == sum(fetched)
    assert "cache" in str(second)


def test_many_steps_are_added_up_as_if_one_by_one():
    rows, world = MemoryRows(3000), World(dp_rank=1, dp_world_size=2)
    often, once = (
        DataLoader(rows, budget=Budget(tokens=90), world=world, accumulation=3) for _ in range(2)
    )
    list(once)
    for _ in often:
        often.stats()
    for name in ("dist_tokens", "dist_cost"):
        one, many = (getattr(loading.stats().this_epoch, name) for loading in (once, often))
        assert 0 < one == pytest.approx(many)


@pytest.mark.parametrize("sync", ["step", "micro-step", None])
def test_dist_ratios_are_those_of_the_plan_on_every_rank(data, sync):
    found = []
    for rank in range(3):
        loading = loader(
            data, world=World(dp_rank=rank, dp_world_size=3), accumulation=2, sync=sync
        )
        list(loading)
        found.append(loading.stats().this_epoch)
    world, tokens = World(dp_rank=0, dp_world_size=3), open_shards(data).index.num_tokens
    plan = loader(data, world=world, accumulation=2, sync=sync).plan
    loads = np.array(
        [
            [[tokens[plan.micro_batch(s, m, r)].sum() for r in range(3)] for m in range(2)]
            for s in range(plan.num_steps)
        ]
    )
    loads = loads.reshape(-1, 3) if sync == "micro-step" else loads.sum(axis=1)
    assert {span.dist_tokens for span in found} == {found[0].dist_tokens}
    assert found[0].dist_tokens == pytest.approx(dist_ratio(loads))
    assert found[0].dist_cost > 0


def test_each_set_of_a_mixture_has_its_share_beside_the_wanted_one(data, tmp_path):
    other = write_data(tmp_path / "other", num_rows=12, seed=1)
    sets = [MixtureSet(name="one", source=data), MixtureSet(name="two", source=other, repeat=2)]
    loading = loader(Mixture(sets))
    list(loading)
    one, two = (loading.stats().this_epoch.sources[name] for name in ("one", "two"))
    assert (one.samples, two.samples) == (NUM_ROWS, 24)
    assert one.tokens == open_shards(data).index.num_tokens.sum()
    for found in (one, two):
        assert found.share_of_samples == pytest.approx(found.wanted_samples)
        assert found.share_of_tokens == pytest.approx(found.wanted_tokens)
        assert found.share_of_tiles == pytest.approx(found.wanted_tiles)


def test_skipped_samples_are_counted_by_what_was_wrong(data):
    transform = Failing(transform_from_settings(open_shards(data).settings))
    loading = loader(data, on_bad_sample="skip", transform=transform)
    list(loading)
    span = loading.stats().this_epoch
    assert (span.skipped, span.samples) == ({"failed transform": 1}, NUM_ROWS - 1)


def test_figures_over_one_rank_are_its_own(data):
    loading = loader(data)
    list(loading)
    stats = loading.stats(reduce=True)
    spread = stats.ranks["samples"]
    assert (spread.least, spread.mean, spread.most, spread.rank) == (24, 24, 24, 0)
    assert "over 1 ranks waited" in str(stats)
