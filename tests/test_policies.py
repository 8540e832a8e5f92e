import json
import math
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError, SampleError
from omniload.images import (
    POLICIES,
    AnyResTiles,
    InternVLTiles,
    NaViTPatches,
    QwenPatches,
    SquarePad,
    TokenPolicy,
    count_tokens,
    policy_from_settings,
    resize,
    tiles,
)
from tests.images_corpus import encode, photo

QWEN3 = QwenPatches(patch_size=16, min_pixels=256 * 256, max_pixels=4096 * 4096)

# (width, height): worked out from the published rules
ANYRES = [  # (columns, rows) of crops of 336 pixels, tokens at 24 x 24 a tile
    ((336, 336), (2, 1), 1176),  # tie with (1, 2), which comes later; 24 * 24 of 24 * 48 + 24 + 576
    ((672, 672), (2, 2), 2928),  # 48 * 48 + 48 + 576
    ((640, 480), (2, 2), 2340),  # 36 of 48 rows hold the image: 36 * 48 + 36 + 576
    ((1280, 720), (2, 2), 1948),  # 27 rows rounded up to an even loss of 20: 28 * 48 + 28 + 576
    ((800, 400), (2, 1), 1752),  # fills it: 24 * 48 + 24 + 576
    ((300, 1000), (1, 3), 2232),  # 72 rows of 21.6 columns, 22 kept
    ((2000, 200), (3, 1), 1160),  # 7.2 of 24 rows, 8 kept: 8 * 72 + 8 + 576
    ((1, 5000), (2, 1), 600),  # nothing of it is left: 24 line breaks
]
QWEN = [  # (columns, rows) of patches: Qwen2-VL at 1280 tokens, Qwen3-VL as its checkpoints
    ((100, 100), (8, 8), (16, 16)),  # 3.6 and 3.1 factors; 96 * 96 is too little, up to 256
    ((336, 336), (24, 24), (20, 20)),  # 10.5 factors of 32: halves go to the even number
    ((640, 480), (46, 34), (40, 30)),
    ((1280, 720), (92, 52), (80, 44)),  # 22.5 factors of 32 are 22
    ((1654, 2339), (60, 84), (104, 146)),  # shrunk to 1003520 pixels
    ((4032, 3024), (82, 60), (252, 188)),
    ((300, 1000), (22, 72), (18, 62)),
    ((2000, 200), (142, 14), (124, 12)),
    ((1000, 10), (40, 2), (160, 2)),  # no whole factor: enlarged to the least pixels, sides up
]
NAVIT = [  # (columns, rows) of patches of 16 pixels, longest side 1024
    ((1, 1), (1, 1)),
    ((336, 336), (21, 21)),
    ((640, 480), (40, 30)),
    ((1024, 1024), (64, 64)),
    ((1025, 1025), (64, 64)),
    ((1280, 720), (64, 36)),
    ((1654, 2339), (46, 64)),  # 1024 high, 724.1 wide
    ((4032, 3024), (64, 48)),
    ((1, 5000), (1, 64)),
]


@pytest.mark.parametrize(("size", "grid", "tokens"), ANYRES)
def test_best_resolutions_and_token_counts_of_llava_next(size, grid, tokens):
    policy = AnyResTiles()
    assert policy.grid(*size) == grid
    assert policy.num_tiles(*size) == 1 + grid[0] * grid[1]
    assert policy.num_tokens(*size) == tokens


@pytest.mark.parametrize(("size", "qwen2", "qwen3"), QWEN)
def test_sizes_of_qwen(size, qwen2, qwen3):
    for policy, grid in ((QwenPatches(), qwen2), (QWEN3, qwen3)):
        assert policy.grid(*size) == grid
        assert policy.num_tiles(*size) == grid[0] * grid[1]
        assert policy.num_tokens(*size) == grid[0] * grid[1] // 4


