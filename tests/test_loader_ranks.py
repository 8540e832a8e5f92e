"""Real processes under gloo agree on the plan before the first batch, or all of them stop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loader_data import write_data

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("ranks") / "shards", num_rows=12)


def run_ranks(data, folder, case):
    command = [sys.executable, "-m", "tests.loader_ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder / "rendezvous"), str(data), case],
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


def test_processes_that_agree_share_the_epoch(data, tmp_path):
    results = run_ranks(data, tmp_path, "agree")
    assert sorted(row for result in results for row in result["rows"]) == list(range(12))


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("seed", "rank 1 in seed (1 against 0)"),
        ("state", "rank 1 in epoch (3 against 0)"),
        ("dp_rank", "none has dp_rank [1]"),
    ],
)
def test_processes_that_differ_all_stop_and_name_the_rank(data, tmp_path, case, part):
    errors = [result["error"] for result in run_ranks(data, tmp_path, case)]
    assert errors[0] == errors[1]
    assert part in errors[0]
