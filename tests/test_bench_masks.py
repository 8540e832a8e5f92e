"""`omniload bench masks` compares masks that are equal, and says so in figures."""

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from omniload.errors import ConfigError
from omniload.tools import bench_masks
from omniload.tools.bench_common import emit


def run(*arguments):
    app = typer.Typer()
    app.command()(bench_masks.masks)
    return CliRunner().invoke(app, arguments)


def test_bench_masks_times_each_way_for_each_size():
    threads = torch.get_num_threads()
    done = run("--tokens", "600", "--tokens", "300", "--max-tokens", "250", "--repeats", "1",
               "--json")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    ways = ["pack", "intervals", "block mask", "block mask compact"]
    assert [(row["way"], row["tokens"]) for row in found["rows"]] == [
        (way, tokens) for tokens in (600, 300) for way in ways
    ]
    assert all(row["us"] > 0 for row in found["rows"])
    assert found["rows"][2]["times"] == 1
    assert torch.get_num_threads() == threads


def test_torchs_search_is_compared_before_it_is_timed(monkeypatch):
    # compiling it takes a minute and gives the same blocks
    monkeypatch.setattr(torch, "compile", lambda function: function)
    size = ("--tokens", "700", "--max-tokens", "250")
    arguments = (*size, "--search-up-to", "700", "--repeats", "1", "--json")
    searches = bench_masks._searches
    done = run(*arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["rows"][-2]["way"] == "create_block_mask"
    monkeypatch.setattr(bench_masks, "_searches", lambda lengths, kind, block: searches(
        [sum(lengths)], kind, block))  # fmt: skip
    with pytest.raises(RuntimeError, match="create_block_mask finds other kv blocks"):
        raise run(*arguments).exception


def test_lengths_that_contradict_each_other_are_refused():
    with pytest.raises(ConfigError, match="at least --min-tokens=200, got 100"):
        raise run("--max-tokens", "100").exception


def test_no_figure_is_cut_where_the_table_goes_to_a_file(capsys):
    rows = [{"way": "a way of many words", **{f"figure {n}": 16_793_600 + n for n in range(9)}}]
    emit("wide", rows)
    out = capsys.readouterr().out
    assert all(f"{16_793_600 + n:,}" in out for n in range(9))
