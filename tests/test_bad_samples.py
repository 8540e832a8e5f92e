"""A sample that can't be used keeps its place, is listed, and left out the next time."""

import json
import random
import shutil

import numpy as np
import pytest
import torch

from omniload import Budget, ConfigError, DataLoader, SampleError, ShardError, StateError, World
from omniload.index import LengthIndex
from omniload.loader.blank import blank_record, blank_sample
from omniload.loss import exact_factor
from omniload.packing import pack
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from omniload.types import Sample, SkippedSample
from tests.loader_data import (
    Failing,
    Longer,
    Noisy,
    assert_same_run,
    flip_until_a_row_is_damaged,
    rows_of,
    write_data,
)

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 24
DAMAGED = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("whole") / "shards", num_rows=NUM_ROWS)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Row 4 has an image that is cut short."""
    return write_data(
        tmp_path_factory.mktemp("damaged") / "shards", num_rows=NUM_ROWS, damage=DAMAGED
    )


@pytest.fixture(scope="module")
def flipped(tmp_path_factory):
    """Shards with a flipped byte, and the rows that can't be read."""
    folder = tmp_path_factory.mktemp("flipped") / "shards"
    write_data(folder, num_rows=NUM_ROWS)
    return folder, flip_until_a_row_is_damaged(folder)


def loader(data, **arguments):
    given = {"budget": BUDGET, "world": World(), "on_bad_sample": "skip", **arguments}
    return DataLoader(data, **given)


def own(data, kind):
    return kind(transform_from_settings(open_shards(data).settings))


def skipped_of(batches):
    return [sample for batch in batches for sample in batch.skipped_samples]


def assert_same_shapes(left, right, *, bad):
    """Two runs differ in the samples of the bad rows only, and have the same sizes throughout."""
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.sizes == other.sizes
        assert one.sample_lengths == other.sample_lengths
        for name in ("cu_seqlens", "position_ids", "image_num_tiles", "image_sizes",
                     "image_grids", "image_spans", "input_ids"):  # fmt: skip
            assert torch.equal(one[name], other[name]), name
        assert one.num_loss_tokens_step == other.num_loss_tokens_step
        assert one.max_seqlen == other.max_seqlen
        is_bad = torch.isin(other.sample_ids, torch.tensor(bad))
        assert torch.equal(one.sample_ids, torch.where(is_bad, -1, other.sample_ids))
        assert sorted(one.skipped.tolist()) == sorted(other.sample_ids[is_bad].tolist())
        # a filler or a dummy document has no number
        for mine, whole, blank in zip(one.unpack(), other.unpack(), is_bad, strict=False):
            assert np.array_equal(mine.labels == -100, whole.labels == -100) or blank
            assert not blank or ((mine.labels == -100).all() and not mine.tiles.any())
            assert blank or np.array_equal(mine.tiles, whole.tiles)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_image_keeps_its_place_with_blank_tiles_and_no_label(data, damaged, num_workers):
    whole, skipping = loader(data), loader(damaged, num_workers=num_workers)
    batches = list(skipping)
    assert_same_shapes(batches, whole, bad=[DAMAGED])
    (sample,) = skipped_of(batches)
    index = skipping.index
    assert (sample.row, sample.key, sample.source) == (DAMAGED, "key-4", "pictures")
    assert sample.kind == "damaged sample"
    assert sample.num_loss_tokens == index.num_loss_tokens[DAMAGED] > 0
    shard, row = skipping.source.locate(DAMAGED)
    assert (sample.shard, sample.shard_row) == (skipping.source.shard_names[shard], row)
    assert "image 1 of 1" in sample.reason
    (batch,) = [batch for batch in batches if batch.skipped_samples]
    assert batch.skipped.tolist() == [DAMAGED]
    assert batch.num_loss_tokens_missing == sample.num_loss_tokens
    assert batch.num_loss_tokens == batch.num_loss_tokens_step - sample.num_loss_tokens


