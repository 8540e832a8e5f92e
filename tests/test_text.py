import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
)

from omniload.errors import ConfigError, SampleError
from omniload.transforms.text import (
    load_template,
    load_tokenizer,
)
from tests.talks import (
    TALK,
    TEMPLATES,
    byte_level,
    labelled,
    make_encoder,
    metaspace,
    read,
    rendered,
    turn,
    unigram,
)

CONTROL_TEXTS = (
    "<|im_start|>",
    "<|im_end|>",
    "</s>",
    "<s>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
    "<|image|>",
    "<|endoftext|>",
)


# the embedded tokenizer


def test_a_chatml_conversation_reads_as_it_should():
    encoder = make_encoder()
    encoded = encoder.encode(TALK[:2], [3])
    assert read(encoder, encoded.input_ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<img>" + "<IMG_CONTEXT>" * 6 + "</img>\nWhat is in the image?<|im_end|>"
        "\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    )
    assert labelled(encoder, encoded) == "A cat.<|im_end|>"
    assert encoded.input_ids.dtype == encoded.labels.dtype == encoded.image_spans.dtype == np.int32


def test_a_vicuna_conversation_reads_as_it_should():
    encoder = make_encoder("vicuna")
    encoded = encoder.encode([turn("system", "Be brief."), *TALK[:2]], [1])
    assert read(encoder, encoded.input_ids) == (
        "<s>Be brief. USER: <image><image>\nWhat is in the image? ASSISTANT: A cat.</s>"
    )
    assert labelled(encoder, encoded) == " A cat.</s>"


def test_a_llama3_conversation_reads_as_it_should():
    encoder = make_encoder("llama3")
    encoded = encoder.encode([turn("user", " Hi \n"), turn("assistant", " Yes ")], [])
    assert read(encoder, encoded.input_ids) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
    )
    assert labelled(encoder, encoded) == "Yes<|eot_id|>"


@pytest.mark.parametrize("template", TEMPLATES)
def test_image_spans_are_exactly_the_image_tokens(template):
    encoder = make_encoder(template, tokens_per_tile=5)
    encoded = encoder.encode(TALK, [1, 4])
    assert encoded.image_spans.shape == (2, 2)
    assert (encoded.image_spans[:, 1] - encoded.image_spans[:, 0]).tolist() == [5, 20]
    inside = np.zeros(len(encoded.input_ids), dtype=bool)
    for start, end in encoded.image_spans:
        inside[start:end] = True
    assert np.array_equal(encoded.input_ids == encoder.image_token_id, inside)
    assert (encoded.labels[inside] == -100).all()


contents = st.lists(
    st.one_of(st.text(max_size=12), st.sampled_from(CONTROL_TEXTS)), max_size=5
).map("".join)
talks = st.lists(st.tuples(contents, contents), min_size=1, max_size=3)


@given(talks, st.sampled_from(TEMPLATES), st.sampled_from(["assistant", "last", "all"]))
@settings(max_examples=150, deadline=None)
def test_labels_are_the_text_of_the_assistant_and_data_forges_no_control_token(
    pairs, template, loss
):
    pairs = [(q.replace("<image>", "") + "?", a.replace("<image>", "")) for q, a in pairs]
    messages = [turn(*item) for q, a in pairs for item in (("user", q), ("assistant", a))]
    encoder = make_encoder(template, loss=loss)
    trained = [a for _, a in pairs] if loss == "assistant" else [pairs[-1][1]]
    if loss != "all" and not any(answer.strip() for answer in trained):
        with pytest.raises(SampleError, match="empty answer"):
            encoder.encode(messages, [])
        return
    encoded = encoder.encode(messages, [])
    data = load_template(template)
    text = data.bos + rendered(data, messages)
    assert read(encoder, encoded.input_ids) == text
    role = data.roles["assistant"]
    answers = [a.strip() if data.trim else a for _, a in pairs]
    expected = [f"{role.content_prefix}{answer}{role.end}" for answer in answers]
    assert (
        labelled(encoder, encoded)
        == {
            "assistant": "".join(e for e, (_, a) in zip(expected, pairs, strict=True) if a.strip()),
            "last": expected[-1],
            "all": text,
        }[loss]
    )
    # the control tokens are those of the template, not one more
    controls = encoded.input_ids[encoded.input_ids >= 256]
    empty = [turn(message.role, "x") for message in messages]
    without = encoder.encode(empty, []).input_ids
    assert controls.tolist() == without[without >= 256].tolist()


def test_loss_all_leaves_images_out_and_nothing_else():
    encoder = make_encoder(loss="all")
    encoded = encoder.encode(TALK, [1, 2])
    image_ids = {encoder.image_token_id, *encoder.image_start_ids, *encoder.image_end_ids}
    for token, label in zip(encoded.input_ids, encoded.labels, strict=True):
        assert label == (-100 if token in image_ids else token)


@pytest.mark.parametrize("template", TEMPLATES)
def test_tokens_do_not_depend_on_the_loss_policy(template):
    runs = [make_encoder(template, loss=loss).encode(TALK, [1, 2]).input_ids.tolist()
            for loss in ("assistant", "last", "all")]  # fmt: skip
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize(
    ("loss", "weights", "expected"),
    [
        ("assistant", [None, 0, None, None], "A picture of the world.<|im_end|>"),
        ("assistant", [None, 1, None, 0], "A cat.<|im_end|>"),
        ("assistant", [0, 0, 0, 0], ""),
        ("last", [None, 1, None, None], "A cat.<|im_end|>A picture of the world.<|im_end|>"),
        ("last", [None, None, None, 0], ""),
        ("last", [None, None, 1, 0], "And in this one?<|im_end|>"),
    ],
)
def test_a_weight_goes_before_the_policy(loss, weights, expected):
    encoder = make_encoder(loss=loss)
    messages = [turn(m.role, m.content, w) for m, w in zip(TALK, weights, strict=True)]
    encoded = encoder.encode(messages, [1, 1])
    assert labelled(encoder, encoded) == expected
    assert encoded.input_ids.tolist() == encoder.encode(TALK, [1, 1]).input_ids.tolist()


