"""`omniload bench pipeline`: the published savings again, and plans against those of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.tools.bench_pipeline_plans import Match

__all__ = ["PARTS", "pipeline"]

#: Values of --only.
PARTS = ("ablation", "sensitivity", "pairs", "tight", "frozen", "solve", "order", "engine")

Tables = dict[str, list[dict[str, Any]]]
Rows = list[dict[str, Any]]
_NEAR = 0.10  # of a published ratio
_SOLVE = {4: 1.0, 16: 5.0}  # stages -> seconds
_ORDER_MS = 20.0
_ORDERED = ((4, 32, 4), (4, 64, 8), (8, 32, 4), (16, 64, 4))  # stages, micro-batches, ranks


def pipeline(
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"A part to run, of {', '.join(PARTS)}; may be repeated."),
    ] = None,
    engine: Annotated[
        bool,
        typer.Option(
            "--engine", help="Hold the simulator against DeepSpeed's engine too; some minutes."
        ),
    ] = False,
    draws: Annotated[int, typer.Option(min=1, help="Draws of the made-up data.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate what balancing data, model and memory saves, and compare plans with those of others.

    Nothing here runs on a GPU: times are counted operations of an A100 through the simulator of
    DeepSpeed's schedule, on made-up lengths. One setting, chosen beforehand, holds for all parts
    (`tools/pipeline_setting.py`); plans are made from other draws than they are timed on. Parts:
    the published ablation of 6B + 20B and 6B + 34B; the same under other settings; nine published
    pairs against OmniBal's search, with ample and with little memory; frozen encoders against a cut
    by forward time; times to plan and to order; with --engine, simulated against real steps.

    Example: `omniload bench pipeline --only pairs --only frozen`
    """
    unknown = sorted(set(only or ()) - set(PARTS))
    if unknown:
        raise ConfigError(f"--only must be of {', '.join(PARTS)}, got {', '.join(unknown)}.")
    chosen = [part for part in PARTS if part in only] if only else list(PARTS[:-1])
    if engine and "engine" not in chosen:
        chosen.append("engine")
    rows: Rows = []
    tables: Tables = {}
    with _progress(_units(chosen, draws), show=not as_json) as tick:
        for part in chosen:
            found, more = _RUN[part](draws, tick)
            rows += found
            tables |= more
    _show(rows, tables, as_json)


