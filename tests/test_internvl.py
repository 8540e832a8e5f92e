import pytest
import torch

from omniload.errors import ConfigError
from omniload.images import InternVLTiles, SquarePad
from omniload.kernels.reference import IMAGENET_MEAN, IMAGENET_STD
from omniload.packing import pack
from omniload.transforms import InternVLTransform, TileTransform, family_transform
from tests.family_data import RNG, make_encoder, make_record, settings_of

POLICY = InternVLTiles(size=28, max_tiles=4)  # 4 patches of 14 a tile, one token after the shuffle
ENCODER = make_encoder("chatml", tokens_per_tile=1)
SIZES = ([(100, 70)], [], [(30, 120), (28, 28)])


def make_transform(policy=POLICY):
    return family_transform(settings_of(ENCODER, policy))


def samples_of(transform, sizes=SIZES):
    return [
        transform(make_record(size, encoder=ENCODER, policy=transform.policy, row=row), RNG)
        for row, size in enumerate(sizes)
    ]


def test_names_of_transformers():
    transform = make_transform()
    assert type(transform) is InternVLTransform
    batch = pack(samples_of(transform))
    inputs = transform.model_inputs(batch, dtype=torch.float16)
    assert inputs["pixel_values"].shape == (batch.num_tiles, 3, 28, 28)
    assert inputs["pixel_values"].dtype == torch.float16
    assert "image_flags" not in inputs
    assert inputs["num_items_in_batch"] == batch.num_loss_tokens


def test_names_of_its_own_code():
    transform = make_transform()
    batch = pack(samples_of(transform))
    inputs = transform.own_model_inputs(batch)
    assert set(inputs) == {
        "input_ids",
        "labels",
        "position_ids",
        "attention_mask",
        "pixel_values",
        "image_flags",
    }
    assert torch.equal(inputs["image_flags"], torch.ones(batch.num_tiles, 1, dtype=torch.long))
    assert torch.equal(inputs["attention_mask"], batch.cu_seqlens[None])
    mean = torch.tensor(IMAGENET_MEAN)[:, None, None]
    std = torch.tensor(IMAGENET_STD)[:, None, None]
    torch.testing.assert_close(inputs["pixel_values"], (batch.tiles / 255 - mean) / std)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_text_alone_gets_a_black_tile_that_does_not_count(dtype):
    transform = make_transform()
    batch = pack(samples_of(transform, [[], []]))
    inputs = transform.own_model_inputs(batch, dtype=dtype)
    assert inputs["pixel_values"].shape == (1, 3, 28, 28)
    assert inputs["pixel_values"].dtype == (dtype or torch.float32)
    assert inputs["image_flags"].tolist() == [[0]]
    assert transform.model_inputs(batch)["pixel_values"] is None


def test_a_filler_has_a_label_where_the_model_takes_a_mean():
    transform = make_transform()
    filler = pack([transform.filler(True)], is_filler=True)
    inputs = transform.own_model_inputs(filler)
    assert (inputs["labels"] != -100).sum() == 1
    assert inputs["image_flags"].tolist() == [[1]]


def test_the_samples_are_those_of_the_plain_transform():
    plain = TileTransform.from_settings(settings_of(ENCODER, POLICY))
    assert plain.fingerprint == make_transform().fingerprint


def test_another_policy_is_refused():
    with pytest.raises(ConfigError, match="InternVLTransform is for InternVLTiles, got SquarePad"):
        InternVLTransform.from_settings(settings_of(ENCODER, SquarePad()))


def tiny_model(transformers):
    """As in transformers, where it is installed."""
    config = transformers.InternVLConfig(
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": [28, 28],
            "patch_size": [14, 14],
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": ENCODER.vocab_size,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
        image_token_id=ENCODER.image_token_id,
        image_seq_length=1,
    )
    torch.manual_seed(0)
    return transformers.InternVLForConditionalGeneration(config).eval()


def test_a_packed_row_gives_what_the_model_gives_for_each_sample_alone():
    transformers = pytest.importorskip("transformers")
    transform = make_transform()
    samples = samples_of(transform)
    batch = pack(samples)
    model = tiny_model(transformers)
    with torch.no_grad():
        packed = model(**transform.model_inputs(batch)).logits[0]
    starts = batch.cu_seqlens.tolist()
    for number, sample in enumerate(samples):
        alone = transform.model_inputs(pack([sample]))
        names = ("input_ids", "pixel_values")
        inputs = {name: alone[name] for name in names if alone[name] is not None}
        with torch.no_grad():
            expected = model(**inputs).logits[0]
        torch.testing.assert_close(packed[starts[number] : starts[number + 1]], expected)
