"""A fork waits for plans that threads make: worker processes must not inherit locks of these."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from omniload.loader.interrupts import interrupts_held
from omniload.plan.ahead import Ahead

ROOT = Path(__file__).parent.parent

# A hook that is registered before those of omniload runs after them, directly at the fork.
PROGRAM = """
import os, threading

at_forks = []
os.register_at_fork(before=lambda: at_forks.append(planning()))

def planning():
    return [t.name for t in threading.enumerate() if t.name == "omniload-plan"]

from omniload import Budget, DataLoader, World
from omniload.plan import make_plan
from tests.loader_data import MemoryRows

if __name__ == "__main__":
    rows = MemoryRows(40_001, most_tokens=4)
    loader = DataLoader(rows, budget=Budget(tokens=2000), world=World(), window_rows=20_000,
                        num_workers=2, multiprocessing_context="fork")
    # the folder of compiled code is empty, so that this compiles, and the workers start meanwhile
    plan = make_plan(rows.index, budget=Budget(tokens=2000), window_rows=20_000)
    plan.plan_ahead()
    assert planning(), "it was planned too soon to see anything"
    at_forks.clear()
    batches = iter(loader)
    next(batches)
    print(at_forks)
    assert plan.has_step(0)
"""


def test_workers_are_forked_when_no_window_is_being_planned(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[], []]"


def fork_and_ask(ask):
    """Fork; what `ask` says in the child, as exit code."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(ask())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_the_child_of_a_fork_has_the_result_and_can_plan_itself():
    ahead = Ahead(lambda: time.sleep(0.3) or 7)
    assert fork_and_ask(lambda: ahead.result() + Ahead(lambda: 1).result()) == 8
    assert ahead.result() == 7
    assert Ahead(lambda: 2).result() == 2  # the parent isn't kept from planning either


def test_a_fork_waits_for_a_plan_that_another_plan_began():
    def make():
        time.sleep(0.2)
        return Ahead(lambda: time.sleep(0.2) or 5)

    outer = Ahead(make)
    assert fork_and_ask(lambda: outer.result().result()) == 5


def test_a_fork_passes_over_the_error_of_a_plan_and_whoever_asks_gets_it():
    def make():
        time.sleep(0.2)
        raise ZeroDivisionError

    ahead = Ahead(make)
    assert fork_and_ask(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        ahead.result()


def test_a_fork_that_a_plan_waits_for_is_made_after_all_and_the_child_plans_anew(
    monkeypatch, caplog
):
    monkeypatch.setattr("omniload.plan.ahead._MOST_WAIT_S", 0.2)
    forked = threading.Event()
    process = os.getpid()
    ahead = Ahead(lambda: 6 if os.getpid() != process else forked.wait() and 7)
    assert fork_and_ask(ahead.result) == 6
    forked.set()
    assert ahead.result() == 7
    assert "forked while a plan is made" in caplog.text


INTERRUPTED = """
import os, signal, threading, time
from omniload.plan.ahead import Ahead

ahead = Ahead(lambda: time.sleep(30))
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    child = os.fork()  # waits for the plan in a hook, where Python drops what is raised
    if child == 0:
        os._exit(0)
    time.sleep(20)
    print("lost")
except KeyboardInterrupt:
    print("heard")
    Ahead(int).result()  # the lock is free
"""


def test_ctrl_c_is_heard_by_a_program_that_waits_at_a_fork():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert (done.stdout, done.stderr) == ("heard\n", "")


def test_ctrl_c_is_held_back_while_workers_are_forked():
    told = []

    def start_workers(*, signals):
        with interrupts_held():
            for _ in range(signals):
                signal.raise_signal(signal.SIGINT)
            told.append(signals)

    with pytest.raises(KeyboardInterrupt):
        start_workers(signals=1)
    with pytest.raises(KeyboardInterrupt):
        start_workers(signals=2)
    assert told == [1]  # the second one goes through at once
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
