import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, SampleError
from omniload.images import InternVLTiles
from omniload.transforms.prepare import prepare_sample
from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer
from omniload.types import Message

POLICY = InternVLTiles(size=28)


def turn(role, content, weight=None):
    return Message(role=role, content=content, weight=weight)


def make_encoder(template="vicuna", **options):
    options = {"tokens_per_tile": 4, **options}
    return ConversationEncoder(
        tokenizer=load_tokenizer(), template=load_template(template), **options
    )


ENCODER = make_encoder()
CHATML = make_encoder("chatml")
TALK = [turn("system", "S"), turn("user", "<image>?"), turn("assistant", "A" * 50)]
WIDE = (280, 28)  # ten tiles in a row and a thumbnail


def prepare(messages=None, sizes=(WIDE,), **options):
    options = {"encoder": ENCODER, "policy": POLICY, **options}
    return prepare_sample(TALK if messages is None else messages, sizes, **options)


def test_a_sample_that_fits_is_left_alone():
    sample = prepare()
    assert sample.image_num_tiles.tolist() == [11]
    assert sample.image_num_tiles.dtype == np.int32
    assert sample.num_tiles == 11
    assert sample.num_tokens == len(sample.input_ids) == len(sample.labels)
    assert sample.num_loss_tokens == 52  # the space, 50 letters, the end token
    assert not sample.truncated
    assert not sample.tiles_reduced
    for oversize in ("truncate", "fewer-tiles", "reject"):
        same = prepare(max_tokens=sample.num_tokens, oversize=oversize)
        assert same.input_ids.tolist() == sample.input_ids.tolist()
        assert not same.truncated
        assert not same.tiles_reduced


def test_the_first_label_gives_no_loss():
    sample = prepare([turn("user", "Hi")], (), encoder=make_encoder(loss="all"))
    assert sample.num_loss_tokens == sample.num_tokens - 1


def test_reject_names_both_lengths():
    length = prepare().num_tokens
    with pytest.raises(SampleError, match=f"too long: at most {length - 1} tokens, got {length}"):
        prepare(max_tokens=length - 1, oversize="reject")


def test_truncate_cuts_the_end_and_only_that():
    whole = prepare()
    cut = prepare(max_tokens=whole.num_tokens - 20)
    assert cut.truncated
    assert not cut.tiles_reduced
    assert cut.input_ids.tolist() == whole.input_ids[:-20].tolist()
    assert cut.labels.tolist() == whole.labels[:-20].tolist()
    assert cut.image_spans.tolist() == whole.image_spans.tolist()
    assert cut.num_loss_tokens == whole.num_loss_tokens - 20


@pytest.mark.parametrize("encoder", [ENCODER, CHATML])
def test_truncate_never_cuts_an_image_or_its_end_token(encoder):
    messages = [turn("assistant", "A"), turn("user", "<image>"), turn("assistant", "B")]
    whole = prepare(messages, encoder=encoder)
    end = int(whole.image_spans[0, 1]) + len(encoder.image_end_ids)
    kept = prepare(messages, encoder=encoder, max_tokens=end)
    assert kept.num_tokens == end
    with pytest.raises(
        SampleError, match=rf"image 1 of 1 ends at token {end}, beyond the {end - 1}"
    ):
        prepare(messages, encoder=encoder, max_tokens=end - 1)


def test_a_cut_sample_without_loss_is_refused():
    with pytest.raises(
        SampleError, match=r"no token that gives loss is left after cutting \d+ tok"
    ):
        prepare(max_tokens=int(prepare().image_spans[0, 1]) + 3)


def test_fewer_tiles_keeps_the_whole_text():
    whole = prepare()
    fewer = prepare(max_tokens=whole.num_tokens - 1, oversize="fewer-tiles")
    assert fewer.tiles_reduced
    assert not fewer.truncated
    assert fewer.image_num_tiles.tolist() == [10]  # nine in a row and a thumbnail
    assert fewer.num_loss_tokens == whole.num_loss_tokens
    text = [ids[ids != ENCODER.image_token_id].tolist() for ids in (whole.input_ids,
            fewer.input_ids)]  # fmt: skip
    assert text[0] == text[1]


def test_fewer_tiles_takes_from_the_largest_image_first():
    messages = [turn("user", "<image><image>?"), turn("assistant", "A")]
    sizes = [(112, 28), WIDE]  # 5 and 11 tiles
    whole = prepare(messages, sizes)
    assert whole.image_num_tiles.tolist() == [5, 11]
    for fewer, counts in ((1, [5, 10]), (6, [5, 5]), (7, [4, 5]), (14, [1, 1])):
        sample = prepare(
            messages, sizes, max_tokens=whole.num_tokens - 4 * fewer, oversize="fewer-tiles"
        )
        assert sample.image_num_tiles.tolist() == counts


def test_fewer_tiles_refuses_what_one_tile_an_image_cannot_fit():
    least = prepare().num_tokens - 40
    assert prepare(max_tokens=least, oversize="fewer-tiles").image_num_tiles.tolist() == [1]
    with pytest.raises(SampleError, match="too long by 1 tokens even with one tile an image"):
        prepare(max_tokens=least - 1, oversize="fewer-tiles")
    with pytest.raises(SampleError, match=r"even with one tile an image \(0 images"):
        prepare([turn("user", "Hi")], (), max_tokens=3, oversize="fewer-tiles")


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), max_size=3),
    st.integers(1, 400),
    st.sampled_from(["truncate", "fewer-tiles", "reject"]),
    st.sampled_from([ENCODER, CHATML]),
)
@settings(max_examples=200, deadline=None)
def test_what_comes_out_fits_and_its_images_are_whole(sizes, max_tokens, oversize, encoder):
    messages = [
        turn("system", "S"),
        turn("user", "Look: " + "<image>" * len(sizes)),
        turn("assistant", "An answer of some length."),
        turn("user", "More?"),
        turn("assistant", "No."),
    ]
    options = {"encoder": encoder, "policy": POLICY}
    whole = prepare_sample(messages, sizes, **options)
    try:
        sample = prepare_sample(
            messages, sizes, max_tokens=max_tokens, oversize=oversize, **options
        )
    except SampleError:
        assert whole.num_tokens > max_tokens
        return
    assert sample.num_tokens <= max_tokens
    assert sample.num_loss_tokens > 0
    assert sample.truncated == (oversize == "truncate" and whole.num_tokens > max_tokens)
    assert sample.tiles_reduced == (oversize == "fewer-tiles" and whole.num_tokens > max_tokens)
    lengths = sample.image_spans[:, 1] - sample.image_spans[:, 0]
    assert lengths.tolist() == (sample.image_num_tiles * 4).tolist()
    inside = np.zeros(sample.num_tokens, dtype=bool)
    for start, end in sample.image_spans:
        assert end + len(encoder.image_end_ids) <= sample.num_tokens
        inside[start:end] = True
    assert np.array_equal(sample.input_ids == encoder.image_token_id, inside)
    for size, count in zip(sizes, sample.image_num_tiles.tolist(), strict=True):
        assert POLICY.for_num_tiles(*size, count).num_tiles(*size) == count


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"oversize": "drop"}, "oversize must be one of truncate, fewer-tiles, reject, got 'drop'"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        prepare(**options)


def test_marks_without_images_are_refused():
    with pytest.raises(SampleError, match="expected 0 marks, got 1"):
        prepare(sizes=())
