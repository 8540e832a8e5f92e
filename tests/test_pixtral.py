"""Pixtral: breaks between rows of patches, and patches put together to images again."""

import numpy as np
import pytest
import torch

from omniload.errors import ConfigError, SampleError
from omniload.images import NaViTPatches, policy_from_settings
from omniload.packing import pack
from omniload.shards import open_shards
from omniload.tools.recipe import Recipe
from omniload.transforms import (
    FunctionTransform,
    PixtralTransform,
    TileTransform,
    family_transform,
)
from tests.data_makers import image_bytes, turns, write_jsonl
from tests.family_data import RNG, make_encoder, make_record, settings_of
from tests.test_preprocess import run

POLICY = NaViTPatches(max_side=96, row_breaks=True)
ENCODER = make_encoder("pixtral")
SIZES = ([(100, 70)], [], [(40, 90), (16, 16)])
IMAGE, BREAK, END = ENCODER.image_token_id, ENCODER.image_break_id, ENCODER.image_end_ids[0]


def make_transform(policy=POLICY):
    return family_transform(settings_of(ENCODER, policy))


def samples_of(transform, sizes=SIZES):
    return [
        transform(make_record(size, encoder=ENCODER, policy=POLICY, row=row), RNG)
        for row, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("size", [(100, 70), (16, 16), (300, 5), (5, 300), (17, 33)])
def test_image_tokens_are_those_of_the_published_processor(size):
    record = make_record([size], encoder=ENCODER, policy=POLICY)
    columns, rows = POLICY.grid(*size)
    # as PixtralProcessor writes them: a break after each row, the last of them the end
    expected = ([IMAGE] * columns + [BREAK]) * rows
    expected[-1] = END
    [[start, end]] = record.image_spans.tolist()
    assert record.input_ids[start : end + 1].tolist() == expected
    assert end - start == POLICY.num_tokens(*size) == columns * rows + rows - 1
    assert (record.labels[start : end + 1] == -100).all()
    assert np.isin(record.input_ids, [IMAGE, BREAK, END]).sum() == len(expected)


def test_a_conversation_reads_as_it_should():
    record = make_record([(32, 32)], encoder=ENCODER, policy=POLICY)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(ENCODER.tokenizer_json())
    text = tokenizer.decode(record.input_ids.tolist(), skip_special_tokens=False)
    row = "[IMG][IMG]"
    expected = f"<s>[INST]{row}[IMG_BREAK]{row}[IMG_END]What is it?[/INST]Picture 0.</s>"
    assert text.replace(" ", "") == expected.replace(" ", "")


def test_names_of_pixtral():
    transform = make_transform()
    assert type(transform) is PixtralTransform
    batch = pack(samples_of(transform))
    inputs = transform.model_inputs(batch)
    assert inputs["image_sizes"].tolist() == [[80, 96], [96, 48], [16, 16]]
    assert inputs["pixel_values"].shape == (3, 3, 96, 96)
    pixels = TileTransform.model_inputs(transform, batch)["pixel_values"]
    assert torch.equal(inputs["pixel_values"][0, :, 16:32, 32:48], pixels[6 + 2])
    assert torch.equal(inputs["pixel_values"][2, :, :16, :16], pixels[-1])
    assert (inputs["pixel_values"][0, :, 80:] == 0).all()
    assert (inputs["pixel_values"][2, :, :, 16:] == 0).all()
    text = transform.model_inputs(pack(samples_of(transform, [[]])))
    assert text["pixel_values"] is None
    assert text["image_sizes"] is None
    filler = transform.filler(True)
    assert (filler.input_ids == IMAGE).sum() == filler.num_tiles == 1


def test_a_packed_row_gives_what_the_model_gives_for_each_sample_alone():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
             "num_attention_heads": 2}  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(
            **small, head_dim=16, patch_size=16, image_size=96
        ),
        text_config=transformers.MistralConfig(
            **small, num_key_value_heads=2, head_dim=16, vocab_size=ENCODER.vocab_size
        ),
        image_token_id=IMAGE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    transform = make_transform()
    samples = samples_of(transform)
    batch = pack(samples)
    with torch.no_grad():
        packed = model(**transform.model_inputs(batch)).logits[0]
    starts = batch.cu_seqlens.tolist()
    for number, sample in enumerate(samples):
        alone = transform.model_inputs(pack([sample]))
        names = ("input_ids", "pixel_values", "image_sizes")
        inputs = {name: alone[name] for name in names if alone[name] is not None}
        with torch.no_grad():
            expected = model(**inputs).logits[0]
        torch.testing.assert_close(packed[starts[number] : starts[number + 1]], expected)


