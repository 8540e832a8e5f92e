"""Pipeline plans in the words of other engines.

Where an engine can't express all of a plan, what it gets is a projection that fits into the same
memory, and what is lost is said.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from omniload.errors import ConfigError
from omniload.pipeline.plan import PipelinePlan
from omniload.pipeline.table import CostTable, Recompute

__all__ = [
    "MODULE_NAMES",
    "ColossalLists",
    "MegatronArguments",
    "colossalai_lists",
    "deepspeed_arguments",
    "megatron_arguments",
    "megatron_table",
    "module_policy",
    "parse_megatron_layout",
]

#: Where blocks are in models of transformers 5: family -> part -> path, {} for their number.
MODULE_NAMES: Mapping[str, Mapping[str, str]] = {
    "internvl": {
        "vision": "model.vision_tower.encoder.layer.{}",
        "projector": "model.multi_modal_projector",
        "language": "model.language_model.layers.{}",
    },
    "llava": {
        "vision": "model.vision_tower.encoder.layers.{}",
        "projector": "model.multi_modal_projector",
        "language": "model.language_model.layers.{}",
    },
    "qwen": {
        "vision": "model.visual.blocks.{}",
        "projector": "model.visual.merger",
        "language": "model.language_model.layers.{}",
    },
}

_BEFORE_LANGUAGE = ("vision", "projector", "embedding")
_SYMBOL = re.compile(r"([EtmL])(?:\*(\d+))?")


@dataclass(frozen=True, kw_only=True)
class MegatronArguments:
    """A plan for Megatron-Core; what it can't express is lost.

    Args:
        layout: value of `--pipeline-model-parallel-layout`.
        flags: all arguments, names and values in turn.
        lost: what the plan says and this can't, in words.
    """

    layout: str
    flags: tuple[str, ...]
    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ColossalLists:
    """A plan for ColossalAI: `set_distribution_config` and `PipelineGradientCheckpointConfig`.

    Args:
        num_layers_per_stage: blocks of encoder and language model on each stage.
        num_ckpt_layers_per_stage: how many of them are recomputed, from the first on.
        lost: what the plan says and this can't, in words.
    """

    num_layers_per_stage: tuple[int, ...]
    num_ckpt_layers_per_stage: tuple[int, ...]
    lost: tuple[str, ...]


def deepspeed_arguments(
    plan: PipelinePlan, *, num_micro_batches: int, zero_stage: int = 1, data_parallel: int = 1
) -> dict[str, object]:
    """Make the arguments of `omniload.adapters.deepspeed.BalancedPipelineModule` and a config.

    Nothing of the plan is lost.

    Args:
        plan: the plan.
        num_micro_batches: micro-batches of a step on each rank.
        zero_stage: 0 or 1; DeepSpeed refuses more with a pipeline.
        data_parallel: copies of the pipeline.

    Returns:
        `module`: arguments by name; `config`: for `deepspeed.initialize`, to be completed.
    """
    whole = plan.to_dict()
    kept = {name: whole[name] for name in ("format", "version", "parts", "recompute", "selective")}
    return {
        "module": {"plan": kept, "num_stages": plan.num_stages},
        "config": {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": num_micro_batches,
            "train_batch_size": num_micro_batches * data_parallel,
            "zero_optimization": {"stage": zero_stage},
            "bf16": {"enabled": True},
        },
    }


def megatron_table(table: CostTable) -> CostTable:
    """Pin all that comes before the language model to the first stage, as Megatron-Core does.

    A plan of the pinned table is the best that Megatron-Core can follow.
    """
    first = {
        layer: 0 for layer in range(table.num_layers) if table.kind(layer).part in _BEFORE_LANGUAGE
    }
    return replace(table, pinned={**table.pinned, **first})


def megatron_arguments(plan: PipelinePlan, table: CostTable) -> MegatronArguments:
    """Project a plan onto the arguments of Megatron-Core.

    Its layout has symbols for embedding (E), blocks (t) and loss (L) only: the encoder runs before
    the embedding, on the first stage. Of recomputation it takes one number for all stages, the
    first blocks of each; here the largest that any stage needs, so that none needs more memory than
    planned. Plan with `megatron_table` for the best plan under these rules.

    Args:
        plan: the plan.
        table: the cost table that it was made from.

    Raises:
        ConfigError: the plan is for another number of layers, or the table has no language model.
    """
    _check(plan, table)
    blocks = _layers(table, "language")
    counts, recomputed = [], []
    for low, high in itertools.pairwise(plan.parts):
        mine = [layer for layer in blocks if low <= layer < high]
        counts.append(len(mine))
        recomputed.append(sum(plan.recompute[layer] != 0 for layer in mine))
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    stages[0] = f"E{stages[0]}"
    stages[-1] += "L"
    layout = "|".join(stages)
    flags = [
        "--pipeline-model-parallel-size",
        str(plan.num_stages),
        "--pipeline-model-parallel-layout",
        layout,
    ]
    lost = _megatron_moves(plan, table)
    more, words = _megatron_recompute(plan, table, counts, recomputed)
    return MegatronArguments(layout=layout, flags=(*flags, *more), lost=(*lost, *words))


def _megatron_moves(plan: PipelinePlan, table: CostTable) -> list[str]:
    lost = []
    before = [at for at in range(table.num_layers) if table.kind(at).part in _BEFORE_LANGUAGE]
    moved = [layer for layer in before if plan.stage_of(layer) > 0]
    if moved:
        lost.append(
            f"{len(moved)} of {len(before)} layers before the language model (from layer "
            f"{moved[0]}) move to the first stage: the layout has no symbol for them. Times and "
            "memory of the plan don't hold then; plan with megatron_table."
        )
    head = _layers(table, "head")
    if head and plan.stage_of(head[0]) < plan.num_stages - 1:
        lost.append("the head moves to the last stage.")
    return lost


def _megatron_recompute(
    plan: PipelinePlan, table: CostTable, counts: list[int], recomputed: list[int]
) -> tuple[list[str], list[str]]:
    lost = []
    vision = _layers(table, "vision")
    seen = sum(plan.recompute[layer] != 0 for layer in vision)
    if seen:
        lost.append(
            f"the plan recomputes {seen} of {len(vision)} blocks of the encoder: set it for the "
            "encoder in your model; these flags are of the language model."
        )
    names = {plan.recompute[layer] for layer in _layers(table, "language")} - {0}
    if not names:
        return [], lost
    if names == {"mlp"}:
        if recomputed != counts:
            lost.append(
                f"the plan recomputes the MLP of {recomputed} blocks of {counts} a stage; here it "
                "is that of all blocks."
            )
        flags = ["--recompute-granularity", "selective", "--recompute-modules", "mlp"]
        return flags, lost
    if names != {1}:
        lost.append("blocks that recompute a part only are recomputed as a whole.")
    if recomputed == counts:
        method, number = "uniform", 1
    else:
        method, number = "block", max(recomputed)
        wanted = [min(number, count) for count in counts]
        if wanted != recomputed:
            lost.append(
                f"the plan recomputes {recomputed} blocks on the stages; one number for all of "
                f"them makes that {wanted}."
            )
    flags = ["--recompute-granularity", "full", "--recompute-method", method]
    return [*flags, "--recompute-num-layers", str(number)], lost


def parse_megatron_layout(layout: str) -> list[int]:
    """Count the blocks of each stage of a layout that `megatron_arguments` wrote.

    Raises:
        ConfigError: symbols other than E, t, m and L.
    """
    found = []
    for stage in layout.replace(",", "").split("|"):
        if not re.fullmatch(rf"(?:{_SYMBOL.pattern})*", stage):
            raise ConfigError(f"a layout must have the symbols E, t, m and L, got {stage!r}.")
        pairs = _SYMBOL.findall(stage)
        found.append(sum(int(number or 1) for symbol, number in pairs if symbol == "t"))
    return found


def colossalai_lists(plan: PipelinePlan, table: CostTable) -> ColossalLists:
    """Make the two lists that ColossalAI takes: blocks of each stage, and recomputed ones.

    Blocks of the encoder and of the language model count alike. The first so many of a stage are
    recomputed; where the plan skips some, they are too, so that no stage needs more memory.

    Args:
        plan: the plan.
        table: the cost table that it was made from.

    Raises:
        ConfigError: the plan is for another number of layers.
    """
    _check(plan, table)
    blocks = {*_layers(table, "vision"), *_layers(table, "language")}
    counts, firsts, lost = [], [], []
    for stage, (low, high) in enumerate(itertools.pairwise(plan.parts)):
        mine = [plan.recompute[layer] for layer in range(low, high) if layer in blocks]
        last = max((place for place, choice in enumerate(mine, start=1) if choice != 0), default=0)
        counts.append(len(mine))
        firsts.append(last)
        needed = sum(choice != 0 for choice in mine)
        if needed != last:
            lost.append(
                f"stage {stage} recomputes {needed} blocks, not the first ones; here the first "
                f"{last}."
            )
        if any(isinstance(choice, str) for choice in mine):
            lost.append(f"blocks of stage {stage} that recompute a part are recomputed as a whole.")
    others = [
        layer
        for layer in range(table.num_layers)
        if layer not in blocks and plan.recompute[layer] != 0
    ]
    if others:
        lost.append("the recomputation of projector, embedding and head.")
    if 0 in counts:
        lost.append("a stage without blocks: ColossalAI needs one on each.")
    return ColossalLists(
        num_layers_per_stage=tuple(counts),
        num_ckpt_layers_per_stage=tuple(firsts),
        lost=tuple(lost),
    )


def module_policy(
    plan: PipelinePlan, table: CostTable, names: str | Mapping[str, str] = "internvl"
) -> dict[str, Recompute]:
    """Say what each module of a model recomputes: for `omniload.adapters.recompute`.

    Args:
        plan: the plan; its bounds don't matter here.
        table: the cost table that it was made from.
        names: a family of `MODULE_NAMES`, or part -> path of its blocks, with {} for the number of
            the block in its part, for example {"vision": "vision.blocks.{}"}. Parts that are left
            out, or that recompute nothing, need no name.

    Returns:
        Path -> 1 or the name of a selective option, for `apply_recompute(model, policy)`.

    Raises:
        ConfigError: a family that isn't known, or a part that recomputes and has no name, or one
            name for several blocks.
    """
    _check(plan, table)
    if isinstance(names, str):
        if names not in MODULE_NAMES:
            raise ConfigError(
                f"names must be of {', '.join(MODULE_NAMES)}, or part -> path: got {names!r}."
            )
        names = MODULE_NAMES[names]
    found: dict[str, Recompute] = {}
    for part in {kind.part for kind in table.kinds}:
        layers = _layers(table, part)
        recomputed = [place for place, layer in enumerate(layers) if plan.recompute[layer] != 0]
        if recomputed and part not in names:
            raise ConfigError(
                f"names must say where the layers of {part} are, which the plan recomputes: got "
                f"{', '.join(names) or 'none'}."
            )
        if recomputed and len(layers) > 1 and "{}" not in names[part]:
            raise ConfigError(
                f"the path of {part} must have {{}} for the number of the block, since it has "
                f"{len(layers)}: got {names[part]!r}."
            )
        for place in recomputed:
            found[names[part].replace("{}", str(place))] = plan.recompute[layers[place]]
    return dict(sorted(found.items(), key=_by_number))


def _by_number(entry: tuple[str, Recompute]) -> list[tuple[int, str]]:
    return [(int(each), "") if each.isdigit() else (-1, each) for each in entry[0].split(".")]


def _layers(table: CostTable, part: str) -> list[int]:
    return [layer for layer in range(table.num_layers) if table.kind(layer).part == part]


def _check(plan: PipelinePlan, table: CostTable) -> None:
    if plan.num_layers != table.num_layers:
        raise ConfigError(
            f"the plan must be for the layers of the table: expected {table.num_layers}, got "
            f"{plan.num_layers}."
        )
