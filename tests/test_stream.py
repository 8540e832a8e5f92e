"""Streams without an index: nothing lost, nothing doubled, equal steps on all ranks, no hang."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, SampleError, StateError, WorkerError
from omniload.packing import pack
from omniload.shards import open_shards
from omniload.stream import StreamLoader, StreamPart, StreamSettings, pack_stream
from omniload.transforms import transform_from_settings
from omniload.types import Budget
from omniload.world import World
from tests.loader_data import Failing, Longer, write_data
from tests.stream_ranks import Numbers, a_filler, text

ROOT = Path(__file__).resolve().parent.parent
WORLD = World()
BUDGET = Budget(tokens=64)


def ids(batches):
    return [number for batch in batches for number in batch.sample_ids.tolist()]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), max_size=200),
    buffer=st.integers(1, 40),
    accumulation=st.integers(1, 3),
)
def test_each_sample_comes_once_within_the_budget(lengths, buffer, accumulation):
    loader = StreamLoader(
        [text(i, n) for i, n in enumerate(lengths)],
        budget=BUDGET, buffer=buffer, accumulation=accumulation, world=WORLD, filler=a_filler(),
    )  # fmt: skip
    batches = list(loader)
    assert sorted(ids(batches)) == list(range(len(lengths)))
    assert all(batch.num_tokens <= 64 for batch in batches)
    assert len(batches) == loader.counts.steps * accumulation
    assert loader.counts.samples == len(lengths)
    assert loader.counts.fillers < accumulation
    for step in range(loader.counts.steps):
        mine = [batch for batch in batches if batch.step == step]
        assert [batch.micro_step for batch in mine] == list(range(accumulation))
        total = sum(batch.num_loss_tokens for batch in mine)
        assert {batch.num_loss_tokens_step for batch in mine} == {total}
        assert sum(batch.loss_scale() * batch.num_loss_tokens for batch in mine) == pytest.approx(
            1.0 if total else 0.0
        )


def test_the_groups_are_those_of_the_planner():
    from omniload.grouping.buffered import BufferedPacker, BufferedSettings

    lengths = np.random.default_rng(0).integers(1, 64, 300)
    packer = BufferedPacker(budget=BUDGET, settings=BufferedSettings(buffer=32))
    expected = [g.tolist() for g in packer.push(lengths, np.zeros_like(lengths))]
    expected += [g.tolist() for g in packer.flush()]
    stream = [text(i, n) for i, n in enumerate(lengths.tolist())]
    found = pack_stream(stream, StreamSettings(budget=BUDGET, buffer=32))
    assert [batch.sample_ids.tolist() for batch in found] == expected


def test_batches_are_those_that_pack_gives():
    stream = [text(i, 5 + i % 7) for i in range(40)]
    for batch in StreamLoader(stream, budget=BUDGET, buffer=8, world=WORLD):
        expected = pack([stream[i] for i in batch.sample_ids.tolist()], step=batch.step)
        for name in batch:
            np.testing.assert_array_equal(batch[name].numpy(), expected[name].numpy())
        assert batch.loss_weights("sqrt").tolist() == expected.loss_weights("sqrt").tolist()


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_read_parts_and_nothing_is_lost_or_doubled(num_workers):
    loader = StreamLoader(
        Numbers(100), budget=BUDGET, buffer=16, num_workers=num_workers, world=WORLD
    )
    for _ in range(2):
        assert sorted(ids(loader)) == list(range(100))


def test_the_same_stream_gives_the_same_batches():
    runs = [
        [b.input_ids.tolist() for b in StreamLoader(Numbers(80), budget=BUDGET, buffer=16,
                                                    num_workers=2, world=WORLD)]
        for _ in range(2)
    ]  # fmt: skip
    assert runs[0] == runs[1]


def test_one_iterable_is_not_read_by_several_workers():
    with pytest.raises(ConfigError, match=r"function of a StreamPart.*each worker would read"):
        StreamLoader([text(0, 3)], budget=BUDGET, num_workers=2, world=WORLD)
    with pytest.raises(ConfigError, match="an iterator can't be sent to worker processes"):
        StreamLoader(iter([text(0, 3)]), budget=BUDGET, num_workers=1, world=WORLD)


def test_an_iterator_is_read_once_and_says_so():
    loader = StreamLoader(iter([text(0, 3)]), budget=BUDGET, world=WORLD)
    assert ids(loader) == [0]
    with pytest.raises(StateError, match="was begun before"):
        list(loader)


def test_the_stream_is_opened_anew_for_each_epoch():
    seen = []

    def open_part(part):
        seen.append(part)
        return [text(part.epoch, 5)]

    loader = StreamLoader(open_part, budget=BUDGET, world=WORLD)
    assert [ids(loader) for _ in range(3)] == [[0], [1], [2]]
    assert seen == [StreamPart(epoch=epoch) for epoch in range(3)]


def test_an_older_iterator_is_ended_by_a_newer_one():
    loader = StreamLoader([text(i, 40) for i in range(5)], budget=BUDGET, buffer=1, world=WORLD)
    old = iter(loader)
    next(old)
    assert len(list(loader)) == 5
    with pytest.raises(StateError, match="replaced by a newer one"):
        next(old)


def test_samples_without_a_number_get_one():
    stream = [text(-1, 5) for _ in range(10)]
    assert sorted(ids(StreamLoader(stream, budget=BUDGET, world=WORLD))) == list(range(10))
    part = StreamPart(rank=1, num_ranks=2, worker=2, num_workers=3, epoch=4)
    assert (part.index, part.count) == (5, 6)


def test_what_is_over_budget_is_an_error_or_counted():
    stream = [text(0, 5), text(1, 65), text(2, 5)]
    with pytest.raises(ConfigError, match=r"expected at most 64 tokens, got 65 \(sample_id=1\)"):
        list(StreamLoader(stream, budget=BUDGET, world=WORLD))
    loader = StreamLoader(stream, budget=BUDGET, world=WORLD, oversize="drop")
    assert sorted(ids(loader)) == [0, 2]
    assert dict(loader.counts.dropped) == {"oversize": 1}
    assert loader.counts.listed[0].where == "sample_id=1"


def test_left_out_samples_at_the_end_are_counted_too():
    loader = StreamLoader(
        [text(0, 5), text(1, 99)], budget=BUDGET, world=WORLD, oversize="drop", buffer=1
    )
    assert ids(loader) == [0]
    assert loader.counts.dropped["oversize"] == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"samples": 3}, "samples must be iterable, or a function"),
        ({"samples": [3]}, "must give omniload.Sample or omniload.Record, got int"),
        ({"samples": lambda part: 3}, "must give something iterable"),
        ({"samples": lambda: []}, r"function of one argument.*with the arguments \(\)"),
        ({"samples": "shards/"}, r"got str: 'shards/'. .* read by omniload.DataLoader"),
        ({"samples": [{"__key__": "1"}]}, r"got dict \(item 0\)\. .*records_stage\(maker\)"),
        ({"samples": [], "budget": 3}, "budget must be an omniload.Budget"),
        ({"samples": [], "buffer": 0}, "buffer must be between 1"),
        ({"samples": [], "transform": 3}, "transform must follow"),
        ({"samples": [], "oversize": "x"}, "oversize must be 'error' or 'drop'"),
        ({"samples": [], "on_bad_sample": "x"}, "on_bad_sample must be 'raise' or 'skip'"),
        ({"samples": [], "num_workers": -1}, "num_workers must be an integer of at least 0"),
        ({"samples": [], "accumulation": 2}, "filler must be given"),
        ({"samples": [], "uniform_modality": True}, "filler must be given"),
        ({"samples": [], "filler": text(0, 3)}, "filler must be an omniload.Sample with"),
        ({"samples": [], "pad_to": 48}, "multiple of what rows are padded to"),
        ({"samples": [], "world": World(dp_world_size=2), "filler": a_filler()},
         "needs torch.distributed"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(arguments, match):
    samples = arguments["samples"]
    options = {"budget": BUDGET, "world": WORLD, **arguments}
    del options["samples"]
    with pytest.raises(ConfigError, match=match):
        list(StreamLoader(samples, **options))


# --- records -----------------------------------------------------------------------------------


class Rows:
    """Records of shards, in parts; spawned workers import it from here."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, part):
        shards = open_shards(self.folder)
        return (shards.read(row) for row in range(part.index, len(shards), part.count))


