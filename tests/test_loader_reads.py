"""What a rank reads, for the stages of a pipeline: all, labels and no image byte, or nothing."""

import mmap

import numpy as np
import psutil
import pytest
import torch

from omniload import Budget, ConfigError, DataLoader, StateError
from omniload.loader.reads import LabelsOnly
from omniload.mixture import Mixture, MixtureSet
from omniload.shards import open_shards
from omniload.shards.views import OpenedShard
from omniload.transforms import TileTransform, transform_from_settings
from tests.loader_data import Wrapped, write_data

BUDGET = Budget(tokens=500, tiles=12)
TOKENS = ("input_ids", "labels", "image_num_tiles", "image_sizes", "image_spans")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "shards", num_images=(0, 1, 2))


@pytest.fixture(scope="module")
def shards(folder):
    return open_shards(folder)


@pytest.fixture(scope="module")
def transform(shards):
    return transform_from_settings(dict(shards.manifest.settings))


def token_bytes(source):
    return 2 * 4 * int(np.asarray(source.index.num_tokens, np.int64).sum())


class CountingMap(mmap.mmap):
    """A map that counts the bytes that are copied out of it."""

    copied = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        self.copied += len(found) if isinstance(key, slice) else 0
        return found


def test_a_row_for_its_tokens_is_read_without_a_byte_of_its_images(folder, shards):
    for number, info in enumerate(shards.manifest.shards):
        path = folder / info.name
        with path.open("rb") as file:
            data = CountingMap(file.fileno(), 0, access=mmap.ACCESS_READ)
        opened = OpenedShard(path, info, data)
        for row in range(len(shards)):
            shard, local = shards.locate(row)
            if shard != number:
                continue
            before = data.copied
            small = opened.record(local, row=row, tokens_only=True)
            used = data.copied - before
            whole = opened.record(local, row=row)
            names = len(small.key) + len(small.source)
            assert used == names
            assert data.copied - before - used >= names + sum(map(len, whole.images))
            assert (small.images, small.messages) == ((), None)
            for name in TOKENS:
                np.testing.assert_array_equal(getattr(small, name), getattr(whole, name))
                np.testing.assert_array_equal(
                    getattr(small, name), getattr(shards.read_tokens(row), name)
                )


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mixed", [False, True])
def test_labels_are_those_of_whole_batches_and_no_image_is_read(folder, workers, mixed):
    source = Mixture([MixtureSet(source=folder)]) if mixed else str(folder)
    whole = DataLoader(source, budget=BUDGET)
    small = DataLoader(source, budget=BUDGET, num_workers=workers)
    small.set_reads("labels")
    for left, right in zip(whole, small, strict=True):
        for name in ("input_ids", "labels", "position_ids", "cu_seqlens", "sample_ids"):
            assert torch.equal(left[name], right[name]), name
        assert left.num_tiles == right.num_tiles
        assert right.tiles.numel() == 3 * right.num_tiles
        assert whole.state_dict() == small.state_dict()
    assert small.stats().since_start.bytes_read == token_bytes(small)
    assert whole.stats().since_start.bytes_read > 2 * token_bytes(whole)


def test_a_rank_that_reads_nothing_keeps_its_place_and_starts_no_worker(folder):
    whole = DataLoader(folder, budget=BUDGET, accumulation=2)
    empty = DataLoader(folder, budget=BUDGET, accumulation=2, num_workers=2)
    empty.set_reads("nothing")
    children = psutil.Process().children()
    for left, right in zip(whole, empty, strict=True):
        assert right.num_tokens == 0
        assert (left.step, left.micro_step) == (right.step, right.micro_step)
        assert left.num_loss_tokens_step == right.num_loss_tokens_step
        assert whole.state_dict() == empty.state_dict()
    assert psutil.Process().children() == children
    assert empty.stats().since_start.bytes_read == 0
    assert whole.epoch == empty.epoch == 1


def test_what_is_read_may_change_between_two_batches(folder):
    loader = DataLoader(folder, budget=BUDGET)
    expected = [batch.sample_ids.tolist() for batch in DataLoader(folder, budget=BUDGET)]
    live = iter(loader)
    for number, (reads, tokens) in enumerate((("nothing", False), ("labels", True), ("all", True))):
        loader.set_reads(reads)
        with pytest.raises(StateError, match=f"ended by set_reads.'{reads}'"):
            next(live)
        loader.load_state_dict(loader.state_dict())
        live = iter(loader)
        batch = next(live)
        assert batch.sample_ids.tolist() == (expected[number] if tokens else [])
        assert (batch.num_tokens > 0) == tokens
    assert batch.tiles.shape[2:] == (28, 28)
    with pytest.raises(ConfigError, match=r"one of 'all', 'labels', 'nothing', got 'images'"):
        loader.set_reads("images")


def test_labels_of_a_loader_that_skips_are_read_with_the_images(tmp_path):
    folder = write_data(tmp_path / "shards", num_images=(1,), damage=3)
    loader = DataLoader(folder, budget=BUDGET, on_bad_sample="skip")
    loader.set_reads("labels")
    assert sum(int(batch.skipped.numel()) for batch in loader) == 1


def test_labels_only_gives_the_tokens_and_counts_of_the_whole_sample(shards, transform):
    light = LabelsOnly(transform)
    assert light.fingerprint == transform.fingerprint
    rng = np.random.default_rng(0)
    for row in range(len(shards)):
        record = shards.read(row)
        whole, small = transform(record, rng), light(shards.read_tokens(row), rng)
        for name in TOKENS:
            np.testing.assert_array_equal(getattr(whole, name), getattr(small, name))
        assert small.num_tiles == whole.num_tiles
        assert small.tiles.nbytes == 3 * whole.num_tiles
        assert light.lengths(record) == transform.lengths(record)
    assert light.filler(True).num_tiles == transform.filler(True).num_tiles
    with pytest.raises(ConfigError, match="reads labels has no model inputs"):
        light.model_inputs(None)


def test_a_transform_of_ones_own_is_used_whole_unless_it_can_do_labels_only(
    shards, transform, caplog
):
    assert LabelsOnly.fits(transform)
    assert not LabelsOnly.fits(Wrapped(transform))

    class Changed(TileTransform):
        def __call__(self, record, rng):
            return super().__call__(record, rng)

    assert not LabelsOnly.fits(Changed.from_settings(dict(shards.manifest.settings)))

    class Both(Wrapped):
        def labels_only(self, record, rng):
            return self.inner(record, rng)

    assert LabelsOnly.fits(Both(transform))
    record = next(r for r in map(shards.read, range(len(shards))) if len(r.images))
    assert LabelsOnly(Both(transform))(record, None).tiles.shape[2:] == (1, 1)
    loader = DataLoader(shards, budget=BUDGET, transform=Wrapped(transform))
    loader.set_reads("labels")
    assert "because only Wrapped knows its tokens" in caplog.text
    assert any(batch.tiles.shape[2:] == (28, 28) for batch in loader)
