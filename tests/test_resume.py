"""A resumed run equals an unbroken one, batch for batch and bit for bit, at every micro-step."""

import copy
import itertools
import json
import random
from collections import Counter

import pytest

from omniload import Budget, ConfigError, CostModel, DataLoader, StateError, World
from omniload._checksum import fields_checksum
from omniload.plan import make_plan
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import (
    ChangingRows,
    MemoryRows,
    Noisy,
    RemoteRows,
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
    return write_data(tmp_path_factory.mktemp("resume") / "shards", num_rows=NUM_ROWS)


@pytest.fixture(scope="module")
def transform(data):
    return Noisy(transform_from_settings(open_shards(data).manifest.settings))


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def world(dp_rank, dp_world_size):
    return World(dp_rank=dp_rank, dp_world_size=dp_world_size)


def resealed(state):
    """A state whose checksum fits what it says now."""
    return {**state, "checksum": fields_checksum(state)}


def through_json(state):
    return json.loads(json.dumps(state))


def record_run(loading, num_epochs):
    """Batches of whole epochs, and the state before each of them and at the end."""
    batches, states = [], [loading.state_dict()]
    for _ in range(num_epochs):
        for batch in loading:
            batches.append(batch)
            states.append(through_json(loading.state_dict()))
    return batches, states


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("size", "accumulation", "window_rows"), [(1, 1, None), (2, 2, None), (1, 2, 7), (3, 1, 7)]
)
def test_resume_at_every_step_is_exact(
    data, transform, num_workers, size, accumulation, window_rows
):
    arguments = {
        "transform": transform,
        "world": world(size - 1, size),
        "accumulation": accumulation,
        "window_rows": window_rows,
    }
    unbroken = loader(data, num_workers=2 - num_workers, **arguments)
    batches, states = record_run(unbroken, num_epochs=2)
    # workers cost 0.1 s each time: with them every third place, without them every place
    for done in range(0, len(batches) + 1, 1 if num_workers == 0 else 3):
        resumed = loader(data, num_workers=num_workers, **arguments)
        resumed.load_state_dict(states[done])
        assert resumed.state_dict() == states[done]
        rest = []
        while len(rest) < len(batches) - done:
            rest += list(resumed)
        assert_same_run(rest, batches[done:])
        if rest:
            assert resumed.state_dict() == states[-1]


BALANCES = (
    {"sync": "step"},
    {"sync": "micro-step"},
    {"sync": None},
    {"cost": CostModel(tile=300.0, token=1.0, token_pair=1 / 4096)},
)


@pytest.mark.parametrize("balance", BALANCES)
def test_resume_inside_a_balanced_step_is_exact(data, balance):
    arguments = {"world": world(1, 2), "accumulation": 3, "budget": Budget(tokens=500), **balance}
    batches, states = record_run(loader(data, **arguments), num_epochs=1)
    for done in range(len(batches)):
        resumed = loader(data, **arguments)
        resumed.load_state_dict(states[done])
        assert resumed.state_dict() == states[done]
        assert_same_run(resumed, batches[done:])


def test_balance_changes_who_gets_what_inside_a_step_only(data):
    runs = []
    for balance in BALANCES:
        arguments = {"accumulation": 3, "budget": Budget(tokens=500), **balance}
        steps = {}
        for rank in range(2):
            for batch in loader(data, world=world(rank, 2), **arguments):
                steps.setdefault(batch.step, []).extend(batch.sample_ids.tolist())
        runs.append(steps)
    assert runs[0] != runs[2]
    for run in runs:
        assert {step: sorted(rows) for step, rows in run.items()} == {
            step: sorted(rows) for step, rows in runs[0].items()
        }


def test_another_balance_is_taken_up_between_two_steps_only(data):
    arguments = {"accumulation": 2, "budget": Budget(tokens=500)}
    batches, states = record_run(loader(data, **arguments), num_epochs=1)
    for balance in BALANCES[1:]:
        other = loader(data, **arguments, **balance)
        assert len(json.dumps(other.state_dict())) < 1000
        for strict in (True, False):
            with pytest.raises(StateError, match=r"sync or cost \(balance step-balance.*boundary"):
                other.load_state_dict(states[3], strict=strict)
        other.load_state_dict(states[2])
        assert sorted(rows_of(other)) == sorted(rows_of(batches[2:]))


