"""The buffered grouping: equal to its slow reference, the same offline and as a stream."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import rng
from omniload.errors import ConfigError
from omniload.grouping.buffered import BufferedPacker, BufferedSettings, buffered
from omniload.grouping.classes import MOST_CLASSES, class_bounds
from omniload.types import Budget
from tests import naive_buffered
from tests.strategies import listed, problems

KEY = (3, 1, 4)
INT32_MAX = 2**31 - 1


def constants():
    return st.builds(
        BufferedSettings,
        buffer=st.integers(1, 12),
        retries=st.integers(1, 4),
        reach=st.integers(1, 5),
        slack_weight=st.sampled_from([0, 16, 32, 64, 200]),
        dummy_tokens=st.sampled_from([0, 0, 3, 300]),
    )


@st.composite
def many_tiles(draw):
    """Problems whose tiles don't fit 64 classes, such as patches."""
    tiles = draw(st.sampled_from([64, 100, 5000, INT32_MAX]))
    budget = Budget(tokens=draw(st.sampled_from([50, 9000])), tiles=tiles)
    size = st.one_of(st.integers(0, tiles), st.integers(0, min(tiles, 90)))
    rows = draw(st.lists(st.tuples(st.integers(1, budget.tokens), size), max_size=40))
    columns = np.array(rows, np.int32).reshape(-1, 2)
    return budget, columns[:, 0].copy(), columns[:, 1].copy()


def naive(tokens, tiles, budget, constants):
    stream = list(zip(tokens.tolist(), tiles.tolist(), strict=True))
    if budget.tiles is None:
        stream = [(count, 0) for count, _ in stream]
    bounds = class_bounds(budget.tiles).tolist()
    return naive_buffered.buffered(stream, budget=budget, settings=constants, bounds=bounds)


def streamed(packer, tokens, tiles, cuts=()):
    found, begin = [], 0
    for end in [*sorted(cuts), len(tokens)]:
        found += listed(packer.push(tokens[begin:end], tiles[begin:end]))
        begin = max(begin, end)
    return found + listed(packer.flush())


def lengths(count, seed=0, text=True):
    generator = np.random.default_rng(seed)
    tiles = generator.choice([0, 1, 3, 5, 7] if text else [1, 3, 4, 5], size=count)
    extra = np.exp(generator.normal(5.3, 0.8, size=count)).astype(int)
    return np.minimum(256 * tiles + extra, 4096).astype(np.int32), tiles.astype(np.int32)


@settings(deadline=None)  # the first call may compile
@given(problem=st.one_of(problems(max_rows=40), many_tiles()), constants=constants())
def test_equals_the_plain_python_reference_group_for_group(problem, constants):
    budget, tokens, tiles = problem
    packer = BufferedPacker(budget=budget, settings=constants)
    assert streamed(packer, tokens, tiles) == naive(tokens, tiles, budget, constants)


@pytest.mark.parametrize(
    "budget",
    [Budget(tokens=4096, tiles=12), Budget(tokens=16384, tiles=52), Budget(tokens=9001),
     Budget(tokens=4096, tiles=14, samples=3), Budget(tokens=100_000, tiles=390)],
)  # fmt: skip
def test_equals_the_reference_on_lengths_of_images_and_text(budget):
    tokens, tiles = lengths(400)
    constants = BufferedSettings(buffer=64)
    packer = BufferedPacker(budget=budget, settings=constants)
    assert streamed(packer, tokens, tiles) == naive(tokens, tiles, budget, constants)


@settings(deadline=None)
@given(problem=problems(), constants=constants())
def test_every_row_is_in_one_group_and_no_group_passes_the_budget(problem, constants):
    budget, tokens, tiles = problem
    groups = buffered(tokens, tiles, budget=budget, key=KEY, settings=constants)
    assert sorted(groups.rows.tolist()) == list(range(len(tokens)))
    sizes = np.diff(groups.offsets)
    assert (sizes > 0).all()
    assert (groups.sums(tokens) <= budget.tokens).all()
    if budget.tiles is not None:
        assert (groups.sums(tiles) <= budget.tiles).all()
    if budget.samples is not None:
        assert (sizes <= budget.samples).all()


