"""The loader deals each row exactly once, in equal steps, whoever does the work."""

import json
import multiprocessing

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniload import Budget, ConfigError, DataLoader, StateError, World
from omniload.images import InternVLTiles
from omniload.loader.checks import check_codecs
from omniload.plan import order
from omniload.shards import open_shards
from omniload.transforms import TileTransform, transform_from_settings
from tests.loader_data import (
    Noisy,
    OtherLengths,
    Torchy,
    Wrapped,
    assert_same,
    assert_same_run,
    rows_of,
    write_data,
)

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("loader") / "shards", num_rows=NUM_ROWS)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("text") / "shards", num_rows=10, num_images=(0,))


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def world(dp_rank, dp_world_size):
    return World(dp_rank=dp_rank, dp_world_size=dp_world_size)


def test_one_rank_gets_every_row_once_within_the_budget(data):
    loading = loader(data)
    expected = len(loading)
    batches = list(loading)
    assert len(batches) == expected
    assert sorted(rows_of(batches)) == list(range(NUM_ROWS))
    for batch in batches:
        assert batch.num_tokens <= BUDGET.tokens
        assert batch.num_tiles <= BUDGET.tiles
        rows = batch.sample_ids.numpy()
        assert batch.num_tokens == loading.index.num_tokens[rows].sum()
        assert batch.num_loss_tokens == loading.index.num_loss_tokens[rows].sum()
        assert batch.num_loss_tokens_step == batch.num_loss_tokens


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_an_epoch_in_equal_steps(data, size, accumulation):
    runs = []
    for rank in range(size):
        loading = loader(data, world=world(rank, size), accumulation=accumulation)
        expected = len(loading)
        runs.append(list(loading))
        assert len(runs[-1]) == expected
    assert len({len(run) for run in runs}) == 1
    assert sorted(row for run in runs for row in rows_of(run)) == list(range(NUM_ROWS))
    for number, slot in enumerate(zip(*runs, strict=True)):
        place = divmod(number, accumulation)
        assert {(batch.step, batch.micro_step) for batch in slot} == {place}
        assert {batch.is_last_micro_step for batch in slot} == {place[1] == accumulation - 1}
    for step in range(len(runs[0]) // accumulation):
        inside = [batch for run in runs for batch in run if batch.step == step]
        total = sum(batch.num_loss_tokens for batch in inside)
        assert {batch.num_loss_tokens_step for batch in inside} == {total}


@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    tokens=st.integers(500, 2000),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
    tail=st.sampled_from(["filler", "empty"]),
)
def test_every_row_comes_once_an_epoch(data, size, accumulation, tokens, seed, shuffle, tail):
    shards = open_shards(data)
    for epoch in range(2):
        rows, lengths = [], set()
        for rank in range(size):
            loading = DataLoader(
                shards,
                budget=Budget(tokens=tokens),
                world=world(rank, size),
                accumulation=accumulation,
                seed=seed,
                shuffle=shuffle,
                tail=tail,
            )
            loading.set_epoch(epoch)
            expected = len(loading)
            batches = list(loading)
            assert len(batches) == expected
            assert loading.epoch == epoch + 1
            rows += rows_of(batches)
            lengths.add(len(batches))
            assert tail == "filler" or not any(batch.is_filler for batch in batches)
        assert sorted(rows) == list(range(NUM_ROWS))
        assert tail == "empty" or len(lengths) == 1


def test_ranks_that_share_a_dp_rank_get_the_same_batches(data):
    runs = [
        loader(
            data,
            world=World(dp_rank=1, dp_world_size=2, replica_rank=replica, replica_size=2),
        )
        for replica in range(2)
    ]
    assert_same_run(*runs)


def test_a_filler_runs_but_gives_no_loss(data, text):
    for folder, has_image in ((data, True), (text, False)):
        runs = [list(loader(folder, world=world(rank, 7))) for rank in range(7)]
        fillers = [batch for run in runs for batch in run if batch.is_filler]
        assert fillers
        for batch in fillers:
            assert batch.num_tokens > 0
            assert (batch.num_tiles > 0) == has_image
            assert len(batch.sample_ids) == 0
            assert (batch.labels == -100).all()
            assert batch.num_loss_tokens == 0
            assert batch.loss_scale() == 0
            same_step = [other for run in runs for other in run if other.step == batch.step]
            assert {other.num_loss_tokens_step for other in same_step} == {
                batch.num_loss_tokens_step
            }
            assert batch.num_loss_tokens_step > 0