def test_prefetched_batches_are_not_counted(data):
    alone = loader(data)
    batches, states = record_run(alone, num_epochs=1)
    eager = loader(data, num_workers=2, prefetch_factor=8)
    for number, _ in enumerate(eager):
        assert eager.state_dict() == states[number + 1]
    assert len(states) == len(batches) + 1


def test_all_ranks_have_the_same_state(data):
    runs = [
        record_run(loader(data, world=world(rank, 3), accumulation=2), num_epochs=2)[1]
        for rank in range(3)
    ]
    assert runs[0] == runs[1] == runs[2]


def test_the_state_after_the_last_batch_is_the_start_of_the_next_epoch(data):
    loading = loader(data)
    last = len(loading) - 1
    for number, _ in enumerate(loading):
        if number == last:
            state = loading.state_dict()
            break
    fresh = loader(data)
    fresh.set_epoch(1)
    assert state == fresh.state_dict()
    assert (state["epoch"], state["step"], state["micro_step"]) == (1, 0, 0)


def test_set_epoch_at_the_head_of_a_resumed_loop_keeps_the_place(data):
    batches, states = record_run(loader(data), num_epochs=2)
    middle = len(loader(data)) + 2
    resumed = loader(data)
    resumed.load_state_dict(states[middle])
    resumed.set_epoch(states[middle]["epoch"])
    assert_same_run(resumed, batches[middle:])


def test_set_epoch_that_throws_a_loaded_place_away_says_so(data, caplog):
    _, states = record_run(loader(data), num_epochs=1)
    for state, where in ((states[-1], "epoch 1, step 0"), (states[2], "epoch 0, step 2")):
        caplog.clear()
        resumed = loader(data)
        resumed.load_state_dict(state)
        resumed.set_epoch(resumed.epoch)
        assert not caplog.text
        resumed.set_epoch(4 if state is states[2] else 0)
        assert f"leaves the loaded place ({where})" in caplog.text
        assert "call set_epoch(loader.epoch)" in caplog.text
    caplog.clear()
    resumed.load_state_dict(states[2])
    next(iter(resumed))
    resumed.set_epoch(4)
    assert not caplog.text


def test_a_loaded_place_holds_until_a_batch_is_taken(data):
    batches, states = record_run(loader(data), num_epochs=1)
    resumed = loader(data)
    resumed.load_state_dict(states[2])
    expected = len(batches)
    assert len(resumed) == expected
    iter(resumed)  # a look that takes nothing
    assert_same(next(iter(resumed)), batches[2])
    assert_same(next(iter(resumed)), batches[0])


def test_a_live_iterator_ends_when_a_state_is_loaded(data):
    batches, states = record_run(loader(data), num_epochs=1)
    loading = loader(data, num_workers=1)
    running = iter(loading)
    next(running)
    loading.load_state_dict(states[3])
    with pytest.raises(StateError, match=r"ended by load_state_dict\(\)"):
        next(running)
    assert_same_run(loading, batches[3:])


def test_loading_does_not_change_the_state_given(data):
    _, states = record_run(loader(data), num_epochs=1)
    state = states[2]
    kept = copy.deepcopy(state)
    loading = loader(data)
    loading.load_state_dict(state)
    list(loading)
    assert state == kept
    saved = loading.state_dict()
    saved["epoch"] = 99
    assert loading.state_dict()["epoch"] == 1


