import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from omniload import _native
from omniload.errors import ConfigError
from omniload.tools import bench_mrope, bench_pack


def run(*arguments):
    app = typer.Typer()
    app.command()(bench_pack.pack)
    return CliRunner().invoke(app, arguments)


def test_bench_pack_compares_all_ways_on_equal_rows():
    threads = torch.get_num_threads()
    done = run(
        "--documents", "2", "--documents", "3", "--max-tokens", "250", "--repeats", "1", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    native = ["native"] if _native.available() else []
    ways = [*native, "numpy", "torch.cat", "lists", "memcpy"]
    ways += [f"M-RoPE {way}" for way in (*native, "torch", "loop")]
    assert [(row["way"], row["documents"]) for row in found["rows"]] == [
        (way, documents) for documents in (2, 3) for way in ways
    ]
    assert all(row["us"] > 0 for row in found["rows"])
    assert found["rows"][0]["times"] == 1
    assert torch.get_num_threads() == threads


def test_ways_that_pack_another_row_are_not_timed(monkeypatch):
    pack_lists = bench_pack._pack_lists
    monkeypatch.setattr(bench_pack, "_pack_lists", lambda ids, labels: pack_lists(labels, ids))
    with pytest.raises(RuntimeError, match="lists packs another row than numpy"):
        raise run("--documents", "2", "--repeats", "1").exception


def test_positions_of_another_row_are_not_timed(monkeypatch):
    loop = bench_mrope._loop
    monkeypatch.setattr(bench_mrope, "_loop", lambda *given: loop(*given) + 1)
    with pytest.raises(RuntimeError, match="gives other positions than the loop"):
        raise run("--documents", "2", "--repeats", "1").exception


def test_lengths_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="at least --min-tokens=200, got 100"):
        raise run("--max-tokens", "100").exception