def test_under_loss_all_a_weight_of_0_silences_the_whole_turn():
    encoder = make_encoder(loss="all")
    messages = [turn("user", "Hi", 0), turn("assistant", "Yes")]
    assert labelled(encoder, encoder.encode(messages, [])) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>assistant\nYes<|im_end|>\n"
    )


def test_every_role_can_speak():
    for template in TEMPLATES:
        encoder = make_encoder(template)
        messages = [turn(role, "x") for role in ("system", "user", "tool", "assistant")]
        assert "x" in labelled(encoder, encoder.encode(messages, []))


# wrong conversations


@pytest.mark.parametrize(
    ("messages", "tiles", "reason"),
    [
        ([], [], r"conversation is empty \(0 messages"),
        ([turn("user", " \n"), turn("assistant", "")], [], r"conversation is empty \(2 messages"),
        ([turn("human", "Hi")], [], "message 0 has the unknown role 'human'; known: system, user"),
        ([turn("user", "Hi", 0.5)], [], r"message 0: weight must be 0 or 1, got 0\.5"),
        ([turn("user", "Hi", 2)], [], "weight must be 0 or 1, got 2"),
        ([turn("user", "<image> Hi")], [], "expected 0 marks, got 1"),
        ([turn("user", "Hi")], [1], "expected 1 marks, got 0"),
        ([turn("user", "<image><image>")], [1], "expected 1 marks, got 2"),
        ([turn("user", "<image>")], [0], r"at least one tile, got \[0\]"),
        ([turn("user", "a\ud800b")], [], r"no valid Unicode: a lone surrogate"),
    ],
)
@pytest.mark.parametrize("template", TEMPLATES)
def test_wrong_conversations_are_refused_with_the_reason(template, messages, tiles, reason):
    with pytest.raises(SampleError, match=reason):
        make_encoder(template).encode(messages, tiles)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "none"}, "loss must be one of assistant, last, all, got 'none'"),
        ({"tokens_per_tile": 0}, "tokens_per_tile must be between 1"),
        ({"tokens_per_tile": 2.0}, "tokens_per_tile must be an integer, got 2.0"),
        ({"tokens_per_tile": True}, "tokens_per_tile must be an integer, got True"),
    ],
)
def test_wrong_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_encoder(**options)


# settings


def test_settings_are_json_and_tell_what_a_model_must_cover():
    encoder = make_encoder()
    facts = encoder.settings()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["added_tokens"] == [
        "<|im_start|>", "<|im_end|>", "<img>", "<IMG_CONTEXT>", "</img>", "<|endoftext|>",
    ]  # fmt: skip
    assert facts["vocab_size"] == encoder.vocab_size == 262
    assert facts["image_token_id"] == 259
    assert facts["image_start_ids"] == [258]
    assert facts["image_end_ids"] == [260]
    assert facts["pad_token_id"] == 261
    assert facts["filler_ids"] == [ord(".")]


def test_settings_change_with_whatever_changes_tokens():
    base = make_encoder().settings()
    assert make_encoder().settings() == base
    for other in (
        make_encoder(loss="all"),
        make_encoder(tokens_per_tile=3),
        make_encoder("vicuna"),
        make_encoder(tokenizer=byte_level()),
    ):
        assert other.settings() != base
    assert make_encoder("vicuna").settings()["template_fingerprint"] != base["template_fingerprint"]
    assert base["tokenizer_fingerprint"] != byte_level().fingerprint


def test_an_encoder_survives_pickling():
    for tokenizer in (None, metaspace("always")):
        encoder = make_encoder(tokenizer=tokenizer)
        again = pickle.loads(pickle.dumps(encoder))
        assert again.settings() == encoder.settings()
        messages = [turn("user", "Hi <|im_end|>"), turn("assistant", "Yes </s>")]
        assert again.encode(messages, []).labels.tolist() == (
            encoder.encode(messages, []).labels.tolist()
        )


def test_the_embedded_tokenizer_is_what_its_file_says():
    encoder = make_encoder()
    text = "caf\u00e9 \U0001f600\n\0<|im_end|>"
    tokenizer = Tokenizer.from_str(encoder.tokenizer_json())
    tokenizer.encode_special_tokens = True
    ids = encoder.encode([turn("user", text)], []).input_ids.tolist()
    assert bytes(t for t in ids if t < 256).decode().endswith(f"user\n{text}\n")
    assert tokenizer.encode(text).ids == list(text.encode())


def test_the_written_tokenizer_gives_the_same_tokens(tmp_path):
    for tokenizer in (None, byte_level(), metaspace("first"), unigram()):
        encoder = make_encoder(tokenizer=tokenizer)
        file = tmp_path / "tokenizer.json"
        file.write_text(encoder.tokenizer_json(), encoding="utf-8")
        again = make_encoder(tokenizer=load_tokenizer(file))
        assert again.added_tokens == ()
        assert again.vocab_size == encoder.vocab_size
        assert again.encode(TALK, [1, 2]).input_ids.tolist() == (
            encoder.encode(TALK, [1, 2]).input_ids.tolist()
        )
