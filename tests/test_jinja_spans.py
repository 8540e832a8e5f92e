"""Jinja templates: where an answer begins, and what a template can't use up."""

import pytest

from omniload.errors import SampleError
from omniload.transforms.text import load_template
from tests.talks import labelled, read, turn
from tests.test_templates import CHATML, TALK, encoder_of, jinja_file

DOUBLE = (
    "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s OP n.s %}{% endfor %}"
)
NO_PROMPT = CHATML.partition("{%- if add_generation_prompt %}")[0]
BLOCKS = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}
{%- generation %}{{ m.content + '<|im_end|>' }}{%- endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}"""


@pytest.mark.parametrize("loss", ["assistant", "last", "all"])
@pytest.mark.parametrize("source", [NO_PROMPT, BLOCKS])
def test_the_header_of_an_answer_gives_no_loss_without_a_generation_prompt(tmp_path, source, loss):
    talk = [turn("system", "S"), *TALK]
    want = encoder_of(load_template("chatml"), loss=loss).encode(talk, [1, 2])
    got = encoder_of(load_template(jinja_file(tmp_path, source)), loss=loss).encode(talk, [1, 2])
    assert got.input_ids.tolist() == want.input_ids.tolist()
    assert got.labels.tolist() == want.labels.tolist()


def test_a_template_without_a_header_keeps_the_space_that_the_model_writes(tmp_path):
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)))
    encoded = encoder.encode([turn("user", "Q"), turn("assistant", "A")], [])
    assert read(encoder, encoded.input_ids) == "[INST] Q [/INST] A<|im_end|>"
    assert labelled(encoder, encoded) == " A<|im_end|>"


def test_answers_that_a_template_changes_and_hides_are_refused(tmp_path):
    source = "{% for m in messages %}{{ m.role }}: {{ m.content | length }}\n{% endfor %}"
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)))
    with pytest.raises(SampleError, match="unknown where they begin"):
        encoder.encode([turn("user", "Q"), turn("assistant", "A")], [])


def test_generation_blocks_must_be_one_an_answer(tmp_path):
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)))
    with pytest.raises(SampleError, match=r"one \{% generation %\} block .* expected 1, got 2"):
        encoder.encode([turn("user", "Q"), turn("assistant", "A")], [])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 99999 ** 99999 }}",
        "{% for i in range(1000000000000) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        DOUBLE.replace("OP", "~"),
        DOUBLE.replace("OP", "+"),
        "{{ 'x' | center(1000000000) }}",
        "{{ 'x'.ljust(1000000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
    ],
)
def test_a_template_can_not_use_up_memory_or_time(tmp_path, source):
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)))
    with pytest.raises(SampleError, match=r"the sandbox forbids: a (text|number|range|format)"):
        encoder.encode([turn("user", "Q"), turn("assistant", "A")], [])


def test_ordinary_arithmetic_and_joining_stay(tmp_path):
    source = (
        "{{ 3 * 4 + 2 ** 3 }}{{ 'ab' * 2 }}{{ 1 ~ 'x' ~ 2 }}{{ '%s' % 5 }}{{ 7 % 4 }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    encoder = encoder_of(load_template(jinja_file(tmp_path, source)), loss="all")
    encoded = encoder.encode([turn("user", "Q"), turn("assistant", "A")], [])
    assert read(encoder, encoded.input_ids) == "20abab1x253QA"
