"""`omniload bench grouping` measures what it says, on lengths that are the same everywhere."""

import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from omniload.errors import ConfigError
from omniload.grouping import GROUPINGS
from omniload.index import LengthIndex
from omniload.tools.bench_grouping import group_figures, grouping
from omniload.tools.length_files import matched_tiles, read_lengths
from omniload.tools.lengths import KINDS, make_lengths
from omniload.types import Budget, Groups

app = typer.Typer()
app.command()(grouping)


def run(*arguments):
    done = CliRunner().invoke(app, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_made_up_lengths_are_the_same_everywhere():
    assert make_lengths(5000, seed=3).fingerprint == "7b97f8a6bb938d0d9c4ac96029c5999b"
    assert make_lengths(0).fingerprint == LengthIndex.from_arrays(
        num_tokens=[], num_tiles=[]
    ).fingerprint  # fmt: skip


def test_made_up_lengths_have_the_shares_and_quantiles_they_are_fitted_to():
    for kind in KINDS:
        index = make_lengths(40_000, kinds=[kind], max_tokens=2**20)
        text = index.num_tokens - 256 * index.num_tiles
        percent = [5, 25, 50, 75, 90, 95, 99]
        np.testing.assert_allclose(np.percentile(text, percent), kind.text[1:-1], rtol=0.06)
        for tiles, weight in kind.tiles.items():
            share = weight / sum(kind.tiles.values())
            assert abs((index.num_tiles == tiles).mean() - share) < 0.01


def test_mixture_has_its_shares_and_its_limit():
    index = make_lengths(40_000, max_tokens=2048)
    assert index.num_tokens.max() == 2048
    assert abs((index.num_tiles == 0).mean() - 0.06) < 0.005
    images = make_lengths(1000, kinds=[kind for kind in KINDS if kind.name != "text"])
    assert images.num_tiles.min() == 1


def test_limit_that_cuts_into_images_is_refused():
    with pytest.raises(ConfigError, match="expected max_tokens above 1792"):
        make_lengths(10, max_tokens=1792)


def test_figures_are_those_of_full_steps():
    index = LengthIndex.from_arrays(num_tokens=[4, 6, 10, 2, 8], num_tiles=[1, 1, 0, 3, 1])
    groups = Groups(rows=np.array([0, 1, 2, 3, 4]), offsets=np.array([0, 2, 3, 4, 5]))
    budget = Budget(tokens=10, tiles=3)
    figures = group_figures(groups, index, budget=budget, ranks=3, accumulation=1)
    # tokens 10, 10, 2 and tiles 2, 0, 3; the fourth group fills no step
    assert figures["groups"] == 4
    assert figures["groups over bound"] == pytest.approx(4 / 3)
    assert figures["dist tokens"] == pytest.approx(8 / 30)
    assert figures["dist tiles"] == pytest.approx(4 / 9)
    both = group_figures(groups, index, budget=budget, ranks=2, accumulation=2)
    assert both["dist tokens"] == pytest.approx(6 / 36)  # 10 + 2 against 10 + 8


def test_tile_budget_is_matched_to_the_data():
    index = LengthIndex.from_arrays(num_tokens=[300, 500], num_tiles=[1, 1])
    assert matched_tiles(index, 4096) == 11
    assert matched_tiles(LengthIndex.from_arrays(num_tokens=[], num_tiles=[]), 4096) == 0


def test_command_compares_all_groupings():
    found = run("--samples", 3000, "--ranks", 4, "--repeats", 1)
    rows = {row["grouping"]: row for row in found["rows"]}
    assert list(rows) == list(GROUPINGS)
    assert all(row["samples"] == 3000 and row["seconds"] > 0 for row in rows.values())
    assert rows["buffered"]["groups"] <= rows["isf"]["groups"] < rows["random"]["groups"]
    for row in rows.values():
        assert row["even tokens"] < row["dist tokens"]
        assert row["step ms"] > 0
    assert "Budget: 4096 tokens, 13 tiles" in found["notes"]


def test_command_prints_a_table():
    done = CliRunner().invoke(app, ["--samples", "500", "--only", "isf", "--repeats", "1"])
    assert done.exit_code == 0, done.output
    assert "isf" in done.output
    assert "bound" in done.output


@pytest.mark.parametrize("names", [("num_tokens", "num_tiles"), ("n_tokens", "n_tiles")])
def test_lengths_come_from_a_parquet_file(tmp_path, names):
    path = tmp_path / "lengths.parquet"
    columns = [np.array([300, 600, 9000], np.int32), np.array([1, 2, 30], np.int16)]
    pyarrow.parquet.write_table(pyarrow.table(dict(zip(names, columns, strict=True))), path)
    found = run("--lengths", path, "--only", "isf", "--ranks", 1, "--repeats", 1)
    assert found["rows"][0]["samples"] == 2
    assert found["rows"][0]["groups"] == 1
    assert "1 rows over the budget left out" in found["notes"]


def test_file_that_is_no_parquet_or_lacks_columns_is_refused(tmp_path):
    path = tmp_path / "lengths.parquet"
    path.write_text("not Parquet")
    with pytest.raises(ConfigError, match="must be a shard folder, a Parquet file or"):
        read_lengths(path, samples=1, seed=0)
    pyarrow.parquet.write_table(pyarrow.table({"num_tokens": [1]}), path)
    with pytest.raises(ConfigError, match="must have a column num_tiles or n_tiles"):
        read_lengths(path, samples=1, seed=0)