@settings(deadline=None)
@given(
    problem=problems(),
    constants=constants(),
    cuts=st.lists(st.integers(0, 60), max_size=4),
)
def test_stream_gives_the_same_groups_however_it_is_cut(problem, constants, cuts):
    budget, tokens, tiles = problem
    whole = streamed(BufferedPacker(budget=budget, settings=constants), tokens, tiles)
    cut = streamed(BufferedPacker(budget=budget, settings=constants), tokens, tiles, cuts)
    assert cut == whole
    order = rng.permutation(len(tokens), *KEY, 1)
    packer = BufferedPacker(budget=budget, settings=constants)
    online = [order[group].tolist() for group in streamed(packer, tokens[order], tiles[order])]
    assert online == listed(buffered(tokens, tiles, budget=budget, key=KEY, settings=constants))


@settings(deadline=None)
@given(problem=problems(), constants=constants(), cut=st.integers(0, 60))
def test_pending_samples_are_all_that_a_stream_needs_to_go_on(problem, constants, cut):
    budget, tokens, tiles = problem
    packer = BufferedPacker(budget=budget, settings=constants)
    packer.push(tokens[:cut], tiles[:cut])
    left = packer.pending()
    assert len(left) < constants.buffer
    later = np.arange(min(cut, len(tokens)), len(tokens))
    expected = listed(packer.push(tokens[cut:], tiles[cut:])) + listed(packer.flush())
    again = BufferedPacker(budget=budget, settings=constants)
    assert len(again.push(tokens[left], tiles[left])) == 0
    numbers = np.concatenate([left, later])
    found = listed(again.push(tokens[later], tiles[later])) + listed(again.flush())
    assert [numbers[group].tolist() for group in found] == expected
    assert len(packer.pending()) == 0


def test_packer_goes_on_after_a_flush():
    tokens, tiles = lengths(300)
    packer = BufferedPacker(budget=Budget(tokens=4096, tiles=13))
    first = streamed(packer, tokens, tiles)
    second = streamed(packer, tokens, tiles)
    assert [[row - 300 for row in group] for group in second] == first


def test_no_sample_waits_longer_than_the_buffer():
    tokens, tiles = lengths(20_000)
    groups = buffered(tokens, tiles, budget=Budget(tokens=4096, tiles=9), key=KEY)
    arrival = np.argsort(rng.permutation(len(tokens), *KEY, 1))[groups.rows]
    entered = np.searchsorted(groups.offsets, arrival + 1 - 1024)  # groups made before
    waited = np.repeat(np.arange(len(groups)), np.diff(groups.offsets)) - entered
    assert 100 < waited.max() < 1024


def test_order_never_changes():
    # golden: a change here is a change of sample order for every user
    tokens = (1 + rng.random_u64(3000, 1) % np.uint64(1500)).astype(np.int32)
    tiles = (rng.random_u64(3000, 2) % np.uint64(6)).astype(np.int32)
    digests = []
    for budget in (Budget(tokens=4096, tiles=13), Budget(tokens=20_000, tiles=70, samples=30)):
        groups = buffered(tokens, tiles, budget=budget, key=KEY)
        data = groups.rows.astype("<i8").tobytes() + groups.offsets.astype("<i8").tobytes()
        digests.append(hashlib.blake2b(data, digest_size=8).hexdigest())
    assert digests == ["f35b3e7dea55f0ee", "9c7eb0439bb37397"]


