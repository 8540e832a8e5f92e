"""`omniload bench grouping`: how fast groupings are, and how good their groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.tools.length_files import FILE_COLUMNS, matched_tiles, read_lengths

if TYPE_CHECKING:
    from omniload.index import LengthIndex
    from omniload.types import Budget, Groups

__all__ = ["balanced_figures", "group_figures", "grouping"]

_MOST_STEPS = 200  # that are balanced for the figures


def grouping(
    lengths: Annotated[
        Path | None,
        typer.Option(
            help=f"Shard folder, or Parquet or CSV file with {FILE_COLUMNS}. Without it: made-up "
            "lengths."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Rows of the made-up lengths.")] = 1_200_000,
    budget_tokens: Annotated[int, typer.Option(min=1, help="Tokens a group may hold.")] = 4096,
    budget_tiles: Annotated[
        int | None,
        typer.Option(min=0, help="Tiles a group may hold. Without it: matched to the data."),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks of a step.")] = 64,
    accumulation: Annotated[int, typer.Option(min=1, help="Groups a rank in a step.")] = 1,
    only: Annotated[
        list[str] | None, typer.Option(help="A grouping to measure; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and groupings.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare groupings: time, number of groups, balance over ranks.

    Dist ratios are sums over the groups of a rank in a step: first in the order in which groups
    come, then with steps balanced as the loader does (sync="step"), which takes `step ms`. Steps
    that are not full are left out. Other times are those of the grouping alone, warm.

    Example: `omniload bench grouping --samples 200000 --ranks 8`
    """
    from omniload.grouping import GROUPINGS, get_grouping
    from omniload.tools.bench_common import emit, measure
    from omniload.types import Budget

    index, note = read_lengths(lengths, samples=samples, seed=seed)
    tiles = matched_tiles(index, budget_tokens) if budget_tiles is None else budget_tiles
    budget = Budget(tokens=budget_tokens, tiles=tiles)
    index, left_out = _leave_out_oversize(index, budget)
    functions = {name: get_grouping(name) for name in (only or GROUPINGS)}
    calls = {
        name: partial(function, index.num_tokens, index.num_tiles, budget=budget, key=(seed, 0))
        for name, function in functions.items()
    }
    timings = measure(calls, repeats=repeats)
    rows = []
    for name, call in calls.items():
        seconds = timings[name].median_s
        groups = call()
        steps: dict[str, Any] = {"budget": budget, "ranks": ranks, "accumulation": accumulation}
        rows.append(
            {
                "grouping": name,
                "samples": len(index),
                "seconds": seconds,
                "samples/s": round(len(index) / max(seconds, 1e-9)),
                **group_figures(groups, index, **steps),
                **balanced_figures(groups, index, **steps),
            }
        )
    notes = (
        f"{note}; {left_out} rows over the budget left out. Budget: {budget.tokens} tokens, "
        f"{budget.tiles} tiles. Steps: {ranks} ranks x {accumulation} groups. Bound of the "
        "groups: sum of sizes by budget, the larger of tokens and tiles. Dist ratios: as groups "
        f"come > with steps balanced, {rows[0]['step ms']:.2g} ms a step for {rows[0]['grouping']}."
    )
    if not as_json:
        rows = [_table_row(row) for row in rows]
    emit("grouping", rows, as_json, notes)


def _table_row(row: dict[str, Any]) -> dict[str, Any]:
    """Fit a row into 80 columns; the rest is in the notes, or in the JSON."""
    return {
        "grouping": row["grouping"],
        "seconds": f"{row['seconds']:.3g}",
        "groups": row["groups"],
        "/ bound": f"{row['groups over bound']:.4f}",
        **{
            f"dist {name}": f"{row[f'dist {name}']:.3f} > {row[f'even {name}']:.4f}"
            for name in ("tiles", "tokens")
        },
    }


def _leave_out_oversize(index: LengthIndex, budget: Budget) -> tuple[LengthIndex, int]:
    import numpy as np

    from omniload.index import LengthIndex
    from omniload.plan.order import find_oversize

    over = find_oversize(index, budget)
    keep = np.ones(len(index), bool)
    keep[over] = False
    kept = LengthIndex(
        num_tokens=index.num_tokens[keep],
        num_tiles=index.num_tiles[keep],
        num_loss_tokens=index.num_loss_tokens[keep],
    )
    return kept, len(over)


def group_figures(
    groups: Groups, index: LengthIndex, *, budget: Budget, ranks: int, accumulation: int
) -> dict[str, Any]:
    """Say how good groups are: their number against the lower bound, and the balance of steps.

    Args:
        groups: groups of index rows, in emission order.
        index: lengths of all rows.
        budget: upper bounds they were made with.
        ranks: data-parallel ranks of a step.
        accumulation: groups of a rank in a step.

    Returns:
        `groups`, `groups over bound`, `dist tiles`, `dist tokens`.
    """
    from omniload.metrics import dist_ratio

    tokens, tiles = groups.sums(index.num_tokens), groups.sums(index.num_tiles)
    bound = -(-int(tokens.sum()) // budget.tokens)
    if budget.tiles:
        bound = max(bound, -(-int(tiles.sum()) // budget.tiles))
    full = len(groups) // (ranks * accumulation) * ranks * accumulation

    def dist(loads: Any) -> float:
        return dist_ratio(loads[:full].reshape(-1, accumulation, ranks).sum(axis=1))

    return {
        "groups": len(groups),
        "groups over bound": len(groups) / max(bound, 1),
        "dist tiles": dist(tiles),
        "dist tokens": dist(tokens),
    }


def balanced_figures(
    groups: Groups, index: LengthIndex, *, budget: Budget, ranks: int, accumulation: int
) -> dict[str, Any]:
    """Say what balancing inside steps makes of the dist ratios, and how long it takes.

    Args:
        groups: groups of index rows, in emission order.
        index: lengths of all rows.
        budget: upper bounds they were made with.
        ranks: data-parallel ranks of a step.
        accumulation: groups of a rank in a step.

    Returns:
        `even tiles` and `even tokens`, dist ratios; `step ms`, the median time of a step. Of full
        steps spread over the epoch, 200 at most.
    """
    import time

    import numpy as np

    from omniload.balance import StepBalance
    from omniload.metrics import dist_ratio
    from omniload.types import Groups

    slots = ranks * accumulation
    full = len(groups) // slots
    chosen = np.unique(np.linspace(0, full - 1, min(full, _MOST_STEPS)).astype(int))
    balance, loads, times = StepBalance(sync="step"), [np.zeros((0, 2, ranks))], [0.0]
    for turn, step in enumerate([*chosen[:1], *chosen]):  # the first one compiles
        offsets = groups.offsets[step * slots : (step + 1) * slots + 1]
        part = Groups(rows=groups.rows[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
        lengths = {name: getattr(index, name)[part.rows] for name in ("num_tokens", "num_tiles")}
        begin = time.perf_counter()
        even = balance(
            part, **lengths, budget=budget, dp_world_size=ranks, accumulation=accumulation
        )
        if turn:
            times.append(time.perf_counter() - begin)
            columns = [even.sums(index.num_tiles), even.sums(index.num_tokens)]
            loads.append(np.stack([c.reshape(-1, ranks).sum(axis=0) for c in columns])[None])
    tiles, tokens = np.concatenate(loads).swapaxes(0, 1)
    return {
        "even tiles": dist_ratio(tiles),
        "even tokens": dist_ratio(tokens),
        "step ms": 1000 * float(np.median(times[1:] or times)),
    }
