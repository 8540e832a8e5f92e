import json

import numpy as np
import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError, ShardError
from omniload.shards import open_shards
from omniload.tools.cli import app
from omniload.tools.inspect_cmd import describe
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe
from tests.data_makers import llava_set
from tests.shard_makers import make_shards


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    src = llava_set(folder / "raw", 60)
    recipe = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)
    preprocess_data(src, folder / "out", recipe=recipe)
    return folder / "out"


def test_json_gives_facts_distributions_and_samples(shards):
    done = CliRunner().invoke(app, ["inspect", str(shards), "--json", "--sample", "5"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    index = open_shards(shards).index
    assert facts["rows"] == 60
    assert facts["sources"] == {"llava_instruct": 60}
    assert facts["settings"]["tiling"]["max_tiles"] == 4
    for name in ("num_tokens", "num_tiles", "num_loss_tokens"):
        found = facts["distributions"][name]
        column = getattr(index, name)
        assert found["sum"] == int(column.sum())
        assert found["percentiles"]["100"] == int(column.max())
        assert sum(found["histogram"]["counts"]) == 60
    assert [sample["row"] for sample in facts["samples"]] == [0, 12, 24, 36, 48]
    for sample in facts["samples"]:
        assert sample["num_tokens"] == int(index.num_tokens[sample["row"]])
        assert sample["num_loss_tokens"] == int(index.num_loss_tokens[sample["row"]])
        assert sum(image["tiles"] for image in sample["images"]) == index.num_tiles[sample["row"]]


def test_the_page_for_people_names_what_matters(shards):
    done = CliRunner().invoke(app, ["inspect", str(shards)])
    assert done.exit_code == 0, done.output
    for text in (
        "60 rows in",
        "template=chatml",
        "llava_instruct",
        "num_loss_tokens: sum",
        "row 0:",
    ):
        assert text in done.stdout
    assert "assistant: " in done.stdout


def test_no_sample_and_more_samples_than_rows(shards):
    opened = open_shards(shards)
    assert describe(opened, num_samples=0)["samples"] == []
    assert len(describe(opened, num_samples=100)["samples"]) == 60


def test_shards_without_text_and_equal_lengths_are_shown(tmp_path):
    make_shards(tmp_path, 3, with_messages=False)
    facts = describe(open_shards(tmp_path))
    assert facts["samples"][0]["messages"] is None
    assert CliRunner().invoke(app, ["inspect", str(tmp_path)]).exit_code == 0


def test_histograms_count_every_row_once_however_long_the_tail():
    from omniload.tools.inspect_cmd import _distribution

    rng = np.random.default_rng(0)
    for column in (
        np.array([5], np.int32),
        np.zeros(10, np.int32),
        np.array([1] * 1000 + [2**31 - 1], np.int32),
        rng.integers(0, 5, 1000).astype(np.int32),
        rng.pareto(1, 5000).astype(np.int32),
    ):
        found = _distribution(column)
        assert sum(found["histogram"]["counts"]) == len(column)
        assert found["histogram"]["edges"][0] == column.min()
        assert found["histogram"]["edges"][-1] == int(column.max()) + 1


def test_errors_are_ours(tmp_path, shards):
    for arguments, kind in (
        ([str(tmp_path)], ShardError),
        ([str(shards), "--sample", "-1"], ConfigError),
    ):
        done = CliRunner().invoke(app, ["inspect", *arguments])
        assert isinstance(done.exception, kind)
