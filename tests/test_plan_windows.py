"""Plans of very many rows: a window at a time, in memory that doesn't grow with the data."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from omniload.grouping import DEFAULT_GROUPING
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.tools.lengths import make_lengths
from omniload.types import Budget

BUDGET = Budget(tokens=4096, tiles=13)
AT_ONCE = 500_000
WINDOW, FEW, MANY = 25_000, 250_000, 1_000_000
COLUMNS = ("num_tokens", "num_tiles", "num_loss_tokens")


def index_on_disk(folder, count):
    """An index of made-up lengths whose columns are memory maps, as those of shards are."""
    columns = {
        name: np.memmap(folder / f"{name}-{count}", np.int32, mode="w+", shape=count)
        for name in COLUMNS
    }
    for first in range(0, count, AT_ONCE):
        part = make_lengths(min(AT_ONCE, count - first), seed=first)
        for name, column in columns.items():
            column[first : first + len(part)] = getattr(part, name)
    return LengthIndex.from_arrays(**columns)


def walk(index, *, window_rows, grouping=DEFAULT_GROUPING):
    """Go through an epoch as one rank of 64 does; the rows that a step holds, and the peak."""
    tracemalloc.start()
    plan = make_plan(
        index, budget=BUDGET, dp_world_size=64, accumulation=4, window_rows=window_rows,
        grouping=grouping, sync=None,
    )  # fmt: skip
    num_rows, step = 0, 0
    while plan.has_step(step):
        plan.micro_batch(step, 3, 63)
        num_rows += len(plan.step_groups(step).rows)
        step += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert step == plan.num_steps
    assert plan._order.num_windows == -(-len(index) // window_rows)
    return num_rows, peak


def first_rows(index, count):
    return LengthIndex(**{name: getattr(index, name)[:count] for name in COLUMNS})


def peaks_of_walks(folder):
    """Peaks of walks through few and many windows; the slow test below takes the default."""
    quick = {"grouping": "random"}
    index, peaks = index_on_disk(folder, MANY), []
    walk(first_rows(index, 10_000), window_rows=5000, **quick)  # imports, compiled code
    for count in (FEW, MANY):
        num_rows, peak = walk(first_rows(index, count), window_rows=WINDOW, **quick)
        assert num_rows == count
        peaks.append(peak)
    return peaks


def peaks_of_figures(folder):
    index, peaks = index_on_disk(folder, 2 * MANY), []
    for count in (10_000, 2 * FEW, 2 * MANY):
        plan = make_plan(
            first_rows(index, count), budget=BUDGET, dp_world_size=64,
            window_rows=2 * WINDOW, grouping="random", sync=None,
        )  # fmt: skip
        tracemalloc.start()
        figures = plan.figures()
        peaks.append(tracemalloc.get_traced_memory()[1] - 400 * figures.num_steps)
        tracemalloc.stop()
        assert figures.num_rows == count
    return peaks[1:]


def in_new_process(function, folder):
    """What a function of this module gives where no other test has left threads and memory."""
    program = (
        "import pathlib, sys; from tests import test_plan_windows as module; "
        "print(*getattr(module, sys.argv[1])(pathlib.Path(sys.argv[2])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, function.__name__, str(folder)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [int(peak) for peak in done.stdout.split()]


def test_memory_of_four_times_the_rows_is_the_same(tmp_path):
    few, many = in_new_process(peaks_of_walks, tmp_path)
    assert many < 1.5 * few  # rows are four times as many; threads that plan differ by chance
    assert few < WINDOW * 120  # bytes; two windows and what planning one takes


def test_figures_of_four_times_the_rows_need_the_same_memory(tmp_path):
    few, many = in_new_process(peaks_of_figures, tmp_path)
    assert many < 1.3 * few  # how far a thread has planned at the worst moment is chance


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_of_a_hundred_million_rows_is_that_of_ten_million(tmp_path):
    peaks = []
    for count in (10_000_000, 100_000_000):
        num_rows, peak = walk(index_on_disk(tmp_path, count), window_rows=4_000_000)
        assert num_rows == count
        peaks.append(peak)
    assert peaks[1] < 1.1 * peaks[0]
