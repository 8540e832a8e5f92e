"""Why a loop waits is worked out from figures alone, and told once an epoch."""

import itertools
import logging

import pytest

from omniload import Budget, DataLoader, World
from omniload.loader.stats import CacheUse, SlowRow, Span
from omniload.loader.waiting import WaitWatch, likely_cause
from tests.loader_data import MemoryRows


def span(**changes):
    figures = {
        "batches": 100, "fillers": 0, "steps": 100, "samples": 1000, "skipped": {},
        "tokens": 10**6, "padding_tokens": 0, "loss_tokens": 10**5, "tiles": 1000,
        "wait_s": 30.0, "loop_s": 70.0, "wait_ready_s": 0.0, "busy": (0.95, 0.95),
        "read_s": 10.0, "transform_s": 170.0, "pack_s": 10.0, "bytes_read": 10**8,
        "cache": None, "fill_tokens": 0.9, "fill_tiles": None, "pad_ratio": 0.0,
        "pad_ratio_unpacked": 0.3, "dist_tokens": 0.01, "dist_tiles": 0.01, "dist_cost": 0.01,
    }  # fmt: skip
    return Span(**{**figures, **changes})


def cache(fetched):
    return CacheUse(hits=5, misses=9, fetched_files=fetched, fetched_bytes=10**9, wait_s=90.0)


@pytest.mark.parametrize(
    ("changes", "facts", "said"),
    [
        ({}, {"worker_type": "none"}, "set num_workers"),
        ({}, {}, "add num_workers while there are CPUs"),
        ({}, {"slowest": SlowRow(row=7, seconds=20.0)}, "row 7 took 20.0 s"),
        ({"wait_ready_s": 25.0}, {}, "slow to take them"),
        ({"read_s": 180.0, "transform_s": 5.0}, {}, "wait for the disk"),
        ({"read_s": 180.0, "transform_s": 5.0, "cache": cache(9)}, {"num_shards": 10}, "network"),
        ({"read_s": 400.0, "cache": cache(19)}, {"num_shards": 10}, "cache is too small"),
        ({"busy": (0.1, 0.2)}, {}, "raise prefetch_factor"),
        ({"busy": (0.1, 0.2)}, {"worker_type": "thread"}, "try worker_type='process'"),
    ],
)  # fmt: skip
def test_the_likely_cause_follows_from_the_figures(changes, facts, said):
    assert said in likely_cause(span(**changes), **{"worker_type": "process", **facts})


def test_waiting_is_told_once_an_epoch(caplog):
    watch = WaitWatch()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watch.look(span(), worker_type="process")
        watch.begin()
        watch.look(span(), worker_type="process")
    assert len(caplog.records) == 2
    assert "waited for data 30 % of the time; likely cause: workers are busy" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"wait_s": 3.0}, {"batches": 10}, {"wait_s": 5.0, "loop_s": 5.0}]
)
def test_little_waiting_and_little_time_are_not_told(changes, caplog):
    WaitWatch().look(span(**changes), worker_type="process")
    assert not caplog.records


def test_a_loop_that_waits_is_told_while_it_runs(caplog):
    loading = DataLoader(MemoryRows(200), budget=Budget(tokens=60), world=World())
    seconds = itertools.count(0, 10**9)
    loading._tally._clock = lambda: next(seconds)  # a second from each look to the next
    for _ in range(2):
        list(loading)
    assert loading.stats().this_epoch.batches > 60
    told = [record.getMessage() for record in caplog.records if "waited" in record.getMessage()]
    assert len(told) == 2
    assert told[0].endswith("batches are made in the training loop itself: set num_workers")