def test_template_and_tiling_must_agree_on_breaks(tmp_path):
    without = NaViTPatches(max_side=96)
    with pytest.raises(ConfigError, match=r"template 'pixtral' breaks .* '\[IMG_BREAK\]', which"):
        make_record([(20, 20)], encoder=ENCODER, policy=without)
    with pytest.raises(ConfigError, match=r"needs a template with an image_break, got 'chatml'"):
        make_record([(20, 20)], encoder=make_encoder("chatml"), policy=POLICY)
    make_record([], encoder=ENCODER, policy=without)  # no image, no question
    write_jsonl(tmp_path / "x.jsonl", [{"conversations": turns("?", "A")}])
    for recipe in (Recipe(template="pixtral"), Recipe(tiling="navit", row_breaks=True)):
        with pytest.raises(ConfigError, match="image_break"):
            run(tmp_path / "x.jsonl", tmp_path / "out", recipe=recipe)
    with pytest.raises(ConfigError, match=r"--row-breaks must be a bool|--row-breaks is not an"):
        Recipe(tiling="qwen", row_breaks=True).policy()


def test_settings_without_breaks_are_what_they_were():
    assert "row_breaks" not in NaViTPatches().settings()
    assert policy_from_settings(POLICY.settings()) == POLICY
    assert type(make_transform(NaViTPatches())) is TileTransform
    with pytest.raises(ConfigError, match=r"is for NaViTPatches\(row_breaks=True\), got NaViT"):
        PixtralTransform.from_settings(settings_of(ENCODER, NaViTPatches()))
    with pytest.raises(ConfigError, match="row_breaks must be a bool, got 1"):
        NaViTPatches(row_breaks=1)


def test_a_limit_on_tokens_takes_patches_and_their_breaks_away():
    size = (96, 96)
    whole = make_record([size], encoder=ENCODER, policy=POLICY)
    most = len(whole.input_ids) - 5
    less = make_record(
        [size], encoder=ENCODER, policy=POLICY, max_tokens=most, oversize="fewer-tiles"
    )
    assert len(less.input_ids) <= most
    transform = TileTransform.from_settings(settings_of(ENCODER, POLICY, "fewer-tiles"))
    sample = transform(less, RNG)
    [[columns, rows]] = sample.image_grids.tolist()
    [[start, end]] = sample.image_spans.tolist()
    expected = ([IMAGE] * columns + [BREAK]) * rows
    assert sample.input_ids[start:end].tolist() == expected[:-1]


def test_a_function_keeps_the_breaks_where_they_are():
    base = make_transform()

    def function(record, rng):
        sample = base(record, rng)
        if record.row == 1:
            ids = sample.input_ids.copy()
            start, _ = sample.image_spans[0]
            columns, _ = sample.image_grids[0]
            ids[start + columns] = IMAGE
            return type(sample)(**{**vars(sample), "input_ids": ids})
        return sample

    transform = FunctionTransform(function, fingerprint="x", filler=base)
    transform(make_record([(50, 60)], encoder=ENCODER, policy=POLICY), RNG)
    with pytest.raises(SampleError, match="image tokens must lie in image_spans"):
        transform(make_record([(50, 60)], encoder=ENCODER, policy=POLICY, row=1), RNG)


def test_shards_of_pixtral_are_made_and_read(tmp_path):
    records = []
    for i, size in enumerate([(90, 50), (30, 80)]):
        (tmp_path / f"{i}.jpg").write_bytes(image_bytes(i, size))
        records.append({"id": i, "image": f"{i}.jpg", "conversations": turns("<image>?", "A")})
    write_jsonl(tmp_path / "x.jsonl", records)
    recipe = Recipe(template="pixtral", tiling="navit", row_breaks=True, max_side=64)
    run(tmp_path / "x.jsonl", tmp_path / "out", recipe=recipe)
    shards = open_shards(tmp_path / "out")
    transform = family_transform(shards.manifest.settings)
    assert type(transform) is PixtralTransform
    for row in range(2):
        sample = transform(shards.read(row), RNG)
        assert (sample.input_ids == IMAGE).sum() == sample.num_tiles
        assert (sample.input_ids == BREAK).sum() == sample.image_grids[0, 1] - 1
