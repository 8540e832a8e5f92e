"""`omniload explain`: which rows of a step go to which rank, and what the step costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.loader.explain import Explanation

__all__ = ["explain_data", "explain_plan"]


def explain_data(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="SHARDS",
            help="Folder of shards or of indexed tars, or .yaml file of a mixture.",
        ),
    ],
    step: Annotated[int, typer.Option(min=0, help="The optimizer step.")],
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches a rank in a step.")] = 1,
    budget_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens a micro-batch may hold.")
    ] = 4096,
    budget_tiles: Annotated[
        int | None,
        typer.Option(min=0, help="Tiles a micro-batch may hold. Without it: matched to the data."),
    ] = None,
    grouping: Annotated[str, typer.Option(help="The grouping.")] = "buffered",
    sync: Annotated[
        str, typer.Option(help='When ranks meet: "step", "micro-step", or "none".')
    ] = "step",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="Epoch; each has other groups.")] = 0,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Rank whose rows are listed. [default: the slowest]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what each rank has in a step, which rank the others wait for, and the rows of one rank.

    The options are those of `omniload plan`; with the same ones the plan is that of
    `omniload.DataLoader`, where no row is over the budget. Index and keys are read, no
    images. --json has the rows of all ranks.

    Example: `omniload explain shards/ --step 100 --ranks 64 --accumulation 4 --budget-tiles 16`
    """
    if rank is not None and rank >= ranks:
        raise ConfigError(f"--rank must be below --ranks, which is {ranks}: got {rank}.")
    found = explain_plan(
        data,
        step,
        ranks=ranks,
        accumulation=accumulation,
        budget_tokens=budget_tokens,
        budget_tiles=budget_tiles,
        grouping=grouping,
        sync=None if sync == "none" else sync,
        seed=seed,
        epoch=epoch,
    )
    if as_json:
        import json

        print(json.dumps(found.as_dict()))
    else:
        _print(found, found.slowest if rank is None else rank)


def explain_plan(
    data: Path,
    step: int,
    *,
    ranks: int,
    accumulation: int,
    budget_tokens: int,
    budget_tiles: int | None,
    grouping: str,
    sync: str | None,
    seed: int,
    epoch: int,
) -> Explanation:
    """Plan an epoch as the loader does, with and without balance, and explain a step of it.

    Raises:
        ConfigError: a wrong setting, or no such step.
        ShardError: no data there.
    """
    from dataclasses import replace

    from omniload.loader.explain import check_step, explain_step
    from omniload.loader.settings import LoaderSettings
    from omniload.loader.sources import row_layout
    from omniload.tools.data import is_mixture_file, open_data
    from omniload.tools.length_files import matched_tiles
    from omniload.types import Budget
    from omniload.world import World

    if data.is_file() and not is_mixture_file(data):
        raise ConfigError(
            f"a step is explained by the rows of shards, tars or a mixture, got the file {data}."
        )
    opened = open_data(data)
    rows = opened.at_epoch(epoch)
    tiles = matched_tiles(rows.index, budget_tokens) if budget_tiles is None else budget_tiles
    settings = LoaderSettings(
        budget=Budget(tokens=budget_tokens, tiles=tiles),
        world=World(dp_world_size=ranks),
        seed=seed,
        accumulation=accumulation,
        grouping=grouping,
        shuffle=True,
        tail="filler",
        oversize="drop",
        window_rows=None,
        sync=sync,
    ).with_source(opened)
    shards, sets = row_layout(rows)
    plan, bare = (
        one.make_plan(rows.index, epoch=epoch, start=None, shard_starts=shards, set_starts=sets)
        for one in (settings, replace(settings, sync=None))
    )
    check_step(step, first=0, has_step=plan.has_step(step))
    return explain_step(
        plan.step_groups(step),
        bare.step_groups(step),
        rows,
        settings=settings,
        epoch=epoch,
        number=step,
    )


def _print(found: Explanation, rank: int) -> None:
    from omniload.tools.bench_common import emit

    mean = found.mean_cost
    rows = [
        {
            "micro-step": slot.micro_step,
            "rank": slot.rank,
            "tokens": slot.tokens,
            "tiles": slot.tiles,
            "cost / mean": f"{slot.cost / mean:.3f}",
            "rows": "filler" if slot.is_filler else len(slot.rows),
        }
        for slot in found.slots
    ]
    waits = ", ".join(
        f"{name} {found.dist_before[name]:.1%} -> {found.dist[name]:.1%}" for name in found.dist
    )
    emit(
        "explain",
        rows,
        notes=f"Epoch {found.epoch}, step {found.step}: rank {found.slowest} is slowest, "
        f"{found.slowest_over_mean:.3f} times the mean cost. Waiting, before and after balance: "
        f"{waits}; {found.moved} rows moved, {found.fillers} fillers.",
    )
    typer.echo(f"rows of rank {rank}:")
    for slot in found.slots:
        for row in slot.rows if slot.rank == rank else ():
            key = "" if row.key is None else f" {row.key!r}"
            place = f"{row.shard}:{row.shard_row}"
            typer.echo(
                f"  micro-step {slot.micro_step}: row {row.row}{key} ({place}), "
                f"tokens {row.tokens}, tiles {row.tiles}"
            )
