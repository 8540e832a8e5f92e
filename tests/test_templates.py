import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, OmniloadError, SampleError
from omniload.transforms.text import (
    ConversationEncoder,
    ImageStrings,
    LoadedTokenizer,
    load_template,
    load_tokenizer,
)
from tests.talks import labelled, read, turn

# chatml as Hugging Face models carry it
CHATML = """{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# ends a turn with plain text, trims the content
PLAIN = (
    "{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def jinja_file(folder, source):
    file = folder / "mine.jinja"
    file.write_text(source, encoding="utf-8")
    return file


def encoder_of(template, tokenizer=None, **options):
    options = {"tokens_per_tile": 2, **options}
    return ConversationEncoder(
        tokenizer=tokenizer or with_chatml_tokens(), template=template, **options
    )


def with_chatml_tokens():
    """The embedded tokenizer with chatml's tokens, as a model's folder has them."""
    return LoadedTokenizer(
        json=encoder_of(load_template("chatml"), load_tokenizer()).tokenizer_json(), name="model"
    )


TALK = [
    turn("user", "<image>\nWhat is it?"),
    turn("assistant", "A <|im_end|>\ncat."),
    turn("user", "Sure?<image>"),
    turn("assistant", " Yes.\n"),
]


# jinja


@pytest.mark.parametrize("loss", ["assistant", "last", "all"])
def test_chatml_as_jinja_is_chatml_as_data(tmp_path, loss):
    by_data = encoder_of(load_template("chatml"), loss=loss)
    by_jinja = encoder_of(load_template(jinja_file(tmp_path, CHATML)), loss=loss)
    for messages, tiles in ((TALK, [1, 2]), ([turn("system", "S"), *TALK[:2]], [3])):
        want, got = by_data.encode(messages, tiles), by_jinja.encode(messages, tiles)
        assert got.input_ids.tolist() == want.input_ids.tolist()
        assert got.labels.tolist() == want.labels.tolist()
        assert got.image_spans.tolist() == want.image_spans.tolist()


contents = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(["<|im_end|>", "<|im_start|>", "{{ 7 * 7 }}", "\ue000", "\ue001", "<img>"]),
    ),
    max_size=4,
).map(lambda parts: "".join(parts).replace("<image>", ""))


@given(st.lists(st.tuples(contents, contents), min_size=1, max_size=3))
@settings(max_examples=60, deadline=None)
def test_no_content_breaks_out_of_a_jinja_template(pairs):
    tokenizer = with_chatml_tokens()
    loaded = LoadedTokenizer(json=tokenizer.json, name="model", chat_template=CHATML)
    by_jinja = encoder_of(load_template("tokenizer", tokenizer=loaded), loaded)
    by_data = encoder_of(load_template("chatml"), tokenizer)
    messages = [turn(*t) for q, a in pairs for t in (("user", f"{q}?"), ("assistant", f"{a}."))]
    want, got = by_data.encode(messages, []), by_jinja.encode(messages, [])
    assert got.input_ids.tolist() == want.input_ids.tolist()
    assert got.labels.tolist() == want.labels.tolist()


def test_weights_cut_a_jinja_rendering_too(tmp_path):
    encoder = encoder_of(load_template(jinja_file(tmp_path, CHATML)))
    messages = [
        turn("user", "One?", 1),
        turn("assistant", "1", 0),
        turn("user", "Two?"),
        turn("assistant", "2"),
    ]
    text = labelled(encoder, encoder.encode(messages, []))
    # the template doesn't tell where a user's text starts: the whole turn gives loss
    assert text.endswith("<|im_start|>user\nOne?<|im_end|>2<|im_end|>")
    encoder = encoder_of(load_template(jinja_file(tmp_path, CHATML)), loss="all")
    assert labelled(encoder, encoder.encode(messages, [])).endswith(
        "One?<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    )


def test_a_template_without_control_tokens_gives_loss_to_the_end_of_the_turn(tmp_path):
    encoder = encoder_of(load_template(jinja_file(tmp_path, PLAIN)))
    encoded = encoder.encode([turn("user", " Hi "), turn("assistant", " Yes. ")], [])
    assert read(encoder, encoded.input_ids) == "USER: Hi\n\nASSISTANT: Yes.\n\n"
    assert labelled(encoder, encoded) == "Yes.\n\n"


def test_begin_and_end_tokens_come_from_the_tokenizer(tmp_path):
    file = jinja_file(
        tmp_path,
        "{{ bos_token }}{% for m in messages %}"
        "{% if m.role == 'assistant' %}A: {{ m.content }}{{ eos_token }}"
        "{% else %}Q: {{ m.content }} {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A: {% endif %}",
    )
    tokenizer = LoadedTokenizer(
        json=load_tokenizer().json, name="model", bos_token="<s>", eos_token="</s>"
    )
    encoder = encoder_of(load_template(file, tokenizer=tokenizer), tokenizer)
    encoded = encoder.encode([turn("user", "<s>?"), turn("assistant", "Yes</s>")], [])
    assert read(encoder, encoded.input_ids) == "<s>Q: <s>? A: Yes</s></s>"
    assert (encoded.input_ids >= 256).sum() == 2
    assert labelled(encoder, encoded) == "Yes</s></s>"


def test_a_template_that_hides_earlier_turns_is_refused_with_the_remedy(tmp_path):
    source = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.role }}: "
        "{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)))
    with pytest.raises(
        SampleError, match=r"the first 2 messages .* not the start .* data \(JSON\)"
    ):
        encoder.encode(TALK, [1, 1])


@pytest.mark.parametrize("source", ["{{ messages[1].content }}", "{{ messages[0].content }} " * 2])
def test_a_template_that_drops_or_repeats_an_image_is_refused(tmp_path, source):
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)), loss="all")
    with pytest.raises(SampleError, match=r"must keep each image once: expected 1, got [02]"):
        encoder.encode([turn("user", "<image>"), turn("user", "Hi")], [1])


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ('%s' | attr('format'))('x').__class__.__mro__ }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}{{ raise_exception.__globals__ }}",
    "{% set _ = messages.append(1) %}",
    "{% set _ = messages[0].update(role='assistant') %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ range(10 ** 9) | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(tmp_path, source):
    messages = [turn("user", "Hi"), turn("assistant", "Yes")]
    with pytest.raises(OmniloadError, match=r"template 'mine.jinja' (does what the sandbox|fails)"):
        encoder_of(load_template(jinja_file(tmp_path, source + "x"))).encode(messages, [])
    assert messages[0].role == "user"


def test_a_template_may_refuse_a_conversation(tmp_path):
    source = "{{ raise_exception('roles must alternate') }}"
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)))
    with pytest.raises(SampleError, match="fails on this conversation: roles must alternate"):
        encoder.encode(TALK, [1, 1])


def test_the_date_is_not_a_template_s_business(tmp_path):
    encoder = encoder_of(load_template(jinja_file(tmp_path, "{{ strftime_now('%Y') }}")))
    with pytest.raises(SampleError, match="'strftime_now' is undefined"):
        encoder.encode(TALK, [1, 1])


def test_a_jinja_template_survives_pickling(tmp_path):
    encoder = encoder_of(load_template(jinja_file(tmp_path, CHATML)))
    again = pickle.loads(pickle.dumps(encoder))
    assert again.settings() == encoder.settings()
    assert (
        again.encode(TALK, [1, 2]).labels.tolist() == encoder.encode(TALK, [1, 2]).labels.tolist()
    )


def test_settings_change_with_a_jinja_template(tmp_path):
    one = load_template(jinja_file(tmp_path, CHATML)).fingerprint
    assert load_template(jinja_file(tmp_path, CHATML)).fingerprint == one
    assert load_template(jinja_file(tmp_path, CHATML + " ")).fingerprint != one


# data


def test_the_strings_of_an_image_can_be_chosen(tmp_path):
    image = ImageStrings(token="<|image_pad|>", start="<|vision_start|>", end="<|vision_end|>")
    for name in ("chatml", "llama3", jinja_file(tmp_path, CHATML)):
        encoder = encoder_of(load_template(name, image=image))
        encoded = encoder.encode([turn("user", "<image>")], [1])
        assert "<|vision_start|><|image_pad|><|image_pad|><|vision_end|>" in read(
            encoder, encoded.input_ids
        )


MINE = {
    "name": "mine",
    "bos": "<s>",
    "eos": "<end>",
    "default_system": "S",
    "roles": {
        "system": {"suffix": "\n"},
        "user": {"prefix": "Q ", "suffix": "\n"},
        "assistant": {"prefix": "A", "content_prefix": " ", "end": ".", "suffix": "\n"},
    },
    "image_token": "<pic>",
    "pad_token": "<pad>",
    "special_tokens": ["<s>", "<end>"],
}


def json_file(folder, content):
    file = folder / "mine.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_template_file_of_ones_own(tmp_path):
    encoder = encoder_of(load_template(json_file(tmp_path, MINE)), load_tokenizer())
    encoded = encoder.encode([turn("user", "<image>?"), turn("assistant", "Yes")], [1])
    assert read(encoder, encoded.input_ids) == "<s>S\nQ <pic><pic>?\nA Yes.\n<end>"
    assert labelled(encoder, encoded) == " Yes.<end>"
    assert encoder.added_tokens == ("<s>", "<end>", "<pic>", "<pad>")


def test_a_role_that_the_template_lacks_is_a_sample_error(tmp_path):
    encoder = encoder_of(load_template(json_file(tmp_path, MINE)))
    with pytest.raises(SampleError, match="'mine' has no role 'tool'; it has system, user, assist"):
        encoder.encode([turn("tool", "x")], [])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object with 'roles'"),
        (MINE | {"colour": 1}, r"unknown keys \['colour'\]; known: .*default_system"),
        (MINE | {"roles": {"user": {}}}, "must have the role 'assistant'"),
        (MINE | {"roles": MINE["roles"] | {"bot": {}}}, r"unknown roles \['bot'\]"),
        (MINE | {"roles": MINE["roles"] | {"user": []}}, "role 'user' must be a JSON object"),
        (MINE | {"roles": MINE["roles"] | {"user": {"x": ""}}}, r"user': unknown keys \['x'\]"),
        (MINE | {"roles": MINE["roles"] | {"user": {"prefix": 1}}}, "prefix must be a text, got 1"),
        (MINE | {"bos": None}, "bos must be a text, got None"),
        (MINE | {"default_system": 3}, "default_system must be a text, got 3"),
        (MINE | {"trim": "yes"}, "trim must be a bool, got 'yes'"),
        (MINE | {"image_token": ""}, "image_token and pad_token must be set"),
        (MINE | {"image_start": 5}, "image_start must be a text, got 5"),
        (MINE | {"special_tokens": "<s>"}, "special_tokens must be a list of texts"),
        (MINE | {"special_tokens": [""]}, "special_tokens must be a list of texts"),
    ],
)
def test_damaged_template_files_are_refused(tmp_path, content, message):
    with pytest.raises(ConfigError, match=message):
        load_template(json_file(tmp_path, content))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match=r"unknown template 'alpaca': known are chatml, qwen"):
        load_template("alpaca")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"template can't be read: .*nothing\.json"):
        load_template(tmp_path / "nothing.json")


def test_a_tokenizer_without_a_chat_template_is_refused():
    for tokenizer in (None, load_tokenizer()):
        with pytest.raises(ConfigError, match="needs a tokenizer folder with a chat template"):
            load_template("tokenizer", tokenizer=tokenizer)


def test_a_jinja_template_that_cannot_be_parsed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"template 'mine.jinja' is not valid jinja"):
        load_template(jinja_file(tmp_path, "{% for %}"))
