"""Plans of very many rows: a window at a time, in memory that doesn't grow with the data."""

import tracemalloc

import numpy as np
import pytest

from omniload.grouping import DEFAULT_GROUPING
from omniload.index import LengthIndex
from omniload.plan import make_plan
from omniload.tools.lengths import make_lengths
from omniload.types import Budget

BUDGET = Budget(tokens=4096, tiles=13)
AT_ONCE = 500_000
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


@pytest.fixture(scope="module")
def five_million(tmp_path_factory):
    return index_on_disk(tmp_path_factory.mktemp("five"), 5_000_000)


def first_rows(index, count):
    return LengthIndex(**{name: getattr(index, name)[:count] for name in COLUMNS})


def test_memory_of_five_million_rows_is_that_of_one_million(five_million):
    quick = {"grouping": "random"}  # the slow test below takes the default
    walk(first_rows(five_million, 10_000), window_rows=5000, **quick)  # imports, compiled code
    peaks = []
    for count in (1_000_000, 5_000_000):
        num_rows, peak = walk(first_rows(five_million, count), window_rows=250_000, **quick)
        assert num_rows == count
        peaks.append(peak)
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[0] < 250_000 * 120  # bytes; two windows and what planning one takes


def test_figures_of_five_million_rows_need_the_memory_of_one_million(five_million):
    peaks = []
    for count in (10_000, 1_000_000, 5_000_000):
        plan = make_plan(
            first_rows(five_million, count), budget=BUDGET, dp_world_size=64, window_rows=250_000,
            grouping="random", sync=None,
        )  # fmt: skip
        tracemalloc.start()
        figures = plan.figures()
        peaks.append(tracemalloc.get_traced_memory()[1] - 400 * figures.num_steps)
        tracemalloc.stop()
        assert figures.num_rows == count
    assert peaks[2] < 1.1 * peaks[1]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_memory_of_a_hundred_million_rows_is_that_of_ten_million(tmp_path):
    peaks = []
    for count in (10_000_000, 100_000_000):
        num_rows, peak = walk(index_on_disk(tmp_path, count), window_rows=4_000_000)
        assert num_rows == count
        peaks.append(peak)
    assert peaks[1] < 1.1 * peaks[0]