@pytest.mark.parametrize(("size", "grid"), NAVIT)
def test_sizes_at_native_resolution(size, grid):
    assert NaViTPatches().grid(*size) == grid
    assert NaViTPatches().num_tokens(*size) == NaViTPatches().num_tiles(*size) == grid[0] * grid[1]


def test_pinpoints_decide_ties_by_their_order():
    turned = AnyResTiles(pinpoints=((672, 336), (336, 672)))
    assert turned.grid(336, 336) == (1, 2)


def test_qwen_refuses_a_thread():
    assert QwenPatches().num_tiles(200, 1) > 0
    with pytest.raises(SampleError, match="at most 200 times as long as wide, got 201x1 pixels"):
        QwenPatches().num_tiles(201, 1)


sides = st.integers(1, 5000)
qwens = st.builds(
    lambda patch, merge, least, more: QwenPatches(
        patch_size=patch, merge=merge, min_pixels=least, max_pixels=least + more
    ),
    st.sampled_from([14, 16]),
    st.integers(1, 3),
    st.integers(0, 70000),
    st.integers(1, 2_000_000),
)


@given(sides, sides, qwens)
def test_qwen_keeps_shape_and_limits(width, height, policy):
    if max(width, height) > 200 * min(width, height):
        return
    columns, rows = policy.grid(width, height)
    factor = policy.patch_size * policy.merge
    wide, high = columns * policy.patch_size, rows * policy.patch_size
    assert wide % factor == high % factor == 0
    assert min(wide, high) >= factor
    if min(wide, high) > factor:  # a side can't be less than a factor
        # one enlarged to the least pixels may pass the most by a row and a column
        assert wide * high <= max(
            policy.max_pixels, (math.sqrt(policy.min_pixels) + factor) ** 2 * 201 / 2
        )
        assert wide * high >= min(policy.min_pixels, policy.max_pixels / 4)


@given(sides, sides, st.integers(1, 500))
def test_navit_keeps_its_limits(width, height, most):
    columns, rows = NaViTPatches(max_patches=most).grid(width, height)
    assert 1 <= columns * rows <= most
    assert max(columns, rows) <= 64


@given(sides, sides, st.integers(1, 400), st.booleans())
def test_a_lower_limit_is_found_again_from_the_number_of_patches(width, height, limit, qwen):
    policy = QwenPatches() if qwen else NaViTPatches()
    if max(width, height) > 200 * min(width, height):
        return
    lowered = policy.limited(limit)
    count = lowered.num_tiles(width, height)
    found = policy.for_num_tiles(width, height, count)
    assert found.num_tiles(width, height) == count


def test_a_number_that_no_limit_gives_is_refused():
    for policy, wrong in ((QwenPatches(), 5), (NaViTPatches(), 10**6), (AnyResTiles(), 2)):
        with pytest.raises(SampleError, match=f"can't be cut into {wrong} tiles: it gives"):
            policy.for_num_tiles(640, 480, wrong)
    assert AnyResTiles().for_num_tiles(640, 480, 5) == AnyResTiles()
    assert SquarePad().limited(1).for_num_tiles(640, 480, 1) == SquarePad()


def test_tokens_come_from_the_policy_or_from_the_number_of_tiles():
    assert isinstance(AnyResTiles(), TokenPolicy)
    assert not isinstance(InternVLTiles(), TokenPolicy)
    assert not isinstance(SquarePad(), TokenPolicy)
    assert count_tokens(InternVLTiles(), 640, 480, tokens_per_tile=256) == 13 * 256
    assert count_tokens(SquarePad(), 640, 480, tokens_per_tile=576) == 576
    assert count_tokens(QwenPatches(), 640, 480, tokens_per_tile=256) == 46 * 34 // 4


# pixels


def cut(image, policy):
    result = tiles(encode(image, "PNG"), policy)
    assert result.dtype == np.uint8
    return result


