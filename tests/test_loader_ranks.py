"""Real processes under gloo agree on the plan before the first batch, or all of them stop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from omniload import ConfigError, World
from omniload.loader.checks import says_that_it_waits
from tests.loader_data import write_data

ROOT = Path(__file__).resolve().parent.parent
NUM_ROWS = 12
CASES = ("agree", "seed", "state", "dp_rank", "alone", "pad_to", "rollback", "epoch", "one_moves",
         "early", "early_alone", "ledger", "stats", "exact", "one_loads")  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of two processes saw, case by case."""
    folder = tmp_path_factory.mktemp("ranks")
    shards = write_data(folder / "shards", num_rows=NUM_ROWS)
    command = [sys.executable, "-m", "tests.loader_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "rendezvous"), str(shards), *CASES],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_processes_that_agree_share_the_epoch(results):
    rows = [row for result in results for row in result["agree"]["rows"]]
    assert sorted(rows) == list(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("seed", "rank 1 in seed (1 against 0)"),
        ("state", "rank 1 in epoch (3 against 0)"),
        ("dp_rank", "none has dp_rank [1]"),
        ("pad_to", "rank 1 in pad_to ("),
        ("rollback", "rank 1 in epoch (1 against 0), step (0 against 1)"),
        ("epoch", "rank 1 in epoch (6 against 5)"),
        ("one_moves", "rank 1 in epoch (2 against 1)"),
        ("early", "Make the loader after init_process_group, or pass world="),
    ],
)
def test_processes_that_differ_all_stop_and_name_the_rank(results, case, part):
    errors = [result[case]["error"] for result in results]
    assert errors[0] == errors[1]
    assert part in errors[0]


def test_ledgers_of_real_processes_add_up(results):
    first, second = (result["ledger"]["ledgers"] for result in results)
    assert first == second
    during, end = first
    assert during["balanced"]
    assert not during["is_complete"]
    assert during["seen"] + during["remaining"] == NUM_ROWS
    assert end["balanced"]
    assert end["is_complete"]
    assert (end["seen"], end["ranks"], end["elsewhere"]) == (NUM_ROWS, 2, 0)


def test_figures_of_real_processes_are_set_side_by_side(results):
    first, second = (result["stats"] for result in results)
    assert first["ranks"] == second["ranks"]
    own = [first["own"], second["own"]]
    assert own[0]["dist_tokens"] == own[1]["dist_tokens"] > 0
    for name in ("samples", "tokens", "tiles", "bytes_read"):
        values = [span[name] for span in own]
        spread = first["ranks"][name]
        assert (spread["least"], spread["most"]) == (min(values), max(values))
        assert spread["mean"] == sum(values) / 2
        assert values[spread["rank"]] == max(values)
    assert sum(span["samples"] for span in own) == NUM_ROWS


def test_what_one_rank_skipped_counts_on_all_ranks_alike(results):
    assert [result["exact"]["factor"] for result in results] == [pytest.approx(120 / 90)] * 2


def test_a_rank_that_alone_loaded_a_state_is_told_why_nobody_comes(results):
    assert results[0]["one_loads"] == {"rows": []}
    error = results[1]["one_loads"]["error"]
    assert "rank 1 could not compare its place with theirs over all ranks" in error
    assert "All ranks must call iter() alike, and load_state_dict, set_epoch" in error


def test_a_rank_that_waits_for_others_says_so(caplog):
    with says_that_it_waits("compare", World(dp_rank=1, dp_world_size=2), seconds=0.01):
        while "rank 1 has waited 0.01 s for the other ranks to compare" not in caplog.text:
            pass
    with pytest.raises(ConfigError, match="rank 1 could not compare over all ranks: timed out"):
        with says_that_it_waits("compare", World(dp_rank=1, dp_world_size=2)):
            raise RuntimeError("timed out")


def test_a_loader_on_one_rank_alone_waits_for_nobody(results):
    assert [len(result["alone"]["rows"]) for result in results] == [0, NUM_ROWS]


def test_a_loader_that_is_meant_to_be_alone_says_so_once(results):
    for result in results:
        assert sorted(result["early_alone"]["rows"]) == list(range(NUM_ROWS))
        assert result["log"].count("torch.distributed has 2 of them: it reads all rows") == 1
