"""`omniload bench pipeline` runs its parts with the setting that was committed beforehand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.simulate import simulate
from omniload.tools.bench_pipeline import PARTS
from omniload.tools.bench_pipeline_ablation import ARMS, Draw, ablation, pair_table, planner_for
from omniload.tools.bench_pipeline_engine import engine_cases
from omniload.tools.bench_pipeline_plans import TIGHT, frozen_match, pair_match
from omniload.tools.cli import app
from omniload.tools.pipeline_setting import PUBLISHED, SETTING, internvl_lengths

SMALL = replace(SETTING, micro_batches=8, data_parallel=2, steps=3)


def run(*arguments):
    done = CliRunner().invoke(app, ["bench", "pipeline", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_setting_is_the_one_that_was_committed():
    chosen = (SETTING.stages, SETTING.data_parallel, SETTING.micro_batches, SETTING.memory_gb)
    assert chosen == (4, 4, 32, 80.0)
    assert (SETTING.vision_efficiency, SETTING.language_efficiency) == (0.40, 0.55)
    assert PUBLISHED["internvl-6b-20b"] == {
        "baseline": 61.8, "data": 51.9, "model": 29.0, "memory": 21.3,
    }  # fmt: skip
    assert internvl_lengths(5000, seed=3).fingerprint == "fc008f8894c4ba1790a551b0aa8dc5d0"


def test_made_up_data_has_its_shares():
    index = internvl_lengths(40_000)
    tiles = index.num_tiles
    assert abs((tiles == 0).mean() - 0.06) < 0.005
    # half of one tile, and those of documents and charts that have one
    assert abs((tiles == 1).mean() - (0.50 + 0.18 * 0.467 + 0.26 * 0.032)) < 0.01


def test_padded_micro_batches_hold_all_tiles_and_the_longest_row_as_often_as_there_are_rows():
    draw = Draw(setting=SMALL, seed=1)
    rows = len(draw.index) // 4 * 4
    assert len(draw.padded) == rows // 4
    assert draw.padded.num_tiles.sum() <= draw.index.num_tiles.sum()
    assert draw.padded.num_tokens.sum() > draw.index.num_tokens.sum()
    assert (draw.padded.num_tokens % 4 == 0).all()
    np.testing.assert_array_equal(draw.padded.sum_squares * 4, draw.padded.num_tokens**2)


def test_packs_keep_the_budget_and_every_row():
    draw = Draw(setting=SMALL, seed=1)
    assert draw.packs.num_tokens.max() <= draw.budget.tokens == 4096
    assert draw.packs.num_tiles.max() <= draw.budget.tiles
    assert draw.packs.num_tiles.sum() == draw.index.num_tiles.sum()
    assert draw.samples_per_pack * len(draw.packs) == pytest.approx(len(draw.index))
    assert isinstance(draw.full, Shapes)
    assert (draw.full.sum_squares >= draw.packs.sum_squares.max()).all()


def test_draws_are_of_one_data_set_whose_rows_all_have_a_tile():
    draws = [Draw(setting=SMALL, seed=seed) for seed in range(3)]
    assert {(draw.budget.tokens, draw.budget.tiles) for draw in draws} == {(4096, 11)}
    assert all(draw.index.num_tiles.min() == 1 for draw in draws)


def test_every_step_of_the_method_saves_time():
    found = ablation("internvl-6b-20b", SMALL, 0)
    assert tuple(found) == ARMS
    days = list(found.values())
    assert days[:5] == sorted(days[:5], reverse=True)
    assert found["ours"] < found["memory"]
    assert found == ablation("internvl-6b-20b", SMALL, 0)


def test_pairs_say_what_fits_and_which_is_quicker():
    found = pair_match("internvl-6b-20b", replace(SMALL, memory_gb=48.0, data_parallel=4))
    assert (found.other_s, found.ratio) == (None, None)
    assert found.ours_s > 0
    frozen = frozen_match("internvl-6b-8b", SMALL)
    assert 1.1 < frozen.ratio < frozen.most
    assert all(changed != SETTING for changed in TIGHT.values())


def test_cases_of_the_engine_are_ranked_by_what_they_do():
    cases = engine_cases()
    steps = {name: simulate(times).step_ns for name, times in cases.items()}
    assert steps["ours, ordered"] < steps["ours"] < steps["ours, recomputed"]
    assert steps["uniform"] < steps["uniform, recomputed"]
    for times in cases.values():
        assert times.forward.shape == (4, 12)
        assert times.transfer.max() == 0
    assert cases["ours"].forward.mean() == pytest.approx(50e6)


def test_json_has_a_row_for_each_figure_with_its_target():
    found = json.loads(run("--only", "solve", "--only", "order", "--json"))
    assert found["benchmark"] == "pipeline"
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert set(row) == {"figure", "found", "target", "met"}
        assert row["found"] > 0
    assert "4 stages, 4 data-parallel ranks, 32 micro-batches" in found["notes"]


def test_ablation_is_shown_beside_the_published_figures():
    text = " ".join(run("--only", "ablation", "--draws", "1").split())
    for words in ("61.8", "51.9", "21.3", "30.5", "order / memory", "<= 0.95"):
        assert words in text


def test_parts_that_are_not_there_are_refused():
    with pytest.raises(ConfigError, match=r"--only must be of ablation, sensitivity, .*got speed"):
        run("--only", "speed")
    assert PARTS[-1] == "engine"  # the one that runs only when it is asked for


def test_plans_are_made_for_full_packs():
    table = pair_table("internvl-6b-20b", SETTING)
    planner = planner_for(table, Draw(setting=SMALL, seed=0))
    assert planner.memory_gb == 80
    assert planner.costs.worst.num_tokens.tolist() == [4096.0]
    assert not planner.costs.selective


@pytest.mark.slow
def test_the_simulator_is_close_to_the_real_engine():
    pytest.importorskip("deepspeed")
    found = json.loads(run("--only", "engine", "--json"))
    runs = next(iter(found["tables"].values()))
    by_engine = sorted(runs, key=lambda line: line["engine s"])
    # no time is asserted: the engine ranks what differs clearly as the simulator does
    assert by_engine[-1]["case"] in ("ours, recomputed", "uniform, recomputed")
    assert all(line["engine s"] > 0.98 * line["simulated s"] for line in runs)
