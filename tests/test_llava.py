import numpy as np
import pytest
import torch

from omniload.errors import ConfigError, SampleError
from omniload.images import AnyResTiles, InternVLTiles, QwenPatches, SquarePad
from omniload.packing import pack
from omniload.transforms import LlavaTransform, family_transform
from omniload.transforms.shared import CLIP_MEAN, CLIP_STD
from tests.family_data import RNG, make_encoder, make_record, settings_of
from tests.images_corpus import encode, photo

# tiles of 2 x 2 patches
NEXT = AnyResTiles(size=28, pinpoints=((28, 56), (56, 28), (56, 56), (84, 28), (28, 84)))
SQUARE = SquarePad(size=28)
ONEVISION = AnyResTiles(size=28, pinpoints=(*NEXT.pinpoints, (84, 84)), max_crops=2)
ENCODER = make_encoder("vicuna", tokens_per_tile=4)
SIZES = ([(100, 70)], [], [(30, 120), (28, 28)])


def make_transform(policy):
    return family_transform(settings_of(ENCODER, policy))


def samples_of(transform, sizes=SIZES):
    return [
        transform(make_record(size, encoder=ENCODER, policy=transform.policy, row=row), RNG)
        for row, size in enumerate(sizes)
    ]


def test_tokens_of_an_image_are_those_of_the_policy():
    transform = make_transform(NEXT)
    assert type(transform) is LlavaTransform
    [sample, _, other] = samples_of(transform)
    for image, size in ((0, (100, 70)),):
        start, end = sample.image_spans[image]
        assert end - start == NEXT.num_tokens(*size)
        assert sample.image_num_tiles[image] == NEXT.num_tiles(*size)
    assert other.image_grids.tolist() == [[1, 3], [2, 1]]
    assert (other.image_spans[:, 1] - other.image_spans[:, 0]).tolist() == [
        NEXT.num_tokens(30, 120),
        NEXT.num_tokens(28, 28),
    ]


def test_names_of_llava_next():
    transform = make_transform(NEXT)
    batch = pack(samples_of(transform))
    inputs = transform.model_inputs(batch)
    assert inputs["pixel_values"].shape == (5 + 4 + 3, 3, 28, 28)
    assert inputs["image_sizes"].tolist() == [[70, 100], [120, 30], [28, 28]]  # height first
    mean, std = torch.tensor(CLIP_MEAN)[:, None, None], torch.tensor(CLIP_STD)[:, None, None]
    torch.testing.assert_close(inputs["pixel_values"], (batch.tiles / 255 - mean) / std)
    text = transform.model_inputs(pack(samples_of(transform, [[]])))
    assert text["pixel_values"] is None
    assert text["image_sizes"] is None


def test_onevision_is_normalised_as_siglip():
    transform = make_transform(ONEVISION)
    batch = pack(samples_of(transform))
    pixels = transform.model_inputs(batch)["pixel_values"]
    torch.testing.assert_close(pixels, batch.tiles / 127.5 - 1)


def test_names_of_llava_1_5():
    transform = make_transform(SQUARE)
    inputs = transform.model_inputs(pack(samples_of(transform)))
    assert inputs["pixel_values"].shape == (3, 3, 28, 28)
    assert "image_sizes" not in inputs


@pytest.mark.parametrize("policy", [NEXT, SQUARE])
def test_a_filler_is_an_image_that_the_model_can_read(policy):
    filler = make_transform(policy).filler(True)
    assert filler.num_tiles == policy.num_tiles(28, 28)
    tokens = NEXT.num_tokens(28, 28) if policy is NEXT else 4
    assert (filler.input_ids == ENCODER.image_token_id).sum() == tokens
    assert (filler.labels == -100).all()


def test_a_stored_count_of_tokens_that_the_policy_does_not_give_is_refused():
    record = make_record([(100, 70)], encoder=ENCODER, policy=NEXT)
    spans = record.image_spans.copy()
    spans[0, 1] -= 1
    wrong = type(record)(**{**vars(record), "image_spans": spans})
    with pytest.raises(SampleError, match="its tokens must be what the policy says: expected"):
        make_transform(NEXT)(wrong, RNG)


