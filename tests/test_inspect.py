import json

import numpy as np
import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError, ShardError
from omniload.shards import open_shards
from omniload.tools.cli import app
from omniload.tools.data import open_data
from omniload.tools.inspect_facts import describe, distribution
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe
from tests.data_makers import llava_set
from tests.loader_data import write_data
from tests.shard_makers import make_shards
from tests.tar_makers import indexed


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
    rng = np.random.default_rng(0)
    for column in (
        np.array([5], np.int32),
        np.zeros(10, np.int32),
        np.array([1] * 1000 + [2**31 - 1], np.int32),
        rng.integers(0, 5, 1000).astype(np.int32),
        rng.pareto(1, 5000).astype(np.int32),
    ):
        found = distribution(column)
        assert sum(found["histogram"]["counts"]) == len(column)
        assert found["histogram"]["edges"][0] == column.min()
        assert found["histogram"]["edges"][-1] > int(column.max())
        widths = np.diff(found["histogram"]["edges"])
        assert len(set(widths[:-1])) <= 1


def test_errors_are_ours(tmp_path, shards):
    for arguments, kind in (
        ([str(tmp_path)], ShardError),
        ([str(shards), "--sample", "-1"], ConfigError),
    ):
        done = CliRunner().invoke(app, ["inspect", *arguments])
        assert isinstance(done.exception, kind)


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two folders of shards, one of tars, and their mixture."""
    folder = tmp_path_factory.mktemp("sets")
    write_data(folder / "a", num_rows=30)
    write_data(folder / "b", num_rows=20, num_images=(2,), seed=1)
    indexed(folder / "tars", counts=(9,))
    (folder / "mix.yaml").write_text(
        "sets: [{source: a, repeat: 0.5}, {source: b, repeat: 2}, {source: tars}]"
    )
    return folder


def inspect(*arguments):
    done = CliRunner().invoke(app, ["inspect", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_tars_are_shown_like_shards(sets):
    facts = inspect(sets / "tars", "--sample", "2")
    assert (facts["kind"], facts["rows"], facts["shards"]) == ("tars", 9, 1)
    assert facts["fingerprint"] == open_data(sets / "tars").fingerprint
    assert facts["bytes"] == sum(path.stat().st_size for path in (sets / "tars").glob("*.tar"))
    assert [sample["key"] for sample in facts["samples"]] == ["0000", "0004"]
    assert facts["samples"][0]["messages"][0]["role"] == "user"


def test_a_mixture_shows_its_sets_in_an_epoch(sets):
    for epoch in (0, 1):
        facts = inspect(sets / "mix.yaml", "--epoch", epoch)
        assert [one["rows"] for one in facts["sets"]] == [15, 40, 9]
        assert [one["passes_so_far"] for one in facts["sets"]] == [
            0.5 * (epoch + 1),
            2 * (epoch + 1),
            epoch + 1,
        ]
        assert list(facts["by_source"]) == ["a", "b", "tars"]
        tiles = sum(one["num_tiles"]["sum"] for one in facts["by_source"].values())
        assert tiles == facts["distributions"]["num_tiles"]["sum"]
    page = CliRunner().invoke(app, ["inspect", str(sets / "mix.yaml")])
    assert page.exit_code == 0
    assert "sets of this epoch" in page.stdout


@pytest.mark.parametrize("workers", [1, 2])
def test_a_scan_counts_images_and_tells_sources_apart(sets, workers):
    facts = inspect(sets / "mix.yaml", "--scan", "--workers", workers)["scan"]
    opened = {name: open_data(sets / name) for name in ("a", "b", "tars")}
    expected, images = {}, 0
    for name, source in opened.items():
        for row in range(len(source)):
            record = source.read(row)
            title = name if len(source.sources) == 1 else f"{name}/{record.source}"
            found = expected.setdefault(title, [0, 0, 0])
            for place, value in enumerate((1, len(record.input_ids), len(record.images))):
                found[place] += value
            images += len(record.images)
    assert {
        name: [found["rows"], found["num_tokens"]["sum"], found["images"]["sum"]]
        for name, found in facts["by_source"].items()
    } == expected
    assert facts["images"]["sum"] == images
    assert facts["unreadable"] == 0


def test_tilings_of_single_sources_are_shown(tmp_path):
    from tests.test_tilings_of_sets import POLICIES, RECIPE, meta_set, run

    run(meta_set(tmp_path / "raw"), tmp_path / "out", recipe=RECIPE)
    facts = inspect(tmp_path / "out")
    assert facts["source_tilings"]["few"] == POLICIES["few"].settings()
    page = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")]).stdout
    assert "  few: max_tiles=2" in page


def test_a_mixture_is_planned_like_shards(sets):
    arguments = ["plan", str(sets / "mix.yaml"), "--json", "--budget-tokens", "900"]
    done = CliRunner().invoke(app, [*arguments, "--ranks", "2"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["source"] == str(sets / "mix.yaml")
    assert {row["num_rows"] for row in facts["rows"]} == {64}


def test_tars_without_an_index_are_sent_to_the_command_that_makes_one(tmp_path):
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    with pytest.raises(ShardError, match="tars without an index: make one with `omniload index"):
        open_data(tmp_path)
