import pickle

import numpy as np
import pytest
import torch

from omniload.errors import ConfigError, SampleError
from omniload.images import AnyResTiles, InternVLTiles, QwenPatches, SquarePad
from omniload.packing import pack
from omniload.transforms import FunctionTransform, TileTransform, Transform, family_transform
from omniload.transforms.processor import HFProcessorTransform
from tests.family_data import RNG, make_encoder, make_record, settings_of
from tests.images_corpus import photo

ENCODER = make_encoder("vicuna", tokens_per_tile=4)
SQUARE = SquarePad(size=28)
NEXT = AnyResTiles(size=28, pinpoints=((28, 56), (56, 28), (56, 56)))
SMALL = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}


def image_processor(name, **settings):
    """An image processor that needs no torchvision."""
    transformers = pytest.importorskip("transformers")
    module = {"Qwen2VL": "qwen2_vl", "LlavaNext": "llava_next"}.get(name, name.lower())
    module = pytest.importorskip(
        f"{transformers.__name__}.models.{module}.image_processing_pil_{module}"
    )
    return getattr(module, f"{name}ImageProcessorPil")(**settings)


def llava_processor(image_processor):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(ENCODER.tokenizer_json())
    )
    return transformers.LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=14,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )


def test_a_llava_processor_makes_the_pixels():
    processor = llava_processor(image_processor("Llava", **SMALL))
    transform = HFProcessorTransform(processor, settings_of(ENCODER, SQUARE))
    assert isinstance(transform, Transform)
    record = make_record([(100, 70)], encoder=ENCODER, policy=SQUARE)
    sample = transform(record, RNG)
    theirs = processor(images=[photo(100, 70)], text="<image>", return_tensors="pt")
    inputs = transform.model_inputs(pack([sample]))
    torch.testing.assert_close(inputs["pixel_values"], theirs["pixel_values"].float())
    # it counts as many tokens for the image as are stored
    [[start, end]] = sample.image_spans.tolist()
    assert (theirs["input_ids"] == ENCODER.image_token_id).sum() == end - start
    assert transform.lengths(record) == (
        sample.num_tokens,
        sample.num_tiles,
        sample.num_loss_tokens,
    )
    assert transform.filler(True).num_tiles == 1


@pytest.mark.parametrize(
    ("name", "policy", "settings"),
    [
        ("CLIP", SQUARE, SMALL),
        ("Siglip", SQUARE, {"size": {"height": 28, "width": 28}}),
        ("LlavaNext", NEXT, SMALL | {"image_grid_pinpoints": [list(p) for p in NEXT.pinpoints]}),
        ("Qwen2VL", QwenPatches(), {}),
    ],
)
def test_pixels_of_bare_image_processors_reach_the_model_unchanged(name, policy, settings):
    processor = image_processor(name, **settings)
    transform = HFProcessorTransform(processor, settings_of(ENCODER, policy))
    record = make_record([(100, 70)], encoder=ENCODER, policy=policy)
    sample = pickle.loads(pickle.dumps(transform))(record, RNG)
    theirs = processor(images=[photo(100, 70)], return_tensors="pt")
    inputs = transform.model_inputs(pack([sample]))
    expected = theirs["pixel_values"].float().reshape(inputs["pixel_values"].shape)
    torch.testing.assert_close(inputs["pixel_values"], expected)
    for extra in ("image_sizes", "image_grid_thw"):
        if extra in theirs:
            assert torch.equal(inputs[extra], theirs[extra])


def test_without_normalising_pixels_are_scaled_only():
    processor = image_processor("CLIP", do_normalize=False, **SMALL)
    transform = HFProcessorTransform(processor, settings_of(ENCODER, SQUARE))
    sample = transform(make_record([(40, 40)], encoder=ENCODER, policy=SQUARE), RNG)
    pixels = transform.model_inputs(pack([sample]))["pixel_values"]
    torch.testing.assert_close(pixels, torch.from_numpy(sample.tiles) / 255)


def test_tiles_that_the_index_did_not_count_are_refused():
    record = make_record([(100, 70)], encoder=ENCODER, policy=SQUARE)
    other = image_processor("CLIP", size={"shortest_edge": 14}, crop_size=14)
    transform = HFProcessorTransform(other, settings_of(ENCODER, SQUARE))
    with pytest.raises(SampleError, match=r"expected \(1, 3, 28, 28\) .* got \(1, 3, 14, 14\)"):
        transform(record, RNG)
    more = image_processor("LlavaNext", image_grid_pinpoints=[[28, 56]], **SMALL)
    with pytest.raises(SampleError, match=r"expected \(1, 3, 28, 28\) .* got \(3, 3, 28, 28\)"):
        HFProcessorTransform(more, settings_of(ENCODER, SQUARE))(record, RNG)


def test_fingerprints_tell_processors_apart():
    settings = settings_of(ENCODER, SQUARE)
    prints = {
        HFProcessorTransform(image_processor("CLIP", **SMALL), settings).fingerprint,
        HFProcessorTransform(image_processor("Llava", **SMALL), settings).fingerprint,
        HFProcessorTransform(image_processor("CLIP", **SMALL, resample=0), settings).fingerprint,
        family_transform(settings).fingerprint,
    }
    assert len(prints) == 4
    again = HFProcessorTransform(image_processor("CLIP", **SMALL), settings)
    assert again.fingerprint in prints