def test_a_square_is_padded_first_and_then_resized():
    image = photo(41, 20)
    square = np.empty((41, 41, 3), np.uint8)
    square[:] = (122, 116, 104)
    square[10:30] = image  # 10 rows above, 11 below
    [tile] = cut(image, SquarePad(size=28))
    assert np.array_equal(tile.transpose(1, 2, 0), resize(square, 28, 28))
    [tile] = cut(image.transpose(1, 0, 2).copy(), SquarePad(size=41))
    assert np.array_equal(tile.transpose(2, 1, 0), square)


def test_anyres_gives_the_whole_image_and_then_the_crops_of_the_padded_one():
    policy = AnyResTiles(size=28, pinpoints=((28, 56), (56, 28), (56, 56)))
    image = photo(80, 60)
    result = cut(image, policy)
    assert result.shape == (5, 3, 28, 28)
    assert np.array_equal(result[0].transpose(1, 2, 0), resize(image, 28, 28))
    canvas = np.zeros((56, 56, 3), np.uint8)
    canvas[7:49] = resize(image, 56, 42)  # 42 of 56 rows
    for index in range(4):
        top, left = index // 2 * 28, index % 2 * 28
        part = canvas[top : top + 28, left : left + 28]
        assert np.array_equal(result[1 + index].transpose(1, 2, 0), part)


@pytest.mark.parametrize("size", [(100, 70), (30, 200), (28, 28)])
def test_patches_of_a_square_lie_together(size):
    policy = QwenPatches(patch_size=14, merge=2, min_pixels=0)
    image = photo(*size)
    columns, rows = policy.grid(*size)
    resized = resize(image, columns * 14, rows * 14)
    expected = [
        resized[y * 14 : y * 14 + 14, x * 14 : x * 14 + 14].transpose(2, 0, 1)
        for top in range(0, rows, 2)
        for left in range(0, columns, 2)
        for y in (top, top + 1)
        for x in (left, left + 1)
    ]
    assert np.array_equal(cut(image, policy), np.stack(expected))


def test_native_patches_lie_row_by_row():
    image = photo(100, 70)
    result = cut(image, NaViTPatches())
    resized = resize(image, 112, 80)
    assert result.shape == (35, 3, 16, 16)
    assert np.array_equal(result[8].transpose(1, 2, 0), resized[16:32, 16:32])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("size", [(1, 1), (1, 40), (45, 31)])
def test_every_policy_gives_the_number_of_tiles_that_it_says(name, size):
    policy = POLICIES[name]()
    assert len(cut(photo(*size), policy)) == policy.num_tiles(*size)


# settings


@pytest.mark.parametrize(
    "policy",
    [
        SquarePad(size=224, fill=(1, 2, 3)),
        AnyResTiles(pinpoints=((336, 672), (672, 672))),
        QWEN3,
        NaViTPatches(max_side=512, max_patches=100),
    ],
)
def test_settings_are_json_and_make_the_same_policy(policy):
    assert policy_from_settings(json.loads(json.dumps(policy.settings()))) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert hash(policy) == hash(policy_from_settings(json.loads(json.dumps(policy.settings()))))


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        (SquarePad, {"size": 0}, "SquarePad.size must be an integer between 1 and 8192, got 0"),
        (SquarePad, {"fill": (1, 2)}, r"SquarePad.fill must be 3 numbers, RGB, got \(1, 2\)"),
        (SquarePad, {"fill": (1, 2, 256)}, "SquarePad.fill must be .* got 256"),
        (AnyResTiles, {"pinpoints": ()}, "must be pairs .* of multiples of size=336"),
        (AnyResTiles, {"pinpoints": ((336, 500),)}, "must be pairs .* multiples of size=336"),
        (AnyResTiles, {"pinpoints": (336, 672)}, "must be pairs"),
        (AnyResTiles, {"patch_size": 337}, "patch_size must be an integer between 1 and 336"),
        (QwenPatches, {"merge": 0}, "QwenPatches.merge must be an integer between 1 and 16, got 0"),
        (QwenPatches, {"max_pixels": 3000}, "min_pixels must be an integer between 0 and 3000"),
        (NaViTPatches, {"max_side": 1.5}, "NaViTPatches.max_side must be an integer"),
        (NaViTPatches, {"max_patches": 0}, "NaViTPatches.max_patches must be an integer"),
    ],
)
def test_wrong_settings_are_refused(policy, settings, message):
    with pytest.raises(ConfigError, match=message):
        policy(**settings)