def test_records_are_transformed_when_their_group_is_due(tmp_path):
    shards = open_shards(write_data(tmp_path, num_rows=24))
    transform = transform_from_settings(dict(shards.settings))
    loader = StreamLoader(
        Rows(tmp_path), budget=Budget(tokens=800, tiles=16), transform=transform, num_workers=1,
        accumulation=2, world=WORLD, pad_to=8, multiprocessing_context="spawn",
    )  # fmt: skip
    batches = list(loader)
    assert sorted(ids(batches)) == list(range(24))
    for batch in batches:
        assert batch.num_tokens % 8 == 0
        if batch.is_filler:
            continue
        for sample, row in zip(batch.unpack(), batch.sample_ids.tolist(), strict=True):
            expected = transform(shards.read(row), np.random.default_rng(0))
            assert sample.num_tiles == expected.num_tiles
            if sample.num_tiles:
                np.testing.assert_array_equal(sample.tiles, expected.tiles)
            np.testing.assert_array_equal(sample.input_ids, expected.input_ids)


@pytest.mark.parametrize(
    ("kind", "row", "reason"), [(Failing, 7, "KeyError"), (Longer, 5, "as lengths of the")]
)
def test_a_bad_sample_ends_the_stream_or_is_left_out_and_counted(tmp_path, kind, row, reason):
    shards = open_shards(write_data(tmp_path, num_rows=12))
    transform = kind(transform_from_settings(dict(shards.settings)))
    options = {"budget": Budget(tokens=800, tiles=16), "transform": transform, "world": WORLD}
    with pytest.raises(SampleError, match=rf"{reason}.*row={row}, key='key-{row}'"):
        list(StreamLoader(Rows(tmp_path), **options))
    loader = StreamLoader(Rows(tmp_path), on_bad_sample="skip", **options)
    batches = list(loader)
    assert sorted(ids(batches)) == [i for i in range(12) if i != row]
    assert dict(loader.counts.dropped) == {"bad": 1}
    assert reason in loader.counts.listed[0].reason
    for batch in batches:
        assert batch.num_loss_tokens_step == batch.num_loss_tokens


