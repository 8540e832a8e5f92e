"""The kernels of omniload.kernels.tiles in Triton's interpreter; run by test_kernels_tiles.py.

A process of its own, because the interpreter is chosen when a kernel's module is imported. A
program takes some milliseconds here, so sizes are small. Its casts to bf16 are not those of a GPU;
values from a bf16 table are only moved, and so are exact.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.kernels import reference, tiles

few = settings(max_examples=12, deadline=None)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
grids_strategy = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=5)


def random_bytes(*shape, seed=0):
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(values)


def images(grids, size, seed=0):
    num_bytes = sum(columns * rows for columns, rows in grids) * size * size * 3
    return random_bytes(num_bytes, seed=seed), torch.tensor(grids, dtype=torch.int32)


@few
@given(
    num_tiles=st.integers(0, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_normalize_equals_the_reference_bit_for_bit(num_tiles, height, width, dtype):
    given_tiles = random_bytes(num_tiles, 3, height, width)
    table = reference.normalize_table(dtype=dtype)
    result = tiles.normalize_tiles(given_tiles, table)
    assert result.dtype == dtype
    assert torch.equal(result, reference.normalize_tiles(given_tiles, table))


def test_all_256_values_of_all_channels_are_the_float_path():
    values = torch.arange(256, dtype=torch.uint8).repeat(1, 3, 1).reshape(1, 3, 16, 16)
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    result = tiles.normalize_tiles(values, reference.normalize_table(mean, std))
    centre, scale = (torch.tensor(given).view(1, 3, 1, 1) for given in (mean, std))
    assert torch.equal(result, (values.float() / 255 - centre) / scale)


def test_tiles_need_not_be_contiguous():
    table = reference.normalize_table()
    for view in (
        random_bytes(2, 5, 6, 3).permute(0, 3, 1, 2),
        random_bytes(4, 3, 5, 9)[::2, :, 1:],
    ):
        assert not view.is_contiguous()
        expected = reference.normalize_tiles(view, table)
        assert torch.equal(tiles.normalize_tiles(view, table), expected)


def test_a_plane_of_several_blocks():
    given_tiles = random_bytes(1, 3, 65, 66)  # 4290 pixels: a block and a bit
    table = reference.normalize_table(dtype=torch.bfloat16)
    expected = reference.normalize_tiles(given_tiles, table)
    assert torch.equal(tiles.normalize_tiles(given_tiles, table), expected)


@few
@given(
    grids=grids_strategy, size=st.integers(1, 6), with_table=st.booleans(), seed=st.integers(0, 9)
)
def test_tiles_of_images_of_any_grid(grids, size, with_table, seed):
    pixels, grids = images(grids, size, seed)
    table = reference.normalize_table() if with_table else None
    result = tiles.images_to_tiles(pixels, grids, size, table)
    assert torch.equal(result, reference.images_to_tiles(pixels, grids, size, table))


@few
@given(
    grids=grids_strategy,
    patch=st.integers(1, 4),
    merge=st.integers(1, 2),
    frames=st.integers(1, 2),
    dtype=st.sampled_from([None, *DTYPES]),
)
def test_patches_in_merge_order(grids, patch, merge, frames, dtype):
    grids = [(columns * merge, rows * merge) for columns, rows in grids[:2]]
    pixels, grids = images(grids, patch)
    table = None if dtype is None else reference.normalize_table(dtype=dtype)
    options = {"patch": patch, "merge": merge, "frames": frames, "table": table}
    result = tiles.patchify(pixels, grids, **options)
    assert torch.equal(result, reference.patchify(pixels, grids, **options))


def test_patches_of_14_pixels_as_qwen_has_them():
    pixels, grids = images([(4, 2)], 14)
    options = {"patch": 14, "merge": 2, "frames": 2, "table": reference.normalize_table()}
    result = tiles.patchify(pixels, grids, **options)
    assert result.shape == (8, 3 * 2 * 14 * 14)
    assert torch.equal(result, reference.patchify(pixels, grids, **options))


def test_a_cell_larger_than_a_block_and_many_images():
    pixels, grids = images([(1, 1), (2, 1)], 70)
    assert torch.equal(
        tiles.images_to_tiles(pixels, grids, 70), reference.images_to_tiles(pixels, grids, 70)
    )
    pixels, grids = images([(1, 1)] * 33, 2)
    assert torch.equal(
        tiles.images_to_tiles(pixels, grids, 2), reference.images_to_tiles(pixels, grids, 2)
    )


@pytest.mark.parametrize("bad", [(2**31 - 1, 2**31 - 1), (-5, 7), (0, 0), (1000, 1)])
def test_wrong_grids_read_and_write_nothing_outside(bad):
    pixels, _ = images([(2, 2)], 4)
    grids = torch.tensor([(1, 1), bad], dtype=torch.int32)
    assert tiles.images_to_tiles(pixels, grids, 4).shape == (4, 3, 4, 4)


def test_wrong_arguments_are_refused():
    pixels, grids = images([(2, 2)], 4)
    with pytest.raises(ConfigError, match=r"frames must be at least 1, got 0"):
        tiles.patchify(pixels, grids, patch=4, frames=0)
    with pytest.raises(ConfigError, match=r"got 191 bytes for cells of 48"):
        tiles.images_to_tiles(pixels[:-1], grids, 4)
    with pytest.raises(ConfigError, match=r"tiles must be uint8"):
        tiles.normalize_tiles(pixels, reference.normalize_table())
    with pytest.raises(ConfigError, match=r"table must be \(3, 256\) on cpu, got \(3, 255\)"):
        tiles.normalize_tiles(pixels.view(-1, 3, 4, 4), reference.normalize_table()[:, :255])
