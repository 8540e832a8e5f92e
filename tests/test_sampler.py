"""The batch sampler gives the plan's micro-batches to torch's own DataLoader, and resumes."""

import json
import pickle
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import omniload
from omniload._checksum import fields_checksum
from omniload.balance import StepBalance
from omniload.errors import ConfigError, StateError
from omniload.grouping import GROUPINGS
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.sampler import PlanBatchSampler
from omniload.tools.lengths import make_lengths
from omniload.types import Budget
from omniload.world import World
from tests.strategies import problems

INDEX = make_lengths(300)
BUDGET = Budget(tokens=4096, tiles=13)


def resealed(state):
    """A state whose checksum fits what it says now."""
    return {**state, "checksum": fields_checksum(state)}


def make_sampler(rank=0, ranks=3, *, index=INDEX, **changes):
    settings = {"budget": BUDGET, "accumulation": 2, "seed": 5, **changes}
    return PlanBatchSampler(index, world=World(dp_rank=rank, dp_world_size=ranks), **settings)


class Rows(torch.utils.data.Dataset):
    """A data set of the user's own: sample i is its number and its length."""

    def __len__(self):
        return len(INDEX)

    def __getitem__(self, row):
        return row, int(INDEX.num_tokens[row])


def as_rows(samples):
    return [row for row, _ in samples]


def loader_of(sampler, *, num_workers=0):
    return torch.utils.data.DataLoader(
        Rows(), batch_sampler=sampler, collate_fn=as_rows, num_workers=num_workers
    )


# --- what it yields


@settings(deadline=None, max_examples=60)
@given(
    problem=problems(max_rows=40),
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    grouping=st.sampled_from(sorted(GROUPINGS)),
    window_rows=st.one_of(st.none(), st.integers(3, 30)),
    tail=st.sampled_from(["repeat", "drop", "empty"]),
)
def test_each_row_comes_once_an_epoch_but_for_the_last_step(
    problem, ranks, accumulation, grouping, window_rows, tail
):
    budget, tokens, tiles = problem
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)
    same = {"budget": budget, "grouping": grouping, "window_rows": window_rows, "tail": tail,
            "accumulation": accumulation}  # fmt: skip
    try:
        samplers = [make_sampler(rank, ranks, index=index, **same) for rank in range(ranks)]
    except ConfigError:
        num_groups = make_plan(index, budget=budget, grouping=grouping, window_rows=window_rows,
                               seed=5).num_steps  # fmt: skip
        assert (tail, num_groups < ranks * accumulation) == ("drop", True)
        return
    batches = [list(sampler) for sampler in samplers]
    assert [len(sampler) for sampler in samplers] == [len(mine) for mine in batches]
    own = [
        [rows for number, rows in enumerate(mine) if not sampler.is_filler(number)]
        for sampler, mine in zip(samplers, batches, strict=True)
    ]
    fed = sorted(row for mine in own for rows in mine for row in rows)
    if tail == "drop":
        left_out = samplers[0].dropped.tolist()
        assert own == batches
        assert sorted([*fed, *left_out]) == list(range(len(index)))
    else:
        assert fed == list(range(len(index)))
    if tail == "empty":
        assert own == batches
        assert max(map(len, batches)) - min(map(len, batches)) <= accumulation
    else:
        assert len(set(map(len, batches))) == 1
        assert len(batches[0]) % accumulation == 0


def test_batches_are_the_micro_batches_of_the_plan():
    plan = make_plan(INDEX, budget=BUDGET, dp_world_size=3, accumulation=2, seed=5)
    for rank in range(3):
        sampler = make_sampler(rank)
        for number, rows in enumerate(sampler):
            if not sampler.is_filler(number):
                assert rows == plan.micro_batch(*divmod(number, 2), rank).tolist()
        assert sampler.num_loss_tokens(1) == plan.num_loss_tokens(1)
        assert sampler.plan.fingerprint == plan.fingerprint


