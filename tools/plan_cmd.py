"""`omniload plan`: what a budget and a number of ranks would do with a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.errors import ConfigError
from omniload.tools.data import is_mixture_file, open_data
from omniload.tools.length_files import FILE_COLUMNS, matched_tiles, read_lengths

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from omniload.costs import CostModel
    from omniload.index import LengthIndex
    from omniload.plan.figures import PlanFigures
    from omniload.types import Budget

__all__ = ["compare_plans", "plan_data"]

# line of the table -> field of PlanFigures
_LINES = {
    "groups": "num_groups",
    "groups / bound": "groups_over_bound",
    "fill of tokens": "fill_tokens",
    "fill of tiles": "fill_tiles",
    "pad ratio": "pad_ratio",
    "pad ratio, unpacked": "pad_ratio_unpacked",
    "dist tiles, step": "dist_tiles_step",
    "dist tokens, step": "dist_tokens_step",
    "dist time, step": "dist_time_step",
    "dist tiles, micro-step": "dist_tiles_micro_step",
    "dist tokens, micro-step": "dist_tokens_micro_step",
    "dist time, micro-step": "dist_time_micro_step",
    "time lost, step": "time_lost_step",
    "time lost, micro-step": "time_lost_micro_step",
    "steps": "num_steps",
    "fillers": "num_fillers",
    "samples a step": "samples_per_step",
    "loss tokens a step": "loss_tokens_per_step",
    "step variance ratio": "variance_ratio",
    "lag-1 correlation": "lag1",
    "in-group correlation": "intra_group",
}


def plan_data(
    lengths: Annotated[
        Path,
        typer.Argument(
            metavar="SHARDS",
            help="Folder of shards or of indexed tars, .yaml file of a mixture, or Parquet or CSV "
            f"file with {FILE_COLUMNS}.",
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches a rank in a step.")] = 1,
    budget_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a micro-batch may hold.")
    ] = 4096,
    budget_tiles: Annotated[
        int | None,
        typer.Option(min=0, help="Tiles a micro-batch may hold. Without it: matched to the data."),
    ] = None,
    grouping: Annotated[
        list[str] | None,
        typer.Option(help="A grouping to show; may be repeated. Without it: all that shuffle."),
    ] = None,
    sync: Annotated[
        str,
        typer.Option(
            help='What balancing inside a step is for: ranks that meet once a "step", or at each '
            '"micro-step"; "none" leaves the order as it is.'
        ),
    ] = "step",
    seed: Annotated[int, typer.Option(help="Seed of the order.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch; each has other groups.")] = 0,
    tile_cost: Annotated[
        float | None,
        typer.Option(
            help="Time of a tile, as that of so many tokens. Without it: that of a model of 6B + "
            "20B parameters, attention included."
        ),
    ] = None,
    lp_bound: Annotated[
        bool, typer.Option(help="Compute the sharper bound of the groups, too; some seconds.")
    ] = False,
    max_steps: Annotated[
        int, typer.Option(min=1, help="Steps whose loads are measured, spread over the epoch.")
    ] = 200,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the loads of the ranks by step to this image file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how groupings would feed a data set: fill, balance over ranks, randomness, time lost.

    Dist ratio: the share of device time spent waiting for the fullest rank, 0 is perfect; "step"
    where ranks meet once a step (DDP, ZeRO-1 and 2), "micro-step" where they meet at each
    micro-batch (FSDP, ZeRO-3, pipelines). Time lost covers the tail of the epoch, too. For a plain
    shuffle the variance ratio is 1 and the correlations are 0.

    Example: `omniload plan shards/ --ranks 64 --accumulation 4 --budget-tokens 4096`
    """
    from omniload.source import shard_starts as first_rows
    from omniload.tools.plan_plot import draw_loads, figure_class
    from omniload.types import Budget

    if plot is not None:
        figure_class()  # what is missing is said before the work, not after it
    shard_starts = set_starts = None
    if lengths.is_dir() or is_mixture_file(lengths):
        opened = open_data(lengths).at_epoch(epoch)  # a mixture has other rows in each epoch
        index, source = opened.index, str(lengths)
        # the windows follow from where shards and sets begin, as in the loader
        shard_starts, set_starts = first_rows(opened), getattr(opened, "set_starts", None)
    else:
        index, source = read_lengths(lengths, samples=0, seed=0)
    tiles = matched_tiles(index, budget_tokens) if budget_tiles is None else budget_tiles
    budget = Budget(tokens=budget_tokens, tiles=tiles)
    found = compare_plans(
        index,
        budget=budget,
        dp_world_size=ranks,
        accumulation=accumulation,
        groupings=grouping,
        sync=None if sync == "none" else sync,
        seed=seed,
        epoch=epoch,
        cost=_cost(tile_cost),
        lp_bound=lp_bound,
        max_steps=max_steps,
        shard_starts=shard_starts,
        set_starts=set_starts,
    )
    if plot is not None:
        draw_loads(found, plot)
    if as_json:
        import json

        rows = [figures.as_dict() for figures in found.values()]
        print(
            json.dumps({"source": source, "seed": seed, "epoch": epoch, "sync": sync, "rows": rows})
        )
        return
    _print(source, found, sync)


