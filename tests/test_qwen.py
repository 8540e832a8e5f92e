import pickle

import numpy as np
import pytest
import torch

from omniload.errors import ConfigError
from omniload.images import InternVLTiles, QwenPatches
from omniload.packing import pack
from omniload.transforms import QwenTransform, TileTransform, family_transform
from omniload.transforms.shared import CLIP_MEAN, CLIP_STD
from tests.family_data import RNG, make_encoder, make_record, settings_of
from tests.images_corpus import encode, photo

POLICY = QwenPatches()
ENCODER = make_encoder("qwen-vl")
SIZES = ([(100, 70)], [], [(60, 120), (56, 56)])


def make_transform(policy=POLICY, **settings):
    return family_transform(settings_of(ENCODER, policy, **settings))


def samples_of(transform, sizes=SIZES):
    return [
        transform(make_record(size, encoder=ENCODER, policy=transform.policy, row=row), RNG)
        for row, size in enumerate(sizes)
    ]


def test_a_sample_holds_patches_and_one_token_for_each_square_of_four():
    transform = make_transform()
    assert type(transform) is QwenTransform
    record = make_record([(100, 70)], encoder=ENCODER, policy=POLICY)
    sample = transform(record, RNG)
    columns, rows = POLICY.grid(100, 70)
    assert sample.tiles.shape == (columns * rows, 3, 14, 14)
    assert sample.image_num_tiles.tolist() == [columns * rows]
    assert sample.image_grids.tolist() == [[columns, rows]]
    [[start, end]] = sample.image_spans.tolist()
    assert end - start == columns * rows // 4
    assert (sample.input_ids[start:end] == ENCODER.image_token_id).all()
    assert transform.lengths(record) == (
        sample.num_tokens,
        sample.num_tiles,
        sample.num_loss_tokens,
    )


@pytest.mark.parametrize("with_image", [True, False])
def test_a_filler_has_one_square_of_patches(with_image):
    policy = QwenPatches(patch_size=16, min_pixels=65536, max_pixels=1 << 20)
    filler = make_transform(policy).filler(with_image)
    assert filler.tiles.shape == ((4, 3, 16, 16) if with_image else (0, 3, 0, 0))
    assert filler.image_grids.tolist() == ([[2, 2]] if with_image else [])
    assert (filler.input_ids == ENCODER.image_token_id).sum() == int(with_image)
    inputs = make_transform(policy).model_inputs(pack([filler], is_filler=True))
    assert inputs["position_ids"].shape == (4, 1, filler.num_tokens)


def test_preprocessing_can_lower_the_patches_of_an_image():
    full = make_record([(500, 400)], encoder=ENCODER, policy=POLICY)
    length = len(full.input_ids)
    record = make_record(
        [(500, 400)],
        encoder=ENCODER,
        policy=POLICY,
        max_tokens=length - 100,
        oversize="fewer-tiles",
    )
    assert length - 130 < len(record.input_ids) <= length - 100
    sample = make_transform(oversize="fewer-tiles")(record, RNG)
    [[columns, rows]] = sample.image_grids.tolist()
    assert columns * rows == sample.num_tiles < full.image_num_tiles[0]


def test_names_and_shapes_of_a_batch():
    transform = make_transform()
    batch = pack(samples_of(transform))
    inputs = transform.model_inputs(batch, dtype=torch.bfloat16)
    assert inputs["image_grid_thw"].tolist() == [
        [1, *POLICY.grid(*size)[::-1]] for sizes in SIZES for size in sizes
    ]
    assert inputs["position_ids"].shape == (4, 1, batch.num_tokens)
    assert torch.equal(inputs["position_ids"][0, 0], batch.position_ids)
    assert inputs["pixel_values"].shape == (batch.num_tiles, 3 * 2 * 14 * 14)
    assert inputs["pixel_values"].dtype == torch.bfloat16
    assert inputs["input_ids"].shape == (1, batch.num_tokens)


def test_each_patch_is_there_twice_in_each_channel_and_normalised_as_clip():
    transform = make_transform()
    batch = pack(samples_of(transform))
    pixels = transform.model_inputs(batch)["pixel_values"].view(-1, 3, 2, 14, 14)
    mean, std = torch.tensor(CLIP_MEAN)[:, None, None], torch.tensor(CLIP_STD)[:, None, None]
    expected = (batch.tiles / 255 - mean) / std
    for frame in (0, 1):
        torch.testing.assert_close(pixels[:, :, frame], expected)


