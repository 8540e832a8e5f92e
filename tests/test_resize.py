"""Resizing: the same bits by every backend, and near to PIL."""

import numpy as np
import pytest
import torch
from PIL import Image

from omniload.errors import ConfigError
from omniload.images import (
    pil_info,
    resize,
)
from omniload.images.resize import as_batch
from tests.images_corpus import (
    HEIGHT,
    WIDTH,
    photo,
)


@pytest.mark.parametrize("size", [(90, 50), (20, 90), (1, 1), (448, 448), (60, 40)])
def test_resize_gives_torchs_8_bit_result(size):
    image = photo(WIDTH, HEIGHT)
    slow = torch.nn.functional.interpolate(
        torch.from_numpy(image).permute(2, 0, 1)[None],
        size=size[::-1],
        mode="bicubic",
        antialias=True,
    )[0].permute(1, 2, 0)
    result = resize(image, *size)
    assert result.shape == (size[1], size[0], 3)
    assert result.flags.c_contiguous
    assert np.array_equal(result, slow.numpy())


def test_torch_keeps_pixels_interleaved_given_these_strides():
    # what makes resize quick; with other strides it is up to three times slower
    batch = as_batch(photo(WIDTH, HEIGHT))
    resized = torch.nn.functional.interpolate(batch, size=(90, 50), mode="bicubic", antialias=True)
    assert resized.permute(0, 2, 3, 1).is_contiguous()


def test_resize_is_what_pil_does_within_two_levels():
    image = photo(200, 120)
    mine = resize(image, 90, 300).astype(int)
    pils = np.asarray(Image.fromarray(image).resize((90, 300), Image.Resampling.BICUBIC))
    assert np.abs(mine - pils).max() <= (0 if pil_info().simd else 2)


def test_resize_takes_any_memory_layout():
    image = photo(WIDTH, HEIGHT)
    expected = resize(image, 31, 17)
    turned = np.ascontiguousarray(image[::-1])[::-1]
    frozen = image.copy()
    frozen.flags.writeable = False
    for variant in (turned, frozen):
        assert np.array_equal(resize(variant, 31, 17), expected)


@pytest.mark.parametrize(
    ("image", "size", "message"),
    [
        (np.zeros((4, 4), np.uint8), (2, 2), r"uint8 \(h, w, 3\), got uint8 \(4, 4\)"),
        (np.zeros((4, 4, 3), np.float32), (2, 2), r"got float32"),
        (np.zeros((0, 4, 3), np.uint8), (2, 2), r"got uint8 \(0, 4, 3\)"),
        (np.zeros((4, 4, 3), np.uint8), (0, 2), r"sides of at least 1, got 0x2"),
    ],
)
def test_resize_refuses_what_is_no_image(image, size, message):
    with pytest.raises(ConfigError, match=message):
        resize(image, *size)