def test_filler_repeats_the_shortest_row_of_the_same_micro_step_with_an_image():
    # groups of one row each, in index order: 2 ranks x 2 micro-steps leave three slots empty
    index = LengthIndex.from_arrays(num_tokens=[90, 91, 92, 93, 94], num_tiles=[1, 1, 1, 1, 0])
    same = {"index": index, "budget": Budget(tokens=100), "shuffle": False}
    assert list(make_sampler(0, 2, **same)) == [[0], [2], [4], [4]]
    assert list(make_sampler(1, 2, **same)) == [[1], [3], [4], [4]]
    fillers = [make_sampler(rank, 2, **same).is_filler(3) for rank in range(2)]
    assert fillers == [True, True]
    # not the shortest of all, as that one has no image
    index = LengthIndex.from_arrays(num_tokens=[90, 91, 92, 60, 70], num_tiles=[1, 1, 1, 0, 1])
    same = {"index": index, "budget": Budget(tokens=100), "shuffle": False, "accumulation": 1}
    assert [list(make_sampler(rank, 3, **same))[1] for rank in range(3)] == [[3], [4], [4]]


def test_balanced_steps_have_the_rows_of_the_plain_ones():
    plain = [list(make_sampler(rank, sync=None)) for rank in range(3)]
    even = [list(make_sampler(rank)) for rank in range(3)]
    assert even != plain
    assert even[0] == list(make_sampler(0, balance=StepBalance(), sync="micro-step"))
    for first in range(0, len(plain[0]) - 2, 2):
        rows = [
            sorted(row for mine in ranks for rows in mine[first : first + 2] for row in rows)
            for ranks in (plain, even)
        ]
        assert rows[0] == rows[1]


def test_lengths_may_be_given_as_arrays():
    tokens, tiles = INDEX.num_tokens.tolist(), INDEX.num_tiles.astype(np.int64)
    same = {"budget": BUDGET, "world": World(), "seed": 5}
    arrays = PlanBatchSampler(num_tokens=tokens, num_tiles=tiles, **same)
    assert list(arrays) == list(make_sampler(0, 1, accumulation=1))
    text = PlanBatchSampler(num_tokens=tokens, **same)
    assert text.plan.figures().steps.num_tiles.sum() == 0
    loss = PlanBatchSampler(num_tokens=tokens, num_loss_tokens=[1] * 300, **same)
    assert loss.num_loss_tokens(0) == len(next(iter(loss)))
    assert omniload.PlanBatchSampler is PlanBatchSampler


# --- in torch's DataLoader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_loads_every_row_of_the_data_set_once(num_workers):
    found = []
    for rank in range(2):
        sampler = make_sampler(rank, 2)
        loader = loader_of(sampler, num_workers=num_workers)
        assert len(loader) == len(sampler)
        batches = list(loader)
        assert len(batches) == len(loader)
        found += [rows for n, rows in enumerate(batches) if not sampler.is_filler(n)]
    assert sorted(row for rows in found for row in rows) == list(range(300))


