"""A transform that would fail late, or silently, is refused before the first batch."""

import numpy as np
import pytest

from omniload import Budget, ConfigError, DataLoader, SampleError, World
from omniload.shards import open_shards
from omniload.transforms import FunctionTransform, transform_from_settings
from tests.loader_data import Wrapped, changed, write_data

BUDGET = Budget(tokens=800, tiles=12)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("transform") / "shards", num_rows=12)


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def inner(data):
    return transform_from_settings(open_shards(data).manifest.settings)


class Filling(Wrapped):
    """Has a filler of another kind."""

    def __init__(self, inner, change):
        super().__init__(inner)
        self.change = change

    def filler(self, with_image):
        return self.change(self.inner, with_image)


def longer(transform, with_image):
    sample = transform.filler(with_image)
    ids = np.concatenate([sample.input_ids, np.ones(5000, np.int32)])
    return changed(sample, input_ids=ids, labels=np.full(len(ids), -100, np.int32))


def cropped(sample):
    return changed(sample, tiles=np.ascontiguousarray(sample.tiles[:, :, :14, :14]))


def smaller(transform, with_image):
    return cropped(transform.filler(with_image))


def thinner(transform, with_image):
    sample = transform.filler(with_image)
    return changed(sample, tiles=np.ascontiguousarray(sample.tiles[:, :, :, :14]))


def labelled(transform, with_image):
    sample = transform.filler(with_image)
    return changed(sample, labels=sample.input_ids.copy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inner, image: None, "must be an omniload.Sample, got NoneType"),
        (lambda inner, image: 1 / 0, "failed with ZeroDivisionError"),
        (lambda inner, image: changed(inner.filler(image), sample_id=3), "sample_id -1, got 3"),
        (labelled, r"only labels -100, got \d+ others"),
        (lambda inner, image: inner.filler(False), "a tile, because the data has images, got 0"),
        (longer, r"fit the budget: .*tokens=800.* got 5\d+ tokens and 1 tiles"),
        (smaller, r"tiles of \(28, 28\) pixels, as the samples have, got \(14, 14\)"),
    ],
)
def test_a_filler_that_cannot_be_one_is_found_at_the_start(data, change, message):
    transform = Filling(inner(data), change)
    with pytest.raises(ConfigError, match=message):
        loader(data, transform=transform)
    with pytest.raises(ConfigError, match=message):  # the dummy document is such a filler
        loader(data, transform=transform, tail="empty", uniform_modality=True)
    loader(data, transform=transform, tail="empty")


def test_a_transform_with_tiles_of_its_own_size_has_a_filler_of_that_size(data):
    base = inner(data)

    def crop(record, rng):
        return cropped(base(record, rng))

    own = FunctionTransform(crop, fingerprint="crop", filler=lambda image: smaller(base, image))
    sizes = {batch.tiles.shape[-1] for batch in loader(data, transform=own) if batch.num_tiles}
    assert sizes == {14}
    other = FunctionTransform(crop, fingerprint="crop", filler=lambda image: thinner(base, image))
    with pytest.raises(ConfigError, match=r"tiles of \(14, 14\) pixels.* got \(28, 14\)"):
        loader(data, transform=other)


def test_rows_that_are_left_out_do_not_give_fillers_an_image(data):
    runs = [
        list(loader(data, budget=Budget(tokens=800, tiles=0), oversize="drop", world=rank))
        for rank in (World(dp_rank=rank, dp_world_size=5) for rank in range(5))
    ]
    fillers = [batch for run in runs for batch in run if batch.is_filler]
    assert fillers
    assert not any(batch.num_tiles for run in runs for batch in run)


@pytest.mark.parametrize("fingerprint", [None, 5, "", b"x", "x" * 65])
def test_a_fingerprint_that_does_not_fit_a_state_is_refused(data, fingerprint):
    transform = Wrapped(inner(data))
    transform.fingerprint = fingerprint
    with pytest.raises(ConfigError, match="fingerprint of the transform must be a str of 1 to 64"):
        loader(data, transform=transform)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_no_sample_names_its_row(data, num_workers):
    base = inner(data)
    transform = FunctionTransform(lambda record, rng: {}, fingerprint="dict", filler=base)
    message = r"must return an omniload.Sample, got dict \(row=0, key='key-0', .*shard='shard-"
    with pytest.raises(SampleError, match=message):
        list(
            loader(
                data,
                transform=transform,
                shuffle=False,
                num_workers=num_workers,
                multiprocessing_context="fork",
            )
        )


def test_a_negative_token_names_its_row(data):
    base = inner(data)

    def negative(record, rng):
        sample = base(record, rng)
        return changed(sample, input_ids=sample.input_ids - np.int32(1000))

    transform = FunctionTransform(negative, fingerprint="negative", filler=base)
    with pytest.raises(SampleError, match=r"input_ids must not be negative, got -\d+ \(row=0, key"):
        next(iter(loader(data, transform=transform, shuffle=False)))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_transform_that_cannot_be_sent_to_workers_is_refused(data, method):
    transform = FunctionTransform(
        lambda record, rng: None, fingerprint="lambda", filler=inner(data)
    )
    with pytest.raises(ConfigError, match=rf"FunctionTransform must be picklable.*'{method}'.*top"):
        loader(data, transform=transform, num_workers=1, multiprocessing_context=method)
    for arguments in ({"num_workers": 0}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        loader(data, transform=transform, **arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (lambda record: None, r"must return the integers .* got None \(row=0, key='key-0'"),
        (lambda record: ("a", 1, 2), r"got \('a', 1, 2\) \(row=0"),
        (lambda record: (1, 2), r"got \(1, 2\) \(row=0"),
        (lambda record: (True, 1, 1.0), r"got \(True, 1, 1.0\) \(row=0"),
        (lambda record: 1 / 0, r"lengths of the transform failed with ZeroDivisionError.*\(row=0"),
    ],
)
def test_lengths_that_are_none_name_the_row(data, lengths, message):
    base = inner(data)
    transform = FunctionTransform(base, fingerprint="x", filler=base, lengths=lengths)
    with pytest.raises(ConfigError, match=message):
        loader(data, transform=transform)
