"""Memory that worker processes use again: never while anything looks into it."""

import gc
import os
from itertools import islice

import pytest
import torch

from omniload import Budget, DataLoader, World
from omniload.loader.segments import Lender, Segments, _open
from tests.loader_data import write_data

BUDGET = Budget(tokens=400, tiles=12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("segments") / "shards", num_rows=200)


def loader(data, num_workers=2, **options):
    return DataLoader(data, budget=BUDGET, world=World(), num_workers=num_workers, **options)


def contents(batches):
    return [batch.buffer.clone() for batch in batches]


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_batches_that_are_kept_stay_as_they_were(data, start):
    options = {"multiprocessing_context": start, "persistent_workers": True}
    wanted = loader(data, 0)
    ours = loader(data, **options)
    first = list(ours)
    assert_same([batch.buffer for batch in first], contents(wanted))
    kept = first[::3]
    expected = contents(kept)
    del first
    assert_same([batch.buffer.clone() for batch in ours], contents(wanted))
    assert_same([batch.buffer for batch in kept], expected)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_view_keeps_a_batch_after_the_loader_is_gone(data, persistent):
    ours = loader(data, persistent_workers=persistent)
    views, expected = [], []
    for _ in range(2):
        batches = iter(ours)
        for batch in islice(batches, 4):
            made = (batch.tiles[:1, 0], batch.input_ids.numpy()[1:], batch["labels"].view(-1)[2:])
            views += [torch.as_tensor(view) for view in made]
            expected += [torch.as_tensor(view).clone() for view in made]
        del batch, batches, made  # left early
    for batch in ours:
        del batch
    del ours
    gc.collect()
    assert_same(views, expected)


def test_memory_that_nothing_looks_into_is_used_again(data):
    ours = loader(data, 1, persistent_workers=True)
    places = [batch.buffer.data_ptr() for _ in range(2) for batch in ours]
    assert len(set(places)) <= 4 + 2  # a few may be replaced by larger ones


def test_what_a_forked_child_may_still_see_is_not_used_again():
    segments = Segments(prefetch_factor=2)
    lender = Lender(segments)
    assert not lender._segments
    batch = _received(lender, segments)
    segment = lender._segments[0]
    del batch
    assert segment.is_free()
    batch = _received(lender, segments)
    child = os.fork()
    if child == 0:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert not segment.is_free()
    del batch
    assert not segment.is_free()


def _received(lender, segments):
    from omniload.batch import PackedBatch
    from tests.test_batch import make_batch

    made = make_batch()
    buffer = lender.lend(len(made.buffer))
    buffer.copy_(made.buffer)
    restore, (_, *rest) = made.__reduce__()
    parcel = lender.parcel(restore(buffer, *rest))
    del buffer
    function, arguments = parcel.__reduce__()
    assert function is _open
    batch = function(*arguments)
    assert isinstance(batch, PackedBatch)
    assert torch.equal(batch.buffer, made.buffer)
    return batch
