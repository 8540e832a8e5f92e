"""`DataLoader.explain` says what the plan says, before and after the place at hand."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from omniload import Budget, ConfigError, DataLoader, World
from omniload.metrics import dist_ratio
from omniload.shards import open_shards
from omniload.tars import open_tars
from omniload.tools.cli import app
from tests.loader_data import assert_same_run, write_data
from tests.tar_makers import indexed

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 30


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("explain") / "shards", num_rows=NUM_ROWS)


def loader(data, **arguments):
    world = World(dp_rank=1, dp_world_size=3)
    return DataLoader(data, **{"budget": BUDGET, "world": world, "accumulation": 2, **arguments})


def test_explaining_any_step_leaves_the_iteration_as_it_is(data):
    untouched, asked = list(loader(data, window_rows=7)), []
    loading = loader(data, window_rows=7)
    steps = loading.plan.num_steps
    for batch in loading:
        for step in range(steps):
            explained = loading.explain(step)
            own = [
                slot
                for slot in explained.slots
                if slot.rank == 1 and slot.micro_step == batch.micro_step
            ]
            if step == batch.step:
                assert [one.row for one in own[0].rows] == batch.sample_ids.tolist()
                assert own[0].tokens == batch.num_tokens
                assert own[0].tiles == batch.num_tiles
        asked.append(batch)
    assert_same_run(asked, untouched)
    assert loading.ledger().balanced


def test_the_steps_of_an_epoch_hold_each_row_once_with_its_place(data):
    loading, shards = loader(data), open_shards(data)
    rows = []
    for step in range(loading.plan.num_steps):
        explained = loading.explain(step)
        assert len(explained.slots) == 6
        for slot in explained.slots:
            assert slot.is_filler == (not slot.rows)
            assert slot.tokens == sum(one.tokens for one in slot.rows) <= BUDGET.tokens
            rows += slot.rows
    assert sorted(one.row for one in rows) == list(range(NUM_ROWS))
    for one in rows:
        assert one.shard == shards.shard_names[shards.locate(one.row)[0]]
        assert one.tokens == shards.index.num_tokens[one.row]
        assert one.key == shards.read(one.row).key
    assert json.loads(json.dumps(explained.as_dict()))["slots"][0]["micro_step"] == 0


@pytest.mark.parametrize("sync", ["step", "micro-step", None])
def test_ratios_and_the_slowest_rank_follow_from_the_loads(data, sync):
    loading = loader(data, sync=sync)
    explained = loading.explain(0)
    tokens = np.array([slot.tokens for slot in explained.slots]).reshape(2, 3)
    loads = tokens if sync == "micro-step" else tokens.sum(axis=0)
    assert explained.dist["tokens"] == pytest.approx(dist_ratio(loads))
    cost = explained.loads["cost"]
    assert explained.slowest == int(np.argmax(cost))
    assert explained.slowest_over_mean == pytest.approx(max(cost) / np.mean(cost))
    if sync is None:
        assert explained.moved == 0
        assert explained.dist == explained.dist_before
    else:
        assert explained.moved > 0
        assert explained.dist["tiles"] <= explained.dist_before["tiles"]
    assert f"rank {explained.slowest} is slowest" in str(explained)


def test_a_plan_taken_up_from_a_state_explains_its_steps_by_their_numbers(data):
    whole = loader(data)
    batches = iter(whole)
    for _ in range(2):
        next(batches)
    resumed = loader(data)
    resumed.load_state_dict(whole.state_dict())
    assert resumed.explain(1).as_dict() == whole.explain(1).as_dict()
    with pytest.raises(ConfigError, match="expected at least 1, got 0"):
        resumed.explain(0)
    with pytest.raises(ConfigError, match="a step of this epoch, got 99"):
        whole.explain(99)
    with pytest.raises(ConfigError, match="step must be an integer"):
        whole.explain("last")


def test_the_commands_plan_as_the_loader_does_in_several_windows(data, monkeypatch):
    monkeypatch.setattr("omniload.plan.order._WINDOW_ROWS", 7)
    loading = loader(data)
    assert loading.plan.num_windows > 1
    options = ["--ranks", "3", "--accumulation", "2", "--budget-tokens", "800"]
    options += ["--budget-tiles", "12", "--json"]

    def run(*arguments):
        done = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    for step in range(loading.plan.num_steps):
        found = run("explain", data, "--step", step, *options)
        assert found == json.loads(json.dumps(loading.explain(step).as_dict()))
    (planned,) = run("plan", data, "--grouping", "buffered", *options)["rows"]
    expected = loading.plan.figures(max_steps=200)
    assert planned == json.loads(json.dumps(expected.as_dict()))


def test_rows_of_tars_have_their_keys_and_costs_are_those_of_the_mean(tmp_path):
    tars = open_tars(indexed(tmp_path / "tars", (9,)))
    loading = DataLoader(tars, budget=BUDGET, world=World(dp_rank=0, dp_world_size=2))
    explained = loading.explain(0)
    for slot in explained.slots:
        assert [one.key for one in slot.rows] == [tars.read(one.row).key for one in slot.rows]
    cost = explained.slots[0].cost / explained.mean_cost
    assert f"cost {cost:.3f} of the mean" in str(explained)
    assert "1 tiles" not in str(explained)


def test_the_command_lists_the_rows_of_the_rank_that_is_asked_for(data):
    arguments = ["explain", str(data), "--step", "0", "--ranks", "2", "--budget-tokens", "800"]
    found = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)
    page = CliRunner().invoke(app, [*arguments, "--rank", "1"]).stdout
    listed = page.partition("rows of rank 1:")[2]
    for slot in found["slots"]:
        for row in slot["rows"]:
            assert (f"row {row['row']} {row['key']!r} " in listed) == (slot["rank"] == 1)
    done = CliRunner().invoke(app, [*arguments, "--rank", "2"])
    assert "--rank must be below --ranks" in str(done.exception)


def test_a_step_that_is_not_there_is_refused_by_the_command(data):
    done = CliRunner().invoke(app, ["explain", str(data), "--step", "999"])
    assert isinstance(done.exception, ConfigError)
    assert "it has fewer" in str(done.exception)
