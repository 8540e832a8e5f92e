import dataclasses
import json
import pickle

import numpy as np
import pytest

from omniload.errors import ConfigError, SampleError
from omniload.images import InternVLTiles, tiles
from omniload.transforms import TileTransform, Transform, in_place, transform_from_settings
from omniload.transforms.prepare import prepare_sample
from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer
from omniload.types import Message, Record, Sample
from tests.images_corpus import encode, photo

POLICY = InternVLTiles(size=28, max_tiles=6)
ENCODER = ConversationEncoder(
    tokenizer=load_tokenizer(), template=load_template("chatml"), tokens_per_tile=4
)
RNG = np.random.default_rng(0)
MESSAGES = (
    Message(role="user", content="<image>What?<image>"),
    Message(role="assistant", content="A cat."),
)


def manifest_settings(**changes):
    """As preprocess writes them."""
    return {
        "encoder": ENCODER.settings(),
        "tiling": POLICY.settings(),
        "max_tokens": None,
        "oversize": "truncate",
        **changes,
    }


def make_record(sizes=((120, 80), (28, 28)), messages=MESSAGES, **options):
    images = tuple(encode(photo(*size, seed=seed), "PNG") for seed, size in enumerate(sizes))
    prepared = prepare_sample(messages, sizes, encoder=ENCODER, policy=POLICY, **options)
    return Record(
        row=5,
        key="a",
        source="s",
        shard="shard-00000.arrow",
        images=images,
        image_sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
        image_num_tiles=prepared.image_num_tiles,
        image_spans=prepared.image_spans,
        input_ids=prepared.input_ids,
        labels=prepared.labels,
        messages=messages,
    )


def test_a_record_becomes_a_sample_with_the_planned_tiles():
    record = make_record()
    transform = transform_from_settings(manifest_settings())
    assert isinstance(transform, Transform)
    sample = transform(record, RNG)
    assert sample.sample_id == 5
    assert sample.image_num_tiles.tolist() == [7, 1]
    assert sample.image_grids.tolist() == [list(POLICY.grid(120, 80)), [1, 1]]
    expected = np.concatenate([tiles(data, POLICY) for data in record.images])
    assert np.array_equal(sample.tiles, expected)
    for name in ("input_ids", "labels", "image_sizes", "image_spans"):
        assert np.array_equal(getattr(sample, name), getattr(record, name))
    assert transform.lengths(record) == (
        sample.num_tokens,
        sample.num_tiles,
        sample.num_loss_tokens,
    )


def test_tiles_are_written_to_memory_that_is_given():
    record = make_record()
    transform = transform_from_settings(manifest_settings())
    expected = transform(record, RNG)
    tiles = np.full((8, 3, *transform.tile_shape), 255, np.uint8)
    sample = transform.write(record, RNG, tiles=tiles)
    assert sample.tiles is tiles
    for name in Sample.__dataclass_fields__:
        assert np.array_equal(getattr(sample, name), getattr(expected, name)), name


class Brighter(TileTransform):
    def __call__(self, record, rng):
        sample = super().__call__(record, rng)
        return dataclasses.replace(sample, tiles=np.maximum(sample.tiles, 128))


class Clipped(Brighter):
    def write(self, record, rng, *, tiles):
        return super().write(record, rng, tiles=tiles)


def test_a_call_of_ones_own_is_not_passed_over():
    options = {"tokens_per_tile": 4, "image_token_id": 1, "pad_token_id": 0}
    plain, own, both = (kind(POLICY, **options) for kind in (TileTransform, Brighter, Clipped))
    assert in_place(plain) is plain
    assert in_place(own) is None
    assert in_place(both) is both


def test_text_alone_has_no_tiles():
    messages = (Message(role="user", content="Hi"), Message(role="assistant", content="Yes"))
    record = make_record((), messages)
    transform = transform_from_settings(manifest_settings())
    sample = transform(record, RNG)
    assert sample.tiles.shape[0] == 0
    assert sample.image_spans.shape == (0, 2)
    assert transform.lengths(record)[1] == 0


def test_tiles_that_preprocessing_lowered_are_cut_the_same_way():
    length = len(make_record().input_ids)
    record = make_record(max_tokens=length - 4 * 4, oversize="fewer-tiles")
    assert record.image_num_tiles.tolist() == [3, 1]
    transform = transform_from_settings(manifest_settings(oversize="fewer-tiles"))
    sample = transform(record, RNG)
    assert sample.image_num_tiles.tolist() == [3, 1]
    assert sample.image_grids.tolist() == [[2, 1], [1, 1]]
    assert np.array_equal(sample.tiles[:3], tiles(record.images[0], POLICY.limited(2)))
    with pytest.raises(SampleError, match=r"image 1 of 2: its tiles must be .* expected 3, got 7"):
        transform_from_settings(manifest_settings())(record, RNG)