def test_all_ranks_keep_their_steps_and_denominators(data, damaged):
    for rank in range(3):
        world = World(dp_rank=rank, dp_world_size=3)
        arguments = {"world": world, "accumulation": 2, "uniform_modality": True}
        assert_same_shapes(loader(damaged, **arguments), loader(data, **arguments), bad=[DAMAGED])


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [(Failing, 7, ("failed transform", "KeyError")), (Longer, 5, ("wrong length", "num_tokens"))],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_failing_transforms_and_wrong_lengths_are_skipped(data, kind, row, said, num_workers):
    skipping = loader(data, transform=own(data, kind), num_workers=num_workers)
    batches = list(skipping)
    assert_same_shapes(batches, loader(data), bad=[row])
    (sample,) = skipped_of(batches)
    assert sample.kind == said[0]
    assert said[1] in sample.reason
    assert f"row={row}, key='key-{row}'" in sample.reason


def test_a_transform_of_the_user_without_a_tiling_gets_blank_tiles_too(data):
    class Bad(Noisy):
        def __call__(self, record, rng):
            if record.row == 8:
                raise OSError("no such file")
            return super().__call__(record, rng)

    for folder in (data,):
        batches = list(loader(folder, transform=own(folder, Bad)))
        assert [sample.row for sample in skipped_of(batches)] == [8]
        whole = list(loader(folder, transform=own(folder, Noisy)))
        for one, other in zip(batches, whole, strict=True):
            assert one.sizes == other.sizes
            assert torch.equal(one.image_grids, other.image_grids)


def test_running_out_of_memory_and_errors_of_settings_are_not_skipped(data):
    class Hungry(Noisy):
        def __call__(self, record, rng):
            raise MemoryError

    class Wrong(Noisy):
        def __call__(self, record, rng):
            raise ConfigError("size must be even")

    for kind, error in ((Hungry, MemoryError), (Wrong, ConfigError)):
        with pytest.raises(error):
            list(loader(data, transform=own(data, kind)))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_damaged_row_is_made_up_from_its_lengths(flipped, num_workers):
    folder, bad = flipped
    assert 0 < len(bad) < 6
    batches = list(loader(folder, num_workers=num_workers, max_bad_samples=10))
    found = skipped_of(batches)
    assert sorted(sample.row for sample in found) == bad
    assert {sample.kind for sample in found} == {"damaged row"}
    assert all(sample.key for sample in found)
    index = open_shards(folder).index
    for batch in batches:
        rows = [*batch.sample_ids[batch.sample_ids >= 0].tolist(), *batch.skipped.tolist()]
        assert batch.num_tokens == index.num_tokens[rows].sum()
        assert batch.num_tiles == index.num_tiles[rows].sum()
        assert int(batch.image_num_tiles.sum()) == batch.num_tiles
        spans = batch.image_spans
        assert (spans[:, 1] > spans[:, 0]).all()
        assert (spans[1:, 0] >= spans[:-1, 1]).all()
    assert sorted(rows_of(batches)) == sorted(
        [-1] * len(bad) + [row for row in range(NUM_ROWS) if row not in bad]
    )


def test_a_damaged_row_is_an_error_unless_it_is_to_be_skipped(flipped):
    folder, _ = flipped
    with pytest.raises((ShardError, SampleError), match="row"):
        list(loader(folder, on_bad_sample="raise"))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_shard_that_is_missing_is_an_error_also_where_samples_are_skipped(
    tmp_path, num_workers, monkeypatch
):
    monkeypatch.setattr("omniload.loader.checks._probes", lambda source: iter(()))
    folder = write_data(tmp_path / "shards", num_rows=8)
    loading = loader(folder, num_workers=num_workers, max_bad_samples=1.0)
    lost = loading.manifest.shards[-1].name
    (folder / lost).unlink()
    with pytest.raises(ShardError, match=lost):
        list(loading)


