"""`omniload plan` shows the figures of plans, over shards and files of lengths."""

import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from omniload.costs import CostModel
from omniload.errors import ConfigError, ShardError
from omniload.grouping import GROUPINGS
from omniload.plan import make_plan
from omniload.shards import open_shards
from omniload.tools.cli import app
from omniload.tools.length_files import read_length_file
from omniload.tools.lengths import make_lengths
from omniload.tools.plan_cmd import compare_plans
from omniload.tools.plan_plot import draw_loads
from omniload.types import Budget
from tests.shard_makers import make_shards

SHUFFLED = [name for name in GROUPINGS if name != "sequential"]


def run(*arguments):
    done = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    """The same lengths as an index, and in a Parquet and a CSV file with the other names."""
    folder = tmp_path_factory.mktemp("lengths")
    index = make_lengths(4000)
    parquet, csv = folder / "lengths.parquet", folder / "lengths.csv"
    columns = {name: getattr(index, name) for name in ("num_tokens", "num_tiles")}
    pyarrow.parquet.write_table(pyarrow.table(columns), parquet)
    rows = np.stack([index.num_tiles, index.num_tokens, index.num_loss_tokens], axis=1)
    header = "n_tiles,n_tokens,n_loss_tokens"
    np.savetxt(csv, rows, fmt="%d", delimiter=",", header=header, comments="")
    return index, parquet, csv


def test_json_holds_the_figures_of_the_plans(lengths):
    index, parquet, _ = lengths
    found = json.loads(
        run(parquet, "--ranks", 4, "--accumulation", 2, "--budget-tokens", 4096, "--seed", 3,
            "--epoch", 1, "--sync", "none", "--max-steps", 1000, "--json")
    )  # fmt: skip
    assert [row["grouping"] for row in found["rows"]] == SHUFFLED
    assert (found["source"], found["seed"]) == ("lengths lengths.parquet", 3)
    plan = make_plan(
        read_length_file(parquet), budget=Budget(tokens=4096, tiles=13), dp_world_size=4,
        accumulation=2, grouping="random", seed=3, epoch=1, sync=None,
    )  # fmt: skip
    assert found["rows"][SHUFFLED.index("random")] == plan.figures().as_dict()
    assert plan.figures().num_rows == len(index)


def test_steps_are_balanced_for_the_way_in_which_ranks_meet():
    found = {
        sync: compare_plans(
            make_lengths(3000), budget=Budget(tokens=4096, tiles=13), dp_world_size=4,
            accumulation=4, groupings=["isf"], sync=sync, cost=CostModel(),
        )["isf"]
        for sync in (None, "step", "micro-step")
    }  # fmt: skip
    plain, step, micro_step = found.values()
    assert step.dist_tiles_step < 0.5 * plain.dist_tiles_step
    assert micro_step.dist_tiles_micro_step < min(
        plain.dist_tiles_micro_step, step.dist_tiles_micro_step
    )
    assert plain.samples_per_step == step.samples_per_step == micro_step.samples_per_step


def test_csv_file_gives_the_lengths_of_the_parquet_file(lengths):
    index, parquet, csv = lengths
    assert read_length_file(csv).fingerprint == index.fingerprint
    # without the loss column all tokens count
    assert read_length_file(parquet).num_loss_tokens.tolist() == (index.num_tokens - 1).tolist()
    arguments = ("--grouping", "isf", "--budget-tiles", 15, "--json", "--sync", "none")
    rows = [json.loads(run(path, *arguments))["rows"][0] for path in (csv, parquet)]
    assert rows[0]["dist_tiles_step"] == rows[1]["dist_tiles_step"] > 0
    assert rows[0]["loss_tokens_per_step"] < rows[1]["loss_tokens_per_step"]


def test_table_of_shards_names_bounds_and_what_was_left_out(tmp_path):
    make_shards(tmp_path / "shards", 60)
    output = run(
        tmp_path / "shards", "--ranks", 2, "--budget-tokens", 50, "--budget-tiles", 30,
        "--grouping", "isf", "--grouping", "random",
    )  # fmt: skip
    index = open_shards(tmp_path / "shards").index
    over = int(((index.num_tokens > 50) | (index.num_tiles > 30)).sum())
    assert over > 0
    text = " ".join(output.split())
    assert f"60 rows, {over} left out" in text.replace(f"{60 - over} rows", "60 rows")
    assert "dist tiles, micro-step" in text
    assert "time lost, step" in text
    assert "2 ranks x 1 groups" in text
    assert "random" in text
    assert "device" not in text


