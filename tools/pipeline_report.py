"""What `omniload plan-pipeline` prints: tables for people, one JSON object for programs."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from omniload.tools.pipeline_planning import Planned

__all__ = ["as_dict", "layers_in_words", "print_plan", "recompute_in_words"]

_SINGLE = ("projector", "embedding", "head")
_NAMES = {
    "parameters-recomputed": "parameters, recomputed",
    "parameters": "parameters",
    "uniform": "uniform",
    "profile": "min-max forward",
    "omnibal": "OmniBal's search",
    "exact": "ours by formula",
}
_CAUSES = {
    "work": "forward and backward passes",
    "warm_up": "filling and draining the pipeline",
    "imbalance": "stages that differ",
    "variation": "micro-batches that differ",
    "transfers": "transfers",
    "ranks": "waiting for other ranks",
}


def as_dict(planned: Planned) -> dict[str, Any]:
    """Turn a plan and what belongs to it into one JSON object."""
    found = planned.plan.to_dict()
    data = planned.data
    return {
        **found,
        "gpu_days": planned.gpu_days(planned.step_ms),
        "baselines": {
            name: {
                "parts": list(other.plan.parts),
                "step_ms": other.plan.step_ms,
                "fits": other.fits,
            }
            for name, other in planned.others.items()
        },
        "step_ms_ordered": planned.ordered_ms,
        "gpu_days_ordered": planned.gpu_days(planned.ordered_ms),
        "bubbles": asdict(planned.bubbles),
        "model": planned.table.name,
        "table_source": planned.table.source,
        "data": {
            "source": data.note,
            "made_up": data.made_up,
            "num_samples": data.num_samples,
            "samples_per_step": data.samples_per_step,
            "budget_tokens": data.budget.tokens,
            "budget_tiles": data.budget.tiles,
        },
        "micro_batches": planned.micro_batches,
        "tensor_parallel": planned.parallel.tensor,
        "data_parallel": planned.parallel.data,
        "zero_stage": planned.parallel.zero,
        "gpus": planned.parallel.gpus,
    }


def layers_in_words(planned: Planned, low: int, high: int) -> str:
    """Count the layers of a stage by part, such as "21 vision + projector"."""
    from omniload.pipeline.kinds import PARTS

    counts = Counter(planned.table.kind(layer).part for layer in range(low, high))
    words = [
        part if counts[part] == 1 and part in _SINGLE else f"{counts[part]} {part}"
        for part in PARTS
        if counts[part]
    ]
    return " + ".join(words)


def recompute_in_words(planned: Planned, low: int, high: int) -> str:
    """Count what a stage recomputes, such as "12 vision, mlp of 3 language"."""
    counts: Counter[tuple[str, int | str]] = Counter()
    for layer in range(low, high):
        choice = planned.plan.recompute[layer]
        if choice != 0:
            counts[planned.table.kind(layer).part, choice] += 1
    words = [
        f"{number} {part}" if choice == 1 else f"{choice} of {number} {part}"
        for (part, choice), number in counts.items()
    ]
    return ", ".join(words) or "-"


def print_plan(planned: Planned) -> None:
    """Print the plan, the others beside it, and where the time goes."""
    from rich.console import Console

    console = Console()
    console.print(_stage_table(planned))
    console.print(_other_table(planned))
    console.print(_time_table(planned))
    console.print(_notes(planned), style="dim", highlight=False)


def _stage_table(planned: Planned) -> Table:
    from rich.table import Table

    plan = planned.plan
    table = Table(
        title=f"{planned.table.name or 'the model'} on {plan.num_stages} stages",
        title_justify="left",
    )
    for name in ("stage", "layers"):
        table.add_column(name, justify="left")
    for name in ("fwd ms", "bwd ms", "GB", "left"):
        table.add_column(name, justify="right")
    table.add_column("recomputed")
    for stage, (low, high) in enumerate(itertools.pairwise(plan.parts)):
        found = plan.stages[stage]
        table.add_row(
            str(stage),
            layers_in_words(planned, low, high),
            f"{found.forward_ms:.1f}",
            f"{found.backward_ms:.1f}",
            f"{found.memory_gb:.1f}",
            "-" if found.headroom_gb is None else f"{found.headroom_gb:.1f}",
            recompute_in_words(planned, low, high),
        )
    return table


def _other_table(planned: Planned) -> Table:
    from rich.table import Table

    table = Table(title="plans side by side", title_justify="left")
    table.add_column("plan", justify="left")
    for name in ("parts", "step s", "GPU days", "of ours", "fits"):
        table.add_column(name, justify="right")

    def add(name: str, parts: tuple[int, ...], step_ms: float, fits: bool) -> None:
        table.add_row(
            name,
            " ".join(map(str, parts)),
            f"{step_ms / 1e3:.3f}",
            f"{planned.gpu_days(step_ms):.2f}",
            f"{step_ms / planned.step_ms:.2f}",
            "yes" if fits else "no",
        )

    for name, other in planned.others.items():
        assert other.plan.step_ms is not None  # plans are made with predictions
        add(_NAMES.get(name, name), other.plan.parts, other.plan.step_ms, other.fits)
    add("ours", planned.plan.parts, planned.step_ms, True)
    add("ours, ordered", planned.plan.parts, planned.ordered_ms, True)
    return table


def _time_table(planned: Planned) -> Table:
    from rich.table import Table

    table = Table(title="time of the GPUs", title_justify="left")
    table.add_column("cause")
    table.add_column("share", justify="right")
    shares: Mapping[str, float] = asdict(planned.bubbles)
    for cause, words in _CAUSES.items():
        table.add_row(words, f"{round(100 * shares[cause], 1) + 0.0:.1f} %")  # no -0.0
    return table


def _notes(planned: Planned) -> str:
    data, parallel = planned.data, planned.parallel
    mean = planned.data.shapes
    limit = planned.plan.memory_limit_gb
    return (
        f"{parallel.gpus} GPUs: {parallel.stages} stages x {parallel.tensor} tensor x "
        f"{parallel.data} data-parallel ranks, ZeRO-{parallel.zero}; a step: "
        f"{planned.micro_batches} micro-batches a rank, {data.samples_per_step:,.0f} samples. A "
        f"micro-batch: {mean.num_tokens.mean():,.0f} tokens and {mean.num_tiles.mean():.1f} tiles "
        f"on average, {data.budget.tokens:,} and {data.budget.tiles:,} at most; memory is counted "
        f"for a full one, {'without a limit' if limit is None else f'limit {limit:g} GB'}. "
        f"Costs are {planned.table.source}; the optimizer and the reduction of gradients are left "
        f"out. An epoch is {data.num_samples:,} samples ({data.note})."
    )
