"""The adapter's parts that need no second process: plans, the loss."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omniload import ConfigError
from omniload.packing import pack
from omniload.pipeline.export import deepspeed_arguments
from omniload.pipeline.plan import PipelinePlan
from tests.packing_samples import make_sample

pytest.importorskip("deepspeed")
from omniload.adapters.deepspeed import BalancedPipelineModule, token_loss
from omniload.adapters.deepspeed.plans import read_plan

ROOT = Path(__file__).resolve().parent.parent
PLAN = PipelinePlan(parts=(0, 2, 5), recompute=(0, 1, "mlp", 0, "attention"))


def test_a_plan_is_the_same_as_value_as_mapping_and_as_file(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(PLAN.to_json(), encoding="utf-8")
    for form in (PLAN, PLAN.to_dict(), file, str(file), json.loads(PLAN.to_json())):
        found = read_plan(form)
        assert (found.parts, found.recompute) == (PLAN.parts, PLAN.recompute)
    assert read_plan({"parts": [0, 1, 3]}).recompute == (0, 0, 0)
    assert read_plan({"parts": [0, 1], "recompute": [True]}).recompute == (1,)


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        ({}, "parts must be a list .* got none. Write one with `omniload plan-pipeline"),
        ([0, 1], "a mapping with parts .* got list. Write one with `omniload plan-pipeline"),
        ({"parts": "02"}, "parts must be a list .* got '02'"),
        ({"parts": ["0", 2]}, "parts must be integers, got '0'.* Write one with"),
        ({"parts": [0, 3, 2]}, "parts must start with 0 and rise"),
        ({"parts": [0, 2], "recompute": [0]}, "one entry a layer: expected 2, got 1"),
        ({"parts": [0, 2], "recompute": None}, "0 or 1 for each of 2 layers: got None"),
        ({"parts": [0, 2], "recompute": 1}, "0 or 1 for each of 2 layers: got 1"),
        ({"parts": [0, 4], "recompute": "0101"}, "0 or 1 for each of 4 layers: got '0101'"),
        ({"parts": [0, 2], "selective": ["mlp"]}, "selective must be a mapping .* got .'mlp'"),
        ({"parts": [0, 2], "selective": {"7": "mlp"}}, "from 0 to below 2 to names: got '7'"),
        ({"parts": [0, 2], "selective": {"-1": "mlp"}}, "from 0 to below 2 to names: got '-1'"),
        ({"parts": [0, 2], "selective": {-1: "mlp"}}, "from 0 to below 2 to names: got -1"),
        ({"parts": [0, 2], "selective": {"a": "mlp"}}, "from 0 to below 2 to names: got 'a'"),
        ({"parts": [0, 2], "selective": {"1": 1}}, "to names: got '1': 1"),
        ("no-such-plan.json", "'no-such-plan.json' can't be read as JSON: .* Write one with"),
    ],
)
def test_what_is_no_plan_is_refused(plan, part):
    with pytest.raises(ConfigError, match=part):
        read_plan(plan)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("parts: [0, 1]", "can't be read as JSON: Expecting value"),
        ("[0, 1]", "a mapping with parts .* got list"),
        ('{"parts": [0, 2, 1]}', "is none: parts must start with 0 and rise"),
        ('{"parts": [0, 2], "recompute": "01"}', "is none: recompute must be a list"),
    ],
)
def test_a_file_that_is_no_plan_is_named_with_a_remedy(tmp_path, text, part):
    file = tmp_path / "mine.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"mine.json' .*{part}.* Write one with `omniload plan-"):
        read_plan(file)


def test_without_deepspeed_the_adapter_says_what_to_install():
    code = (
        "import sys; sys.modules['deepspeed'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'deepspeed' else found(name, *rest)\n"
        "import omniload.adapters.deepspeed"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "pip install 'omniload-vlm[deepspeed]'" in done.stderr


def test_the_arguments_that_a_plan_is_exported_to_are_those_of_the_adapter():
    arguments = deepspeed_arguments(PLAN, num_micro_batches=4)["module"]
    assert set(arguments) <= set(inspect.signature(BalancedPipelineModule).parameters)
    assert read_plan(arguments["plan"]) == PLAN


def test_the_loss_is_the_weighted_sum_over_labels():
    batch = pack([make_sample(0, text=9, tiles_per_image=(1,)), make_sample(1, text=6)])
    logits = torch.randn(1, batch.num_tokens, 50)
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], batch.labels[1:])
    weights = batch.loss_weights(engine_divides_accumulation=True)
    for given in (logits, logits[0]):
        torch.testing.assert_close(token_loss(given, (batch.labels, weights)), expected)
    with pytest.raises(ConfigError, match=r"expected \d+ tokens, got \(4, 50\)"):
        token_loss(logits[0, :4], (batch.labels, weights))
