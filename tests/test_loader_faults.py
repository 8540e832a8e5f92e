"""What goes wrong in a batch is named with its sample, and nothing hangs or is left behind."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omniload import Budget, DataLoader, SampleError, ShardError, StateError, WorkerError, World
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import Failing, Longer, Slow, Swapped, write_data

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 24
DAMAGED = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("faults") / "shards", num_rows=NUM_ROWS)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return write_data(
        tmp_path_factory.mktemp("damaged") / "shards", num_rows=NUM_ROWS, damage=DAMAGED
    )


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def own(data, kind):
    return kind(transform_from_settings(open_shards(data).manifest.settings))


@pytest.fixture
def children():
    """Names the worker processes that the test has started and that are still there."""
    before = {process.pid for process in multiprocessing.active_children()}
    return lambda: {process.pid for process in multiprocessing.active_children()} - before


def shard_of(data, row):
    shards = open_shards(data)
    return shards.manifest.shards[shards.locate(row)[0]].name


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_image_names_row_key_source_and_shard(damaged, num_workers):
    shard = shard_of(damaged, DAMAGED)
    place = f"row={DAMAGED}, key='key-{DAMAGED}', source='pictures', shard='{shard}'"
    with pytest.raises(SampleError, match=place) as caught:
        list(loader(damaged, num_workers=num_workers))
    assert type(caught.value) is SampleError


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_length_that_differs_from_the_index_shows_both(data, num_workers):
    planned = int(open_shards(data).index.num_tokens[Longer.row])
    message = (
        rf"num_tokens .* expected {planned}, got {planned + 1} \(row={Longer.row}, "
        rf"key='key-{Longer.row}', source='pictures', shard='{shard_of(data, Longer.row)}'\)"
    )
    with pytest.raises(SampleError, match=message):
        list(loader(data, num_workers=num_workers, transform=own(data, Longer)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failing_transform_is_named_with_its_cause(data, num_workers):
    message = rf"transform failed with KeyError: 'no such colour' \(row={Failing.row}, key="
    with pytest.raises(SampleError, match=message) as caught:
        list(loader(data, num_workers=num_workers, transform=own(data, Failing)))
    if num_workers:
        # the worker's traceback travels as text, and beside the message
        assert str(caught.value).startswith("the transform failed")
        assert 'raise KeyError("no such colour")' in str(caught.value.__cause__)
    else:
        assert isinstance(caught.value.__cause__, KeyError)


def test_a_sample_under_a_wrong_number_is_refused(data):
    with pytest.raises(SampleError, match=r"sample_id must be the row .* got 0"):
        list(loader(data, transform=own(data, Swapped)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_vanishes_is_named(tmp_path, num_workers, monkeypatch):
    # a shard that is open stays readable, so take one that the check of a few rows leaves alone
    monkeypatch.setattr("omniload.loader.checks._probes", lambda shards: iter(()))
    folder = write_data(tmp_path / "shards", num_rows=8)
    loading = loader(folder, num_workers=num_workers)
    lost = loading.manifest.shards[-1].name
    (folder / lost).unlink()
    with pytest.raises(ShardError, match=lost):
        list(loading)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_after_an_error_the_place_is_kept_and_the_iterator_says_so(damaged, num_workers):
    loading = loader(damaged, num_workers=num_workers)
    batches, seen = iter(loading), []
    with pytest.raises(SampleError):
        seen.extend(batches)
    with pytest.raises(StateError, match="closed by an error in one of its batches"):
        next(batches)
    state = loading.state_dict()
    assert state["step"] == len(seen)
    loading.load_state_dict(state)
    with pytest.raises(SampleError, match=f"row={DAMAGED}"):
        next(iter(loading))


def test_a_batch_that_takes_too_long_is_an_error_of_ours(data, children):
    slow = loader(data, num_workers=1, timeout=0.5, transform=own(data, Slow))
    where = (
        r"gave a batch in time: expected one within timeout=0.5 s, waited .*; "
        r"worker 0 \(pid \d+\): transforming row \d+ \(shard '.*', row \d+ there, key 'key-\d+'; "
        r"one of \d+ for step 0, micro-step 0 of epoch 0\) for .* s\. Raise timeout"
    )
    with pytest.raises(WorkerError, match=where):
        list(slow)
    assert not children()


def test_a_break_leaves_no_process(data, children):
    loading = loader(data, num_workers=2)
    for _ in loading:
        assert len(children()) == 2
        break
    assert not children()
    batches = iter(loading)
    next(batches)
    newer = iter(loading)
    next(newer)
    assert len(children()) == 2
    del newer, loading
    assert not children()


def test_an_error_that_is_kept_keeps_no_process(damaged, children):
    with pytest.raises(SampleError) as caught:
        list(loader(damaged, num_workers=2))
    assert not children()
    assert f"row={DAMAGED}" in str(caught.value)


def test_a_dropped_loader_takes_its_persistent_workers_along(data, children):
    loading = loader(data, num_workers=1, persistent_workers=True)
    list(loading)
    assert len(children()) == 1
    del loading
    assert not children()


def heed_interrupts():
    # a shell starts background jobs with SIGINT ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_an_interrupt_ends_the_program_and_its_workers(data):
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.loader_endless", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        assert len(program.stdout.readline().split()) == 2
        os.killpg(program.pid, signal.SIGINT)  # as a terminal does: the workers get it too
        _, errors = program.communicate(timeout=60)
        assert program.returncode != 0
        assert "KeyboardInterrupt" in errors
        with pytest.raises(ProcessLookupError):
            os.killpg(program.pid, 0)  # nobody is left in its session
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