def test_uniform_modality_gives_text_beside_images_a_dummy(tmp_path):
    shards = open_shards(write_data(tmp_path, num_rows=24, num_images=(0, 0, 2)))
    transform = transform_from_settings(dict(shards.settings))
    loader = StreamLoader(
        (shards.read(row) for row in range(24)), budget=Budget(tokens=800, tiles=16), buffer=1,
        transform=transform, world=WORLD, uniform_modality=True, accumulation=1,
    )  # fmt: skip
    assert all(b.num_tokens <= 800 for b in loader)  # alone, no rank runs the vision encoder
    assert loader.counts.samples == 24


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"timeout": -1}, "timeout must be seconds, at least 0"),
        ({"timeout": "5"}, "timeout must be seconds.*got '5'"),
        ({"multiprocessing_context": "nope"}, "multiprocessing_context must be one of .*'nope'"),
        ({"pin_memory": "yes"}, "pin_memory must be True or False"),
        ({"samples": lambda part: [], "multiprocessing_context": "spawn"},
         r"samples \(function\) must be picklable, .* start by 'spawn'.*'fork'"),
    ],
)  # fmt: skip
def test_what_workers_can_t_use_is_refused_before_they_start(arguments, match):
    options = {"samples": Numbers(3), "budget": BUDGET, "num_workers": 2, **arguments}
    with pytest.raises(ConfigError, match=match):
        StreamLoader(**options, world=WORLD)


