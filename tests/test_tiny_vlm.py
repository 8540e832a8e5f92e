from itertools import pairwise

import numpy as np
import pytest
import torch

from examples.tiny_vlm import TinyVLM
from omniload.packing import pack
from omniload.types import IGNORE_INDEX
from tests.packing_samples import IMAGE_TOKEN, VOCAB, make_filler, make_sample


@pytest.fixture(autouse=True)
def _one_thread():
    # the model is so small that threads only wait for each other
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "image_token_id": IMAGE_TOKEN, "width": 16, "num_heads": 2}
    return TinyVLM(**(sizes | {"num_layers": 1} | changes))


MIXED = [
    make_sample(0, text=6, tiles_per_image=(2,)),
    make_sample(1, text=11),
    make_sample(2, text=3, tiles_per_image=(1, 3)),
    make_sample(3, text=2),
]


def padded(samples):
    """The same samples one to a row, padded on the right: what a usual collate gives."""
    longest = max(sample.num_tokens for sample in samples)
    ids = np.zeros((len(samples), longest), np.int64)
    labels = np.full((len(samples), longest), IGNORE_INDEX)
    for row, sample in enumerate(samples):
        ids[row, : sample.num_tokens] = sample.input_ids
        labels[row, : sample.num_tokens] = sample.labels
    labels[:, 0] = IGNORE_INDEX
    return torch.from_numpy(ids), torch.from_numpy(labels)


def test_packed_and_padded_rows_give_the_same_logits_and_loss():
    model = make_model().double()
    batch = pack(MIXED)
    inputs = batch.model_inputs(dtype=torch.float64)
    packed = model(**inputs)
    ids, labels = padded(MIXED)
    rows = model(ids, labels, pixel_values=inputs["pixel_values"])
    torch.testing.assert_close(packed.loss, rows.loss, rtol=0, atol=1e-10)
    bounds = batch.cu_seqlens.tolist()
    for row, (start, end) in enumerate(pairwise(bounds)):
        torch.testing.assert_close(
            packed.logits[0, start:end], rows.logits[row, : end - start], rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_runs_in_the_dtype_of_its_weights(dtype):
    output = make_model().to(dtype)(**pack(MIXED).model_inputs(dtype=dtype))
    assert output.logits.dtype == dtype
    assert output.loss.isfinite()


def test_tile_size_and_tokens_per_tile_are_settings():
    model = make_model(tile_size=32, patch_size=4, tokens_per_tile=16)
    sample = make_sample(0, text=6, tiles_per_image=(3,), tokens_per_tile=16, size=32)
    output = model(**pack([sample]).model_inputs())
    assert output.logits.shape == (1, 6 + 48, VOCAB)
    with pytest.raises(ValueError, match="16 patches a multiple of tokens_per_tile=5"):
        make_model(tokens_per_tile=5)
    with pytest.raises(ValueError, match="tile_size=28 must be a multiple of patch_size=8"):
        make_model(patch_size=8)


def test_images_change_the_text_after_them_and_no_text_before():
    model = make_model()
    sample = make_sample(0, text=8, tiles_per_image=(1,))
    before = model(**pack([sample]).model_inputs()).logits[0]
    sample.tiles[:] = 255 - sample.tiles
    after = model(**pack([sample]).model_inputs()).logits[0]
    start, end = sample.image_spans[0]
    assert torch.equal(before[:start], after[:start])
    assert not torch.isclose(before[end:], after[end:]).all(dim=1).any()


def test_visual_tokens_that_do_not_fit_the_text_are_refused():
    sample = make_sample(0, text=6, tiles_per_image=(2,), tokens_per_tile=3)
    with pytest.raises(ValueError, match=r"8 visual tokens of 2 tiles, got 6"):
        make_model()(**pack([sample]).model_inputs())


@pytest.mark.parametrize("packed", [[make_sample(0, text=6)], MIXED])
def test_every_parameter_gets_a_gradient_with_and_without_images(packed):
    model = make_model()
    model(**pack(packed).model_inputs()).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_filler_gives_a_finite_mean_and_zero_sum():
    batch = pack([make_filler()], is_filler=True, num_loss_tokens_step=5)
    assert make_model(loss="mean")(**batch.model_inputs(loss="mean")).loss.isfinite()
    assert make_model(loss="sum")(**batch.model_inputs()).loss == 0
    assert make_model(loss="step")(**batch.model_inputs()).loss == 0


def test_without_labels_it_gives_logits_alone():
    output = make_model()(torch.tensor([[8, 9, 10]]))
    assert output.loss is None
    assert output.logits.shape == (1, 3, VOCAB)


@pytest.mark.parametrize(
    ("tile_size", "tokens_per_tile", "patch_size"),
    [(448, 256, 28), (112, 16, 14), (28, 1, 2), (336, 576, 14), (56, 4, 7)],
)
def test_a_model_for_shards_has_patches_for_their_tokens(tile_size, tokens_per_tile, patch_size):
    settings = {
        "tiling": {"policy": "internvl", "size": tile_size},
        "encoder": {"vocab_size": 9, "image_token_id": 7, "tokens_per_tile": tokens_per_tile},
    }
    model = TinyVLM.for_shards(settings)
    assert model.vision.patches.kernel_size == (patch_size, patch_size)
    settings["tiling"] = {"policy": "qwen", "patch_size": 14}
    with pytest.raises(ValueError, match="--tiling internvl or square, got qwen"):
        TinyVLM.for_shards(settings)