def compare_plans(
    index: LengthIndex,
    *,
    budget: Budget,
    dp_world_size: int,
    accumulation: int = 1,
    groupings: list[str] | None = None,
    sync: str | None = "step",
    seed: int = 0,
    epoch: int = 0,
    cost: CostModel,
    lp_bound: bool | int = False,
    max_steps: int | None = None,
    shard_starts: npt.NDArray[np.int64] | None = None,
    set_starts: npt.NDArray[np.int64] | None = None,
) -> dict[str, PlanFigures]:
    """Plan an epoch with each grouping, and measure it.

    Args:
        index: lengths of the rows; those over the budget are left out.
        budget: upper bounds of a group.
        dp_world_size: data-parallel ranks.
        accumulation: micro-steps of a step.
        groupings: names; None: all that shuffle.
        sync: when ranks meet, for balancing inside a step; None: nothing is balanced.
        seed: seed of the order.
        epoch: the epoch.
        cost: estimates times.
        lp_bound: compute the sharper bound; a number: it is known.
        max_steps: steps whose loads are measured; None: all.
        shard_starts: first rows of the shards; see `omniload.make_plan`.
        set_starts: first rows of the sets of a mixture; see `omniload.make_plan`.

    Returns:
        Name of the grouping -> its figures.

    Raises:
        ConfigError: an unknown grouping or `sync`, or no row that fits the budget.
    """
    from omniload.grouping import GROUPINGS, get_grouping
    from omniload.plan import make_plan

    shown = groupings or [name for name in GROUPINGS if name != "sequential"]
    names = [get_grouping(name).name for name in shown]
    found, bound = {}, lp_bound
    for name in names:
        plan = make_plan(
            index,
            budget=budget,
            dp_world_size=dp_world_size,
            accumulation=accumulation,
            grouping=name,
            seed=seed,
            epoch=epoch,
            oversize="drop",
            sync=sync,
            shard_starts=shard_starts,
            set_starts=set_starts,
        )
        if len(plan.dropped) == len(index):
            raise ConfigError(
                f"there must be rows that fit {budget}: got {len(index)} rows, and none does."
            )
        found[name] = plan.figures(cost=cost, lp_bound=bound, max_steps=max_steps)
        bound = found[name].lp_bound or False  # the rows are the same for all
    return found


def _cost(tile_cost: float | None) -> CostModel:
    from omniload.costs import REFERENCE_COST, CostModel

    return REFERENCE_COST if tile_cost is None else CostModel(tile=tile_cost, token=1.0)


def _print(source: str, found: dict[str, PlanFigures], sync: str) -> None:
    from omniload.tools.bench_common import emit

    first = next(iter(found.values()))
    budget, bound = first.budget, first.size_bound
    lines = {line: field for line, field in _LINES.items() if getattr(first, field) is not None}
    rows: list[dict[str, Any]] = [
        {"": line, **{name: _cell(getattr(figures, field)) for name, figures in found.items()}}
        for line, field in lines.items()
    ]
    notes = (
        f"{source}: {first.num_rows:,} rows, {first.num_dropped:,} left out because they are over "
        f"the budget of {budget.tokens:,} tokens and {budget.tiles:,} tiles. A step: "
        f"{first.dp_world_size} ranks x {first.accumulation} groups, balanced for "
        f"sync={sync}; loads are those of {len(first.steps.measured):,} steps. The rows need at "
        f"least {bound:,} groups by the sums of their sizes"
    )
    notes += "." if first.lp_bound is None else f"; {first.lp_bound:,} by the linear programme."
    emit("plan", rows, notes=notes)


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4f}"
    return value
