"""Exports say what the plan says, or what they lose; none of them needs more memory."""

import dataclasses
import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.export import (
    MODULE_NAMES,
    colossalai_lists,
    deepspeed_arguments,
    megatron_arguments,
    megatron_table,
    module_policy,
    parse_megatron_layout,
)
from omniload.pipeline.partition import plan_pipeline
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.presets import preset
from tests.pipeline_tables import ONE

LAYERS = (
    *["vision_block"] * 5,
    "projector",
    "embedding",
    *["language_block"] * 6,
    "head",
)
TABLE = dataclasses.replace(cost_table(preset("internvl2-2b")), layers=LAYERS)
LANGUAGE = range(7, 13)
BLOCKS = [*range(5), *LANGUAGE]


@st.composite
def plans(draw, choices=(0, 1, "mlp", "attention")):
    stages = draw(st.integers(1, 6))
    cuts = draw(st.sets(st.integers(1, 13), min_size=stages - 1, max_size=stages - 1))
    allowed = [[each for each in TABLE.kind(layer).choices if each in choices]
               for layer in range(14)]  # fmt: skip
    recompute = draw(st.tuples(*(st.sampled_from(each) for each in allowed)))
    return PipelinePlan(parts=(0, *sorted(cuts), 14), recompute=recompute)


def count(plan, layers, wanted=lambda choice: True):
    return [
        sum(low <= layer < high and wanted(plan.recompute[layer]) for layer in layers)
        for low, high in itertools.pairwise(plan.parts)
    ]


def unroll(layout):
    """Read a layout by the rules of Megatron-Core: repeat (...)*n, then x*n, then cut at |."""
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        layout = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), layout)
    return layout.split("|")


@settings(deadline=None, max_examples=200)
@given(plans())
def test_megatron_layout_has_all_blocks_of_each_stage_and_both_ends_once(plan):
    found = megatron_arguments(plan, TABLE)
    stages = unroll(found.layout)
    assert len(stages) == plan.num_stages
    assert [stage.count("t") for stage in stages] == count(plan, LANGUAGE)
    assert parse_megatron_layout(found.layout) == count(plan, LANGUAGE)
    together = "".join(stages)
    assert (together[0], together[-1]) == ("E", "L")
    assert set(together[1:-1]) == {"t"}
    assert found.flags[:4] == (
        "--pipeline-model-parallel-size", str(plan.num_stages),
        "--pipeline-model-parallel-layout", found.layout,
    )  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(plans())
def test_megatron_recomputes_at_least_what_the_plan_does_and_says_what_is_more(plan):
    found = megatron_arguments(plan, TABLE)
    blocks, wanted = count(plan, LANGUAGE), count(plan, LANGUAGE, lambda choice: choice != 0)
    options = dict(zip(found.flags[4::2], found.flags[5::2], strict=True))
    names = {plan.recompute[layer] for layer in LANGUAGE} - {0}
    if not names:
        assert options == {}
        return
    if options["--recompute-granularity"] == "selective":
        assert names == {"mlp"}
        assert options["--recompute-modules"] == "mlp"
        got = blocks
    elif options["--recompute-method"] == "uniform":
        assert options["--recompute-num-layers"] == "1"
        got = blocks
    else:
        got = [min(int(options["--recompute-num-layers"]), number) for number in blocks]
        assert names & {1, "attention"}
    assert all(has >= needs for has, needs in zip(got, wanted, strict=True))
    if got != wanted:
        assert any(str(wanted) in line for line in found.lost)


def test_megatron_plan_of_the_pinned_table_loses_no_layer():
    pinned = megatron_table(TABLE)
    plan = plan_pipeline(pinned, ONE, num_stages=3, num_micro_batches=4)
    assert plan.parts[1] >= 7
    found = megatron_arguments(plan, TABLE)
    assert found.lost == ()
    assert sum(parse_megatron_layout(found.layout)) == 6


def test_megatron_says_which_layers_move_and_what_the_encoder_recomputes():
    recompute = (1, 1, 1, *[0] * 11)
    plan = PipelinePlan(parts=(0, 4, 9, 14), recompute=recompute)
    found = megatron_arguments(plan, TABLE)
    assert found.layout == "E|t*2|t*4L"
    assert "3 of 7 layers before the language model (from layer 4) move" in found.lost[0]
    assert "3 of 5 blocks of the encoder" in found.lost[1]


def test_a_layout_of_other_symbols_is_refused():
    assert parse_megatron_layout("Et*3|ttt,m|L") == [3, 3, 0]
    with pytest.raises(ConfigError, match=r"symbols E, t, m and L, got 'x\*3'"):
        parse_megatron_layout("Et|x*3|L")


