"""Workers that die are named and replaced; threads make what processes make."""

import ctypes
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from omniload import Budget, ConfigError, DataLoader, SampleError, StateError, WorkerError, World
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import Failing, Noisy, Slow, Wrapped, assert_same_run, rows_of, write_data

BUDGET = Budget(tokens=400, tiles=12)
NUM_ROWS = 40
FATAL_ROW = 17


class Fatal(Wrapped):
    """Ends its process at one row: once, where a file says that it was done, or always."""

    fingerprint = "fatal/1"

    def __init__(self, inner, way, done=None):
        super().__init__(inner)
        self.way = way
        self.done = done

    def __call__(self, record, rng):
        if record.row == FATAL_ROW and not (self.done and self.done.exists()):
            if self.done:
                self.done.touch()
            if isinstance(self.way, signal.Signals):
                os.kill(os.getpid(), self.way)
                time.sleep(60)
            if self.way == "segfault":
                ctypes.string_at(0)
            sys.exit(self.way)
        return self.inner(record, rng)


class Gated(Wrapped):
    """Stands still at one row until a file is there."""

    fingerprint = "gated/1"

    def __init__(self, inner, gate):
        super().__init__(inner)
        self.gate = gate

    def __call__(self, record, rng):
        while record.row == FATAL_ROW and not self.gate.exists():
            time.sleep(0.01)
        return self.inner(record, rng)


class Counting(Wrapped):
    """Notes its rows in a file."""

    fingerprint = "counting/1"

    def __init__(self, inner, path):
        super().__init__(inner)
        self.path = path

    def __call__(self, record, rng):
        with self.path.open("a") as file:
            file.write(f"{record.row}\n")
        return self.inner(record, rng)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("workers") / "shards", num_rows=NUM_ROWS)


@pytest.fixture
def children():
    """Names the worker processes that the test has started and that are still there."""
    before = {process.pid for process in multiprocessing.active_children()}
    return lambda: {process.pid for process in multiprocessing.active_children()} - before


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def own(data, kind, *arguments):
    return kind(transform_from_settings(open_shards(data).manifest.settings), *arguments)


def place_of(data, row):
    shards = open_shards(data)
    shard, inside = shards.locate(row)
    return rf"row {row} \(shard '{shards.shard_names[shard]}', row {inside} there, key 'key-{row}'"


@pytest.mark.parametrize(
    ("method", "persistent"),
    [("fork", False), ("fork", True), ("spawn", True), ("forkserver", True)],
)
def test_a_killed_worker_is_replaced_and_no_row_is_lost_or_doubled(
    data, method, persistent, children, caplog
):
    loading = loader(
        data,
        num_workers=2 if method == "fork" else 1,
        persistent_workers=persistent,
        multiprocessing_context=method,
    )
    plain = list(loader(data))
    batches = iter(loading)
    seen = [next(batches), next(batches)]
    killed = min(children())
    os.kill(killed, signal.SIGKILL)
    seen.extend(batches)
    assert_same_run(seen, plain)
    # on a busy machine other warnings come too, as that the loop waits for data
    (told,) = [text for text in caplog.messages if text.startswith("a worker ended")]
    assert f"(pid {killed}) was killed by SIGKILL" in told
    assert loading.ledger().balanced
    assert sorted(rows_of(loading)) == list(range(NUM_ROWS))  # the next epoch
    del batches, loading
    assert not children()


@pytest.mark.parametrize(
    ("way", "how", "remedy"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", "the kernel where memory ends"),
        (signal.SIGBUS, "was killed by SIGBUS", "/dev/shm is full"),
        (signal.SIGABRT, "was killed by SIGABRT", "leave that out with exclude="),
        ("segfault", "was killed by SIGSEGV", "leave that out with exclude="),
        (3, "ended with exit code 3", "look for sys.exit"),
        (0, "ended with exit code 0", "look for sys.exit"),
    ],
)
def test_a_row_that_ends_its_worker_twice_is_named_with_signal_and_memory(data, way, how, remedy):
    loading = loader(data, num_workers=1, transform=own(data, Fatal, way))
    seen = []
    once = rf"worker 0 \(pid \d+\) {how} while transforming {place_of(data, FATAL_ROW)}.*Memory: .*"
    with pytest.raises(WorkerError, match=f"second time.*Now: {once}Before: {once}") as caught:
        seen.extend(loading)
    assert remedy in str(caught.value)
    assert "MiB not shared" in str(caught.value)
    state = loading.state_dict()
    assert state["step"] == len(seen)
    assert FATAL_ROW not in rows_of(seen)
    loading = loader(data)
    plain = list(loading)
    assert_same_run(seen, plain[: len(seen)])


def test_a_row_that_ends_its_worker_once_is_made_by_the_next(data, tmp_path):
    fatal = own(data, Fatal, "segfault", tmp_path / "done")
    plain = list(loader(data, transform=own(data, Fatal, 0, data)))
    assert_same_run(loader(data, num_workers=2, transform=fatal), plain)


def test_a_worker_that_dies_after_a_resume_is_replaced_at_the_exact_place(data, tmp_path):
    fatal = own(data, Fatal, signal.SIGKILL, tmp_path / "done")
    plain = list(loader(data, transform=own(data, Fatal, 0, data), accumulation=3))
    halfway = loader(data, transform=own(data, Fatal, 0, data), accumulation=3)
    batches = iter(halfway)
    first = [next(batches) for _ in range(4)]
    resumed = loader(data, num_workers=1, transform=fatal, accumulation=3)
    resumed.load_state_dict(halfway.state_dict())
    rest = list(resumed)
    assert (tmp_path / "done").exists()
    assert_same_run(first + rest, plain)
    assert resumed.ledger().balanced