@pytest.mark.parametrize("family", ["internvl", "qwen", "anyres", "text"])
def test_made_up_records_have_the_images_that_a_model_expects(family, data):
    settings = dict(open_shards(data).settings)
    settings["tiling"] = {
        "internvl": settings["tiling"],
        "qwen": {"policy": "qwen", "patch_size": 14, "merge": 2, "min_pixels": 28 * 28},
        "anyres": {"policy": "anyres", "size": 28, "pinpoints": [[28, 56], [56, 28], [56, 56]]},
        "text": settings["tiling"],
    }[family]
    transform = transform_from_settings(settings)
    per_image = transform.filler(with_image=True).num_tiles
    tiles = 0 if family == "text" else 3 * per_image

    class Source:
        index = LengthIndex.from_arrays(num_tokens=[500], num_tiles=[tiles])
        shard_names = ("a",)

        def locate(self, row):
            return 0, row

    record = blank_record(Source(), 0, transform)
    sample = blank_sample(record, transform, Source())
    assert (sample.num_tokens, sample.num_tiles) == (500, tiles)
    assert len(sample.image_num_tiles) == (0 if family == "text" else 3)
    image = getattr(transform, "image_token_id", None)
    inside = np.zeros(500, bool)
    for start, end in sample.image_spans.tolist():
        inside[start:end] = True
    assert np.array_equal(inside, sample.input_ids == image)
    if tiles:
        filler = transform.filler(with_image=True)
        assert sample.image_grids.tolist() == filler.image_grids.tolist() * 3
        assert inside.sum() == 3 * (filler.input_ids == image).sum()
    pack([sample], skipped_samples=[skipped(0)])


def test_tiles_that_no_number_of_smallest_images_has_become_one_image(data):
    settings = {**open_shards(data).settings}
    pinpoints = [[28, 56], [56, 28], [56, 56]]
    settings["tiling"] = {"policy": "anyres", "size": 28, "pinpoints": pinpoints}
    transform = transform_from_settings(settings)

    class Source:
        index = LengthIndex.from_arrays(num_tokens=[500], num_tiles=[5])
        shard_names = ("a",)

        def locate(self, row):
            return 0, row

    sample = blank_sample(blank_record(Source(), 0, transform), transform, Source())
    assert sample.image_num_tiles.tolist() == [5]
    assert len(sample.image_spans) == 1


def test_a_filler_that_blank_samples_can_not_be_made_of_is_found_before_the_start(data):
    class NoFiller(Noisy):
        def filler(self, with_image):
            raise NotImplementedError

    with pytest.raises(ConfigError, match=r"filler.* of the transform failed"):
        loader(data, transform=own(data, NoFiller), tail="empty")
    list(loader(data, transform=own(data, NoFiller), tail="empty", on_bad_sample="raise"))


# --- how many are borne


def test_past_the_limit_it_is_an_error_that_lists_the_last(data):
    class Broken(Noisy):
        def __call__(self, record, rng):
            raise ValueError(f"colour {record.row}")

    loading = loader(data, transform=own(data, Broken), max_bad_samples=3)
    batches, seen = iter(loading), []
    with pytest.raises(SampleError, match=r"at most 3 samples may be bad .*got \d+.*colour \d+"):
        seen.extend(batches)
    with pytest.raises(StateError, match="closed by an error"):
        next(batches)
    assert len(skipped_of(seen)) <= 3
    assert loading.state_dict()["step"] == len(seen)
    with pytest.raises(SampleError, match=r"max_bad_samples=0\.01"):
        list(loader(data, transform=own(data, Broken), max_bad_samples=0.01))
    assert len(skipped_of(loader(data, transform=own(data, Broken), max_bad_samples=1.0))) == 24


def test_each_epoch_is_counted_by_itself(data):
    loading = loader(data, transform=own(data, Failing), max_bad_samples=1)
    for _ in range(3):
        assert len(skipped_of(loading)) == 1


