import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from omniload.errors import ConfigError, SampleError
from omniload.images import AnyResTiles, InternVLTiles, NaViTPatches, QwenPatches, SquarePad
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
    names = {"Qwen2VL": "qwen2_vl", "LlavaNext": "llava_next", "GotOcr2": "got_ocr2"}
    module = names.get(name, name.lower())
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
        ("Pixtral", NaViTPatches(max_side=64), {"size": {"longest_edge": 64}}),
        (
            "GotOcr2",
            InternVLTiles(size=28, max_tiles=4),
            {"size": {"height": 28, "width": 28}, "max_patches": 4, "crop_to_patches": True},
        ),
    ],
)
def test_pixels_of_bare_image_processors_reach_the_model_unchanged(name, policy, settings):
    processor = image_processor(name, **settings)
    transform = HFProcessorTransform(processor, settings_of(ENCODER, policy))
    record = make_record([(100, 70)], encoder=ENCODER, policy=policy)
    sample = pickle.loads(pickle.dumps(transform))(record, RNG)
    theirs = processor(images=[photo(100, 70)], return_tensors="pt")
    inputs = transform.model_inputs(pack([sample]))
    expected = theirs["pixel_values"].float()
    if name == "Pixtral":  # one image, cut into patches row by row
        expected = expected.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5)
    expected = expected.reshape(inputs["pixel_values"].shape)
    torch.testing.assert_close(inputs["pixel_values"], expected)
    for extra in ("image_sizes", "image_grid_thw"):
        if extra in theirs and extra in inputs:
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


QWEN = {"size": {"shortest_edge": 3136, "longest_edge": 1003520}}
LONGER_SIDE = {"size": {"longest_edge": 64}}


@pytest.mark.parametrize(
    ("name", "policy", "settings", "message"),
    [
        ("Qwen2VL", QwenPatches(), {"merge_size": 1}, r"merge_size 2 for QwenP.*, got 1\."),
        ("Qwen2VL", QwenPatches(patch_size=16), {}, r"patch_size 16 for QwenP.*, got 14\."),
        ("Qwen2VL", QwenPatches(), {"temporal_patch_size": 1}, r"temporal_patch_size 2 .*got 1\."),
        (
            "LlavaNext",
            NEXT,
            SMALL | {"image_grid_pinpoints": [list(p) for p in reversed(NEXT.pinpoints)]},
            r"\(in this order\) \(\(28, 56\), .* got \(\(56, 56\), ",
        ),
        ("Pixtral", NaViTPatches(), {"patch_size": {"height": 14, "width": 16}}, "16 .*, got 14"),
        ("GotOcr2", InternVLTiles(max_tiles=6), {}, r"max_patches 6 for .*, got 12\."),
        ("GotOcr2", InternVLTiles(min_tiles=2), {}, r"min_patches 2 for .*, got 1\."),
    ],
)
def test_a_processor_with_another_layout_is_refused_at_once(name, policy, settings, message):
    processor = image_processor(name, **settings)
    with pytest.raises(ConfigError, match=message):
        HFProcessorTransform(processor, settings_of(ENCODER, policy))


class Whole:
    """A processor around an image processor."""

    def __init__(self, image_processor, **facts):
        self.image_processor = image_processor
        vars(self).update(facts)


def test_what_the_processor_itself_says_of_the_layout_is_compared_too():
    pixtral, navit = image_processor("Pixtral"), settings_of(ENCODER, NaViTPatches())
    HFProcessorTransform(Whole(pixtral, spatial_merge_size=1), navit)
    with pytest.raises(ConfigError, match=r"spatial_merge_size 1 for NaViTPatches.*, got 2"):
        HFProcessorTransform(Whole(pixtral, spatial_merge_size=2), navit)
    crops = image_processor(
        "LlavaNext", image_grid_pinpoints=[list(p) for p in NEXT.pinpoints], **SMALL
    )
    with pytest.raises(ConfigError, match=r"patch_size 14 for AnyResTiles.*, got 7"):
        HFProcessorTransform(Whole(crops, patch_size=7), settings_of(ENCODER, NEXT))
    onevision = Whole(crops, vision_aspect_ratio="anyres_max_9")
    with pytest.raises(ConfigError, match=r"ratio no limit for .*, got anyres_max_9"):
        HFProcessorTransform(onevision, settings_of(ENCODER, NEXT))
    HFProcessorTransform(onevision, settings_of(ENCODER, replace(NEXT, max_crops=9)))


