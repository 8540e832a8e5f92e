"""`omniload plan-pipeline` plans for the data as the loader groups it, and says what it found."""

import dataclasses
import html.parser
import itertools
import json
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.partition import plan_pipeline
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.presets import preset
from omniload.pipeline.table import CostTable
from omniload.plan import make_plan
from omniload.tools.cli import app
from omniload.tools.length_files import read_length_file
from omniload.tools.lengths import make_lengths
from omniload.tools.pipeline_inputs import Parallel, read_shapes
from omniload.types import Budget
from tests.shard_makers import make_shards

MODEL = ("--model", "internvl2-2b", "--micro-batches", 8)


def run(*arguments):
    done = CliRunner().invoke(app, ["plan-pipeline", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def plan(*arguments):
    return json.loads(run(*arguments, "--json"))


@pytest.fixture(scope="module")
def lengths(tmp_path_factory):
    path = tmp_path_factory.mktemp("lengths") / "lengths.parquet"
    index = make_lengths(3000, seed=5)
    columns = {name: getattr(index, name) for name in ("num_tokens", "num_tiles")}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.fixture(scope="module")
def found(lengths):
    return plan(*MODEL, "--memory", "24GB", "--data", lengths, "--data-parallel", 2)


def test_json_has_the_fields_that_others_rely_on(found):
    parts, stages = found["parts"], found["stages"]
    assert parts[0] == 0
    assert parts[-1] == 51
    assert len(parts) == 5
    assert len(found["recompute"]) == 51
    assert set(found["recompute"]) <= {0, 1}
    assert [stage["layers"] for stage in stages] == np.diff(parts).tolist()
    for stage in stages:
        assert {"layers", "forward_ms", "backward_ms", "memory_gb"} <= set(stage)
        assert stage["memory_gb"] <= 24
    assert {"parameters", "uniform", "profile", "omnibal"} <= set(found["baselines"])
    for other in found["baselines"].values():
        assert set(other) == {"parts", "step_ms", "fits"}
        assert len(other["parts"]) == 5
    assert found["step_ms"] <= found["baselines"]["parameters"]["step_ms"]
    assert found["step_ms_ordered"] < found["step_ms"]
    assert sum(found["bubbles"].values()) == pytest.approx(1)


def test_one_stage_is_planned_and_takes_as_long_in_any_order(lengths):
    found = plan(*MODEL, "--stages", 1, "--data", lengths)
    assert found["step_ms_ordered"] == found["step_ms"]
    assert {tuple(other["parts"]) for other in found["baselines"].values()} == {(0, 51)}


def test_plan_is_that_of_the_planner_for_the_groups_of_the_loader(found, lengths):
    index = read_length_file(lengths)
    budget = Budget(tokens=4096, tiles=found["data"]["budget_tiles"])
    groups = make_plan(index, budget=budget, dp_world_size=2, accumulation=8, oversize="drop")
    rows, samples = [], 0
    steps = min(groups.num_steps, 16)
    for step in range(steps):
        for micro_step, rank in itertools.product(range(8), range(2)):
            mine = groups.micro_batch(step, micro_step, rank)
            samples += len(mine)
            if len(mine):
                tokens = index.num_tokens[mine].astype(float)
                rows.append((index.num_tiles[mine].sum(), tokens.sum(), (tokens**2).sum()))
    tiles, tokens, squares = np.array(rows, float).T
    most = np.array([4096.0 * index.num_tokens.max()])
    expected = plan_pipeline(
        cost_table(preset("internvl2-2b"), data_parallel=2),
        Shapes(num_tiles=tiles, num_tokens=tokens, sum_squares=squares),
        num_stages=4,
        num_micro_batches=8,
        memory_gb=24,
        worst=Shapes(
            num_tiles=np.array([float(budget.tiles)]),
            num_tokens=np.array([4096.0]),
            sum_squares=most,
        ),
        selective=False,
    )
    assert tuple(found["parts"]) == expected.parts
    assert found["step_ms"] == expected.step_ms
    per_step = samples / len(rows) * 16
    assert found["data"]["samples_per_step"] == pytest.approx(per_step)
    days = expected.step_ms / 1e3 * (3000 / per_step) * 8 / 86400
    assert found["gpu_days"] == pytest.approx(days)


def test_out_is_a_plan_that_training_takes(lengths, tmp_path):
    path = tmp_path / "plan.json"
    table = run(*MODEL, "--data", lengths, "--recompute", "selective", "--memory", "20GB",
                "--out", path)  # fmt: skip
    made = PipelinePlan.from_json(path.read_text(encoding="utf-8"))
    assert made.memory_limit_gb == 20
    assert max(stage.memory_gb for stage in made.stages) <= 20
    for words in ("vision", "OmniBal's search", "filling and draining", "GPU days", "limit 20 GB"):
        assert words in table


def test_shards_are_read_and_several_data_sets_joined(lengths, tmp_path):
    folder = tmp_path / "shards"
    make_shards(folder, 80)
    alone = plan(*MODEL, "--data", folder, "--stages", 2)
    both = plan(*MODEL, "--data", folder, "--data", lengths, "--stages", 2)
    assert alone["data"]["num_samples"] == 80
    assert both["data"]["num_samples"] == 3080
    assert both["data"]["source"] == f"shards {folder.name} + lengths lengths.parquet"


def test_without_data_it_is_made_up_and_says_so():
    text = run(*MODEL, "--stages", 2)
    assert "made-up rows" in text.replace("\n", " ")
    made = plan(*MODEL, "--stages", 2)["data"]
    assert (made["made_up"], made["num_samples"]) == (True, 1_200_000)


@pytest.mark.parametrize("mode", ["full", "none"])
def test_recompute_of_all_and_of_none(lengths, mode):
    options = (*MODEL, "--data", lengths, "--recompute", mode)
    found, other = plan(*options, "--memory", "80GB"), plan(*MODEL, "--data", lengths)
    blocks = [layer for layer in range(51) if layer not in (25, 50)]
    wanted = {1} if mode == "full" else {0}
    assert {found["recompute"][layer] for layer in blocks} == wanted
    assert found["recompute"][25] == found["recompute"][50] == 0
    # nothing is recomputed without a limit
    assert (found["step_ms"] > other["step_ms"] * 1.2) == (mode == "full")
    with pytest.raises(ConfigError, match=f"with {'everything' if mode == 'full' else 'nothing'}"):
        plan(*options, "--memory", "7GB")


def test_a_frozen_encoder_is_known(lengths):
    found = plan(*MODEL, "--data", lengths, "--freeze", "vision")
    trained = plan(*MODEL, "--data", lengths)
    assert found["parts"][1] > trained["parts"][1]
    assert found["stages"][0]["backward_ms"] < 0.5 * found["stages"][0]["forward_ms"]
    kept = plan(*MODEL, "--data", lengths, "--freeze", "vision", "--trained-stages")
    assert kept["parts"][1] > 24


def test_a_measured_table_is_planned_alone_or_corrects_the_counted_one(lengths, tmp_path):
    counted = cost_table(preset("internvl2-2b"))
    slow = dataclasses.replace(
        counted,
        source="measured",
        kinds=tuple(
            dataclasses.replace(kind, forward_s=kind.forward_s.scaled(3))
            if kind.part == "vision" else kind
            for kind in counted.kinds
        ),
    )  # fmt: skip
    path = tmp_path / "table.json"
    path.write_text(slow.to_json(), encoding="utf-8")
    assert CostTable.from_json(path.read_text(encoding="utf-8")) == slow
    before = plan(*MODEL, "--data", lengths)
    alone = plan("--table", path, "--micro-batches", 8, "--data", lengths)
    corrected = plan(*MODEL, "--table", path, "--data", lengths)
    assert [alone["table_source"], corrected["table_source"]] == ["measured", "corrected"]
    for found in (alone, corrected):
        assert found["parts"][1] < before["parts"][1]
    with pytest.raises(ConfigError, match="--tensor-parallel must be that of the table: expected"):
        plan("--table", path, "--tensor-parallel", 2, "--data", lengths)
    with pytest.raises(ConfigError, match="--freeze needs --model or --config"):
        plan("--table", path, "--freeze", "vision")


def test_config_of_hugging_face(lengths, tmp_path):
    config = {
        "model_type": "llava",
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 256, "intermediate_size": 512,
            "num_hidden_layers": 4, "image_size": 336, "patch_size": 14,
        },
        "text_config": {
            "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024,
            "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": 1000,
        },
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = plan("--config", tmp_path, "--stages", 2, "--data", lengths)
    assert found["parts"][-1] == 3 + 2 + 6 + 1  # the last block of the encoder is not used
    with pytest.raises(ConfigError, match="--model or --config, not both"):
        plan("--config", tmp_path, *MODEL)


class _Boxes(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.kinds, self.links, self.limits = [], [], 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "rect" and "box" in found["class"]:
            self.kinds.append(found["class"].split()[1])
        self.limits += tag == "line" and found["class"] == "limit"
        self.links += [value for name, value in attrs if name in ("src", "href")]


def test_gantt_draws_every_pass_and_needs_nothing_from_elsewhere(lengths, tmp_path):
    path = tmp_path / "step.html"
    run(*MODEL, "--data", lengths, "--memory", "24GB", "--gantt", path)
    page = path.read_text(encoding="utf-8")
    boxes = _Boxes()
    boxes.feed(page)
    assert boxes.kinds.count("forward") == boxes.kinds.count("backward") == 4 * 8
    assert boxes.kinds.count("send-activation") == 3 * 8
    assert boxes.limits == 4
    assert boxes.links == []
    assert "http" not in page.replace("<!doctype html>", "")
    assert "script" not in page
    assert "stage 2, forward of micro-batch 7:" in page


def test_names_are_escaped_in_the_drawing(lengths, tmp_path):
    table = dataclasses.replace(cost_table(preset("internvl2-2b")), name="<b>&me</b>")
    (tmp_path / "table.json").write_text(table.to_json(), encoding="utf-8")
    run("--table", tmp_path / "table.json", "--data", lengths, "--gantt", tmp_path / "step.html")
    page = (tmp_path / "step.html").read_text(encoding="utf-8")
    assert "&lt;b&gt;&amp;me&lt;/b&gt;" in page
    assert "<b>" not in page


@pytest.mark.parametrize("form", ["json", "deepspeed", "megatron", "colossalai", "torch"])
def test_exports_are_written_and_what_they_lose_is_said(lengths, tmp_path, form):
    path = tmp_path / "export.json"
    options = (*MODEL, "--data", lengths, "--memory", "14GB", "--tensor-parallel", 2)
    found = plan(*options, "--export", form, path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content == found["export"]["content"]
    if form == "json":
        again = PipelinePlan.from_json(path.read_text(encoding="utf-8"))
        assert list(again.parts) == found["parts"]
    elif form == "deepspeed":
        assert content["module"]["plan"]["parts"] == found["parts"]
        assert content["config"]["gradient_accumulation_steps"] == 8
    elif form == "megatron":
        assert content["layout"].startswith("E")
        assert "s a step instead of" in content["lost"][0]
        assert content["lost"][0] in run(*options, "--export", form, path)
    elif form == "colossalai":
        assert sum(content["num_layers_per_stage"]) == 48
    else:
        assert len(content) == sum(found["recompute"]) > 0


def test_names_of_modules_are_given(lengths, tmp_path):
    path = tmp_path / "policy.json"
    options = (*MODEL, "--data", lengths, "--recompute", "full", "--export", "torch", path)
    plan(*options, "--modules", "vision=eye.{},projector=glue,language=mind.{}")
    policy = json.loads(path.read_text(encoding="utf-8"))
    assert set(policy) == {
        "glue",
        *(f"{part}.{at}" for part in ("eye", "mind") for at in range(24)),
    }
    with pytest.raises(ConfigError, match="part=path pairs, got 'vision='"):
        plan(*options, "--modules", "vision=")
    with pytest.raises(ConfigError, match="--modules must be one of internvl, llava, qwen"):
        plan(*options, "--modules", "gpt")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (("--model", "nothing"), "model must be one of internvl-6b-20b"),
        ((), "a plan needs a model"),
        ((*MODEL, "--stages", 60), "60 stages for 51 layers"),
        ((*MODEL, "--memory", "6.5GB"), "needs [0-9.]+ GB on stage"),
        ((*MODEL, "--vision-efficiency", 40), "share of the peak and must be at most 1, got 40"),
        ((*MODEL, "--recompute", "some"), "--recompute must be one of auto, selective, full, none"),
        ((*MODEL, "--gpus", 6), "expected a multiple of 4, got 6"),
        ((*MODEL, "--gpus", 8, "--data-parallel", 3), "expected 12, got 8"),
        ((*MODEL, "--freeze", "eye"), "parts to freeze are vision, projector, language"),
        ((*MODEL, "--tokens", 100), "must be rows that fit"),
        ((*MODEL, "--export", "pdf", "plan.pdf"), "--export must be one of json, deepspeed"),
        ((*MODEL, "--table", "none.json"), "--table must be a file that can be read"),
        ((*MODEL, "--out", "nowhere/plan.json"), "must be a file that can be written"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would_be_needed(options, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_tokens,num_tiles\n" + "900,3\n300,1\n" * 200, encoding="utf-8")
    with pytest.raises(ConfigError, match=match):
        plan(*options, "--data", lengths)


def test_gpus_are_dealt_to_copies():
    found = Parallel.of(stages=4, tensor=2, data=None, gpus=32, zero=1)
    assert (found.data, found.gpus) == (4, 32)
    assert Parallel.of(stages=3, tensor=1, data=None, gpus=None, zero=0).gpus == 3


def test_fewer_rows_than_a_step_are_used_without_the_fillers(tmp_path):
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_tokens,num_tiles\n" + "900,3\n" * 10, encoding="utf-8")
    parallel = Parallel(stages=2, data=4)
    found = read_shapes([lengths], tokens=1000, tiles=None, parallel=parallel, micro_batches=8,
                        seed=0)  # fmt: skip
    assert found.shapes.num_tokens.tolist() == [900.0] * 10
    assert found.samples_per_step == 32


def test_help_shows_an_example():
    done = subprocess.run(
        [sys.executable, "-m", "omniload", "plan-pipeline", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "omniload plan-pipeline --model internvl-6b-20b" in " ".join(done.stdout.split())
