"""Mixtures in the loader: real shards and tars, resume over ranks, YAML files, settings."""

import json
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from omniload import Budget, Cache, DataLoader, StateError, World
from omniload.errors import ConfigError, ShardError
from omniload.images import InternVLTiles, QwenPatches
from omniload.mixture import Mixture, MixtureSet, open_mixture
from omniload.shards import open_shards
from omniload.tars import open_tars
from tests.http_server import FaultyServer
from tests.loader_data import MemoryRows, Noisy, assert_same_run, encoder, rows_of, write_data
from tests.tar_makers import indexed

BUDGET = Budget(tokens=800, tiles=16)
#: what two epochs of `mixed` have: (set, row of it) -> times
TWO_EPOCHS = {
    **{(0, row): 1 for row in range(40)},
    **{(1, row): 2 for row in range(18)},
    **{(2, row): 4 for row in range(9)},
}
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two sets of shards that lie side by side."""
    folder = tmp_path_factory.mktemp("mixture")
    write_data(folder / "a", num_rows=40, seed=1)
    write_data(folder / "b", num_rows=18, seed=2)
    write_data(folder / "c", num_rows=9, seed=3)
    return folder


def mixed(data):
    return Mixture(
        [
            MixtureSet(source=data / "a", repeat=0.5),
            MixtureSet(source=data / "b"),
            MixtureSet(source=data / "c", repeat=2),
        ]
    )


def loader(source, size=1, rank=0, **arguments):
    world = World(dp_rank=rank, dp_world_size=size)
    return DataLoader(source, **{"budget": BUDGET, "world": world, **arguments})


def fed(mixture, loading, seen):
    """Train to the end of the epoch; count (set, row of it)."""
    rows = mixture.at_epoch(loading.epoch)
    for batch in loading:
        seen.update(rows.origin(row) for row in batch.sample_ids.tolist() if row >= 0)


def write_yaml(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_an_epoch_has_every_row_as_often_as_the_mixture_says(data):
    mixture = mixed(data)
    loading, seen = loader(mixture), Counter()
    for _ in range(2):
        fed(mixture, loading, seen)
        assert loading.ledger().balanced
    assert loading.epoch == 2
    assert seen == TWO_EPOCHS


def test_windows_of_a_plan_have_each_set_s_share(data):
    mixture = mixed(data)
    loading = loader(mixture, window_rows=14)
    rows = np.array([row for row in rows_of(loading) if row >= 0])
    assert len(rows) == 56
    # 4 windows: rows come window after window, up to what balancing moves inside a step
    counts = np.array(
        [np.bincount(mixture.source_of(part), minlength=3) for part in rows.reshape(4, 14)]
    )
    assert (abs(counts - [5, 4.5, 4.5]) <= 2).all()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("window_rows", [None, 17])
def test_four_two_and_three_ranks_feed_two_epochs_exactly_once(data, workers, window_rows):
    mixture, seen, state = mixed(data), Counter(), None
    arguments = {"num_workers": workers, "window_rows": window_rows, "accumulation": 2}
    arguments["budget"] = Budget(tokens=400, tiles=16)
    for size, steps in ((4, 2), (2, 3), (3, None)):
        states = set()
        for rank in range(size):
            loading = loader(mixed(data), size, rank, **arguments)
            if state is not None:
                loading.load_state_dict(state)
            count_rows(mixture, loading, seen, steps)
            states.add(json.dumps(loading.state_dict(), sort_keys=True))
        assert len(states) == 1
        state = json.loads(states.pop())
        assert (state["epoch"], state["step"]) != (0, 0)
    assert state["epoch"] == 2
    assert seen == TWO_EPOCHS


def count_rows(mixture, loading, seen, steps):
    """Train for some steps, or to the end of the second epoch; count (set, row of it)."""
    done = 0
    while loading.epoch < 2:
        rows = mixture.at_epoch(loading.epoch)
        for batch in loading:
            seen.update(rows.origin(row) for row in batch.sample_ids.tolist() if row >= 0)
            done += batch.is_last_micro_step
            if done == steps:
                return


def test_the_copies_of_a_row_are_augmented_differently(data):
    mixture = Mixture([MixtureSet(source=data / "b", repeat=2)])
    inner = loader(mixture)._transform
    single = Budget(tokens=800, tiles=16, samples=1)
    pixels = {}
    for batch in loader(mixture, transform=Noisy(inner), budget=single):
        pixels[int(batch.sample_ids[0])] = batch.tiles.clone()
    different = [
        not torch.equal(pixels[row], pixels[row + 18]) for row in range(18) if len(pixels[row])
    ]
    assert different
    assert all(different)


def test_workers_give_the_same_batches_however_they_start(data):
    expected = list(loader(mixed(data)))
    for method in ("fork", "spawn"):
        found = loader(mixed(data), num_workers=2, multiprocessing_context=method)
        assert_same_run(found, expected)


def test_a_state_of_another_mixture_is_refused(data):
    loading = loader(mixed(data))
    next(iter(loading))
    state = loading.state_dict()
    loader(mixed(data)).load_state_dict(state)
    other = Mixture(
        [
            MixtureSet(source=data / name, repeat=repeat)
            for name, repeat in zip("abc", (0.5, 1, 3), strict=True)
        ]
    )
    with pytest.raises(StateError, match=r"belongs to other data or settings.*num_rows"):
        loader(other).load_state_dict(state)
    seeded = Mixture(
        [MixtureSet(source=data / n, repeat=r) for n, r in zip("abc", (0.5, 1, 2), strict=True)],
        seed=1,
    )
    with pytest.raises(StateError, match=r"data: '[0-9a-f]{32}' in the state"):
        loader(seeded).load_state_dict(state)


def test_data_that_moved_is_the_same_mixture(data, tmp_path):
    shutil.copytree(data / "a", tmp_path / "elsewhere")
    sets = [MixtureSet(source=tmp_path / "elsewhere", repeat=0.5, name="a")]
    moved = Mixture([*sets, MixtureSet(source=data / "b"), MixtureSet(source=data / "c", repeat=2)])
    assert moved.fingerprint == mixed(data).fingerprint
    assert_same_run(loader(moved), loader(mixed(data)))


YAML = """
seed: 0
sets:
  - {source: a, repeat: 0.5}
  - source: ./b
  - {source: ../SET/c, name: c, repeat: 2}