def test_epochs_advance_by_themselves_and_differ():
    loader = loader_of(make_sampler())
    epochs = [list(loader) for _ in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    assert loader.batch_sampler.epoch == 2
    again = make_sampler()
    again.set_epoch(2)
    assert list(again) == epochs[2]


def test_epoch_that_was_left_halfway_begins_anew():
    sampler = make_sampler()
    whole = list(make_sampler())
    for number, _ in enumerate(sampler):
        if number == 3:
            break
    assert list(sampler) == whole
    assert sampler.epoch == 0
    # but one whose last batch was drawn is over, even if nobody asked for more
    exact = iter(make_sampler())
    sampler = make_sampler()
    for _ in zip(range(len(sampler)), sampler, strict=False):
        pass
    assert next(iter(sampler)) != next(exact)
    assert sampler.epoch == 1


def test_set_epoch_at_the_head_of_every_epoch_changes_nothing():
    plain, told = make_sampler(), make_sampler()
    for epoch in range(2):
        told.set_epoch(epoch)
        assert list(told) == list(plain)
    told.set_epoch(1)  # once more
    assert list(told) != list(plain)
    told.load_state_dict(make_sampler().state_dict(5))
    told.set_epoch(0)
    assert told.start == 5


def test_older_iterator_does_not_disturb_the_newest():
    sampler = make_sampler()
    old = iter(sampler)
    new = iter(sampler)
    first = next(new)
    for _ in old:
        pass
    assert sampler.state_dict() == make_sampler().state_dict(1)
    assert [first, *new] == list(make_sampler())


def test_example_trains_on_a_data_set_of_its_own(monkeypatch, capsys):
    folder = Path(__file__).parent.parent / "examples"
    monkeypatch.syspath_prepend(folder)
    example = runpy.run_path(str(folder / "own_dataset.py"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny matrices: threads only wait for each other
    example["main"]()
    torch.set_num_threads(threads)
    assert "160 rows in " in (output := capsys.readouterr().out)
    assert "next: epoch 1" in output
    data = example["Pictures"](60)
    lengths = data.num_tiles * 4 + data.num_text
    assert [len(data[row]["ids"]) for row in range(60)] == lengths.tolist()
    batch = example["pack"]([data[row] for row in range(60)])
    loss_tokens = data.num_text - (data.num_tiles == 0)
    assert int((batch["labels"] != -100).sum()) == loss_tokens.sum()


# --- resuming


@pytest.mark.parametrize("tail", ["repeat", "drop", "empty"])
@pytest.mark.parametrize("window_rows", [None, 70])
def test_state_after_any_batch_gives_the_rest(tail, window_rows):
    same = {"tail": tail, "window_rows": window_rows}
    sampler = make_sampler(2, **same)
    whole = list(sampler)
    sampler.set_epoch(0)
    walk = iter(sampler)
    for done in range(len(whole) + 1):
        state = json.loads(json.dumps(sampler.state_dict()))
        assert make_sampler(2, **same).state_dict(done) == state
        rest = make_sampler(2, **same)
        rest.load_state_dict(state)
        if done == len(whole):
            # with tail="empty", another rank may still have a batch of this epoch
            assert rest.epoch == 1 or (tail == "empty" and list(rest) == [])
            iter(rest)
            assert rest.epoch == 1
            break
        assert (rest.epoch, rest.start, len(rest)) == (0, done, len(whole))
        assert rest.state_dict() == state
        assert list(rest) == whole[done:]
        assert rest.is_filler(len(whole) - 1) == make_sampler(2, **same).is_filler(len(whole) - 1)
        assert rest.num_loss_tokens(done // 2) == make_sampler(**same).num_loss_tokens(done // 2)
        next(walk)


def test_state_is_the_same_on_all_ranks():
    for done in (0, 3, 4, len(make_sampler())):
        states = [make_sampler(rank).state_dict(done) for rank in range(3)]
        assert states[0] == states[1] == states[2]


def test_state_is_the_same_on_ranks_that_have_fewer_batches():
    samplers = [make_sampler(rank, tail="empty") for rank in range(3)]
    runs = [[sampler.state_dict(done) for done in range(len(sampler) + 1)] for sampler in samplers]
    assert len({len(run) for run in runs}) > 1
    for states in zip(*runs, strict=False):
        assert states[0] == states[1] == states[2]
    assert max(runs, key=len)[-1]["epoch"] == 1


def test_number_of_batches_makes_the_state_exact_with_workers():
    sampler = make_sampler()
    loader = loader_of(sampler, num_workers=1)
    batches = iter(loader)
    used = [next(batches) for _ in range(3)]
    assert sampler.state_dict() != sampler.state_dict(3)  # the worker's next rows are drawn
    rest = make_sampler()
    rest.load_state_dict(sampler.state_dict(3))
    assert [*used, *loader_of(rest)] == list(make_sampler())
    del batches


def test_rest_of_an_epoch_goes_to_other_ranks_between_two_steps():
    before = [make_sampler(rank, 3) for rank in range(3)]
    fed = [rows for sampler in before for rows in list(sampler)[:4]]
    after = [make_sampler(rank, 2, accumulation=1) for rank in range(2)]
    for sampler in after:
        sampler.load_state_dict(before[0].state_dict(4))
        batches = list(sampler)
        assert len(sampler) == sampler.start + len(batches)
        fed += [
            rows
            for number, rows in enumerate(batches, start=sampler.start)
            if not sampler.is_filler(number)
        ]
    assert sorted(row for rows in fed for row in rows) == list(range(300))
    with pytest.raises(StateError, match="a position inside a step fits the same ranks"):
        after[0].load_state_dict(before[0].state_dict(3))


def test_states_of_other_orders_and_other_things_are_refused():
    state = make_sampler().state_dict(4)
    for changes in ({"seed": 6}, {"budget": Budget(tokens=4096)}, {"index": make_lengths(299)}):
        with pytest.raises(StateError, match="belongs to another order of rows"):
            make_sampler(**changes).load_state_dict(state)
    for wrong in ({}, [], {**state, "schema": 2}, {**state, "epoch": -1}, {**state, "more": 1}):
        with pytest.raises(StateError, match="a sampler state must be what state_dict"):
            make_sampler().load_state_dict(wrong)
    with pytest.raises(StateError, match="start must be a position"):
        make_sampler().load_state_dict(resealed({**state, "position": {"window": -1}}))


@pytest.mark.parametrize(
    "change", [{"step": 3}, {"position": {}}, {"checksum": 5}, {"step": 10**30}]
)
def test_a_state_that_was_edited_is_refused(change):
    state = {**make_sampler().state_dict(4), **change}
    with pytest.raises(StateError, match=r"changed since state_dict|must be what state_dict"):
        make_sampler().load_state_dict(state)


# --- what is refused, what is reported


def test_dropped_tail_is_reported(caplog):
    sampler = make_sampler(tail="drop")
    rows = {row for mine in range(3) for batch in make_sampler(mine, tail="drop") for row in batch}
    list(sampler)
    left_out = set(sampler.dropped.tolist())
    assert left_out
    assert rows | left_out == set(range(300))
    assert f"tail='drop' leaves out {len(left_out)} rows of the last step of epoch 0" in caplog.text


def test_rows_over_the_budget_are_an_error_or_reported():
    with pytest.raises(ConfigError, match="rows are over Budget"):
        make_sampler(budget=Budget(tokens=1000))
    sampler = make_sampler(budget=Budget(tokens=1000), oversize="drop")
    assert sampler.dropped.tolist() == np.flatnonzero(INDEX.num_tokens > 1000).tolist()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: make_sampler(tail="pad"), "tail must be one of repeat, drop, empty, got 'pad'"),
        (lambda: make_sampler(index=None), r"needs the lengths once: .* got no num_tokens"),
        (lambda: make_sampler(num_tokens=[1]), r"needs the lengths once: .* got both"),
        (lambda: make_sampler(0, 500, tail="drop"), "500 ranks x 2 groups, got 300 rows"),
        (
            lambda: PlanBatchSampler(INDEX, budget=BUDGET, world="x"),
            "world must be an omniload.World, got str",
        ),
        (lambda: make_sampler(tail=["drop"]), "tail must be one of"),
        (lambda: make_sampler(index=3), "index must be an omniload.LengthIndex, got int"),
        (lambda: make_sampler().is_filler("x"), "batch must be an integer, got 'x'"),
        (lambda: make_sampler().num_loss_tokens(0.5), "step must be an integer, got 0.5"),
        (lambda: make_sampler().state_dict("x"), "num_batches must be an integer, got 'x'"),
        (lambda: make_sampler().set_epoch("x"), "epoch must be an integer, got 'x'"),
        (lambda: make_sampler().set_epoch(-1), "epoch must be an integer of at least 0, got -1"),
        (lambda: make_sampler().is_filler(10**6), r"expected a number from 0 to \d+, got 1000000"),
        (lambda: make_sampler().state_dict(-1), "num_batches must be at least 0, got -1"),
        (lambda: make_sampler().state_dict(10**6), "must have the batch"),
        (lambda: make_sampler().num_loss_tokens(10**6), "step must be at least 0 and below"),
    ],
)
def test_wrong_arguments_are_refused(call, match):
    with pytest.raises(ConfigError, match=match):
        call()


def test_world_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(PlanBatchSampler(INDEX, budget=BUDGET, accumulation=2, seed=5)) == list(
        make_sampler(1)
    )


def test_sampler_travels_to_another_process():
    sampler = make_sampler()
    assert list(pickle.loads(pickle.dumps(sampler))) == list(make_sampler())