def test_time_of_a_tile_may_be_given(lengths):
    _, parquet, _ = lengths
    base = (parquet, "--grouping", "isf", "--sync", "none", "--json")
    with_tiles = json.loads(run(*base, "--tile-cost", 1e6))["rows"][0]
    assert with_tiles["dist_time_step"] == pytest.approx(with_tiles["dist_tiles_step"], rel=1e-2)
    without = json.loads(run(*base, "--tile-cost", 0))["rows"][0]
    assert without["dist_time_step"] == pytest.approx(without["dist_tokens_step"])


def test_groupings_are_compared_on_the_same_rows():
    found = compare_plans(
        make_lengths(3000), budget=Budget(tokens=2000, tiles=9), dp_world_size=4,
        sync=None, cost=CostModel(), max_steps=7,
    )  # fmt: skip
    assert list(found) == SHUFFLED
    assert len({(f.num_rows, f.num_dropped, f.size_bound) for f in found.values()}) == 1
    assert all(len(f.steps.measured) == 7 for f in found.values())
    assert found["isf"].num_groups < found["random"].num_groups
    assert found["length"].pad_ratio_unpacked < 0.1 < found["random"].pad_ratio_unpacked


def test_sharper_bound_is_computed_where_it_is_asked_for(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("n_tokens,n_tiles\n" + "20,5\n" * 60)
    command = (path, "--grouping", "isf", "--grouping", "random", "--budget-tiles", 13)
    rows = json.loads(run(*command, "--lp-bound", "--json"))["rows"]
    assert [(row["size_bound"], row["lp_bound"]) for row in rows] == [(24, 30)] * 2
    assert "30 by the linear programme" in " ".join(run(*command, "--lp-bound").split())
    assert "linear programme" not in run(*command)


def test_rows_that_all_pass_the_budget_are_refused():
    with pytest.raises(ConfigError, match=r"rows that fit Budget\(tokens=3, .* got 50 rows, and"):
        compare_plans(make_lengths(50), budget=Budget(tokens=3), dp_world_size=1, cost=CostModel())


def test_loads_are_drawn(lengths, tmp_path):
    _, parquet, _ = lengths
    run(parquet, "--grouping", "isf", "--sync", "none", "--plot", tmp_path / "loads.png")
    assert (tmp_path / "loads.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", ["loads.what", "missing/loads.png"])
def test_image_that_cannot_be_written_is_refused(tmp_path, name):
    plan = make_plan(make_lengths(50), budget=Budget(tokens=4096), grouping="random")
    found = {"random": plan.figures()}
    with pytest.raises(ConfigError, match="--plot must name an image file that can be written"):
        draw_loads(found, tmp_path / name)


def test_plot_without_matplotlib_says_how_to_get_it(lengths, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"needs matplotlib: .*pip install 'omniload-vlm\[bench"):
        run(lengths[1], "--grouping", "random", "--plot", tmp_path / "loads.png")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("n_tokens,n_tiles\n5,1\n7,x\n", "num_tiles must hold integers, got dtype object"),
        ("n_tokens,n_tiles\n5,1\n0,1\n", r"num_tokens must be between 1 and .* got 0 \(row 1\)"),
        ("n_tokens,tiles\n5,1\n", r"must have a column num_tiles or n_tiles, got \['n_tokens'"),
        ("n_tokens,n_tiles\n5\n", "must be a shard folder, a Parquet file or a .* file"),
        ("", "must be a shard folder, a Parquet file or a .* file"),
    ],
)
def test_csv_files_that_hold_no_lengths_are_refused(tmp_path, text, match):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        read_length_file(path)


def test_what_is_not_there_is_one_message_and_exit_code_1(tmp_path):
    for path, error in ((tmp_path / "none.parquet", "ConfigError"), (tmp_path, "ShardError")):
        done = subprocess.run(
            [sys.executable, "-m", "omniload", "plan", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"{error}: ")
        assert "Traceback" not in done.stderr
    with pytest.raises(ConfigError, match=r"there is no such file or folder. For data at a URL"):
        run("s3://bucket/set")
    with pytest.raises(ShardError):
        run(tmp_path)


def test_groupings_that_there_are_not_are_refused(lengths):
    with pytest.raises(ConfigError, match=r"grouping must be one of .*, got 'best'"):
        run(lengths[1], "--grouping", "isf", "--grouping", "best")