@settings(deadline=None, max_examples=200)
@given(plans())
def test_colossalai_recomputes_at_least_what_the_plan_does(plan):
    found = colossalai_lists(plan, TABLE)
    assert list(found.num_layers_per_stage) == count(plan, BLOCKS)
    wanted = count(plan, BLOCKS, lambda choice: choice != 0)
    for has, first, needs in zip(
        found.num_layers_per_stage, found.num_ckpt_layers_per_stage, wanted, strict=True
    ):
        assert has >= first >= needs


@settings(deadline=None, max_examples=200)
@given(plans(choices=(0, 1)))
def test_colossalai_lists_without_loss_give_the_plan_back(plan):
    found = colossalai_lists(plan, TABLE)
    again = [0] * 14
    for (low, high), first in zip(
        itertools.pairwise(plan.parts), found.num_ckpt_layers_per_stage, strict=True
    ):
        for layer in [each for each in BLOCKS if low <= each < high][:first]:
            again[layer] = 1
    assert (tuple(again) == plan.recompute) == (
        not [line for line in found.lost if "without blocks" not in line]
    )


@settings(deadline=None, max_examples=50)
@given(plans())
def test_deepspeed_arguments_lose_nothing(plan):
    found = deepspeed_arguments(plan, num_micro_batches=8, zero_stage=0, data_parallel=3)
    again = PipelinePlan.from_json(json.dumps(found["module"]["plan"]))
    assert (again.parts, again.recompute) == (plan.parts, plan.recompute)
    assert found["module"]["num_stages"] == plan.num_stages
    assert found["config"]["train_batch_size"] == 24
    assert found["config"]["zero_optimization"] == {"stage": 0}


@settings(deadline=None, max_examples=100)
@given(plans())
def test_module_policy_gives_the_recompute_of_the_plan_back(plan):
    found = module_policy(plan, TABLE)
    again = [0] * 14
    for path, choice in found.items():
        assert choice != 0
        number = int(path.rsplit(".", 1)[1]) if path[-1].isdigit() else None
        first = 0 if "vision" in path else 7
        again[5 if number is None else first + number] = choice
    assert tuple(again) == plan.recompute


def test_one_path_for_several_blocks_is_refused():
    plan = PipelinePlan(parts=(0, 14), recompute=(1,) * 14)
    with pytest.raises(ConfigError, match=r"must have \{\} for the number of the block"):
        module_policy(plan, TABLE, {kind.part: "block" for kind in TABLE.kinds})


def test_module_policy_makes_a_model_recompute_those_layers():
    torch = pytest.importorskip("torch")
    from omniload.adapters.recompute import apply_recompute

    class Counting(torch.nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    model = torch.nn.ModuleDict(
        {name: torch.nn.ModuleList(Counting(4, 4) for _ in range(6)) for name in ("eye", "mind")}
    )
    recompute = [0] * 14
    recompute[3] = recompute[8] = 1
    plan = PipelinePlan(parts=(0, 14), recompute=tuple(recompute))
    policy = module_policy(plan, TABLE, {"vision": "eye.{}", "language": "mind.{}"})
    assert policy == {"eye.3": 1, "mind.1": 1}
    apply_recompute(model, policy)
    x = torch.ones(2, 4, requires_grad=True)
    for layer in (*model["eye"], *model["mind"]):
        x = layer(x)
    x.sum().backward()
    twice = [(name, at) for name in ("eye", "mind") for at in range(6)
             if model[name][at].calls == 2]  # fmt: skip
    assert twice == [("eye", 3), ("mind", 1)]


@pytest.mark.parametrize(
    ("family", "model"),
    [("internvl", "InternVL"), ("llava", "Llava"), ("qwen", "Qwen2VL"), ("qwen", "Qwen2_5_VL")],
)
def test_paths_are_those_of_models_of_transformers(family, model):
    transformers = pytest.importorskip("transformers")
    import torch

    config = getattr(transformers, f"{model}Config")()
    for section in (config.text_config, config.vision_config):
        for name in ("num_hidden_layers", "depth"):
            if hasattr(section, name):
                setattr(section, name, 2)
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = ["full_attention"] * 2
    with torch.device("meta"):
        made = getattr(transformers, f"{model}ForConditionalGeneration")(config)
    modules = dict(made.named_modules())
    for path in MODULE_NAMES[family].values():
        assert path.format(1) in modules


def test_what_has_no_name_is_refused():
    plan = PipelinePlan(parts=(0, 14), recompute=(1,) + (0,) * 13)
    with pytest.raises(ConfigError, match="where the layers of vision are"):
        module_policy(plan, TABLE, {"language": "blocks.{}"})
    with pytest.raises(ConfigError, match="internvl, llava, qwen, or part -> path: got 'gpt'"):
        module_policy(plan, TABLE, "gpt")
    short = PipelinePlan(parts=(0, 3), recompute=(0, 0, 0))
    for export in (megatron_arguments, colossalai_lists, module_policy):
        with pytest.raises(ConfigError, match="expected 14, got 3"):
            export(short, TABLE)
