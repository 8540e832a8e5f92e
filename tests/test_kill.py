"""kill -9 of real processes at random points: nothing is lost, doubled or left behind."""

import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.kill_program import lines, run
from tests.loader_data import write_data

NUM_ROWS = 60
ROOT = Path(__file__).resolve().parent.parent
LONG = 120  # seconds until a test gives up


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("kill") / "shards", num_rows=NUM_ROWS)


def start(data, log, **arguments):
    # forked: the program is there at once, with all imports done
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        program = multiprocessing.get_context("fork").Process(
            target=run, args=(data, log), kwargs=arguments
        )
        program.start()
    return program


def wait_until(true, what, *, program=None):
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"not within {LONG} s: {what}"
        assert program is None or program.is_alive(), f"the program ended before {what}"
        time.sleep(0.005)


def group_of(leader):
    """Processes in the session of a program."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def left_in_shared_memory(pids):
    """Names that hold memory; torch removes a name before it fills the pages, but a kill between
    making and removing it leaves an empty one."""
    names = {str(pid) for pid in pids}
    found = [path for path in Path("/dev/shm").glob("torch_*") if path.name.split("_")[1] in names]
    return [path.name for path in found if path.stat().st_blocks]


def run_with_kills(data, log, *, num_workers, kinds, chance):
    """Start the program again and again, and kill it or its workers at a random point."""
    for kind in kinds:
        before = len(lines(log))
        program = start(data, log, num_workers=num_workers, last_epoch=10**6)
        target = before + chance.randrange(40)
        wait_until(lambda at=target: len(lines(log)) > at, "progress", program=program)
        time.sleep(chance.uniform(0, 0.02))
        everybody = group_of(program.pid)
        workers = [pid for pid in everybody if pid != program.pid]
        if kind == "worker" and workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(workers), signal.SIGKILL)
            target = len(lines(log)) + 10
            wait_until(lambda at=target: len(lines(log)) > at, "new workers", program=program)
            everybody += group_of(program.pid)
        if kind == "main":
            os.kill(program.pid, signal.SIGKILL)
        else:
            os.killpg(program.pid, signal.SIGKILL)
        program.join(LONG)
        assert program.exitcode == -signal.SIGKILL
        wait_until(lambda pid=program.pid: not group_of(pid), "the end of all workers")
        assert not left_in_shared_memory(everybody)
    last = start(data, log, num_workers=num_workers, last_epoch=lines(log)[-1]["state"]["epoch"])
    last.join(LONG)
    assert last.exitcode == 0


def assert_each_row_once_an_epoch(log):
    rows = {}
    for line in lines(log):
        rows.setdefault(line["epoch"], Counter()).update(r for r in line["rows"] if r >= 0)
    assert list(rows) == list(range(len(rows)))
    for epoch, counted in rows.items():
        lost = set(range(NUM_ROWS)) - set(counted)
        doubled = {row for row, times in counted.items() if times > 1}
        assert not lost, f"epoch {epoch}"
        assert not doubled, f"epoch {epoch}"


@pytest.mark.parametrize(("num_workers", "kinds"), [(0, ["group"]), (1, ["worker", "main"])])
def test_a_killed_run_loses_and_doubles_nothing(data, tmp_path, num_workers, kinds):
    log = tmp_path / "log"
    run_with_kills(data, log, num_workers=num_workers, kinds=kinds, chance=random.Random(1))
    assert_each_row_once_an_epoch(log)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("num_workers", [0, 1, 4])
def test_twenty_kills_lose_and_double_nothing(data, tmp_path, num_workers):
    chance = random.Random(num_workers)
    kinds = [chance.choice(["worker", "main", "group"]) for _ in range(20)]
    log = tmp_path / "log"
    run_with_kills(data, log, num_workers=num_workers, kinds=kinds, chance=chance)
    assert_each_row_once_an_epoch(log)


def heed_interrupts():
    # a shell starts background jobs with SIGINT ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def endless(data, *arguments):
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.loader_endless", str(data), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        program.stdout.readline()
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_an_interrupt_ends_a_program_whose_workers_hang(data, worker_type):
    with endless(data, worker_type, "fork", "hang") as program:
        everybody = group_of(program.pid)
        os.kill(program.pid, signal.SIGINT)  # to this process alone, as a scheduler does
        _, errors = program.communicate(timeout=LONG)  # the workers hang for much longer
        assert program.returncode != 0
        assert "KeyboardInterrupt" in errors
        wait_until(lambda: not group_of(program.pid), "the end of all workers")
        assert not left_in_shared_memory(everybody)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_hang_end_with_a_killed_program(data, method):
    semaphores = {path.name for path in Path("/dev/shm").glob("sem.mp-*")}
    with endless(data, "process", method, "hang") as program:
        everybody = group_of(program.pid)
        own = {path.name for path in Path("/dev/shm").glob("sem.mp-*")} - semaphores
        assert len(everybody) >= 3
        os.kill(program.pid, signal.SIGKILL)
        program.communicate()
        wait_until(lambda: not group_of(program.pid), "the end of all workers")
        assert not left_in_shared_memory(everybody)
        still = {path.name for path in Path("/dev/shm").glob("sem.mp-*")}
        assert not own or own - still  # those of others come and go meanwhile