def test_a_share_counts_at_least_one_sample_of_a_rank(damaged):
    assert len(skipped_of(loader(damaged, max_bad_samples=0.0))) == 1
    with pytest.raises(SampleError, match="at most 0 samples"):
        list(loader(damaged, max_bad_samples=0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on_bad_sample": "ignore"}, "on_bad_sample must be 'raise' or 'skip', got 'ignore'"),
        ({"max_bad_samples": -1}, "max_bad_samples must be an integer of at least 0"),
        ({"max_bad_samples": 1.5}, r"a count or a share from 0\.0 to 1\.0, got 1\.5"),
        ({"max_bad_samples": True}, "max_bad_samples must be an integer"),
        ({"quarantine": 3}, "quarantine must be the path of a file, got int"),
        ({"quarantine": "a", "on_bad_sample": "raise"}, "expected on_bad_sample='skip', got"),
        ({"quarantine": "a", "exclude": "./a"}, "exclude must be another file than quarantine"),
        ({"quarantine": "/proc/no/such"}, "quarantine file /proc/no/such can't be written"),
        ({"exclude": 5}, "exclude must be the path of a quarantine file, a list .* got int"),
        ({"exclude": [1.5]}, r"rows \(integers\) or keys \(strings\), not both"),
        ({"exclude": [24]}, "exclude must hold rows from 0 to 23, got 24"),
        ({"exclude": [-1]}, "exclude must hold rows from 0 to 23, got -1"),
        ({"exclude": [10**30]}, "exclude must hold rows from 0 to 23, got 1000"),
        ({"exclude": b"\1"}, "exclude must be the path of a quarantine file.* got bytes"),
        ({"exclude": "a\0b"}, "exclude must be a file .* embedded null byte"),
        ({"quarantine": "a\0b"}, "can't be written: embedded null byte"),
        ({"exclude": ["key-1", "nobody"]}, r"1 of 2 are not in .* \['nobody'\]"),
        ({"exclude": "no-such-file.jsonl"}, "a file that quarantine= wrote, but no-such-file"),
        ({"exclude": range(24)}, "at least one row within .* that is not excluded"),
    ],
)
def test_wrong_arguments_are_named(data, arguments, message):
    with pytest.raises(ConfigError, match=message):
        loader(data, **arguments)


# --- the quarantine file, and what is excluded


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skipped_samples_are_listed_and_a_next_run_leaves_them_out(damaged, tmp_path, num_workers):
    path = tmp_path / "bad.jsonl"
    arguments = {"num_workers": num_workers, "quarantine": path}
    loading = loader(damaged, **arguments)
    assert path.read_bytes() == b""
    for _ in range(2):
        list(loading)
    first, second = map(json.loads, path.read_text().splitlines())
    assert {**first, "epoch": 1} == second
    assert "damaged jpeg image" in first.pop("reason")
    shard, row = loading.source.locate(DAMAGED)
    assert first == {
        "source": "pictures",
        "shard": loading.source.shard_names[shard],
        "shard_row": row,
        "key": "key-4",
        "kind": "damaged sample",
        "row": DAMAGED,
        "epoch": 0,
        "rank": 0,
        "data": loading.source.fingerprint,
    }
    later = loader(damaged, exclude=path, on_bad_sample="raise")
    assert sorted(rows_of(later)) == [row for row in range(NUM_ROWS) if row != DAMAGED]
    assert later.dropped.tolist() == [DAMAGED]
    assert later.ledger().dropped == {"oversize": 0, "excluded": 1}


def test_ranks_share_a_quarantine_file_and_replicas_write_once(damaged, tmp_path):
    path = tmp_path / "bad.jsonl"
    for rank in range(2):
        for replica in range(2):
            world = World(dp_rank=rank, dp_world_size=2, replica_rank=replica, replica_size=2)
            list(loader(damaged, world=world, quarantine=path))
    assert len(path.read_text().splitlines()) == 1


def test_a_batch_that_nobody_took_is_not_listed(data, tmp_path):
    class Broken(Noisy):
        def __call__(self, record, rng):
            raise ValueError

    path = tmp_path / "bad.jsonl"
    loading = loader(
        data, transform=own(data, Broken), quarantine=path, num_workers=1, prefetch_factor=4,
        max_bad_samples=1.0, multiprocessing_context="fork",
    )  # fmt: skip
    first = next(iter(loading))
    assert len(path.read_text().splitlines()) == len(first.skipped)


def test_rows_and_keys_are_excluded_alike(data):
    by_row = list(loader(data, exclude=np.array([3, 9])))
    assert sorted(rows_of(by_row)) == [row for row in range(NUM_ROWS) if row not in (3, 9)]
    assert_same_run(by_row, loader(data, exclude=["key-9", "key-3"]))
    assert_same_run(loader(data, exclude=[]), loader(data))


def test_a_file_of_other_data_or_of_something_else_is_refused(data, damaged, tmp_path):
    path = tmp_path / "bad.jsonl"
    list(loader(damaged, quarantine=path))
    with pytest.raises(ConfigError, match=r"lists rows of other data .*key 'key-4'"):
        loader(data, exclude=path)
    line = path.read_text()
    path.write_text(line[:20])  # killed while it wrote, and the next run went on
    list(loader(damaged, quarantine=path))
    assert path.read_text() == line[:20] + "\n" + line
    path.write_text(path.read_text() + line[:20])
    assert loader(damaged, exclude=path).dropped.tolist() == [DAMAGED]
    path.write_text("[" * 99_999 + "\n" + line)
    with pytest.raises(ConfigError, match=r"line 1 of .* is not one that quarantine= wrote"):
        loader(damaged, exclude=path)
    path.write_text(line.replace(f'"row": {DAMAGED}', '"row": "x"'))
    with pytest.raises(ConfigError, match=r"line 1 of .* must have a row, got 'x'"):
        loader(damaged, exclude=path)