@pytest.mark.parametrize("name", POLICIES)
def test_an_image_without_pixels_is_refused(name):
    for call in ("grid", "num_tiles"):
        with pytest.raises(ConfigError, match="sides of at least 1 pixel, got 0x5"):
            getattr(POLICIES[name](), call)(0, 5)


def test_an_unknown_policy_names_the_known_ones():
    with pytest.raises(ConfigError, match="known: internvl, anyres, square, qwen, navit"):
        policy_from_settings({"policy": ["qwen"]})


# against transformers, where it is installed


@settings(deadline=None)  # the first call imports
@given(sides, sides)
def test_sizes_equal_those_of_transformers(width, height):
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    utils = pytest.importorskip("transformers.image_processing_utils")
    best = utils.select_best_resolution((height, width), list(AnyResTiles().pinpoints))
    assert AnyResTiles().resolution(width, height) == best[::-1]
    if max(width, height) > 200 * min(width, height):
        return
    for policy in (QwenPatches(), QWEN3):
        limits = (policy.patch_size * 2, policy.min_pixels, policy.max_pixels)
        high, wide = qwen.smart_resize(height, width, *limits)
        assert policy.grid(width, height) == (wide // policy.size, high // policy.size)


ONEVISION = AnyResTiles(
    size=384,
    pinpoints=tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7)),
    max_crops=9,
)


def test_onevision_shrinks_the_tokens_of_many_crops():
    # 27 x 27 patches a tile: 729 for the whole image; 4 x 4 crops have 108 x 108, more than
    # 1.1 ** 2 times those of 9 tiles, so each side is divided by 4 / 3
    assert ONEVISION.num_tokens(1536, 1536) == 729 + 81 * 81 + 81
    assert ONEVISION.num_tokens(1152, 1152) == 729 + 81 * 81 + 81
    assert ONEVISION.num_tokens(384, 384) == 729 + 27 * 27 + 27
    assert ONEVISION.num_tiles(1536, 1536) == 17
    unlimited = AnyResTiles(size=384, pinpoints=ONEVISION.pinpoints)
    assert unlimited.num_tokens(1536, 1536) == 729 + 108 * 108 + 108
    assert "max_crops" not in unlimited.settings()
    for policy in (ONEVISION, unlimited):
        assert policy_from_settings(policy.settings()) == policy


@settings(deadline=None)
@given(sides, sides, st.sampled_from([1, 4, 9]))
def test_tokens_of_onevision_equal_those_of_transformers(width, height, max_crops):
    module = pytest.importorskip("transformers.models.llava_onevision.processing_llava_onevision")
    policy = replace(ONEVISION, max_crops=max_crops)

    theirs = object.__new__(module.LlavaOnevisionProcessor)  # all but its counting needs files
    theirs.num_image_tokens = 729
    theirs.vision_aspect_ratio = f"anyres_max_{max_crops}"
    pinpoints = [list(pair) for pair in policy.pinpoints]
    theirs.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
    expected = theirs._get_number_of_features(height, width, 384, 384)
    assert policy.num_tokens(width, height) == expected


def test_an_image_that_no_square_can_hold_is_refused_before_it_is_decoded():
    with pytest.raises(SampleError, match=r"too long to be padded to a square.* got 65500x100"):
        SquarePad().num_tiles(65_500, 100)