class Turned:
    """An image processor whose grid lies on its side."""

    def __init__(self, inner):
        self.inner = inner

    def to_dict(self):
        return self.inner.to_dict()

    def __call__(self, images, **options):
        result = self.inner(images=images, **options)
        if "image_grid_thw" in result:
            result["image_grid_thw"] = result["image_grid_thw"][:, [0, 2, 1]]
        else:
            result["pixel_values"] = np.swapaxes(result["pixel_values"], 2, 3)
        return result


@pytest.mark.parametrize(
    ("name", "policy", "settings", "message"),
    [
        ("Qwen2VL", QwenPatches(), QWEN, r"expected image_grid_thw \[\[1, 6, 8\]\] .*\[1, 8, 6\]"),
        ("Pixtral", NaViTPatches(max_side=64), LONGER_SIDE, r"\(1, 3, 48, 64\) .*\(1, 3, 64, 48\)"),
        (
            "Pixtral",
            NaViTPatches(max_side=48),
            LONGER_SIDE,
            r"expected .*\(1, 3, 48, 48\) .*3, 64, 48\)",
        ),
    ],
)
def test_as_many_tiles_in_another_grid_are_refused(name, policy, settings, message):
    record = make_record([(100, 75)], encoder=ENCODER, policy=policy)
    other = Turned(image_processor(name, **settings))
    transform = HFProcessorTransform(other, settings_of(ENCODER, policy))
    with pytest.raises(SampleError, match=message):
        transform(record, RNG)


def test_a_thumbnail_that_the_index_did_not_count_is_refused():
    policy = InternVLTiles(size=28, max_tiles=4, thumbnail=False)
    size = {"height": 28, "width": 28}
    processor = image_processor("GotOcr2", size=size, max_patches=4)  # it cuts, whatever it says
    transform = HFProcessorTransform(processor, settings_of(ENCODER, policy))
    record = make_record([(100, 40)], encoder=ENCODER, policy=policy)
    with pytest.raises(SampleError, match=r"expected \(3, 3, 28, 28\) .* got \(4, 3, 28, 28\)"):
        transform(record, RNG)


def test_a_policy_name_that_is_no_text_is_a_config_error():
    with pytest.raises(ConfigError, match=r"unknown tiling policy \['qwen'\]"):
        family_transform({**settings_of(ENCODER, SQUARE), "tiling": {"policy": ["qwen"]}})


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


def record_of(policy, sizes=((100, 70), (28, 28))):
    return make_record(list(sizes), encoder=ENCODER, policy=policy)


def altered(change, policy, *, filler=None, lengths=None, sizes=((100, 70), (28, 28))):
    """Run a function that changes some arrays of the plain sample."""
    base = family_transform(settings_of(ENCODER, policy))

    def function(record, rng):
        sample = base(record, rng)
        arrays = {name: np.array(value) for name, value in vars(sample).items()}
        del arrays["sample_id"]
        return type(sample)(sample_id=sample.sample_id, **{**arrays, **change(arrays)})

    transform = FunctionTransform(
        function, fingerprint="x", filler=filler(base) if filler else base, lengths=lengths
    )
    return transform(record_of(policy, sizes), RNG)


def swapped(name):
    return lambda arrays: {name: arrays[name][::-1].copy()}


def moved(arrays):
    return {"image_spans": arrays["image_spans"] + np.int32(1)}


