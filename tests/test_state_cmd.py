"""`omniload state` explains any state that it finds, and says whether data fits it."""

import json
import os

import pytest
import torch
from typer.testing import CliRunner

from omniload import Budget, DataLoader, PlanBatchSampler, StateError, World
from omniload.tools.cli import app
from omniload.tools.state_cmd import find_states
from tests.loader_data import write_data

BUDGET = Budget(tokens=800, tiles=12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("state") / "shards", num_rows=24)


@pytest.fixture
def state(data):
    loading = DataLoader(data, budget=BUDGET, world=World(dp_world_size=2), accumulation=2)
    batches = iter(loading)
    for _ in range(3):
        next(batches)
    return loading.state_dict()


def run(*arguments):
    return CliRunner().invoke(app, ["state", *map(str, arguments)])


def test_a_state_is_explained_in_words(state, tmp_path):
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    done = run(path)
    assert done.exit_code == 0, done.output
    for line in (
        "place: epoch 0, 1 steps of it done, and 1 of 2 micro-batches of the next",
        "saved on: 2 data-parallel ranks, accumulation 2",
        "goes on: inside a step: on 2 data-parallel ranks, accumulation 2, and with the same sync",
        "budget: 800 tokens, 12 tiles, no limit of samples",
        "excluded: none",
        f"data: 24 rows, {state['data']}",
    ):
        assert line in done.output


def test_a_state_between_two_steps_goes_on_anywhere(data, tmp_path):
    path = tmp_path / "state.json"
    state = DataLoader(data, budget=BUDGET, world=World()).state_dict()
    path.write_text(json.dumps({"trainer": {"loader": state}}))
    done = run(path)
    assert "between two steps: on any number of ranks" in done.output
    assert "in " + str(path) + " at trainer.loader" in done.output.replace("\n", " ")


def test_states_are_found_in_checkpoints(state, tmp_path):
    path = tmp_path / "checkpoint.pt"
    sampler = PlanBatchSampler(num_tokens=[5] * 90, budget=Budget(tokens=10), world=World())
    list(zip(sampler, range(4), strict=False))
    saved = {"model": {"w": torch.zeros(3)}, "data": [state, sampler.state_dict()], "step": 7}
    torch.save(saved, path)
    done = run(path, "--json")
    assert done.exit_code == 0, done.output
    first, second = json.loads(done.output)["states"]
    assert (first["kind"], first["at"]) == ("DataLoader", "data.0")
    assert first["state"] == state
    assert (second["kind"], second["at"]) == ("PlanBatchSampler", "data.1")
    assert "steps of it done" in second["lines"][0]


def test_the_state_in_a_checkpoint_of_deepspeed_is_found_once(state, tmp_path):
    folder = tmp_path / "run" / "global_step4"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "latest").write_text("global_step4")
    for rank in range(2):
        saved = {"module": {}, "dp_world_size": 2, "global_steps": 4, "loader": state}
        torch.save(saved, folder / f"mp_rank_{rank:02d}_model_states.pt")
    found = list(find_states(tmp_path / "run"))
    assert [(file.name, at) for file, at, _ in found] == [("mp_rank_00_model_states.pt", "loader")]


def test_data_that_fits_and_data_that_does_not(state, data, tmp_path):
    path = tmp_path / "state.json"
    path.write_text(json.dumps(state))
    fits = run(path, "--data", data)
    assert fits.exit_code == 0, fits.output
    assert "fits" in fits.output
    other = write_data(tmp_path / "other", num_rows=25)
    found = run(path, "--data", other, "--json")
    assert found.exit_code == 1
    (shown,) = json.loads(found.output)["states"]
    assert shown["fits"] is False
    assert any(line.startswith("rows: 24 in the state, 25 in") for line in shown["differences"])
    assert "does NOT fit" in run(path, "--data", other).output


def test_what_is_no_state_is_refused_and_never_run(state, tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/ran",))

    path = tmp_path / "file"
    for content, message in (
        (b"{", "must be JSON, but can't be read"),
        (b"{}", "holds no state of omniload"),
        (b"\x80something", r"must be JSON or a checkpoint that torch.save wrote: its first bytes"),
        (b"", "first bytes are b''"),
    ):
        path.write_bytes(content)
        with pytest.raises(StateError, match=message):
            raise run(path).exception
    torch.save({"loader": state, "x": Evil()}, path)
    with pytest.raises(StateError, match="weights_only=True"):
        raise run(path).exception
    assert not (tmp_path / "ran").exists()
    path.write_text(json.dumps({**state, "step": 9}))
    with pytest.raises(StateError, match="was changed since"):
        raise run(path).exception
    with pytest.raises(StateError, match="there is none"):
        raise run(tmp_path / "nowhere").exception
    with pytest.raises(StateError, match=r"no \*model_states\.pt"):
        raise run(tmp_path).exception