"""


def test_a_yaml_file_is_the_mixture_in_python(data):
    path = write_yaml(data / "mix.yaml", YAML.replace("SET", data.name))
    mixture = open_mixture(path)
    assert mixture.set_names == ("a", "b", "c")
    assert mixture.location == str(path)
    assert mixture.fingerprint == mixed(data).fingerprint
    assert_same_run(loader(str(path)), loader(mixed(data)))


def test_weights_and_epoch_rows_come_from_the_file(data):
    text = "epoch_rows: 30\nsets: [{source: a, weight: 2}, {source: b, weight: 0.5}]"
    mixture = open_mixture(write_yaml(data / "weights.yaml", text))
    assert [one.rows for one in mixture.figures()] == [24, 6]
    assert len(rows_of(loader(mixture))) >= 30


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be a mapping with the keys sets, seed, epoch_rows, cache, got NoneType"),
        ("[1]", "must be a mapping with the keys"),
        ("sets: []", "sets must be a list of one or more"),
        ("sets: [{source: a}]\nwindow: 5", "unknown key 'window' in .*expected sets, seed"),
        ("sets: [{source: a, repeats: 2}]", r"unknown key 'repeats' in sets\[0\] of .*repeat"),
        ("sets: [{name: a}]", r"source must be a path or URL, got None \(sets\[0\]"),
        ("sets: [{source: [a]}]", "source must be a path or URL"),
        ("sets: [a, b]", r"sets\[0\] of .* must be a mapping with the keys source, name"),
        ("sets: [{source: a, weight: x}]", r"sets\[0\] of .*weight of a set must be a number"),
        ("sets: [{source: a, repeat: 1, repeat: 2}]", "key 'repeat' stands twice"),
        ("sets: [{source: &x a}, {source: *x}]", "must not have aliases"),
        ("sets: [{source: a", "must be YAML, but it can't be read"),
        ("sets: !!python/object/apply:os.system [ls]", "must be YAML, but it can't be read"),
        ("[" * 5000, "must be YAML, but it can't be read"),
        ("sets: [{source: s3://bucket/x}]", "give cache=Cache"),
        ("sets: [{source: a, cache: {folder: x}}]", "cache is for a URL"),
        ("sets: [{source: s3://b/x}]\ncache: {max: 5}", "unknown key 'max' in cache of"),
        ("sets: [{source: s3://b/x}]\ncache: {max_bytes: 5}", "cache must have a folder"),
        ("seed: x\nsets: [{source: a}]", "seed of a mixture must be an integer"),
    ],
)
def test_wrong_files_are_refused(data, text, message):
    path = write_yaml(data / "wrong.yaml", text)
    with pytest.raises(ConfigError, match=message):
        open_mixture(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sets: [{source: inner.yaml}]", r"folder or URL, got the mixture .*list its sets in"),
        ("epoch_rows: 1.5\nsets: [{source: a, weight: 1}]", r"mix.yaml: epoch_rows of a mixture"),
    ],
)
def test_what_a_mixture_refuses_names_its_file(tmp_path, text, message):
    (tmp_path / "mix.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        open_mixture(tmp_path / "mix.yaml")


def test_files_that_are_missing_or_too_large_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        loader(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="at most 1048576 bytes"):
        open_mixture(write_yaml(tmp_path / "big.yaml", "#" * (1 << 20) + "\n"))
    with pytest.raises(ShardError, match="not a folder"):
        open_mixture(write_yaml(tmp_path / "lost.yaml", "sets: [{source: lost}]"))


def test_the_example_is_a_mixture_that_trains(tmp_path):
    for seed, name in enumerate(("captions", "questions", "charts")):
        write_data(tmp_path / name, num_rows=12, seed=seed)
    shutil.copy(ROOT / "examples" / "mixture.yaml", tmp_path)
    mixture = open_mixture(tmp_path / "mixture.yaml")
    assert [one.rows for one in mixture.figures(0)] == [6, 12, 24]
    assert [one.rows for one in mixture.figures(3)] == [6, 12, 0]
    assert sum(row >= 0 for row in rows_of(loader(tmp_path / "mixture.yaml"))) == 42


def test_shards_tars_and_a_url_mix(data, tmp_path):
    indexed(tmp_path / "tars")
    tars = open_tars(tmp_path / "tars")
    shards = open_shards(data / "a")
    with FaultyServer(data / "b") as server:
        text = (
            f"sets: [{{source: tars}}, {{source: {data}/a}}, {{source: '{server.url}', name: b}}]\n"
            "cache: {folder: cache}"
        )
        mixture = open_mixture(write_yaml(tmp_path / "mix.yaml", text))
        assert mixture.wants_prefetch
        assert sorted(row for row in rows_of(loader(mixture, num_workers=2)) if row >= 0) == list(
            range(len(tars) + 40 + 18)
        )
        assert (tmp_path / "cache").is_dir()
        assert np.array_equal(mixture.read(3).input_ids, tars.read(3).input_ids)
        read = mixture.read(len(tars) + 5)
        assert (read.source, read.key) == ("a/pictures", shards.read(5).key)
        # a transform of the user's is tried on rows of one shard, though shards don't rise
        twice = MixtureSet(source=server.url, cache=Cache(folder=tmp_path / "y"), repeat=2)
        far = Mixture([twice, MixtureSet(source=data / "a")])
        default = loader(data / "a")._transform
        assert len(rows_of(loader(far, transform=Noisy(default)))) >= 36 + 40
        small = MixtureSet(source=server.url, cache=Cache(folder=tmp_path / "x", max_bytes=90_000))
        both = Mixture([MixtureSet(source=data / "a"), small])
        fits = loader(both).state_dict()["window_rows"]
        assert fits is not None
        assert fits < 58


def retiled(tmp_path, name, policy, *, seed, **encoder_changes):
    """Rows in memory whose settings have another tiling or encoder."""
    rows = MemoryRows(30, seed=seed)
    rows.settings = {
        "encoder": {**encoder().settings(), **encoder_changes},
        "tiling": policy.settings(),
    }
    return MixtureSet(source=rows, name=name)


def test_each_set_keeps_its_tiling(data, tmp_path):
    from tests.test_tilings_of_sets import POLICIES, RECIPE, SETS, meta_set, run

    src = meta_set(tmp_path / "raw")
    run(src, tmp_path / "meta", recipe=RECIPE)
    run(src, tmp_path / "again", recipe=RECIPE)
    assert set(open_shards(tmp_path / "meta").sources) == set(SETS)
    mixture = Mixture(
        [
            MixtureSet(source=data / "a"),
            MixtureSet(source=tmp_path / "meta"),
            MixtureSet(source=tmp_path / "again"),
        ]
    )
    assert mixture.settings["source_tilings"] == {
        f"{folder}/{name}": POLICIES[name].settings()
        for folder in ("meta", "again")
        for name in ("few", "many")
    }
    assert {"meta/few", "again/many", "meta/silent"} <= set(mixture.sources)
    # each image is cut as its set was planned, or the loader would refuse it
    rows = [row for row in rows_of(loader(mixture)) if row >= 0]
    assert sorted(rows) == list(range(len(mixture)))
    records = [mixture.read(row) for row in range(40, len(mixture))]
    assert {record.source for record in records} == {
        f"{folder}/{name}" for folder in ("meta", "again") for name in SETS
    }


def test_the_set_with_other_tiles_may_come_first(data, tmp_path):
    few = retiled(tmp_path, "few", InternVLTiles(size=28, max_tiles=1), seed=0)
    mixture = Mixture([few, MixtureSet(source=data / "a")])
    assert list(mixture.settings["source_tilings"]) == ["a/pictures", "a/text"]
    rows = [row for row in rows_of(loader(mixture)) if row >= 0]
    assert sorted(rows) == list(range(70))


@pytest.mark.parametrize("policy", [InternVLTiles(size=14), QwenPatches(patch_size=28)])
def test_tiles_of_another_kind_or_size_are_refused(data, tmp_path, policy):
    other = retiled(tmp_path, "other", policy, seed=0)
    message = (
        r"tiles of one kind and size.*expected those of InternVLTiles.*'a'.*got .* \('other'\)"
    )
    with pytest.raises(ConfigError, match=message):
        Mixture([MixtureSet(source=data / "a"), other])


def test_encoders_must_agree_but_for_the_loss(data, tmp_path):
    policy = InternVLTiles(size=28, max_tiles=4)
    first = MixtureSet(source=data / "a")
    Mixture([first, retiled(tmp_path, "x", policy, seed=0, loss="all")])
    other = retiled(tmp_path, "x", policy, seed=0, template="llava", tokens_per_tile=9)
    message = (
        r"tokens of one encoder.*template: 'chatml' in 'a', 'llava' in 'x'; "
        r"tokens_per_tile: 4 in 'a', 9 in 'x'"
    )
    with pytest.raises(ConfigError, match=message):
        Mixture([first, other])
    other.source.settings = {}
    with pytest.raises(ConfigError, match="'a' and 'x' differ in having one at all"):
        Mixture([first, other])
