import itertools
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import ConfigError, SampleError
from omniload.images import InternVLTiles, cut_tiles, decode, policy_from_settings, resize, tiles
from tests.images_corpus import encode, exif, photo

# (width, height), max_tiles, (columns, rows): worked out by hand from the published rule with tiles
# of 448 pixels. Half a tile is 100352 pixels; a grid of n tiles wins a tie above n times that.
BY_HAND = [
    ((448, 448), 12, (1, 1)),
    ((633, 633), 12, (1, 1)),  # 400689 pixels: not above 4 * 100352 = 401408
    ((634, 634), 12, (2, 2)),  # 401956: above
    ((900, 900), 12, (2, 2)),  # 810000: not above 9 * 100352 = 903168
    ((1000, 1000), 12, (3, 3)),  # a million: above
    ((640, 480), 12, (4, 3)),  # 4/3 exactly, however small the image
    ((4032, 3024), 12, (4, 3)),
    ((640, 480), 6, (3, 2)),  # no 4/3 within 6 tiles: 3/2 is off by 1/6, 1 by 1/3
    ((1280, 720), 12, (4, 2)),  # 16/9: 2 is nearest; 921600 is above 8 * 100352 = 802816
    ((800, 400), 12, (2, 1)),  # 320000: not above
    ((3000, 1000), 12, (6, 2)),
    ((1654, 2339), 12, (2, 3)),  # 0.7071: 2/3 is off by 0.0405, 3/4 by 0.0429
    ((700, 400), 12, (2, 1)),  # 7/4 lies midway between 3/2 and 2; 280000 pixels
    ((1120, 640), 12, (3, 2)),  # midway again; 716800: above 6 * 100352, not above 8 *
    ((1400, 800), 12, (4, 2)),  # midway again; 1120000: above both
    ((100, 1000), 12, (1, 10)),
    ((1, 5000), 12, (1, 12)),
    ((5000, 1), 12, (12, 1)),
    ((1, 1), 12, (1, 1)),
    ((3000, 1000), 1, (1, 1)),
]


@pytest.mark.parametrize(("size", "max_tiles", "grid"), BY_HAND)
def test_grids_worked_out_by_hand(size, max_tiles, grid):
    policy = InternVLTiles(max_tiles=max_tiles)
    assert policy.grid(*size) == grid
    count = grid[0] * grid[1]
    assert policy.num_tiles(*size) == (count + 1 if count > 1 else 1)
    assert InternVLTiles(max_tiles=max_tiles, thumbnail=False).num_tiles(*size) == count


sides = st.integers(1, 5000)
policies = st.tuples(
    st.integers(1, 6), st.integers(0, 8), st.booleans(), st.sampled_from([28, 448])
)


def make(settings):
    least, more, thumbnail, size = settings
    return InternVLTiles(size=size, min_tiles=least, max_tiles=least + more, thumbnail=thumbnail)


@given(sides, sides, policies)
def test_no_allowed_grid_is_nearer_and_ties_go_by_area(width, height, settings):
    policy = make(settings)
    columns, rows = policy.grid(width, height)
    assert policy.min_tiles <= columns * rows <= policy.max_tiles
    aspect = Fraction(width, height)
    allowed = [
        (c, r)
        for c, r in itertools.product(range(1, policy.max_tiles + 1), repeat=2)
        if policy.min_tiles <= c * r <= policy.max_tiles
    ]
    least = min(abs(aspect - Fraction(c, r)) for c, r in allowed)
    assert float(abs(aspect - Fraction(columns, rows)) - least) < 1e-9
    # of the grids of one shape, the largest that the image fills by more than half, else the least
    same = sorted(c * r for c, r in allowed if c * rows == columns * r)
    filled = [n for n in same if 2 * width * height > n * policy.size**2]
    assert columns * rows == (filled[-1] if filled else same[0])


@given(sides, sides, policies)
def test_a_lower_limit_is_found_again_from_the_number_of_tiles(width, height, settings):
    policy = make(settings)
    for limit in range(1, policy.max_tiles + 1):
        limited = policy.limited(limit)
        again = policy.for_num_tiles(width, height, limited.num_tiles(width, height))
        assert again.grid(width, height) == limited.grid(width, height)
        assert limited.num_tiles(width, height) <= policy.num_tiles(width, height)