def test_a_death_while_the_training_loop_works_is_no_error_there(data, children):
    loading = loader(data, num_workers=1, prefetch_factor=1)
    seen = []
    for batch in loading:
        if not seen:
            (killed,) = children()
            os.kill(killed, signal.SIGKILL)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:  # signals are handled between two lines of Python
                pass
        seen.append(batch)
    assert_same_run(seen, list(loader(data)))


def test_workers_that_died_between_two_epochs_are_replaced(data, children, caplog):
    loading = loader(data, num_workers=2, persistent_workers=True)
    list(loading)
    for worker in children():
        os.kill(worker, signal.SIGKILL)
    assert sorted(rows_of(loading)) == list(range(NUM_ROWS))
    assert "new ones start" in caplog.text


def test_a_batch_that_is_long_in_coming_is_told_of_and_then_comes(
    data, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("omniload.loader.iterator.LATE_S", 0.5)
    loading = loader(data, num_workers=1, transform=own(data, Gated, tmp_path / "gate"))
    seen = []
    with caplog.at_level(logging.WARNING):
        for batch in loading:
            seen.append(batch)
            if len(seen) == 1:
                opens = multiprocessing.Process(target=open_later, args=(tmp_path / "gate",))
                opens.start()
    opens.join()
    assert sorted(rows_of(seen)) == list(range(NUM_ROWS))
    assert f"transforming row {FATAL_ROW} (shard" in caplog.text


def open_later(gate):
    time.sleep(4)
    gate.touch()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_threads_make_the_same_batches_as_processes_to_the_last_bit(data, num_workers):
    arguments = {"transform": own(data, Noisy), "seed": 3, "accumulation": 2}
    processes = loader(data, num_workers=1, worker_type="process", **arguments)
    threads = loader(data, num_workers=num_workers, worker_type="thread", **arguments)
    for _ in range(2):
        assert_same_run(threads, processes)
    assert threads.ledger() == processes.ledger()


def test_threads_resume_where_processes_stopped(data):
    plain = list(loader(data))
    processes = loader(data, num_workers=1)
    batches = iter(processes)
    first = [next(batches) for _ in range(3)]
    threads = loader(data, num_workers=2, worker_type="thread")
    threads.load_state_dict(processes.state_dict())
    assert_same_run(first + list(threads), plain)


def test_threads_raise_what_processes_raise_and_keep_the_place(data):
    loading = loader(data, num_workers=2, worker_type="thread", transform=own(data, Failing))
    batches, seen = iter(loading), []
    with pytest.raises(SampleError, match=r"KeyError: 'no such colour' \(row=7, key='key-7'"):
        seen.extend(batches)
    with pytest.raises(StateError, match="closed by an error in one of its batches"):
        next(batches)
    assert loading.state_dict()["step"] == len(seen)


def test_a_transform_that_ends_its_thread_is_an_error(data):
    loading = loader(data, num_workers=2, worker_type="thread", transform=own(data, Fatal, 3))
    with pytest.raises(WorkerError, match="thread was ended by SystemExit: 3"):
        list(loading)


def test_a_thread_that_hangs_times_out_and_is_named(data):
    loading = loader(
        data, num_workers=1, worker_type="thread", timeout=0.3, transform=own(data, Slow)
    )
    with pytest.raises(WorkerError, match=r"worker 0: transforming row \d+ \(shard .* for \d"):
        list(loading)


def test_threads_prefetch_as_far_as_processes(data, tmp_path):
    counted = own(data, Counting, tmp_path / "rows")
    loading = loader(
        data, num_workers=2, prefetch_factor=2, worker_type="thread", transform=counted
    )
    plan = [len(loading.plan.micro_batch(step, 0, 0)) for step in range(len(loading))]
    batches = iter(loading)
    next(batches)
    until = sum(plan[:5])
    while len((tmp_path / "rows").read_text().split()) < until:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len((tmp_path / "rows").read_text().split()) == until


def test_threads_end_with_their_iterator(data):
    def names():
        import threading

        return [t.name for t in threading.enumerate() if t.name.startswith("omniload-worker")]

    before = len(names())  # one that hangs is left by another test
    loading = loader(data, num_workers=2, worker_type="thread")
    batches = iter(loading)
    next(batches)
    assert len(names()) == before + 2
    del batches
    assert len(names()) == before
    list(loading)
    assert len(names()) == before


@pytest.mark.parametrize("worker_type", ["fork", None, 3])
def test_an_unknown_type_of_worker_is_refused(data, worker_type):
    with pytest.raises(ConfigError, match="worker_type must be one of 'auto', 'process', 'thread'"):
        loader(data, worker_type=worker_type)


def test_a_program_that_starts_spawned_workers_without_the_guard_is_told_of_it(data, tmp_path):
    program = tmp_path / "bare.py"
    program.write_text(
        "from omniload import Budget, DataLoader\n"
        f"next(iter(DataLoader({str(data)!r}, budget=Budget(tokens=4000), num_workers=1, "
        "multiprocessing_context='spawn')))\n"
    )
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
        check=False,
    )
    assert done.returncode == 1
    assert 'must do it under if __name__ == "__main__":' in done.stderr
    assert "sys.exit" not in done.stderr