def _ablation(draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_ablation import ARMS, mean_days
    from omniload.tools.pipeline_setting import PUBLISHED, SETTING

    rows: Rows = []
    tables: Tables = {}
    for name, published in PUBLISHED.items():
        found = list(mean_days(name, SETTING, draws, progress=tick))
        mean = _mean(found)
        tables[f"{name}: GPU days"] = [
            {"arm": arm,
             "published": published.get(arm, "-"),
             "mean": mean[arm],
             "least": min(each[arm] for each in found),
             "most": max(each[arm] for each in found)}
            for arm in ARMS
        ]  # fmt: skip
        last = published["baseline"]
        for arm in list(published)[1:]:
            wanted, got = published[arm] / last, mean[arm] / mean["baseline"]
            rows.append(
                _row(
                    f"{name}: {arm} / baseline", got, f"{wanted:.3f} +- 10 %",
                    abs(got / wanted - 1) <= _NEAR,
                )
            )  # fmt: skip
        if len(published) > 2:
            ratio = mean["order"] / mean["memory"]
            rows.append(_row(f"{name}: order / memory", ratio, "<= 0.95", ratio <= 0.95))
    return rows, tables


def _sensitivity(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_ablation import ARMS, VARIATIONS, ablation
    from omniload.tools.pipeline_setting import PUBLISHED, SETTING

    name, published = next(iter(PUBLISHED.items()))
    lines: Rows = [
        {"setting": "published", **{arm: _share(published, arm) for arm in ARMS[1:]}},
    ]
    for words, setting in {"the setting": SETTING, **VARIATIONS}.items():
        days = ablation(name, setting, 0)
        lines.append({"setting": words, **{arm: _share(days, arm) for arm in ARMS[1:]}})
        tick()
    return [], {f"{name}: days by those of the baseline, one draw": lines}


def _pairs(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_plans import all_pairs, pair_match
    from omniload.tools.pipeline_setting import SETTING

    found = all_pairs(pair_match, SETTING, progress=tick)
    ratios = [match.ratio for match in found if match.ratio is not None]
    least = min(ratios, default=0.0)
    row = _row("80 GB: OmniBal's step / ours, least of 9", least, ">= 0.995", least >= 0.995)
    return [row], {"80 GB: ours against OmniBal's search": list(map(_match_row, found))}


def _tight(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_plans import TIGHT, all_pairs, pair_match

    tables = {
        words: all_pairs(pair_match, setting, progress=tick) for words, setting in TIGHT.items()
    }
    every = [match for found in tables.values() for match in found]
    faster = sum(match.ratio is not None and match.ratio > 1.005 for match in every)
    rescued = sum(match.other_s is None and match.ours_s is not None for match in every)
    lost = sum(match.ours_s is None and match.other_s is not None for match in every)
    rows = [
        _row(f"little memory: quicker by 0.5 %, of {len(every)}", faster, ">= 6", faster >= 6),
        _row("little memory: only ours fits", rescued, ">= 1", rescued >= 1),
        _row("little memory: only OmniBal's fits", lost, "0", lost == 0),
    ]
    return rows, {
        f"{words}: ours against OmniBal's search": list(map(_match_row, found))
        for words, found in tables.items()
    }


def _frozen(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_plans import all_pairs, frozen_match
    from omniload.tools.pipeline_setting import SETTING

    found = all_pairs(frozen_match, SETTING, progress=tick)
    ratios = [match.ratio or 0.0 for match in found]
    lines = [{**_match_row(match), "most": match.most} for match in found]
    rows = [
        _row("frozen: by forward time / ours, least", min(ratios), ">= 1.15",
             min(ratios) >= 1.15),
        _row("frozen: by forward time / ours, most", max(ratios), ">= 1.5",
             max(ratios) >= 1.5),
    ]  # fmt: skip
    return rows, {"frozen encoder: ours against the least longest forward time": lines}


def _solve(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_plans import solve_seconds

    rows = []
    for stages, most in _SOLVE.items():
        taken = solve_seconds(stages)
        rows.append(
            _row(f"plan of 131 layers, {stages} stages, CPU s", taken, f"<= {most:g}",
                 taken <= most)
        )  # fmt: skip
        tick()
    return rows, {}


def _order(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_plans import order_ms

    rows = []
    for stages, micro_batches, ranks in _ORDERED:
        taken = order_ms(stages, micro_batches, ranks)
        rows.append(
            _row(
                f"order, {stages} stages, {micro_batches} x {ranks}, CPU ms",
                taken,
                f"<= {_ORDER_MS:g}",
                taken <= _ORDER_MS,
            )
        )
        tick()
    return rows, {}


def _engine(_draws: int, tick: Callable[[], None]) -> tuple[Rows, Tables]:
    from omniload.tools.bench_pipeline_engine import engine_runs

    found = engine_runs(tick)
    most = max(abs(run.over) for run in found)
    lines = [
        {"case": run.case, "engine s": run.engine_s, "simulated s": run.simulated_s,
         "over %": 100 * run.over}
        for run in found
    ]  # fmt: skip
    row = _row("engine against simulator, most", most, "<= 0.12", most <= 0.12)
    return [row], {"steps of DeepSpeed's engine, sleeping layers": lines}


_RUN: Mapping[str, Callable[[int, Callable[[], None]], tuple[Rows, Tables]]] = {
    "ablation": _ablation,
    "sensitivity": _sensitivity,
    "pairs": _pairs,
    "tight": _tight,
    "frozen": _frozen,
    "solve": _solve,
    "order": _order,
    "engine": _engine,
}


def _units(parts: Sequence[str], draws: int) -> int:
    """Count the ticks of parts."""
    from omniload.tools.bench_pipeline_ablation import VARIATIONS

    each = {"ablation": 2 * draws, "sensitivity": 1 + len(VARIATIONS), "pairs": 9, "tight": 18,
            "frozen": 9, "solve": len(_SOLVE), "order": len(_ORDERED), "engine": 5}  # fmt: skip
    return sum(each[part] for part in parts)


def _row(figure: str, found: float, target: str, met: bool) -> dict[str, Any]:
    return {"figure": figure, "found": found, "target": target, "met": met}


def _match_row(match: Match) -> dict[str, Any]:
    return {
        "pair": match.pair,
        "other s": match.other_s if match.other_s is not None else "no fit",
        "ours s": match.ours_s if match.ours_s is not None else "no fit",
        "ratio": match.ratio if match.ratio is not None else "-",
        "cuts": " ".join(map(str, match.other[1:-1])),
        "our cuts": " ".join(map(str, match.ours[1:-1])),
    }


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {arm: sum(each[arm] for each in found) / len(found) for arm in found[0]}


def _share(days: Mapping[str, float], arm: str) -> float | str:
    return days[arm] / days["baseline"] if arm in days else "-"


def _show(rows: Rows, tables: Tables, as_json: bool) -> None:
    from omniload.tools.bench_common import emit, environment
    from omniload.tools.pipeline_setting import SETTING

    notes = (
        f"{SETTING.stages} stages, {SETTING.data_parallel} data-parallel ranks, "
        f"{SETTING.micro_batches} micro-batches of {SETTING.tokens} tokens, "
        f"{SETTING.memory_gb:g} GB, ZeRO-{SETTING.zero_stage}, "
        f"{SETTING.vision_efficiency:.0%} and {SETTING.language_efficiency:.0%} of the peak of an "
        "A100 in encoder and language model. Simulated; the optimizer, the reduction of gradients "
        "and the data loader are left out. Ratios: step time of the other plan by that of ours; "
        "`most` is what they could be if all stages were even."
    )
    if as_json:
        found = {"benchmark": "pipeline", "rows": rows, "tables": tables, "notes": notes,
                 "environment": environment()}  # fmt: skip
        print(json.dumps(found))
        return
    for title, lines in tables.items():
        emit(title, lines)
    shown = [{**row, "met": "yes" if row["met"] else "no"} for row in rows]
    emit("pipeline", shown, notes=notes)


@contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[], None]]:
    """Show how far it is, on standard error."""
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pipeline", total=total)
        yield lambda: bar.advance(task)