def text_inside(arrays):
    arrays["input_ids"][arrays["image_spans"][0, 0] + 2] = 5
    return {"input_ids": arrays["input_ids"]}


def image_outside(arrays):
    arrays["input_ids"][0] = ENCODER.image_token_id
    return {"input_ids": arrays["input_ids"]}


def shorter_span(arrays):
    end = arrays["image_spans"][1, 1]
    arrays["image_spans"][1, 1] -= 1
    arrays["input_ids"][end - 1] = 5
    return {name: arrays[name] for name in ("image_spans", "input_ids")}


def turned_sizes(arrays):
    return {"image_sizes": arrays["image_sizes"][:, ::-1] // np.array([1, 3], np.int32)}


TILES = InternVLTiles(size=28, max_tiles=4)


@pytest.mark.parametrize(
    ("change", "policy", "message"),
    [
        (swapped("image_spans"), TILES, r"must not overlap and must be in order, got \[\[\d+"),
        (moved, TILES, r"must lie in image_spans: the image token \d+ is at position \d+, got"),
        (text_inside, TILES, r"must be image tokens: expected \d+ at position \d+ .* got 5"),
        (image_outside, TILES, "is at position 0, got the spans"),
        (shorter_span, TILES, r"image 2 of 2 .*: expected 4 for 28x28 pixels, 1 tiles .*, got 3"),
        (
            swapped("image_num_tiles"),
            TILES,
            r"those that are stored.*expected \[5, 1\], got \[1, 5",
        ),
        (swapped("image_grids"), TILES, r"image 1 has 5 tiles, got the grid \(1, 1\)"),
        (lambda a: {"image_grids": a["image_grids"] * 0}, TILES, r"5 tiles, got the grid \(0, 0\)"),
        (lambda a: {"image_grids": a["image_grids"] * 0}, SQUARE, r"1 tiles, got .* \(0, 0\)"),
        (swapped("image_grids"), QwenPatches(), r"image 1 has 32 tiles, got the grid \(4, 4\)"),
        (
            lambda a: {
                "image_grids": np.stack([a["image_num_tiles"], a["image_num_tiles"] ** 0], 1)
            },
            QwenPatches(),
            r"expected 0 for .* a grid of \d+x1, got \d+ in its span",
        ),
        (turned_sizes, NEXT, r"image 2 of 2 .*: expected 14 for 28x9 pixels.*, got 10 in"),
    ],
)
def test_a_sample_that_contradicts_itself_is_an_error_that_shows_both(change, policy, message):
    altered(lambda arrays: {}, policy)
    with pytest.raises(SampleError, match=message):
        altered(change, policy)


def test_a_function_with_lengths_of_its_own_may_change_the_tiles_of_an_image():
    def fewer(arrays):
        return {"image_num_tiles": np.array([2, 4], np.int32), "image_grids": np.array(
            [[2, 1], [2, 2]], np.int32)}  # fmt: skip

    with pytest.raises(SampleError, match=r"expected 8 for .*, got 20 in"):
        altered(fewer, TILES, lengths=lambda record: (1, 6, 1))
    altered(fewer, TILES, lengths=lambda record: (1, 6, 1), filler=lambda base: base.filler)
    with pytest.raises(SampleError, match="Give FunctionTransform lengths="):
        altered(fewer, TILES, filler=lambda base: base.filler)


@pytest.mark.parametrize("wrap", ["function", "processor"])
def test_the_image_token_is_known_through_other_transforms_too(wrap):
    def filler(base):
        if wrap == "function":
            return FunctionTransform(base, fingerprint="inner", filler=base)
        return HFProcessorTransform(image_processor("CLIP", **SMALL), settings_of(ENCODER, SQUARE))

    altered(lambda arrays: {}, SQUARE, filler=filler)
    with pytest.raises(SampleError, match="must be image tokens"):
        altered(text_inside, SQUARE, filler=filler)


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
