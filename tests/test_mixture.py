import pickle
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.index import LengthIndex
from omniload.mixture import Mixture, MixtureSet
from omniload.mixture.part import RowPart, choose_rows
from omniload.plan import make_plan
from omniload.plan.dealt import DealtWindows
from omniload.source import lengths_of
from omniload.types import Budget
from tests.loader_data import MemoryRows


def mix(*sizes, seed=0, epoch_rows=None, **options):
    """A mixture of rows in memory; `options` are lists, one value a set."""
    sets = [
        MixtureSet(
            source=MemoryRows(size, seed=number),
            name=f"set{number}",
            **{key: values[number] for key, values in options.items()},
        )
        for number, size in enumerate(sizes)
    ]
    return Mixture(sets, seed=seed, epoch_rows=epoch_rows)


def origins(mixture, epoch):
    """(set, row of it) of every row of an epoch."""
    rows = mixture.at_epoch(epoch)
    return [rows.origin(row) for row in range(len(rows))]


@given(st.integers(1, 5000), st.integers(1, 9), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_parts_of_a_walk_have_every_row_once(num_rows, parts, seed):
    seen = np.zeros(num_rows, np.int64)
    for part in range(parts):
        begin, end = part * num_rows // parts, (part + 1) * num_rows // parts
        chosen = choose_rows(num_rows, begin, end, seed=seed)
        assert chosen.sum() == end - begin
        seen += chosen
    assert (seen == 1).all()


@given(st.integers(1, 20_000), st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_a_part_finds_its_rows_and_counts_those_below(num_rows, start, share, seed):
    begin = int(start * (num_rows - 1))
    size = int(share * num_rows)
    chosen = choose_rows(num_rows, begin, begin + size, seed=seed)
    part, rows = RowPart(chosen), np.flatnonzero(chosen)
    assert len(part) == len(rows) == size
    assert np.array_equal(part.mask(), chosen)
    for place in range(0, size, max(1, size // 20)):
        assert part.row(place) == rows[place]
    bounds = np.array([0, num_rows // 3, num_rows])
    assert np.array_equal(part.below(bounds), np.searchsorted(rows, bounds))


def test_every_part_of_a_walk_is_spread_over_the_whole_set():
    for part in range(4):
        chosen = choose_rows(100_000, part * 25_000, (part + 1) * 25_000, seed=3)
        counts = np.add.reduceat(chosen, np.arange(0, 98 * 1024, 1024), dtype=np.int64)
        assert np.ptp(counts[:-1]) <= 1


def test_repeat_two_gives_each_row_twice_as_rows_of_their_own():
    mixture = mix(7, 5, repeat=[2, 1])
    assert len(mixture) == 19
    assert mixture.at_epoch(3) is mixture
    assert Counter(origins(mixture, 0)) == {
        **{(0, row): 2 for row in range(7)},
        **{(1, row): 1 for row in range(5)},
    }
    first, again = mixture.read(3), mixture.read(10)
    assert (first.row, again.row) == (3, 10)
    assert np.array_equal(first.input_ids, again.input_ids)
    assert first.source == "set0"
    assert first.shard == "set0/shard-0"


@pytest.mark.parametrize("repeat", [0.5, "1/3", 1 / 3, 0.4, 2.5, Fraction(3, 7)])
def test_a_fraction_walks_through_the_set_over_epochs(repeat):
    exact = Fraction(repeat).limit_denominator(1000)
    mixture = mix(1500, 40, repeat=[repeat, 1])
    seen, epochs = Counter(), exact.denominator
    for epoch in range(epochs):
        found = Counter(origins(mixture, epoch))
        ones = [count for (number, _), count in found.items() if number == 0]
        assert max(ones) - min(ones) <= 1  # no row comes again before all others came
        assert sum(ones) == int((epoch + 1) * exact * 1500) - int(epoch * exact * 1500)
        seen += found
    assert set(seen.values()) == {exact.numerator, epochs}
    assert all(seen[0, row] == exact.numerator for row in range(1500))


def test_halves_of_a_set_are_random_and_depend_on_the_seed():
    halves = [
        {row for number, row in origins(mix(4000, 2, repeat=[0.5, 1], seed=seed), 0) if number == 0}
        for seed in (0, 0, 1)
    ]
    assert halves[0] == halves[1] != halves[2]
    assert 900 < len(halves[0] & halves[2]) < 1100


def test_two_equal_sets_are_not_walked_through_alike():
    rows = MemoryRows(4000)
    sets = [MixtureSet(source=rows, name=name, repeat=0.5) for name in "ab"]
    halves = [set(), set()]
    for number, row in origins(Mixture(sets), 0):
        halves[number].add(row)
    assert 900 < len(halves[0] & halves[1]) < 1100


@given(
    st.lists(st.tuples(st.integers(50, 3000), st.integers(1, 50)), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(400, 5000)),
)
@settings(max_examples=40, deadline=None)
def test_weights_are_shares_of_the_rows_to_within_one(sets, epoch_rows):
    sizes, weights = zip(*sets, strict=True)
    mixture = mix(*sizes, weight=weights, epoch_rows=epoch_rows)
    total = sum(weights)
    for epoch in (0, 1, 5):
        rows = mixture.at_epoch(epoch)
        counts = np.diff(rows.set_starts)
        assert (abs(counts - len(rows) * np.array(weights) / total) < 1).all()
        if epoch_rows is not None:
            assert len(rows) == epoch_rows
        else:
            assert (counts <= np.array(sizes)).all()
            # one more share and a set would run out
            assert any(
                count + 1 + weight / total > size
                for count, size, weight in zip(counts, sizes, weights, strict=True)
            )


def test_a_set_with_epochs_is_used_up():
    mixture = mix(10, 4, repeat=[0.5, 1], epochs=[1, None])
    found = [Counter(origins(mixture, epoch)) for epoch in range(4)]
    assert [sum(n for (s, _), n in one.items() if s == 0) for one in found] == [5, 5, 0, 0]
    assert all(sum(one[0, row] for one in found) == 1 for row in range(10))
    ends = mix(10, 4, epochs=[2, 1])
    assert [len(ends.at_epoch(epoch)) for epoch in (0, 1)] == [14, 10]
    with pytest.raises(ConfigError, match="epoch 2 of mixture of set0, set1 has no rows"):
        ends.at_epoch(2)


def test_lengths_places_and_sets_agree_for_every_row():
    mixture = mix(150, 90, 260, repeat=[1.5, 1, 0.5], seed=4)
    for epoch in (0, 1):
        rows = mixture.at_epoch(epoch)
        sets = [MemoryRows(size, seed=number) for number, size in enumerate((150, 90, 260))]
        numbers = rows.source_of(np.arange(len(rows)))
        assert rows.source_of(5) == 0
        shards = []
        for row in range(len(rows)):
            number, inner = rows.origin(row)
            source = sets[number]
            assert numbers[row] == number
            assert rows.index.num_tokens[row] == source.index.num_tokens[inner]
            assert rows.lengths_of(row)[0] == source.index.num_tokens[inner]
            shard, local = rows.locate(row)
            assert rows.shard_names[shard] == f"set{number}/{source.shard_names[inner // 100]}"
            assert local == inner % 100
            record = rows.read(row)
            assert (record.row, record.key) == (row, f"key-{inner}")
            shards.append(shard)
        starts = np.flatnonzero(np.diff(shards, prepend=-1))
        assert set(starts) <= set(rows.shard_starts)
        with pytest.raises(ConfigError, match="row must be between 0 and"):
            rows.read(len(rows))


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=5),
    st.integers(1, 300),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_window_has_its_share_of_each_set(sizes, window_rows, shuffle, with_shards, left):
    starts = np.concatenate([[0], np.cumsum(sizes)])
    num_rows = int(starts[-1])
    left_out = np.flatnonzero(np.random.default_rng(left).random(num_rows) < 0.2 * left)
    windows = DealtWindows(
        num_rows,
        window_rows=window_rows,
        sets=starts,
        starts=np.unique([*range(0, num_rows, 37), num_rows]) if with_shards else None,
        key=(1, left) if shuffle else None,
        left_out=left_out,
    )
    kept = np.setdiff1d(np.arange(num_rows), left_out)
    share = np.histogram(kept, starts)[0] / windows.count
    found = [windows.rows(window) for window in range(windows.count)]
    for rows in found:
        assert (abs(np.histogram(rows, starts)[0] - share) < 1).all()
    assert np.array_equal(np.sort(np.concatenate(found)), kept)


def test_without_shuffling_sets_are_interleaved():
    starts = np.array([0, 600, 900, 1000])
    windows = DealtWindows(
        1000,
        window_rows=100,
        sets=starts,
        starts=None,
        key=None,
        left_out=np.zeros(0, np.int64),
    )
    order = np.concatenate([windows.rows(window) for window in range(windows.count)])
    for number in range(3):
        own = order[(order >= starts[number]) & (order < starts[number + 1])]
        assert (np.diff(own) == 1).all()  # each set in its own order
    shares = np.diff(starts) / 1000
    for size in (10, 50, 137):
        for begin in range(0, 1000 - size):
            counts = np.histogram(order[begin : begin + size], starts)[0]
            assert (abs(counts - size * shares) <= 2).all()


def test_a_plan_reads_each_row_once_and_mixes_every_window():
    rng = np.random.default_rng(0)
    index = LengthIndex.from_arrays(
        num_tokens=rng.integers(2, 60, 3000), num_tiles=np.zeros(3000, np.int32)
    )
    sets = [0, 2000, 2900, 3000]
    options = {"budget": Budget(tokens=128), "window_rows": 300, "dp_world_size": 2}
    plan = make_plan(index, set_starts=sets, **options)
    fed = np.concatenate([plan.step_groups(step).rows for step in range(plan.num_steps)])
    assert np.array_equal(np.sort(fed), np.arange(3000))
    for begin in range(0, 3000, 300):  # the windows come one after the other
        counts = np.histogram(fed[begin : begin + 300], sets)[0]
        assert (abs(counts - [200, 90, 10]) <= (12, 12, 4)).all()
    assert make_plan(index, **options).order_fingerprint != plan.order_fingerprint
    with pytest.raises(ConfigError, match="set_starts must begin with 0 and end with 3000"):
        make_plan(index, set_starts=[0, 2000], **options)


def test_the_fingerprint_covers_sets_shares_and_seed_and_not_names():
    same = mix(40, 50, repeat=[0.5, 2])
    renamed = Mixture(
        [
            MixtureSet(source=MemoryRows(40, seed=0), name="x", repeat=Fraction(1, 2)),
            MixtureSet(source=MemoryRows(50, seed=1), name="y", repeat="2"),
        ]
    )
    assert same.fingerprint == renamed.fingerprint == same.at_epoch(1).fingerprint
    others = [
        mix(40, 50, repeat=[0.5, 1]),
        mix(40, 50, repeat=[0.5, 2], seed=1),
        mix(40, 51, repeat=[0.5, 2]),
        mix(40, 50, repeat=[0.5, 2], epochs=[1, None]),
        mix(40, 50, weight=[1, 5]),
        mix(40, 50, weight=[1, 5], epoch_rows=12),
    ]
    fingerprints = [other.fingerprint for other in others]
    assert len({same.fingerprint, *fingerprints}) == 7
    assert all(len(text) == 32 for text in fingerprints)


def test_it_pickles_without_its_lists():
    mixture = mix(3000, 500, repeat=[0.5, 3], seed=2)
    bare = len(pickle.dumps(mixture))
    expected = origins(mixture, 1)
    assert len(pickle.dumps(mixture)) == bare
    copy = pickle.loads(pickle.dumps(mixture))
    assert origins(copy, 1) == expected
    assert copy.fingerprint == mixture.fingerprint
    assert len(copy) == len(mixture)


def test_figures_say_what_each_set_gives():
    mixture = mix(100, 60, repeat=[0.5, 2])
    for epoch in (0, 1):
        first, second = mixture.figures(epoch)
        assert (first.rows, second.rows) == (50, 120)
        assert (first.name, first.location, first.stored_rows) == ("set0", "memory", 100)
        assert first.share_of_rows == 50 / 170
        rows = mixture.at_epoch(epoch)
        assert first.tokens == rows.index.num_tokens[:50].sum()
        assert first.share_of_tokens + second.share_of_tokens == pytest.approx(1)
        assert (second.tiles, second.share_of_tiles) == (0, 0)
        assert (first.passes, first.passes_so_far) == (0.5, 0.5 * (epoch + 1))
        assert first.as_dict()["loss_tokens"] == rows.index.num_loss_tokens[:50].sum()


def test_a_mixture_of_whole_sets_may_be_a_set_of_another():
    inner = mix(250, 30, repeat=[1, 2])
    outer = Mixture(
        [MixtureSet(source=inner, name="inner"), MixtureSet(source=MemoryRows(40), repeat=0.5)]
    )
    assert outer.set_names == ("inner", "memory")
    assert len(outer) == 330
    assert outer.read(260).source == "inner/set1"
    assert outer.read(320).source == "memory"
    assert outer.shard_names[:2] == ("inner/set0/shard-0", "inner/set0/shard-1")
    with pytest.raises(ConfigError, match="same rows in all epochs"):
        Mixture([MixtureSet(source=outer)])


def test_hints_go_to_the_set_that_has_the_shard():
    rows = [MemoryRows(250, seed=0), MemoryRows(130, seed=1)]
    rows[1].location = "s3://bucket/x"
    mixture = Mixture([MixtureSet(source=one) for one in rows])
    assert mixture.wants_prefetch
    mixture.prefetch([4, 0, 3])
    assert rows[0].prefetched == [(0,)] or rows[0].prefetched == [[0]]
    assert [list(hint) for hint in rows[1].prefetched] == [[1, 0]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeat": [0, 1]}, "repeat of a set must be above 0"),
        ({"repeat": [-1, 1]}, "repeat of a set must be above 0"),
        ({"repeat": [float("nan"), 1]}, "repeat of a set must be a number"),
        ({"repeat": ["half", 1]}, "repeat of a set must be a number, got 'half'"),
        ({"repeat": [True, 1]}, "repeat of a set must be a number, got True"),
        ({"weight": [1, None]}, r"all sets .* must have a weight, or none: \['set1'\]"),
        ({"weight": [1, 1], "repeat": [1, None]}, "either repeat or weight"),
        ({"weight": [1, 1], "epochs": [1, None]}, "epochs goes with repeat"),
        ({"epoch_rows": 10}, "epoch_rows goes with weights"),
        ({"weight": [1, 1], "epoch_rows": 0}, "epoch_rows of a mixture must be an integer"),
        ({"weight": [1, 1000], "epoch_rows": 10}, "set0 gets none of 10 rows"),
        ({"seed": -1}, "seed of a mixture"),
    ],
)
def test_wrong_shares_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        mix(20, 30, **options)


def test_wrong_sets_are_refused():
    rows = MemoryRows(5)
    for sets in ([], None, [rows], "ab"):
        with pytest.raises(ConfigError, match="sets must be a list of one or more"):
            Mixture(sets)
    with pytest.raises(ConfigError, match="must be a path, a URL or an opened set"):
        MixtureSet(source=5)
    with pytest.raises(ConfigError, match=r"names of sets must differ, got \['a'\]"):
        Mixture([MixtureSet(source=rows, name="a"), MixtureSet(source=rows, name="a")])
    assert Mixture([MixtureSet(source=rows)] * 3).set_names == ("memory", "memory-2", "memory-3")
    with pytest.raises(ConfigError, match="a set of a mixture must have rows: empty"):
        Mixture([MixtureSet(source=rows), MixtureSet(source=MemoryRows(0), name="empty")])


def test_workers_make_no_index_of_their_own():
    mixture = mix(300, 200, repeat=[0.5, 1])
    copy = pickle.loads(pickle.dumps(mixture)).at_epoch(1)
    for row in range(0, len(copy), 7):
        assert lengths_of(copy, row)[0] == len(copy.read(row).input_ids)
    assert "index" not in vars(copy)
    rows = MemoryRows(30)
    assert lengths_of(rows, 5) == (
        *(int(rows.index.num_tokens[5]),),
        0,
        len(rows.read(5).labels) - 1,
    )