def test_evaluation_goes_in_index_order_without_fillers(data):
    alone = list(loader(data, shuffle=False, tail="empty"))
    assert rows_of(alone) == list(range(NUM_ROWS))
    runs = []
    for rank in range(3):
        loading = loader(data, shuffle=False, tail="empty", world=world(rank, 3))
        expected = len(loading)
        runs.append(list(loading))
        assert len(runs[-1]) == expected
        assert loading.epoch == 1
    assert not any(batch.is_filler for run in runs for batch in run)
    slots = [
        batch for step in range(len(runs[0])) for run in runs for batch in run[step : step + 1]
    ]
    assert rows_of(slots) == list(range(NUM_ROWS))
    results = np.zeros(NUM_ROWS)
    for run in runs:
        for batch in run:
            results[batch.sample_ids.numpy()] += 1
    assert (results == 1).all()


def test_states_of_an_evaluation_are_the_same_on_all_ranks(data):
    arguments = {"shuffle": False, "tail": "empty", "accumulation": 2}
    runs, ends = [], []
    for rank in range(3):
        loading = loader(data, world=world(rank, 3), **arguments)
        runs.append([loading.state_dict() for _ in loading])
        ends.append(loading.state_dict())
    assert len({len(run) for run in runs}) > 1
    for states in zip(*runs, strict=False):
        assert states[0] == states[1] == states[2]
    assert ends[0] == ends[1] == ends[2]
    longest = max(runs, key=len)
    assert longest[-1] == ends[0]
    assert ends[0]["epoch"] == 1


def test_each_rank_of_an_evaluation_goes_on_from_the_state_of_another(data):
    arguments = {"shuffle": False, "tail": "empty", "accumulation": 2}
    loaders = [loader(data, world=world(rank, 3), **arguments) for rank in range(3)]
    runs = [[(batch, loading.state_dict()) for batch in loading] for loading in loaders]
    longest = max(runs, key=len)
    for number, (_, state) in enumerate(longest[:-1], start=1):
        for rank, run in enumerate(runs):
            resumed = loader(data, world=world(rank, 3), **arguments)
            resumed.load_state_dict(state)
            assert rows_of(resumed) == rows_of(batch for batch, _ in run[number:])
            assert resumed.epoch == 1


def test_a_loop_that_ends_with_the_last_batch_goes_on_with_the_next_epoch(data):
    for rank in range(3):
        loading = loader(data, shuffle=False, tail="empty", accumulation=2, world=world(rank, 3))
        last = len(loading) - 1
        for number, _ in enumerate(loading):
            if number == last:
                break
        iter(loading)
        assert loading.epoch == 1


def test_a_rank_without_any_group_gets_an_empty_epoch(text):
    loading = loader(text, budget=Budget(tokens=100_000), tail="empty", world=world(1, 2))
    assert len(loading) == 0
    assert list(loading) == []
    assert loading.epoch == 1


def test_text_only_data_has_no_tiles(text):
    batches = list(loader(text))
    assert sorted(rows_of(batches)) == list(range(10))
    assert all(batch.num_tiles == 0 for batch in batches)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_give_the_batches_of_the_main_process(data, method):
    shards = open_shards(data)
    transform = Noisy(transform_from_settings(shards.manifest.settings))
    arguments = {"transform": transform, "accumulation": 2, "world": world(1, 2)}
    context = multiprocessing.get_context(method) if method == "spawn" else method
    assert_same_run(
        loader(data, **arguments),
        loader(shards, num_workers=2, multiprocessing_context=context, **arguments),
    )


def test_persistent_workers_survive_epochs_and_a_break(data):
    shards = open_shards(data)
    transform = Noisy(transform_from_settings(shards.manifest.settings))
    alone = loader(shards, transform=transform)
    loading = loader(shards, transform=transform, num_workers=1, persistent_workers=True)
    assert_same_run(alone, loading)
    workers = {process.pid for process in multiprocessing.active_children()}
    for _ in loading:
        break
    assert_same_run(alone, loading)
    assert {process.pid for process in multiprocessing.active_children()} == workers
    assert loading.epoch == 2


def test_an_epoch_has_its_own_order_and_a_run_repeats_itself(data):
    one, other = loader(data, seed=3), loader(data, seed=3)
    epochs = [list(one) for _ in range(2)]
    assert one.epoch == 2
    assert rows_of(epochs[0]) != rows_of(epochs[1])
    assert sorted(rows_of(epochs[0])) == sorted(rows_of(epochs[1]))
    for epoch in epochs:
        assert_same_run(epoch, other)
    assert rows_of(loader(data, seed=4)) != rows_of(epochs[0])


def test_iter_in_the_middle_restarts_the_epoch(data):
    loading = loader(data)
    first = next(iter(loading))
    assert_same(first, next(iter(loading)))
    assert loading.epoch == 0