def test_a_processor_is_loaded_from_a_folder(tmp_path):
    image_processor("CLIP", **SMALL).save_pretrained(tmp_path)
    settings = settings_of(ENCODER, SQUARE)
    transform = HFProcessorTransform(tmp_path, settings)
    sample = transform(make_record([(40, 40)], encoder=ENCODER, policy=SQUARE), RNG)
    assert sample.tiles.shape == (1, 3, 28, 28)
    with pytest.raises(ConfigError, match=r"no processor can be loaded from .*nothing"):
        HFProcessorTransform(tmp_path / "nothing", settings)


class Processor:
    """Does what it is told."""

    def __init__(self, pixels=None, **facts):
        self.pixels, self.facts = pixels, {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, **facts}

    def to_dict(self):
        return self.facts

    def __call__(self, **_):
        if self.pixels is None:
            raise RuntimeError("no pixels today")
        return {"pixel_values": self.pixels}


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (None, "the image processor failed with RuntimeError: no pixels today"),
        (np.full((1, 3, 28, 28), 0.5), "whole numbers from 0 to 255 .* float64 from 0.5 to 0.5"),
        (np.full((1, 3, 28, 28), -1), "whole numbers from 0 to 255 .* from -1 to -1"),
    ],
)
def test_a_processor_that_misbehaves_is_an_error_of_the_sample(pixels, message):
    transform = HFProcessorTransform(Processor(pixels), settings_of(ENCODER, SQUARE))
    record = make_record([(40, 40)], encoder=ENCODER, policy=SQUARE)
    with pytest.raises(SampleError, match=f"image 1 of 1: .*{message}"):
        transform(record, RNG)


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (3, "takes a processor or an image processor of transformers, got int"),
        (Processor(rescale_factor=1 / 127), "must rescale by 1/255"),
        (Processor(do_rescale=False), "must rescale by 1/255"),
        (Processor(image_mean=None), "must have image_mean and image_std, got None"),
    ],
)
def test_processors_that_cannot_be_used_are_refused(processor, message):
    with pytest.raises(ConfigError, match=message):
        HFProcessorTransform(processor, settings_of(ENCODER, SQUARE))


# functions


def mirrored(record, rng):
    """What a user writes."""
    sample = PLAIN(record, rng)
    return type(sample)(**{**vars(sample), "tiles": sample.tiles[..., ::-1].copy()})


PLAIN = TileTransform.from_settings(settings_of(ENCODER, InternVLTiles(size=28, max_tiles=4)))


def test_a_function_becomes_a_transform_with_the_stored_lengths():
    transform = FunctionTransform(mirrored, fingerprint="mirrored, version 1", filler=PLAIN)
    assert isinstance(transform, Transform)
    record = make_record([(100, 70)], encoder=ENCODER, policy=PLAIN.policy)
    sample = pickle.loads(pickle.dumps(transform))(record, RNG)
    assert np.array_equal(sample.tiles[..., ::-1], PLAIN(record, RNG).tiles)
    assert transform.lengths(record) == PLAIN.lengths(record)
    assert transform.filler(True).num_tiles == 1
    inputs = transform.model_inputs(pack([sample]))
    assert inputs["pixel_values"].shape == sample.tiles.shape
    assert len(transform.fingerprint) == 32
    other = FunctionTransform(mirrored, fingerprint="version 2", filler=PLAIN)
    assert other.fingerprint != transform.fingerprint


def test_a_function_may_bring_its_own_lengths_filler_and_names():
    transform = FunctionTransform(
        mirrored,
        fingerprint="0123456789abcdef" * 2,
        filler=PLAIN.filler,
        lengths=lambda record: (1, 2, 3),
        model_inputs=lambda batch: {"x": batch},
    )
    assert transform.fingerprint == "0123456789abcdef" * 2
    assert transform.lengths(None) == (1, 2, 3)
    assert transform.model_inputs(7) == {"x": 7}
    assert transform.filler(False).num_tiles == 0
    plain = FunctionTransform(mirrored, fingerprint="a", filler=PLAIN.filler)
    batch = pack([PLAIN.filler(False)], is_filler=True)
    assert plain.model_inputs(batch).keys() == batch.model_inputs().keys()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"function": 3}, "needs a callable function, got 3"),
        ({"filler": None}, "needs a callable filler, got None"),
        ({"lengths": 3}, "needs a callable lengths, got 3"),
        ({"model_inputs": 3}, "needs a callable model_inputs, got 3"),
        ({"fingerprint": ""}, "needs a fingerprint: .* got ''"),
    ],
)
def test_wrong_arguments_of_a_function_transform_are_refused(changes, message):
    arguments = {"function": mirrored, "fingerprint": "a", "filler": PLAIN} | changes
    with pytest.raises(ConfigError, match=message):
        FunctionTransform(arguments.pop("function"), **arguments)