def test_an_error_of_ours_in_a_worker_comes_with_its_own_message():
    def too_long(part):
        return [text(0, 5), text(1, 65)]

    loader = StreamLoader(too_long, budget=BUDGET, num_workers=1, world=WORLD)
    with pytest.raises(
        ConfigError, match=r"^every sample must fit .* oversize='drop'\.$"
    ) as caught:
        list(loader)
    assert "in _lengths" in str(caught.value.__cause__)
    assert not multiprocessing.active_children()  # though the error is kept


def test_a_stream_that_hangs_is_not_taken_for_one_that_needs_memory():
    def hanging(part):
        yield text(0, 5)
        time.sleep(2)

    loader = StreamLoader(hanging, budget=BUDGET, num_workers=1, world=WORLD, timeout=0.2)
    with pytest.raises(WorkerError, match=r"expected one within timeout=0.2 s\. What opens"):
        list(loader)


class Dying:
    def __call__(self, part):
        yield text(0, 5)
        os.kill(os.getpid(), 9)


def test_a_worker_that_dies_is_an_error_of_ours():
    loader = StreamLoader(Dying(), budget=BUDGET, num_workers=1, world=WORLD)
    with pytest.raises(WorkerError, match=r"worker process of the stream ended.*(killed|exited)"):
        list(loader)


# --- ranks -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Kind of streams -> what each of two ranks got, of one run of torchrun."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node=2", "tests/stream_ranks.py", str(folder)]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = [folder / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in found), done.stderr[-3000:]
    both = [json.loads(path.read_text()) for path in found]
    return {kind: [rank[kind] for rank in both] for kind in both[0]}


@pytest.mark.parametrize("kind", ["unequal", "workers", "empty"])
def test_ranks_with_streams_of_unequal_length_take_equal_steps(ranks, kind):
    one, two = ranks[kind]
    assert one["steps"] == two["steps"] > 0
    assert one["places"] == two["places"]
    assert sorted(one["ids"] + two["ids"]) == sorted(one["expected"])
    assert one["denominators"] == two["denominators"]
    for step in range(one["steps"]):
        total = one["loss_tokens"][step] + two["loss_tokens"][step]
        assert one["denominators"][step][0] == total
    assert one["fillers"] + two["fillers"] > 0


def test_text_beside_images_of_another_rank_gets_an_image_too(ranks):
    one, two = ranks["modality"]
    assert one["has_tiles"] == two["has_tiles"]
    assert two["dummies"] > 0
    assert sorted(one["ids"] + two["ids"]) == sorted(one["expected"])
    assert max(one["tokens"] + two["tokens"]) <= 800


@pytest.mark.parametrize("kind", ["failing", "opening"])
def test_a_rank_that_fails_leaves_none_waiting(ranks, kind):
    one, two = ranks[kind]
    assert "boom" in two["error"]
    assert "another rank failed" in one["error"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"batch_size": 8}, r"has no batch_size.*Budget\(tokens"),
        ({"shuffle": True}, "comes in the order in which it is read"),
        ({"drop_last": True}, "no row is lost"),
    ],
)
def test_arguments_of_torch_s_loader_are_explained(arguments, match):
    with pytest.raises(ConfigError, match=match):
        StreamLoader([], budget=BUDGET, world=WORLD, **arguments)
    with pytest.raises(ConfigError, match="all else by name, got 2 positional"):
        StreamLoader([], 8)
    with pytest.raises(TypeError, match="unexpected keyword"):
        StreamLoader([], budget=BUDGET, world=WORLD, shufle=True)