def test_the_epoch_advances_when_it_is_exhausted_only(data):
    loading = loader(data)
    last = len(loading) - 1
    for number, _ in enumerate(loading):
        assert loading.epoch == 0
        if number == last:
            break
    # all of epoch 0 was handed out, so the next iterator begins epoch 1
    fresh = loader(data)
    fresh.set_epoch(1)
    assert_same_run(fresh, loading)
    assert loading.epoch == 2


def test_set_epoch_chooses_the_order_and_is_not_needed(data):
    loading = loader(data)
    epochs = [list(loading) for _ in range(3)]
    loading.set_epoch(1)
    assert_same_run(epochs[1], loading)
    assert loading.epoch == 2
    loading.set_epoch(0)
    for number, _ in enumerate(loading):
        if number == len(epochs[0]) - 1:
            break
    loading.set_epoch(0)
    assert_same_run(epochs[0], loading)


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", True, None, 2**53 + 1, 10**30])
def test_an_epoch_that_is_none_is_refused(data, epoch):
    with pytest.raises(ConfigError, match="epoch must be an integer of at least 0 and at most"):
        loader(data).set_epoch(epoch)


def test_set_epoch_to_the_running_epoch_keeps_its_place(data):
    loading = loader(data)
    running = iter(loading)
    next(running)
    state = loading.state_dict()
    loading.set_epoch(0)
    assert loading.state_dict() == state
    loading.set_epoch(1)
    with pytest.raises(StateError, match=r"ended by set_epoch\(1\)"):
        next(running)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_the_newest_iterator_lives(data, num_workers):
    loading = loader(data, num_workers=num_workers)
    old = iter(loading)
    next(old)
    new = iter(loading)
    with pytest.raises(StateError, match=r"replaced by a newer one.*Call iter\(\)"):
        next(old)
    assert sorted(rows_of(new)) == list(range(NUM_ROWS))
    with pytest.raises(StopIteration):
        next(new)


def test_iterating_leaves_the_global_generator_of_torch_alone(data):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    list(loader(data, num_workers=1))
    assert torch.equal(torch.rand(3), expected)


def test_randomness_of_a_transform_depends_on_seed_epoch_and_row_only(data):
    transform = Noisy(transform_from_settings(open_shards(data).manifest.settings))
    tiles = {}
    for size in (1, 2):
        for rank in range(size):
            loading = loader(data, transform=transform, world=world(rank, size))
            for epoch in range(2):
                for batch in loading:
                    for sample, row in enumerate(batch.sample_ids.tolist()):
                        start, end = batch.cu_seqlens[sample : sample + 2].tolist()
                        first = batch.image_spans[:, 0]
                        inside = (first >= start) & (first < end)
                        before = int(batch.image_num_tiles[first < start].sum())
                        own = before + int(batch.image_num_tiles[inside].sum())
                        tiles.setdefault((epoch, row), []).append(batch.tiles[before:own])
    assert len(tiles) == 2 * NUM_ROWS
    for (epoch, row), (alone, shared) in tiles.items():
        assert torch.equal(alone, shared)
        other = tiles[1 - epoch, row][0]
        assert len(alone) == 0 or not torch.equal(alone, other)


def test_workers_seed_the_generator_of_torch_by_seed_and_epoch(data):
    transform = Torchy(transform_from_settings(open_shards(data).manifest.settings))

    def first_tiles(seed, epoch):
        loading = loader(data, transform=transform, num_workers=1, shuffle=False, seed=seed)
        loading.set_epoch(epoch)
        list(zip(loading, range(1), strict=False))  # an earlier iterator must not matter
        return list(loading)[1].tiles

    assert torch.equal(first_tiles(1, 0), first_tiles(1, 0))
    assert not torch.equal(first_tiles(1, 0), first_tiles(2, 0))
    assert not torch.equal(first_tiles(1, 0), first_tiles(1, 1))


def test_samples_over_budget_are_an_error_or_reported(data, caplog):
    tokens = int(np.sort(open_shards(data).index.num_tokens)[-3])
    with pytest.raises(ConfigError, match=r"oversize"):
        loader(data, budget=Budget(tokens=tokens))
    order._warn_once.cache_clear()  # the same is told once a process
    loading = loader(data, budget=Budget(tokens=tokens), oversize="drop")
    over = np.flatnonzero(loading.index.num_tokens > tokens)
    assert len(over)
    assert sorted(loading.dropped.tolist()) == over.tolist()
    assert f"{len(over)} of {NUM_ROWS} rows are over" in caplog.text
    assert sorted(rows_of(loading) + over.tolist()) == list(range(NUM_ROWS))
    with pytest.raises(ConfigError, match="at least one row within Budget"):
        loader(data, budget=Budget(tokens=1), oversize="drop")