def test_a_number_of_tiles_that_no_limit_gives_is_refused():
    record = make_record()
    counts = record.image_num_tiles.copy()
    counts[0] = 6
    spans = record.image_spans.copy()
    spans[0, 1] -= 4
    wrong = dataclasses.replace(record, image_num_tiles=counts, image_spans=spans)
    transform = transform_from_settings(manifest_settings(oversize="fewer-tiles"))
    with pytest.raises(SampleError, match=r"120x80 pixels can't be cut into 6 tiles: it gives 7"):
        transform(wrong, RNG)


def changed(record, **changes):
    return dataclasses.replace(record, **changes)


def test_damaged_images_are_named():
    record = make_record()
    transform = transform_from_settings(manifest_settings())
    for data, reason in ((b"", "is empty"), (record.images[1][:90], "damaged png image: ")):
        with pytest.raises(SampleError, match=f"image 2 of 2: .*{reason}.*--check-images"):
            transform(changed(record, images=(record.images[0], data)), RNG)


def test_an_image_of_another_size_is_refused():
    record = make_record()
    other = encode(photo(121, 80), "PNG")
    transform = transform_from_settings(manifest_settings())
    with pytest.raises(SampleError, match=r"image 1 of 2: its size .* expected 120x80, got 121x80"):
        transform(changed(record, images=(other, record.images[1])), RNG)


def test_another_tokens_per_tile_is_refused():
    settings = manifest_settings()
    settings["encoder"] = settings["encoder"] | {"tokens_per_tile": 5}
    with pytest.raises(SampleError, match=r"tokens must be 5 a tile: expected 35 .* got 28"):
        transform_from_settings(settings)(make_record(), RNG)


def test_an_image_too_few_is_refused():
    record = make_record()
    transform = transform_from_settings(manifest_settings())
    with pytest.raises(SampleError, match="one number of tiles an image: expected 1, got 2"):
        transform(changed(record, images=record.images[:1]), RNG)


# fillers


@pytest.mark.parametrize("with_image", [False, True])
def test_a_filler_is_a_short_document_that_trains_nothing(with_image):
    transform = transform_from_settings(manifest_settings())
    sample = transform.filler(with_image)
    assert sample.sample_id == -1
    assert (sample.labels == -100).all()
    assert sample.num_tokens >= 2
    text = sample.input_ids[sample.input_ids != ENCODER.image_token_id]
    assert ord(".") in text
    assert len(sample.tiles) == int(with_image)
    if with_image:
        assert sample.tiles.shape == (1, 3, 28, 28)
        start, end = sample.image_spans[0]
        assert (sample.input_ids[start:end] == ENCODER.image_token_id).all()
        assert end - start == 4
        assert sample.input_ids[start - 1] == ENCODER.image_start_ids[0]
        assert sample.input_ids[end] == ENCODER.image_end_ids[0]


# settings


def test_the_fingerprint_tells_settings_apart_and_is_stable():
    one = transform_from_settings(manifest_settings())
    stored = json.loads(json.dumps(manifest_settings()))
    assert transform_from_settings(stored).fingerprint == one.fingerprint
    assert len(one.fingerprint) == 32
    encoder = ENCODER.settings()
    for other in (
        manifest_settings(tiling=InternVLTiles(size=28).settings()),
        manifest_settings(oversize="fewer-tiles"),
        manifest_settings(encoder=encoder | {"image_token_id": 7}),
    ):
        assert transform_from_settings(other).fingerprint != one.fingerprint


def test_a_transform_survives_pickling():
    transform = transform_from_settings(manifest_settings())
    again = pickle.loads(pickle.dumps(transform))
    assert again.fingerprint == transform.fingerprint
    record = make_record()
    assert np.array_equal(again(record, RNG).tiles, transform(record, RNG).tiles)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens_per_tile": 0}, "tokens_per_tile must be an integer of at least 1, got 0"),
        ({"image_token_id": -1}, "image_token_id must be an integer of at least 0, got -1"),
        ({"pad_token_id": None}, "pad_token_id must be an integer of at least 0, got None"),
        ({"image_end_ids": [True]}, "image_end_ids must be an integer of at least 0, got True"),
        ({"filler_ids": ["a"]}, "filler_ids must be an integer"),
        ({"fewer_tiles": "yes"}, "fewer_tiles must be a bool, got 'yes'"),
        ({"policy": 448}, "policy must be a tiling policy, got 448"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    options = {"tokens_per_tile": 4, "image_token_id": 1, "pad_token_id": 0, **changes}
    with pytest.raises(ConfigError, match=message):
        TileTransform(options.pop("policy", POLICY), **options)


def test_the_constructor_is_closed():
    with pytest.raises(TypeError, match="colour"):
        TileTransform(POLICY, tokens_per_tile=4, image_token_id=1, pad_token_id=0, colour=1)


def test_settings_that_lack_something_are_refused():
    settings = manifest_settings()
    del settings["encoder"]["image_token_id"]
    for wrong in (settings, {}, {"encoder": None}):
        with pytest.raises(ConfigError, match="settings of the shards lack what the transform"):
            transform_from_settings(wrong)


def test_the_names_of_the_batch_are_left_to_it():
    class Batch:
        def model_inputs(self):
            return {"input_ids": 1}

    assert transform_from_settings(manifest_settings()).model_inputs(Batch()) == {"input_ids": 1}