def test_images_that_cannot_be_lowered_are_refused_when_too_long():
    for policy in (NEXT, SQUARE):
        record = make_record([(100, 70)], encoder=ENCODER, policy=policy)
        with pytest.raises(SampleError, match="too long by 1 tokens even with one tile an image"):
            make_record(
                [(100, 70)],
                encoder=ENCODER,
                policy=policy,
                max_tokens=len(record.input_ids) - 1,
                oversize="fewer-tiles",
            )


@pytest.mark.parametrize("policy", [InternVLTiles(), QwenPatches()])
def test_another_policy_is_refused(policy):
    with pytest.raises(ConfigError, match="LlavaTransform is for SquarePad or AnyResTiles, got"):
        LlavaTransform.from_settings(settings_of(ENCODER, policy))


# against transformers, where it is installed


def tiny_model(transformers, policy):
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        projection_dim=32,
    )
    text = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=ENCODER.vocab_size,
    )
    torch.manual_seed(0)
    common = {
        "vision_config": vision,
        "text_config": text,
        "image_token_id": ENCODER.image_token_id,
    }
    if policy is SQUARE:
        config = transformers.LlavaConfig(**common)
        return transformers.LlavaForConditionalGeneration(config).eval()
    pinpoints = [list(pair) for pair in policy.pinpoints]
    if policy is ONEVISION:
        config = transformers.LlavaOnevisionConfig(
            image_grid_pinpoints=pinpoints,
            vision_aspect_ratio="anyres_max_2",
            vision_feature_select_strategy="default",
            **common,
        )
        return transformers.LlavaOnevisionForConditionalGeneration(config).eval()
    config = transformers.LlavaNextConfig(image_grid_pinpoints=pinpoints, **common)
    return transformers.LlavaNextForConditionalGeneration(config).eval()


@pytest.mark.parametrize("policy", [NEXT, SQUARE, ONEVISION])
def test_a_packed_row_gives_what_the_model_gives_for_each_sample_alone(policy):
    transformers = pytest.importorskip("transformers")
    transform = make_transform(policy)
    samples = samples_of(transform)
    batch = pack(samples)
    model = tiny_model(transformers, policy)
    with torch.no_grad():
        packed = model(**transform.model_inputs(batch)).logits[0]
    starts = batch.cu_seqlens.tolist()
    for number, sample in enumerate(samples):
        alone = transform.model_inputs(pack([sample]))
        names = ("input_ids", "pixel_values", "image_sizes")
        inputs = {name: alone[name] for name in names if alone.get(name) is not None}
        with torch.no_grad():
            expected = model(**inputs).logits[0]
        torch.testing.assert_close(packed[starts[number] : starts[number + 1]], expected)


@pytest.mark.parametrize("size", [(56, 56), (56, 28), (28, 84)])
def test_tiles_equal_those_of_the_image_processor(size):
    # a size of the pinpoints: only the whole-image tile is resized
    module = pytest.importorskip("transformers.models.llava_next.image_processing_pil_llava_next")
    processor = module.LlavaNextImageProcessorPil(
        image_grid_pinpoints=[list(pair) for pair in NEXT.pinpoints],
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        do_rescale=False,
        do_normalize=False,
    )
    image = photo(*size)
    theirs = np.asarray(processor(images=[image])["pixel_values"][0])
    record = make_record([size], encoder=ENCODER, policy=NEXT)
    record = type(record)(**{**vars(record), "images": (encode(image, "PNG"),)})
    ours = make_transform(NEXT)(record, RNG).tiles
    assert ours.shape == theirs.shape
    assert np.array_equal(ours[1:], theirs[1:])
    assert np.abs(ours[0].astype(int) - theirs[0]).max() <= 2  # plain PIL resizes otherwise


def test_a_padded_square_equals_that_of_the_image_processor():
    module = pytest.importorskip("transformers.models.llava.image_processing_pil_llava")
    processor = module.LlavaImageProcessorPil(
        do_pad=True,
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        do_rescale=False,
        do_normalize=False,
    )
    image = photo(28, 21)  # as wide as the tile: nothing is resized
    [theirs] = processor(images=[image])["pixel_values"]
    record = make_record([(28, 21)], encoder=ENCODER, policy=SQUARE)
    record = type(record)(**{**vars(record), "images": (encode(image, "PNG"),)})
    [ours] = make_transform(SQUARE)(record, RNG).tiles
    assert np.array_equal(ours, theirs)