def test_properties_describe_the_loader(data):
    loading = loader(data, world=world(1, 2))
    assert loading.world == world(1, 2)
    assert len(loading.index) == loading.manifest.num_rows == NUM_ROWS
    assert loading.plan.num_steps == len(loading)
    assert len(loading.dropped) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"budget": 4096}, "budget must be an omniload.Budget, got int"),
        ({"world": 2}, "world must be an omniload.World"),
        ({"num_workers": -1}, "num_workers must be .* at least 0 and at most 4096, got -1"),
        ({"num_workers": True}, "num_workers must be an integer"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"seed": 2**63}, "seed must be an integer"),
        ({"accumulation": 0}, "accumulation must be an integer of at least 1"),
        ({"accumulation": 2**20 + 1}, "at least 1 and at most 1048576, got 1048577"),
        ({"num_workers": 2**31}, "num_workers must be an integer of at least 0 and at most"),
        ({"prefetch_factor": 1025}, "prefetch_factor must be .* at most 1024, got 1025"),
        ({"timeout": float("inf")}, "timeout must be seconds.* at most 31622400, got inf"),
        ({"timeout": 10**30}, "timeout must be seconds"),
        ({"tail": ["filler"]}, "tail must be 'filler' or 'empty'"),
        ({"oversize": np.array(["drop", "error"])}, "oversize must be 'error' or 'drop'"),
        ({"grouping": "best"}, "grouping must be one of .*isf"),
        ({"shuffle": 1}, "shuffle must be True or False"),
        ({"tail": "drop"}, "tail must be 'filler' or 'empty', got 'drop'"),
        ({"oversize": "cut"}, "oversize must be 'error' or 'drop'"),
        ({"prefetch_factor": 0}, "prefetch_factor must be an integer of at least 1"),
        ({"persistent_workers": None}, "persistent_workers must be True or False"),
        ({"timeout": -1}, "timeout must be seconds"),
        ({"timeout": float("nan")}, "timeout must be seconds"),
        ({"multiprocessing_context": "thread"}, "must be one of .*spawn.*, got 'thread'"),
        ({"multiprocessing_context": 3}, "must be the name of a start method or a context"),
        ({"window_rows": 0}, "window_rows must be an integer of at least 1"),
        ({"transform": len}, "transform must follow omniload.transforms.Transform"),
    ],
)
def test_wrong_arguments_are_named(data, arguments, message):
    with pytest.raises(ConfigError, match=message):
        loader(data, **arguments)


def test_a_source_of_another_kind_is_refused():
    with pytest.raises(ConfigError, match=r"source must be a folder .* got list.*StreamLoader"):
        loader([1, 2])
    with pytest.raises(ConfigError, match=r"got list\. Several sets make a mixture"):
        loader(["one/", "two/"])


def test_a_misspelt_argument_is_not_swallowed(data):
    with pytest.raises(TypeError, match="budgets"):
        DataLoader(data, budget=BUDGET, budgets=BUDGET)


def test_options_of_workers_may_stay_when_there_are_none(data):
    loading = loader(
        data, timeout=5, persistent_workers=True, multiprocessing_context="spawn", prefetch_factor=4
    )
    assert sorted(rows_of(loading)) == list(range(NUM_ROWS))


def test_a_transform_with_other_settings_than_the_shards_is_refused(data):
    settings = open_shards(data).manifest.settings
    default = transform_from_settings(settings)
    other = TileTransform(
        InternVLTiles(size=28, min_tiles=1, max_tiles=6, thumbnail=True),
        tokens_per_tile=default.tokens_per_tile,
        image_token_id=default.image_token_id,
        pad_token_id=default.pad_token_id,
    )
    with pytest.raises(
        ConfigError, match=r"policy: .*max_tiles=4.* max_tiles=6.* in the transform"
    ):
        loader(data, transform=other)
    with pytest.raises(ConfigError, match=r"must give the lengths of the index: expected.*row=0"):
        loader(data, transform=OtherLengths(default))
    assert_same_run(loader(data, transform=Wrapped(default)), loader(data))


def test_an_image_kind_that_cannot_be_read_is_named_before_the_start(data):
    shards = open_shards(data)
    with pytest.raises(ConfigError, match=r"jpeg images.*row=1, key='key-1'.*: install it\."):
        check_codecs(shards, {"jpeg": "install it"})
    check_codecs(shards, {"avif": "install it"})


def test_the_state_is_plain_json_of_a_few_hundred_bytes(data):
    loading = loader(data, seed=2**63 - 1)
    next(iter(loading))
    text = json.dumps(loading.state_dict())
    assert len(text) < 1000
    assert json.loads(text) == loading.state_dict()