def test_a_state_belongs_to_what_was_excluded(data):
    loading = loader(data, exclude=[3])
    batches = iter(loading)
    next(batches)
    state = loading.state_dict()
    assert len(json.dumps(state)) < 1000
    rest = list(batches)
    resumed = loader(data, exclude=[3])
    resumed.load_state_dict(state)
    assert_same_run(resumed, rest)
    for other, said in (([], "'none'"), ([3, 4], "'2 rows ")):
        with pytest.raises(StateError, match=f"excluded: '1 rows .*' in the state, {said}"):
            loader(data, exclude=other).load_state_dict(state)


def test_a_run_that_skips_resumes_exactly(damaged):
    loading = loader(damaged, accumulation=2)
    batches, states = [], [loading.state_dict()]
    for batch in loading:
        batches.append(batch)
        states.append(loading.state_dict())
    for done in range(len(batches)):
        resumed = loader(damaged, accumulation=2)
        resumed.load_state_dict(states[done])
        assert_same_run(resumed, batches[done:])


# --- the loss


def skipped(row, loss=0):
    return SkippedSample(
        row=row, key="", source="", shard="", shard_row=row, kind="damaged row", reason="",
        num_loss_tokens=loss,
    )  # fmt: skip


def test_exact_factor_turns_the_planned_mean_into_that_of_what_is_there(damaged):
    batches = list(loader(damaged, accumulation=2))
    steps = {}
    for batch in batches:
        steps.setdefault(batch.step, []).append(batch)
    changed = 0
    for inside in steps.values():
        there = sum(batch.num_loss_tokens for batch in inside)
        planned = inside[0].num_loss_tokens_step
        assert exact_factor(inside) == pytest.approx(planned / there)
        changed += planned != there
    assert changed == 1
    with pytest.raises(ConfigError, match="micro-batches of one step: got 0 batches"):
        exact_factor([])
    with pytest.raises(ConfigError, match=r"of 2 steps"):
        exact_factor([steps[0][0], steps[1][0]])


def test_a_step_of_skipped_samples_only_has_the_factor_one():
    ids = np.ones(4, np.int32)
    blank = Sample(sample_id=-1, input_ids=ids, labels=np.full(4, -100, np.int32))
    batch = pack([blank], skipped_samples=[skipped(0, loss=3)], num_loss_tokens_step=3)
    assert exact_factor([batch]) == 1.0


def test_blank_samples_without_a_reason_or_with_labels_are_refused():
    ids = np.ones(4, np.int32)
    blank = Sample(sample_id=-1, input_ids=ids, labels=np.full(4, -100, np.int32))
    with pytest.raises(ConfigError, match=r"sample_id=-1.* 0 skipped"):
        pack([blank])
    with pytest.raises(ConfigError, match="must give no loss"):
        pack([Sample(sample_id=-1, input_ids=ids, labels=ids)], skipped_samples=[skipped(0)])


# --- random damage


def test_any_flipped_byte_of_a_shard_is_skipped_or_named(tmp_path):
    whole = write_data(tmp_path / "whole", num_rows=9)
    chance = random.Random(5)
    for number in range(25):
        folder = tmp_path / f"copy-{number}"
        shutil.copytree(whole, folder)
        shard = chance.choice(sorted(folder.glob("shard-*.arrow")))
        data = bytearray(shard.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        shard.write_bytes(data)
        try:
            loading = loader(folder, max_bad_samples=1.0)
            batches = list(loading)
        except ShardError as error:
            assert shard.name in str(error)  # noqa: PT017
            continue
        ledger = loading.ledger()
        assert ledger.balanced
        assert ledger.seen + sum(ledger.skipped.values()) == 9
        assert len(skipped_of(batches)) == sum(ledger.skipped.values())
