"""Budgets from memory: the largest that fit, for one GPU, for a plan, for the best cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import Budget, LengthIndex
from omniload.errors import ConfigError
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.budget import fit_budget, parse_memory
from omniload.pipeline.kinds import LayerKind, Linear, Shapes
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.presets import preset
from omniload.pipeline.stage_costs import StageCosts
from omniload.pipeline.table import CostTable

TOKENS = np.array([900, 350, 120, 700])
TILES = np.array([3, 1, 0, 2])


def tiny(counts=(3, 4), *, token=200.0, tile=5000.0, params=1000, token_pair=0.0):
    nothing = Linear()
    fields = {"forward_s": nothing, "backward_s": nothing, "output_bytes": nothing}
    kinds = (
        LayerKind(
            name="v", part="vision", params=params, kept_bytes=Linear(tile=tile),
            kept_bytes_recompute=Linear(tile=tile / 10), **fields,
        ),
        LayerKind(
            name="l", part="language", params=2 * params,
            kept_bytes=Linear(token=token, token_pair=token_pair),
            kept_bytes_recompute=Linear(token=token / 10), **fields,
        ),
    )  # fmt: skip
    layers = ("v",) * counts[0] + ("l",) * counts[1]
    return CostTable(kinds=kinds, layers=layers, reserve_bytes=0.0, name="tiny")


def memory(table, budget, parts, recompute=0, longest=900):
    worst = Shapes(
        num_tiles=[budget.tiles],
        num_tokens=[budget.tokens],
        sum_squares=[float(budget.tokens) * longest],
    )
    stages = len(parts) - 1
    costs = StageCosts(
        table=table, shapes=worst, worst=worst, num_stages=stages, num_micro_batches=stages
    )
    return costs.memory(parts, table.choices(recompute)).max()


def one_more(budget):
    """The budget of one token more, with the tiles that go with it."""
    tokens = budget.tokens + 1
    return Budget(tokens=tokens, tiles=max(-(-tokens * TILES.sum() // TOKENS.sum()), TILES.max()))


def all_parts(layers, stages):
    if stages == 1:
        return [(0, layers)]
    return [
        (*parts, layers)
        for last in range(stages - 1, layers)
        for parts in all_parts(last, stages - 1)
    ]


@settings(max_examples=60, deadline=None)
@given(
    limit=st.integers(300_000, 3_000_000), recompute=st.sampled_from([0, 1]),
    stages=st.integers(1, 3), token=st.integers(1, 300), pair=st.sampled_from([0.0, 0.05]),
)  # fmt: skip
def test_the_budget_is_the_largest_that_some_cut_fits(limit, recompute, stages, token, pair):
    table = tiny(token=float(token), token_pair=pair)

    def least(budget):
        return min(memory(table, budget, parts, recompute)
                   for parts in all_parts(table.num_layers, stages))  # fmt: skip

    settings_ = {"memory_bytes": limit, "recompute": recompute, "num_stages": stages}
    smallest = Budget(tokens=900, tiles=3)
    if least(smallest) > limit:
        with pytest.raises(ConfigError, match="the longest row must fit the memory"):
            fit_budget(TOKENS, TILES, table, **settings_)
        return
    found = fit_budget(TOKENS, TILES, table, **settings_)
    assert found.tokens >= 900
    assert found.tiles >= 3
    assert least(found) <= limit
    assert found.tokens == TOKENS.sum() or least(one_more(found)) > limit


@pytest.mark.parametrize("parts", [(0, 7), (0, 3, 7), (0, 1, 4, 7)])
def test_the_budget_of_a_plan_fills_its_fullest_stage(parts):
    table, limit = tiny(), 1_400_000
    many = np.tile(TOKENS, 9), np.tile(TILES, 9)
    found = fit_budget(*many, table, memory_bytes=limit, parts=parts)
    assert memory(table, found, parts) <= limit
    assert memory(table, one_more(found), parts) > limit
    # tokens and tiles are used up together: 2070 tokens of the data have 6 tiles
    assert found.tiles == max(-(-found.tokens * 6 // 2070), 3)
    assert found.tiles > 3


def test_recomputation_stages_and_memory_never_make_a_budget_smaller():
    table = tiny()
    plenty = np.tile(TOKENS, 20), np.tile(TILES, 20)

    def tokens(memory_bytes=1_500_000, **settings_):
        return fit_budget(*plenty, table, memory_bytes=memory_bytes, **settings_).tokens

    assert tokens() < tokens(memory_bytes=2_000_000) < tokens(memory_bytes=2e6, recompute=1)
    assert tokens() < tokens(recompute=(1, 1, 1, 0, 0, 0, 0)) < tokens(recompute=1)
    # no micro-batch is larger than all of the data
    assert tokens(memory_bytes=1e15) == plenty[0].sum()


def test_a_refusal_says_what_would_be_needed():
    table = cost_table(preset("internvl-6b-20b"))
    with pytest.raises(ConfigError, match=r"900 tokens with 3 tiles need .* GB on 1 stage"):
        fit_budget(TOKENS, TILES, table, memory_bytes=80e9)
    try:
        fit_budget(TOKENS, TILES, table, memory_bytes=80e9)
    except ConfigError as error:
        needed = float(str(error).split("need ")[1].split(" GB")[0])
    found = fit_budget(TOKENS, TILES, table, memory_bytes=(needed + 0.1) * 1e9)
    assert found.tokens >= 900
    with pytest.raises(ConfigError, match="the longest row must fit"):
        fit_budget(TOKENS, TILES, table, memory_bytes=(needed - 0.1) * 1e9)


def test_the_published_model_fits_its_gpus_with_the_published_budget():
    index = LengthIndex.from_arrays(num_tokens=np.tile(TOKENS, 100), num_tiles=np.tile(TILES, 100))
    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    plan = PipelinePlan(parts=(0, 23, 46, 71, 96), recompute=table.choices(1))
    budget = Budget.auto(index, memory="80GB", model=table, plan=plan, verbose=False)
    assert budget.tokens > 4096
    plain = PipelinePlan(parts=plan.parts, recompute=(0,) * 96)
    less = Budget.auto(index, memory="80GB", model=table, plan=plain, verbose=False)
    assert 900 <= less.tokens < budget.tokens


def test_a_budget_is_chosen_by_the_name_of_a_model(capsys):
    index = LengthIndex.from_arrays(num_tokens=TOKENS, num_tiles=TILES)
    budget = Budget.auto(index, memory="80GiB", model="internvl2-2b", samples=3)
    assert budget.samples == 3
    assert capsys.readouterr().out == (
        f"budget for 80GiB: {budget.tokens} tokens, {budget.tiles} tiles\n"
    )
    assert Budget.auto(index, memory=70e9, model="internvl2-2b", verbose=False).tokens <= (
        budget.tokens
    )


def test_text_alone_has_no_tiles():
    assert fit_budget([50, 60], [0, 0], tiny(), memory_bytes=2e6).tiles == 0


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("80GB", 80e9), ("80 gb", 80e9), ("40GiB", 40 * 2**30), ("1.5TB", 1.5e12), ("80e9", 80e9),
     (2.5e9, 2.5e9), ("512 MiB", 2**29)],
)  # fmt: skip
def test_memory_is_read_with_its_unit(text, bytes_):
    assert parse_memory(text) == bytes_


@pytest.mark.parametrize(
    "text", ["80", 80, "GB", "80 parsecs", "-3GB", "1.2.3GB", "inf", None, True]
)
def test_amounts_that_are_no_memory_are_refused(text):
    with pytest.raises(ConfigError, match='memory must be like "80GB" or "40GiB", or in bytes'):
        parse_memory(text)


INDEX = LengthIndex.from_arrays(num_tokens=TOKENS, num_tiles=TILES)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Budget.auto(INDEX), "either tokens, or memory and model: got tokens=None"),
        (lambda: Budget.auto(INDEX, tokens=9, memory="8GB", model="a"), "either tokens"),
        (lambda: Budget.auto(INDEX, memory="8GB"), "either tokens, or memory and model"),
        (lambda: Budget.auto(INDEX, tokens=9, model="a"), "either tokens, or memory and model"),
        (lambda: Budget.auto(INDEX, memory="8GB", model="gpt"), "model must be one of internvl-6b"),
        (lambda: Budget.auto(INDEX, memory="8GB", model=3), "CostTable or the name of .*got int"),
        (
            lambda: Budget.auto(INDEX, memory="8GB", model="internvl2-2b", plan="plan.json"),
            r"got str\. Read the file of one with PipelinePlan\.from_json",
        ),
        (lambda: fit_budget([], [], tiny(), memory_bytes=1e9), "one or more rows .*got 0 and 0"),
        (lambda: fit_budget([1], [1, 2], tiny(), memory_bytes=1e9), "got 1 and 2"),
        (lambda: fit_budget([1], [1], tiny(), memory_bytes=0), "memory_bytes must be finite and"),
        (
            lambda: fit_budget([1], [1], tiny(), memory_bytes=1e9, num_stages=8),
            "a pipeline needs a layer for each stage: got 8 stages for 7 layers",
        ),
        (
            lambda: fit_budget([1], [1], tiny(), memory_bytes=1e9, recompute=(0, 1)),
            "one entry a layer: expected 7, got 2",
        ),
    ],
)
def test_budgets_that_can_not_be_are_refused(make, match):
    with pytest.raises(ConfigError, match=match):
        make()