def test_a_number_of_tiles_that_no_limit_gives_is_refused():
    with pytest.raises(SampleError, match=r"100x100 pixels can't be cut into 5 tiles: it gives 1 "):
        InternVLTiles().for_num_tiles(100, 100, 5)


def test_with_min_tiles_of_1_the_order_of_grids_with_equal_tiles_never_matters():
    # the docstring says so: neighbouring aspect ratios never share a number of tiles
    for max_tiles in range(1, 41):
        shapes = {}
        for c, r in itertools.product(range(1, max_tiles + 1), repeat=2):
            if c * r <= max_tiles:
                shapes.setdefault(Fraction(c, r), set()).add(c * r)
        for low, high in itertools.pairwise(sorted(shapes)):
            assert not shapes[low] & shapes[high]


def test_of_two_equally_near_grids_with_equal_tiles_the_one_with_fewer_columns_is_first():
    policy = InternVLTiles(min_tiles=2, max_tiles=2)
    assert policy.grid(50, 40) == (1, 2)  # 5/4 lies midway between 1/2 and 2
    assert policy.grid(5000, 4000) == (2, 1)


# pixels


@pytest.mark.parametrize("size", [(640, 480), (30, 90), (50, 50), (7, 1)])
def test_tiles_are_the_resized_image_cut_row_by_row_and_a_thumbnail(size):
    policy = InternVLTiles(size=28)
    image = photo(*size)
    columns, rows = policy.grid(*size)
    cut = tiles(encode(image, "PNG"), policy)
    assert cut.shape == (policy.num_tiles(*size), 3, 28, 28)
    assert cut.dtype == np.uint8
    resized = resize(image, columns * 28, rows * 28)
    for index in range(columns * rows):
        top, left = index // columns * 28, index % columns * 28
        part = resized[top : top + 28, left : left + 28].transpose(2, 0, 1)
        assert np.array_equal(cut[index], part)
    if columns * rows > 1:
        assert np.array_equal(cut[-1], resize(image, 28, 28).transpose(2, 0, 1))


def test_without_a_thumbnail_the_grid_is_all():
    policy = InternVLTiles(size=28, thumbnail=False)
    assert tiles(encode(photo(80, 40), "PNG"), policy).shape == (
        policy.grid(80, 40)[0] * policy.grid(80, 40)[1],
        3,
        28,
        28,
    )


def test_tiles_are_those_of_the_upright_image():
    policy = InternVLTiles(size=28)
    data = encode(photo(90, 30), "JPEG", exif=exif(6))
    assert len(tiles(data, policy)) == policy.num_tiles(30, 90)
    out = np.empty((policy.num_tiles(30, 90), 3, 28, 28), dtype=np.uint8)
    cut_tiles(decode(data), policy, out=out)
    assert np.array_equal(tiles(data, policy), out)


def test_tiles_of_damaged_data_say_why():
    with pytest.raises(SampleError, match="not an image"):
        tiles(b"no image", InternVLTiles())


def test_cut_tiles_refuses_another_shape():
    out = np.empty((2, 3, 28, 28), dtype=np.uint8)
    with pytest.raises(ConfigError, match=r"out must be uint8 \(1, 3, 28, 28\), got uint8 \(2,"):
        cut_tiles(photo(20, 20), InternVLTiles(size=28), out=out)


# settings


@given(policies)
def test_settings_are_json_and_make_the_same_policy(settings):
    policy = make(settings)
    assert policy_from_settings(json.loads(json.dumps(policy.settings()))) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": 0}, "size must be an integer between 1 and 8192, got 0"),
        ({"size": 448.0}, "size must be an integer .* got 448.0"),
        ({"min_tiles": 0}, "min_tiles must be an integer between 1"),
        ({"min_tiles": 3, "max_tiles": 2}, "max_tiles must be an integer between 3 .* got 2"),
        ({"max_tiles": True}, "max_tiles must be an integer .* got True"),
        ({"thumbnail": 1}, "thumbnail must be a bool, got 1"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        InternVLTiles(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "unknown tiling policy None; known: internvl"),
        ({"policy": "other"}, "unknown tiling policy 'other'"),
        ({"policy": "internvl", "colour": 3}, r"has the settings .* got also \['colour'\]"),
    ],
)
def test_wrong_stored_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        policy_from_settings(settings)


def test_an_image_without_pixels_has_no_grid():
    with pytest.raises(ConfigError, match="sides of at least 1 pixel, got 0x5"):
        InternVLTiles().grid(0, 5)