def test_a_chain_of_stops_over_changing_ranks_sees_each_row_once(data):
    for seed in range(6):
        chance = random.Random(seed)
        shards, state, seen = open_shards(data), None, []
        while state is None or state["epoch"] == 0:
            size, accumulation = chance.randint(1, 4), chance.randint(1, 3)
            steps = chance.randint(1, 3)
            states = []
            for rank in range(size):
                loading = loader(
                    shards, world=world(rank, size), accumulation=accumulation, seed=seed
                )
                if state is not None:
                    loading.load_state_dict(state)
                for batch in loading:
                    seen += batch.sample_ids.tolist()
                    steps_here = batch.step + 1 - (0 if state is None else state["step"])
                    if batch.is_last_micro_step and steps_here == steps:
                        break
                states.append(loading.state_dict())
            assert all(other == states[0] for other in states)
            state = through_json(states[0])
        assert sorted(seen) == list(range(NUM_ROWS)), f"seed {seed}"
        assert (state["epoch"], state["step"]) == (1, 0)


def test_a_thousand_stops_at_random_places_over_changing_ranks_lose_and_double_nothing():
    """4 -> 2 -> 3 -> 8 ranks and other accumulations, at any micro-step: by the plan alone."""
    index = MemoryRows(4_000).index
    chance = random.Random(0)
    shapes = itertools.cycle(((4, 1), (2, 3), (3, 2), (8, 1)))
    (size, accumulation), epoch, position, seen, stops = next(shapes), 0, None, Counter(), 0
    while stops < 1_000 or position is not None:
        if position is None or "micro_step" not in position:
            size, accumulation = next(shapes)  # inside a step the same ranks have to go on
        plan = make_plan(
            index, budget=Budget(tokens=120), window_rows=900, dp_world_size=size,
            accumulation=accumulation, epoch=epoch, start=position,
        )  # fmt: skip
        place, stop = plan.first_micro_step, plan.first_micro_step + chance.randint(1, 6)
        while place < stop and plan.has_step(place // accumulation):
            step, micro_step = divmod(place, accumulation)
            for rank in range(size):
                seen.update(plan.micro_batch(step, micro_step, rank).tolist())
            place += 1
        stops += 1
        if plan.has_step(place // accumulation):
            position = through_json(plan.position(*divmod(place, accumulation)))
        else:
            assert seen == Counter(range(4_000))
            epoch, position, seen = epoch + 1, None, Counter()
    assert epoch > 3


@pytest.mark.parametrize("cycles", [60, pytest.param(1_000, marks=pytest.mark.slow)])
def test_stops_of_loaders_over_changing_ranks_lose_and_double_nothing(cycles):
    """4 -> 2 -> 3 -> 8 ranks and other accumulations, one state for all, at any micro-step."""
    rows = MemoryRows(600)
    chance = random.Random(0)
    loaders = {
        (size, accumulation): [
            DataLoader(
                rows, budget=Budget(tokens=120), world=world(rank, size),
                accumulation=accumulation, window_rows=250,
            )
            for rank in range(size)
        ]
        for size, accumulation in ((4, 1), (2, 3), (3, 2), (8, 1))
    }  # fmt: skip
    state, epoch, seen, epochs, sizes = None, 0, Counter(), 0, itertools.cycle(loaders)
    chosen = next(sizes)
    for _ in range(cycles):
        # inside a step the same ranks have to go on
        if state is None or state["micro_step"] == 0:
            chosen = next(sizes)
        stop, states = chance.randint(1, 6), []
        for loading in loaders[chosen]:
            if state is not None:
                loading.load_state_dict(state)
            for batch in itertools.islice(iter(loading), stop):
                seen.update(batch.sample_ids.tolist())
            states.append(loading.state_dict())
        assert all(other == states[0] for other in states)
        state = through_json(states[0])
        if state["epoch"] > epoch:
            assert seen == Counter(range(600))
            epoch, seen, epochs = state["epoch"], Counter(), epochs + 1
    assert epochs > cycles // 60


@pytest.mark.parametrize("num_workers", [0, 1])
def test_epochs_with_other_rows_are_planned_and_read_as_they_are(num_workers):
    rows = ChangingRows(300)
    arguments = {"budget": Budget(tokens=120), "world": World(), "num_workers": num_workers}
    loading = DataLoader(rows, **arguments)
    batches, states = [], []
    for epoch in range(3):
        assert len(loading.index) == 300 + epoch
        for batch in loading:
            batches.append(batch)
            states.append(loading.state_dict())
        ledger = loading.ledger()
        assert (ledger.epoch, ledger.seen, ledger.balanced) == (epoch, 300 + epoch, True)
    for done in (1, 20, len(batches) // 2, len(batches) - 2):
        resumed = DataLoader(rows, **arguments)
        resumed.load_state_dict(states[done])
        rest = []
        while len(rest) < len(batches) - done - 1:
            rest += list(resumed)
        assert_same_run(rest, batches[done + 1 :])
    with pytest.raises(ConfigError, match="exclude= needs data whose rows are the same in every"):
        DataLoader(rows, exclude=[1], **arguments)


def test_a_remote_source_is_told_which_shards_come_next():
    rows = RemoteRows(2_000)
    loading = DataLoader(rows, budget=Budget(tokens=300), world=World(), window_rows=500)
    needed = [
        list(dict.fromkeys(rows.locate(row)[0] for row in batch.sample_ids.tolist()))
        for batch in loading
    ]
    assert len(rows.prefetched) == len(needed)
    for told, shards in zip(rows.prefetched, needed, strict=True):
        assert list(told[: len(shards)]) == shards
        assert len(told) <= 32
    assert any(set(needed[place + 5]) <= set(rows.prefetched[place]) for place in range(9))
    near = MemoryRows(200)
    list(DataLoader(near, budget=Budget(tokens=300), world=World()))
    assert near.prefetched == []


def test_a_large_epoch_is_planned_ahead_and_the_next_one_too(monkeypatch):
    monkeypatch.setattr("omniload.loader.course._LEAST_ROWS_AHEAD", 3000)
    monkeypatch.setattr("omniload.plan.order._LEAST_ROWS_AHEAD", 1000)
    rows = MemoryRows(3000, shard_rows=100, most_tokens=4)
    arguments = {"budget": Budget(tokens=1000), "world": World(), "window_rows": 1000}
    loading = DataLoader(rows, **arguments)
    for epoch in range(2):
        assert sum(len(batch.sample_ids) for batch in loading) == 3000
        assert loading.epoch == epoch + 1
        assert loading._course._next[0] == epoch + 1
    fresh = DataLoader(rows, **arguments)
    fresh.set_epoch(2)
    assert fresh.plan.fingerprint == loading.plan.fingerprint
    assert_same(next(iter(fresh)), next(iter(loading)))


def test_other_ranks_continue_at_a_step_boundary_with_the_steps_counted(data):
    _, states = record_run(loader(data, accumulation=2), num_epochs=1)
    resumed = loader(data, world=world(0, 2), accumulation=1)
    resumed.load_state_dict(states[4])
    expected = len(resumed)
    batches = list(resumed)
    assert batches[0].step == 2
    assert batches[-1].step + 1 == expected
    assert resumed.epoch == 1


@pytest.mark.parametrize(
    "change", [{"world": World(dp_world_size=2)}, {"accumulation": 3}, {"accumulation": 1}]
)
def test_other_ranks_inside_a_step_are_refused(data, change):
    _, states = record_run(loader(data, accumulation=2), num_epochs=1)
    other = loader(data, **{"accumulation": 2, **change})
    with pytest.raises(StateError, match=r"optimizer-step boundary only.*step 0, 1 of 2"):
        other.load_state_dict(states[1])
    with pytest.raises(StateError, match="optimizer-step boundary"):
        other.load_state_dict(states[1], strict=False)
    other.load_state_dict(states[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"budget": Budget(tokens=900, tiles=12)}, r"budget_tokens: 800 .*, 900 in this loader"),
        ({"budget": Budget(tokens=800)}, r"budget_tiles: 12 in the state, None in this loader"),
        ({"seed": 5}, r"seed: 0 in the state, 5 in this loader"),
        (
            {"shuffle": False},
            r"order: 'buffered/\d+' in the state, 'sequential/\d+' in this loader",
        ),
        ({"grouping": "random"}, r"order: 'buffered/\d+' .* 'random/\d+'"),
        ({"oversize": "drop"}, r"oversize: 'error' in the state, 'drop' in this loader"),
        ({"window_rows": 5}, r"window_rows: None in the state, 5 in this loader"),
    ],
)
def test_changed_settings_are_refused_with_both_values(data, change, message):
    state = loader(data).state_dict()
    other = loader(data, **change)
    before = other.state_dict()
    with pytest.raises(StateError, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_changed_data_is_refused(data, tmp_path):
    state = loader(data).state_dict()
    moved = write_data(tmp_path / "moved", num_rows=NUM_ROWS)
    loader(moved).load_state_dict(state)
    changed = write_data(tmp_path / "changed", num_rows=NUM_ROWS, seed=1)
    with pytest.raises(StateError, match=r"data: '\w{32}' in the state, '\w{32}' in this loader"):
        loader(changed).load_state_dict(state)
    longer = write_data(tmp_path / "longer", num_rows=NUM_ROWS + 1)
    with pytest.raises(StateError, match="num_rows: 24 in the state, 25 in this loader"):
        loader(longer).load_state_dict(state)


def test_a_changed_transform_is_refused_unless_not_strict(data, transform, caplog):
    own = Wrapped(transform.inner)
    batches, states = record_run(loader(data, transform=transform), num_epochs=1)
    resumed = loader(data, transform=own)
    with pytest.raises(StateError, match=r"transform: 'noisy/1' in the state, 'wrapped/1'"):
        resumed.load_state_dict(states[2])
    resumed.load_state_dict(states[2], strict=False)
    assert "transform: 'noisy/1' in the state" in caplog.text
    assert rows_of(resumed) == rows_of(batches[2:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "must have schema 1, which this omniload reads, got 2"),
        ({"schema": None}, "must have schema 1"),
        ({"epoch": -1}, "damaged: epoch must be a count, got -1"),
        ({"groups": 10**30}, "damaged: groups must be a count, got an integer of 100 bits"),
        ({"step": "4"}, "damaged: step must be a count, got '4'"),
        ({"micro_step": True}, "damaged: micro_step must be a count"),
        ({"micro_step": 2}, "micro_step .* must be below its accumulation: got 2 of 2"),
        ({"accumulation": 0}, "damaged: accumulation must be a count"),
        ({"data": 3}, "damaged: data must be str"),
        ({"extra": 1}, r"unknown \['extra'\]"),
        ({"step": 50, "groups": 10**6}, "must lie in this epoch"),
        ({"step": 50, "window": 10**6}, "must lie in this epoch"),
    ],
)
def test_a_damaged_state_is_refused(data, change, message):
    loading = loader(data, accumulation=2)
    state = resealed({**loading.state_dict(), **change})
    with pytest.raises(StateError, match=message):
        loading.load_state_dict(state)


@pytest.mark.parametrize(
    "change", [{"groups": 2}, {"step": 7}, {"seed": 1}, {"checksum": None}, {"window_rows": 9}]
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_that_was_edited_is_refused(data, change, strict):
    loading = loader(data)
    state = {**loading.state_dict(), **change}
    with pytest.raises(StateError, match=r"changed since state_dict\(\) returned it"):
        loading.load_state_dict(state, strict=strict)


def test_a_place_at_the_end_of_an_epoch_is_refused(data):
    loading = loader(data)
    end = loading.plan.position(loading.plan.num_steps)
    with pytest.raises(StateError, match=r"names no place in this data: group \d+ of window 0"):
        loading.load_state_dict(resealed({**loading.state_dict(), "step": 50, **end}))


def test_another_order_of_the_same_data_is_refused(data):
    loading = loader(data)
    state = resealed({**loading.state_dict(), "plan": "0" * 32})
    with pytest.raises(StateError, match="another order of samples"):
        loading.load_state_dict(state)
    loading.load_state_dict(state, strict=False)


def test_what_is_no_state_is_refused(data):
    loading = loader(data)
    with pytest.raises(
        StateError, match=r"must be the dict that state_dict\(\) returned, got list"
    ):
        loading.load_state_dict([1])
    state = loading.state_dict()
    del state["groups"]
    with pytest.raises(StateError, match=r"missing \['groups'\]"):
        loading.load_state_dict(state)
    with pytest.raises(ConfigError, match="epoch must be an integer"):
        loading.set_epoch(-1)
