"""Padding: shapes that kernels ask for, without a token of any sample changed."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import omniload
from examples.tiny_vlm import TinyVLM
from omniload import _native
from omniload.errors import ConfigError
from omniload.packing import pack
from omniload.padding import Padding
from omniload.transforms import transform_from_settings
from omniload.types import IGNORE_INDEX, Budget, Sample
from tests.loader_data import Wrapped, rows_of, write_data
from tests.packing_samples import IMAGE_TOKEN, VOCAB, make_filler, make_sample, samples

SAMPLES = [
    make_sample(0, text=9, tiles_per_image=(2,)),
    make_sample(1, text=24),
    make_sample(2, text=5, tiles_per_image=(1, 3)),
]
TOKENS = sum(sample.num_tokens for sample in SAMPLES)
BACKENDS = ["numpy", *(["native"] if _native.available() else [])]
FIELDS = Sample.__dataclass_fields__


@st.composite
def paddings(draw):
    document = draw(st.integers(1, 5))
    return Padding(
        multiple=draw(st.integers(1, 24)),
        document_multiple=document,
        num_documents=draw(st.none() | st.integers(8, 12)),
        token_id=draw(st.none() | st.integers(0, 9)),
    )


def assert_same_sample(found, expected):
    for name in FIELDS:
        if name == "tiles" and found.num_tiles == expected.num_tiles == 0:
            continue  # no tile has no size either
        one, other = getattr(found, name), getattr(expected, name)
        if name == "labels":
            other = other.copy()
            other[0] = IGNORE_INDEX
        assert np.array_equal(one, other), name
        assert not isinstance(one, np.ndarray) or one.dtype == other.dtype, name


# -- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_at_the_end_is_a_document_of_its_own(backend):
    batch = pack(SAMPLES, pad_to=Padding(multiple=64, token_id=3), backend=backend)
    plain = pack(SAMPLES, backend=backend)
    rest = -TOKENS % 64
    assert batch.num_tokens == TOKENS + rest
    assert batch.cu_seqlens.tolist() == [*plain.cu_seqlens.tolist(), TOKENS + rest]
    assert batch.input_ids[TOKENS:].tolist() == [3] * rest
    assert (batch.labels[TOKENS:] == IGNORE_INDEX).all()
    assert batch.position_ids[TOKENS:].tolist() == list(range(rest))
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(batch[name][:TOKENS], plain[name])
    assert batch.sample_ids.tolist() == [0, 1, 2]
    assert (batch.num_samples, batch.num_documents) == (3, 4)
    assert batch.num_loss_tokens == plain.num_loss_tokens
    assert batch.num_padding_tokens == rest
    assert batch.pad_ratio == rest / (TOKENS + rest)
    assert f"({rest} padding)" in repr(batch)


def test_no_padding_and_no_empty_document_unless_asked():
    for pad_to in (None, 1, TOKENS, Padding()):
        batch = pack(SAMPLES, pad_to=pad_to)
        assert torch.equal(batch.buffer, pack(SAMPLES).buffer)
        assert batch.num_documents == batch.num_samples == 3
        assert batch.num_padding_tokens == 0


def test_a_padding_document_may_be_the_longest():
    batch = pack(SAMPLES, pad_to=Padding(num_tokens=200))
    assert batch.num_tokens == 200
    assert batch.max_seqlen == 200 - TOKENS


def test_fixed_capacity_repeats_the_last_offset():
    batch = pack(SAMPLES, pad_to=Padding(multiple=64, num_documents=8))
    assert batch.cu_seqlens.shape == (9,)
    assert batch.cu_seqlens.tolist()[4:] == [batch.num_tokens] * 5
    with pytest.raises(ConfigError, match=r"at most 3 documents, got 4 .*Budget\(samples=2\)"):
        pack(SAMPLES, pad_to=Padding(multiple=64, num_documents=3))


def test_documents_padded_to_a_multiple_keep_their_tokens_in_front():
    batch = pack(SAMPLES, pad_to=Padding(document_multiple=8, token_id=1))
    bounds = batch.cu_seqlens.tolist()
    for index, sample in enumerate(SAMPLES):
        start, end = bounds[index : index + 2]
        middle = start + sample.num_tokens
        assert (end - start) % 8 == 0
        assert end - middle < 8
        assert batch.input_ids[start:middle].tolist() == sample.input_ids.tolist()
        assert (batch.input_ids[middle:end] == 1).all()
        assert (batch.labels[middle:end] == IGNORE_INDEX).all()
    assert batch.num_documents == 3
    assert batch.sample_lengths == tuple(sample.num_tokens for sample in SAMPLES)
    images = batch.image_spans
    assert all((batch.input_ids[a:b] == IMAGE_TOKEN).all() for a, b in images.tolist())


@settings(max_examples=60, deadline=None)
@given(samples(), paddings())
def test_unpacking_gives_back_what_was_packed(packed, padding):
    batch = pack(packed, pad_to=padding)
    assert batch.num_tokens % padding.row_multiple == 0
    assert batch.max_seqlen == max(batch.cu_seqlens.diff().tolist(), default=0)
    found = batch.unpack()
    assert len(found) == len(packed)
    for one, other in zip(found, packed, strict=True):
        assert_same_sample(one, other)
    parts = batch.split(batch.input_ids)
    for part, sample in zip(parts, packed, strict=True):
        assert part.tolist() == sample.input_ids.tolist()
    copied = pickle.loads(pickle.dumps(batch))
    assert copied.sample_lengths == batch.sample_lengths
    assert torch.equal(copied.buffer, batch.buffer)


@pytest.mark.skipif(not _native.available(), reason="needs the C++ extension")
@settings(max_examples=60, deadline=None)
@given(samples(), paddings())
def test_both_writers_pad_to_the_same_bits(packed, padding):
    native, numpy = (pack(packed, pad_to=padding, backend=b) for b in ("native", "numpy"))
    assert torch.equal(native.buffer, numpy.buffer)
    assert native.num_loss_tokens == numpy.num_loss_tokens


def test_a_filler_is_padded_like_any_row():
    batch = pack([make_filler()], is_filler=True, pad_to=Padding(num_tokens=64))
    assert batch.num_tokens == 64
    assert batch.sample_ids.shape == (0,)
    assert batch.num_loss_tokens == 0
    (sample,) = batch.unpack()
    assert sample.sample_id == -1
    assert pack([], pad_to=Padding(num_tokens=64)).num_padding_tokens == 64


# -- one row a sample -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad_to", [None, Padding(multiple=64, document_multiple=8)])
def test_padded_rows_hold_one_sample_each(side, pad_to):
    batch = pack(SAMPLES, pad_to=pad_to)
    rows = batch.padded(pad_token_id=5, side=side, multiple=16)
    width = -(-max(batch.sample_lengths) // 16) * 16
    for index, sample in enumerate(SAMPLES):
        length = sample.num_tokens
        own = slice(0, length) if side == "right" else slice(width - length, width)
        rest = slice(length, width) if side == "right" else slice(0, width - length)
        labels = sample.labels.copy()
        labels[0] = IGNORE_INDEX
        for name, want, filling in (
            ("input_ids", sample.input_ids.tolist(), 5),
            ("labels", labels.tolist(), IGNORE_INDEX),
            ("attention_mask", [1] * length, 0),
            ("position_ids", list(range(length)), 0),
        ):
            assert rows[name].shape == (3, width)
            assert rows[name].dtype == torch.int64
            assert rows[name][index, own].tolist() == want, name
            assert (rows[name][index, rest] == filling).all(), name


def test_a_model_gives_the_same_loss_packed_padded_and_in_one_row_each():
    torch.manual_seed(0)
    model = TinyVLM(vocab_size=VOCAB, image_token_id=IMAGE_TOKEN, width=16, num_heads=2)
    model = model.double()
    want = model(**pack(SAMPLES).model_inputs(dtype=torch.float64)).loss
    for pad_to in (16, Padding(num_tokens=160, num_documents=9), Padding(document_multiple=8)):
        batch = pack(SAMPLES, pad_to=pad_to)
        inputs = batch.model_inputs(dtype=torch.float64)
        torch.testing.assert_close(model(**inputs).loss, want, rtol=0, atol=1e-10)
        rows = batch.padded()
        found = model(
            rows["input_ids"],
            rows["labels"],
            rows["position_ids"],
            pixel_values=inputs["pixel_values"],
        ).loss
        torch.testing.assert_close(found, want, rtol=0, atol=1e-10)


def test_rows_without_samples_have_no_padded_rows():
    assert pack([]).padded()["input_ids"].shape == (0, 0)


# -- the loader -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return str(write_data(tmp_path_factory.mktemp("data") / "shards", num_rows=20))


def loader(shards, *, tokens=512, samples=None, **options):
    return omniload.DataLoader(shards, budget=Budget(tokens=tokens, samples=samples), **options)


def test_full_rows_have_one_shape_and_the_same_samples(shards):
    plain, full = list(loader(shards)), list(loader(shards, pad_to="full"))
    assert {batch.num_tokens for batch in full} == {512}
    assert len(plain) == len(full)
    pad = loader(shards).manifest.settings["encoder"]["pad_token_id"]
    for one, other in zip(plain, full, strict=True):
        assert one.sample_ids.tolist() == other.sample_ids.tolist()
        assert torch.equal(other.input_ids[: one.num_tokens], one.input_ids)
        assert (other.input_ids[one.num_tokens :] == pad).all()
        assert other.num_padding_tokens == 512 - one.num_tokens
        assert one.num_loss_tokens_step == other.num_loss_tokens_step


def test_document_padding_is_planned_within_the_budget(shards):
    padding = Padding(document_multiple=32, num_documents=8, multiple=64)
    batches = list(loader(shards, samples=7, pad_to=padding))
    assert sorted(rows_of(batches)) == list(range(20))
    for batch in batches:
        assert batch.num_tokens <= 512
        assert batch.num_tokens % 64 == 0
        assert (batch.cu_seqlens % 32 == 0).all()
        assert batch.cu_seqlens.shape == (9,)
        assert batch.num_samples <= 7
    # without it, some row would have passed the budget
    plain = list(loader(shards, samples=7))
    padded = [sum(-(-length // 32) * 32 for length in batch.sample_lengths) for batch in plain]
    assert max(padded) > 512


def test_padding_and_loss_totals_cross_from_workers(shards):
    here = list(loader(shards, pad_to=64))
    there = list(loader(shards, pad_to=64, num_workers=1))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.buffer, other.buffer)
        for name in ("sample_lengths", "sample_images", "num_loss_samples_step"):
            assert getattr(one, name) == getattr(other, name)
        assert one.sqrt_loss_tokens_step == other.sqrt_loss_tokens_step


def test_a_padded_run_resumes_exactly(shards):
    padding = Padding(document_multiple=16)
    whole = list(loader(shards, pad_to=padding))
    stopped = loader(shards, pad_to=padding)
    batches = iter(stopped)
    next(batches)
    resumed = loader(shards, pad_to=padding)
    resumed.load_state_dict(stopped.state_dict())
    rest = list(resumed)
    assert len(rest) == len(whole) - 1
    assert all(torch.equal(a.buffer, b.buffer) for a, b in zip(rest, whole[1:], strict=True))
    other = loader(shards)
    with pytest.raises(omniload.StateError):
        other.load_state_dict(stopped.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_to": "fill"}, r"pad_to must be an integer, 'full', or an omniload\.Padding"),
        ({"pad_to": 0}, r"Padding\.multiple must be an integer of at least 1"),
        ({"pad_to": 48}, r"Budget\.tokens must be a multiple .* multiple of 48, got 512"),
        ({"pad_to": Padding(num_tokens=1024)}, "must be the token budget, 512, got 1024"),
        ({"pad_to": Padding(num_documents=4)}, r"Budget\.samples must be at most 3"),
    ],
)
def test_padding_that_does_not_go_with_the_budget_is_refused_at_once(shards, options, message):
    with pytest.raises(ConfigError, match=message):
        loader(shards, **options)


class LongFiller(Wrapped):
    fingerprint = "long-filler/1"

    def filler(self, with_image):
        return make_filler(text=600)


def test_a_filler_longer_than_the_rows_is_refused_at_once(shards):
    transform = LongFiller(transform_from_settings(loader(shards).manifest.settings))
    for pad_to in ("full", 16, None):
        with pytest.raises(ConfigError, match=r"fit the budget.*tokens=512.* got 6\d\d tokens"):
            loader(shards, transform=transform, pad_to=pad_to)
    loader(shards, transform=transform, pad_to="full", tail="empty")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiple": True}, "multiple must be an integer"),
        ({"num_tokens": 0}, "num_tokens must be an integer of at least 1"),
        ({"num_tokens": 100, "multiple": 8}, "num_tokens must be a multiple of 8"),
        ({"num_tokens": 20, "multiple": 4, "document_multiple": 6}, "a multiple of 12"),
        ({"token_id": -1}, "token_id must be an integer of at least 0"),
    ],
)
def test_wrong_paddings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        Padding(**options)


def test_wrong_arguments_of_batches_are_named():
    batch = pack(SAMPLES)
    with pytest.raises(ConfigError, match="at most 16 tokens, got"):
        pack(SAMPLES, pad_to=Padding(num_tokens=16))
    with pytest.raises(ConfigError, match="side must be one of 'right', 'left'"):
        batch.padded(side="both")
    with pytest.raises(ConfigError, match="multiple must be an integer"):
        batch.padded(multiple=0)
    with pytest.raises(ConfigError, match="one entry a token"):
        batch.split(batch.input_ids[None])
