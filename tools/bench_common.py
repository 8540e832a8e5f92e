"""What every benchmark shares: interleaved timing, and one way to report.

The candidates of a benchmark take turns, round after round, so that a busy machine slows all
of them alike; ratios between them hold where absolute times do not.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Timing", "emit", "environment", "measure", "one_thread"]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall time of one candidate over all rounds, seconds."""

    min_s: float
    median_s: float
    p20_s: float
    p80_s: float


def measure(
    candidates: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each candidate `repeats` times, in turns, after one call that warms it up.

    Args:
        candidates: name -> a function without arguments.
        repeats: rounds.
        clock: seconds; `time.process_time` counts CPU time instead of wall time.

    Returns:
        name -> Timing.
    """
    for call in candidates.values():
        call()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, call in candidates.items():
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
    return {name: _timing(values) for name, values in seconds.items()}


def _timing(seconds: Sequence[float]) -> Timing:
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return Timing(
        min_s=ordered[0],
        median_s=statistics.median(ordered),
        p20_s=ordered[round(0.2 * last)],
        p80_s=ordered[round(0.8 * last)],
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread, as it is in a worker process."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def environment() -> dict[str, str]:
    """Say on what the figures were taken: machine, versions, commit."""
    facts = {
        "machine": f"{platform.machine()} {platform.processor()}".strip(),
        "python": platform.python_version(),
        "commit": _commit(),
    }
    for name in ("omniload-vlm", "numpy", "numba", "pyarrow", "torch", "pillow", "pillow-simd"):
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).resolve().parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def emit(
    name: str, rows: Sequence[Mapping[str, Any]], as_json: bool = False, notes: str = ""
) -> None:
    """Print the figures of one benchmark: a table for people, or one JSON object.

    Args:
        name: name of the benchmark.
        rows: one mapping a line; all have the keys of the first.
        as_json: print `{"benchmark", "rows", "notes", "environment"}` on one line instead.
        notes: what a reader must know to read the table.
    """
    if as_json:
        found = {
            "benchmark": name,
            "rows": list(rows),
            "notes": notes,
            "environment": environment(),
        }
        print(json.dumps(found))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name, title_justify="left")
    columns = list(rows[0]) if rows else []
    for position, column in enumerate(columns):
        # names are broken before a figure is
        table.add_column(
            column, justify="right" if position else "left", no_wrap=position > 0, min_width=4
        )
    for row in rows:
        table.add_row(*(_cell(row[column]) for column in columns))
    console = Console()
    if not console.is_terminal:  # a file or a pipe is as wide as it takes
        options = console.options.update(width=1000)
        console.width = max(console.width, console.measure(table, options=options).maximum)
    console.print(table)
    if notes:
        console.print(notes, style="dim", highlight=False)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