@pytest.mark.parametrize(
    ("tokens", "tiles", "budget", "expected"),
    [
        ([], [], Budget(tokens=1), []),
        ([5], [0], Budget(tokens=5), [1]),
        ([10] * 9, [1] * 9, Budget(tokens=30, tiles=9), [3, 3, 3]),
        ([10] * 9, [1] * 9, Budget(tokens=300, tiles=2), [1, 2, 2, 2, 2]),
        ([10] * 9, [0] * 9, Budget(tokens=30, tiles=0), [3, 3, 3]),
        ([INT32_MAX, 1, 1], [INT32_MAX, 0, 0], Budget(tokens=INT32_MAX, tiles=INT32_MAX), [1, 2]),
        ([INT32_MAX] * 3, [0] * 3, Budget(tokens=INT32_MAX), [1, 1, 1]),
        ([1] * 3, [INT32_MAX] * 3, Budget(tokens=9), [3]),
        ([4096] + [8] * 512, [0] * 513, Budget(tokens=4096, tiles=0), [1, 512]),
        ([7] * 5, [1] * 5, Budget(tokens=100, samples=2), [1, 2, 2]),
    ],
)
def test_adversarial_lengths(tokens, tiles, budget, expected):
    groups = buffered(np.array(tokens, np.int32), np.array(tiles, np.int32), budget=budget, key=KEY)
    assert sorted(map(len, listed(groups))) == expected


def test_group_without_tiles_keeps_room_for_a_dummy():
    tokens, tiles = lengths(4000)
    tiles[::2] = 0
    tokens[tiles == 0] = np.minimum(tokens[tiles == 0], 3000)
    constants = BufferedSettings(dummy_tokens=300)
    groups = buffered(tokens, tiles, budget=Budget(tokens=4096, tiles=7), key=KEY,
                      settings=constants)  # fmt: skip
    bare = groups.sums(tiles) == 0
    assert bare.sum() > 20
    assert groups.sums(tokens)[bare].max() <= 4096 - 300


def test_groups_are_near_the_lower_bound():
    tokens, tiles = lengths(60_000, text=False)
    cap = -(-4096 * int(tiles.sum()) // int(tokens.sum()))
    groups = buffered(tokens, tiles, budget=Budget(tokens=4096, tiles=cap), key=KEY)
    bound = max(-(-int(tokens.sum()) // 4096), -(-int(tiles.sum()) // cap))
    assert len(groups) <= 1.005 * bound


@given(st.one_of(st.none(), st.integers(0, 200), st.integers(0, INT32_MAX)))
def test_tile_classes_rise_to_the_cap_and_are_64_at_most(cap):
    bounds = class_bounds(cap)
    assert 1 <= len(bounds) <= MOST_CLASSES
    assert bounds[-1] == (cap or 0)
    assert bounds[0] == 0
    assert (np.diff(bounds) > 0).all()
    if cap is not None and cap < MOST_CLASSES:
        assert bounds.tolist() == list(range(cap + 1))


def test_large_tile_counts_share_classes_of_a_tenth_at_most():
    for cap in (64, 390, 5000, 131_072):
        bounds = class_bounds(cap)
        large = bounds[bounds > 16]
        assert (np.diff(large) <= np.maximum(large[1:] // 4, 1)).all()
        assert len(bounds) > 48


def test_wrong_samples_and_constants_are_refused():
    packer = BufferedPacker(budget=Budget(tokens=10, tiles=3))
    with pytest.raises(ConfigError, match=r"expected 1 to 10 tokens, got 11 \(sample 1 of"):
        packer.push([5, 11], [0, 0])
    with pytest.raises(ConfigError, match="expected 1 to 10 tokens, got 0"):
        packer.push([0], [0])
    with pytest.raises(ConfigError, match="expected 0 to 3 tiles, got 4"):
        packer.push([5], [4])
    with pytest.raises(ConfigError, match="expected 0 to 3 tiles, got -1"):
        packer.push([5], [-1])
    with pytest.raises(ConfigError, match="one entry a sample: expected 1, got 2"):
        packer.push([5], [1, 1])
    with pytest.raises(ConfigError, match="column of integers, got float64"):
        packer.push([5.5], [1])
    assert len(packer.pending()) == 0
    for name, value in (("buffer", 0), ("buffer", 32768), ("retries", True), ("reach", 0),
                        ("slack_weight", -1), ("dummy_tokens", 1.5)):  # fmt: skip
        with pytest.raises(ConfigError, match=f"{name} must be"):
            BufferedSettings(**{name: value})