def test_qwen3_is_normalised_with_a_half_unless_told_otherwise():
    policy = QwenPatches(patch_size=16, min_pixels=0)
    transform = make_transform(policy)
    batch = pack(samples_of(transform))
    pixels = transform.model_inputs(batch)["pixel_values"]
    assert pixels.min() >= -1
    assert pixels.max() <= 1
    again = QwenTransform(
        policy, tokens_per_tile=1, image_token_id=1, pad_token_id=0, mean=(0, 0, 0), std=(1, 1, 1)
    )
    assert again.model_inputs(batch)["pixel_values"].min() >= 0


def test_text_alone_has_no_pixels_and_plain_positions():
    transform = make_transform()
    batch = pack(samples_of(transform, [[], []]))
    inputs = transform.model_inputs(batch)
    assert inputs["pixel_values"] is None
    assert inputs["image_grid_thw"] is None
    assert torch.equal(inputs["position_ids"][:, 0], batch.position_ids.expand(4, -1))


def test_another_policy_is_refused():
    with pytest.raises(ConfigError, match="QwenTransform is for QwenPatches, got InternVLTiles"):
        QwenTransform.from_settings(settings_of(ENCODER, InternVLTiles()))
    plain = TileTransform.from_settings(settings_of(ENCODER, POLICY))
    assert plain.fingerprint == make_transform().fingerprint
    assert pickle.loads(pickle.dumps(make_transform())).fingerprint == plain.fingerprint


@pytest.mark.parametrize("value", [(1, 2), (1, 2, 3, 4)])
def test_mean_and_std_are_one_number_a_channel(value):
    with pytest.raises(ConfigError, match="std must be 3 numbers, RGB"):
        QwenTransform(POLICY, tokens_per_tile=1, image_token_id=1, pad_token_id=0, std=value)


# against transformers, where it is installed


def tiny_model(transformers, name):
    """A model of a few thousand weights."""
    text = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": ENCODER.vocab_size,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    if name == "Qwen2VL":
        vision |= {"embed_dim": 32}
    elif name == "Qwen2_5_VL":
        vision |= {"out_hidden_size": 32, "intermediate_size": 64, "window_size": 56}
        vision |= {"fullatt_block_indexes": [1]}
    else:
        vision |= {"out_hidden_size": 32, "intermediate_size": 64, "num_position_embeddings": 16}
        vision |= {"patch_size": 16, "deepstack_visual_indexes": [0]}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision,
        image_token_id=ENCODER.image_token_id,
        vision_start_token_id=ENCODER.image_start_ids[0],
        vision_end_token_id=ENCODER.image_end_ids[0],
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_a_packed_row_gives_what_the_model_gives_for_each_sample_alone(name):
    transformers = pytest.importorskip("transformers")
    policy = QwenPatches(patch_size=16, min_pixels=0) if name == "Qwen3VL" else POLICY
    transform = make_transform(policy)
    samples = samples_of(transform)
    batch = pack(samples)
    model = tiny_model(transformers, name)
    with torch.no_grad():
        packed = model(**transform.model_inputs(batch)).logits[0]
    starts = batch.cu_seqlens.tolist()
    for number, sample in enumerate(samples):
        alone = transform.model_inputs(pack([sample]))
        # without position_ids: the model works them out
        inputs = {"input_ids": alone["input_ids"]}
        if sample.num_tiles:
            inputs |= {name: alone[name] for name in ("pixel_values", "image_grid_thw")}
            inputs["mm_token_type_ids"] = (alone["input_ids"] == ENCODER.image_token_id).long()
        with torch.no_grad():
            expected = model(**inputs).logits[0]
        torch.testing.assert_close(packed[starts[number] : starts[number + 1]], expected)


def test_pixels_equal_those_of_the_image_processor():
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    image = photo(84, 56)  # multiples of the factor: nothing is resized
    theirs = module.Qwen2VLImageProcessorPil()(images=[image], return_tensors="pt")
    transform = make_transform()
    record = make_record([(84, 56)], encoder=ENCODER, policy=POLICY)
    record = type(record)(**{**vars(record), "images": (encode(image, "PNG"),)})
    ours = transform.model_inputs(pack([transform(record, RNG)]))
    assert torch.equal(ours["image_grid_thw"], theirs["image_grid_thw"])
    torch.testing.assert_close(ours["pixel_values"], theirs["pixel_values"].float())
    assert np.isfinite(ours["pixel_values"].numpy()).all()
