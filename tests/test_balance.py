"""Balance inside a step: the same samples, within the budget, and loads that become alike."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import rng
from omniload.balance import StepBalance, dummy_slots
from omniload.costs import CostModel
from omniload.errors import ConfigError
from omniload.grouping.buffered import buffered
from omniload.index import LengthIndex
from omniload.metrics import dist_ratio
from omniload.plan import make_plan
from omniload.types import Budget, Groups
from tests.strategies import listed

BALANCES = [
    StepBalance(),
    StepBalance(sync="micro-step"),
    StepBalance(uniform_modality=True, dummy_tokens=3),
    StepBalance(sync="micro-step", uniform_modality=True),
    StepBalance(cost=CostModel(tile=3.0, token=0.01, token_pair=1e-5, fixed=2.0)),
    StepBalance(sync="micro-step", cost=CostModel(tile=1.0, token=0.0)),
]


@st.composite
def steps(draw):
    """(groups, tokens, tiles, budget, ranks, accumulation), fillers at the end."""
    ranks, accumulation = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    slots = ranks * accumulation
    filled = draw(st.integers(max(0, slots - ranks - 1), slots))
    largest = draw(st.sampled_from([3, 40, 2**31 - 1]))
    samples = st.lists(
        st.tuples(st.integers(1, largest), st.sampled_from([0, 0, 1, 4, largest])),
        min_size=1,
        max_size=6,
    )
    groups = [draw(samples) for _ in range(filled)] + [[]] * (slots - filled)
    sizes = np.array([size for group in groups for size in group], np.int64).reshape(-1, 2)
    offsets = np.cumsum([0, *map(len, groups)])
    step = Groups(rows=np.arange(len(sizes)) + 7, offsets=offsets)
    most = [max(1, max((sum(s[c] for s in g) for g in groups), default=1)) for c in (0, 1)]
    tiles = draw(st.sampled_from([None, min(most[1], 2**31 - 1)]))
    if max(most) > 2**31 - 1:
        sizes, tiles = sizes // 8, None  # no budget could hold the groups otherwise
        sizes[:, 0] += 1
        most[0] = most[0] // 8 + 6
    budget = Budget(tokens=min(most[0] + draw(st.integers(0, 5)), 2**31 - 1), tiles=tiles)
    columns = sizes.astype(np.int32)
    return step, columns[:, 0].copy(), columns[:, 1].copy(), budget, ranks, accumulation


def arranged(balance, problem):
    step, tokens, tiles, budget, ranks, accumulation = problem
    found = balance(
        step,
        num_tokens=tokens,
        num_tiles=tiles,
        budget=budget,
        dp_world_size=ranks,
        accumulation=accumulation,
    )
    place = np.searchsorted(step.rows, found.rows)
    return found, tokens[place], tiles[place]


def sums(groups, column):
    return np.diff(np.concatenate([[0], np.cumsum(column.astype(np.int64))])[groups.offsets])


@settings(deadline=None)  # the first call may compile
@given(problem=steps(), balance=st.sampled_from(BALANCES))
def test_samples_of_a_step_and_the_number_of_its_groups_never_change(problem, balance):
    step, _, _, budget, _, _ = problem
    before = step.rows.copy()
    found, tokens, tiles = arranged(balance, problem)
    assert step.rows.tolist() == before.tolist()
    assert sorted(found.rows.tolist()) == step.rows.tolist()
    assert len(found) == len(step)
    assert ((np.diff(found.offsets) > 0) == (np.diff(step.offsets) > 0)).all()  # fillers stay
    assert (sums(found, tokens) <= budget.tokens).all()
    if budget.tiles is not None:
        assert (sums(found, tiles) <= budget.tiles).all()
    again, _, _ = arranged(balance, problem)
    assert listed(again) == listed(found)


@settings(deadline=None)
@given(problem=steps())
def test_groups_keep_their_number_of_samples(problem):
    step = problem[0]
    for balance in BALANCES:
        found, _, _ = arranged(balance, problem)
        assert sorted(np.diff(found.offsets)) == sorted(np.diff(step.offsets))


@settings(deadline=None)
@given(problem=steps(), sync=st.sampled_from(["step", "micro-step"]))
def test_uniform_modality_leaves_no_more_mixed_micro_steps_than_one(problem, sync):
    step, _, tiles, _, ranks, accumulation = problem
    found, _, moved = arranged(StepBalance(sync=sync, uniform_modality=True), problem)
    needed = dummy_slots(found, moved, dp_world_size=ranks)
    assert needed.shape == (accumulation, ranks)
    assert needed.any(axis=1).sum() <= 1
    assert (sums(found, moved) == 0).sum() <= (sums(step, tiles) == 0).sum()


def lengths(count, seed=0, shares=(6, 30, 26, 10, 28)):
    words = rng.random_u64(count, seed, 1) % np.uint64(100)
    tiles = np.array([0, 1, 3, 4, 5])[np.searchsorted(np.cumsum(shares), words, side="right")]
    extra = 30 + rng.random_u64(count, seed, 2).astype(np.float64) / 2**64
    text = (extra * np.exp(3 * (rng.random_u64(count, seed, 3).astype(np.float64) / 2**64))) + 30
    text = np.where(tiles == 0, 4 * text, text).astype(np.int64)
    return (256 * tiles + text).astype(np.int32), tiles.astype(np.int32)


def planned(tokens, tiles, budget, balance, ranks, accumulation, sync):
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)
    groups = buffered(tokens, tiles, budget=budget, key=(0,))
    slots = ranks * accumulation
    ratios = []
    for first in range(0, len(groups) // slots * slots, slots):
        offsets = groups.offsets[first : first + slots + 1]
        step = Groups(rows=groups.rows[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
        if balance is not None:
            step = balance(
                step,
                num_tokens=tokens[step.rows],
                num_tiles=tiles[step.rows],
                budget=budget,
                dp_world_size=ranks,
                accumulation=accumulation,
            )
        loads = [
            step.sums(column).reshape(accumulation, ranks)
            for column in (index.num_tiles, index.num_tokens)
        ]
        if sync == "step":
            loads = [load.sum(axis=0) for load in loads]
        ratios.append([dist_ratio(load) for load in loads])
    return np.mean(ratios, axis=0)


@pytest.mark.parametrize(
    ("tokens_cap", "accumulation", "sync", "most"),
    [
        (4096, 4, "step", (0.02, 0.002)),
        (4096, 4, "micro-step", (0.03, 0.002)),
        (16384, 1, "step", (0.012, 0.001)),
    ],
)
def test_loads_of_image_data_come_near_their_bounds(tokens_cap, accumulation, sync, most):
    tokens, tiles = lengths(8_000, shares=(0, 30, 30, 12, 28))
    cap = -(-tokens_cap * int(tiles.sum()) // int(tokens.sum()))
    budget = Budget(tokens=tokens_cap, tiles=cap)
    before = planned(tokens, tiles, budget, None, 16, accumulation, sync)
    after = planned(tokens, tiles, budget, StepBalance(sync=sync), 16, accumulation, sync)
    assert (after <= before).all()
    assert (after <= most).all()


def test_uniform_modality_makes_mixed_micro_steps_rarer():
    tokens, tiles = lengths(4000, shares=(60, 10, 10, 10, 10))
    budget = Budget(tokens=2200, tiles=5)
    tokens = np.minimum(tokens, 2200)
    groups = buffered(tokens, tiles, budget=budget, key=(0,))
    for sync in ("step", "micro-step"):
        before, after = 0, 0
        for first in range(0, len(groups) // 32 * 32, 32):
            offsets = groups.offsets[first : first + 33]
            step = Groups(rows=groups.rows[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
            found = StepBalance(sync=sync, uniform_modality=True)(
                step, num_tokens=tokens[step.rows], num_tiles=tiles[step.rows], budget=budget,
                dp_world_size=8, accumulation=4,
            )  # fmt: skip
            before += dummy_slots(step, tiles[step.rows], dp_world_size=8).any(axis=1).sum()
            after += dummy_slots(found, tiles[found.rows], dp_world_size=8).any(axis=1).sum()
        assert before > 20
        assert after < before / 3


def test_dummy_slots_are_those_without_tiles_beside_some_with():
    # slots: (2 tiles), (none) | (none), filler | (none), (none)
    step = Groups(rows=np.arange(5), offsets=np.array([0, 1, 2, 3, 3, 4, 5]))
    needed = dummy_slots(step, [2, 0, 0, 0, 0], dp_world_size=2)
    assert needed.tolist() == [[False, True], [False, False], [False, False]]


def test_two_swaps_at_once_where_neither_fits_alone():
    # both groups are full, and no sample with tiles has as many tokens as one with fewer tiles
    tokens = np.array([10, 20, 9, 5, 5, 5, 5, 5, 5, 12, 18, 7, 7, 5, 5, 5, 5, 5], np.int32)
    tiles = np.array([3, 3, 4, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0], np.int32)
    step = Groups(rows=np.arange(18), offsets=np.array([0, 9, 18]))
    budget = Budget(tokens=69, tiles=12)
    problem = (step, tokens, tiles, budget, 2, 1)
    found, moved_tokens, moved_tiles = arranged(StepBalance(), problem)
    assert sums(step, tiles).tolist() == [10, 2]
    assert sums(found, moved_tiles).tolist() == [6, 6]
    assert sums(found, moved_tokens).tolist() == [69, 69]


class AsEmitted:
    fingerprint = "as emitted"

    def __call__(self, step, **_):
        return step


def test_plan_takes_a_balance_and_feeds_the_same_samples_a_step():
    tokens, tiles = lengths(3000)
    index = LengthIndex.from_arrays(num_tokens=tokens, num_tiles=tiles)
    arguments = {"budget": Budget(tokens=4096, tiles=14), "dp_world_size": 4, "accumulation": 2}
    plain = make_plan(index, balance=AsEmitted(), **arguments)
    even = make_plan(index, balance=StepBalance(), **arguments)
    assert even.num_steps == plain.num_steps
    assert even.fingerprint != plain.fingerprint
    for step in reversed(range(plain.num_steps)):  # a later step doesn't need the earlier ones
        groups = even.step_groups(step)
        assert sorted(groups.rows) == sorted(plain.step_groups(step).rows)
        assert even.num_loss_tokens(step) == plain.num_loss_tokens(step)


def test_arrangement_never_changes():
    # golden: a change here is a change of what each rank gets, for every user
    tokens, tiles = lengths(600)
    order = buffered(tokens, tiles, budget=Budget(tokens=4096, tiles=13), key=(0,))
    offsets = order.offsets[:33]
    step = Groups(rows=order.rows[: offsets[-1]], offsets=offsets)
    digests = []
    for balance in BALANCES:
        problem = (step, tokens[step.rows], tiles[step.rows], Budget(tokens=4096, tiles=13), 8, 4)
        found = balance(step, num_tokens=problem[1], num_tiles=problem[2], budget=problem[3],
                        dp_world_size=8, accumulation=4)  # fmt: skip
        data = found.rows.astype("<i8").tobytes() + found.offsets.astype("<i8").tobytes()
        digests.append(hashlib.blake2b(data, digest_size=4).hexdigest())
    assert digests == [
        "99277509", "ecb0876a", "99277509", "ecb0876a", "3e985993", "082753f0",
    ]  # fmt: skip


def test_wrong_settings_and_arguments_are_refused():
    with pytest.raises(ConfigError, match="sync must be one of step, micro-step, got 'never'"):
        StepBalance(sync="never")
    with pytest.raises(ConfigError, match="cost must be an omniload"):
        StepBalance(cost=1.0)
    with pytest.raises(ConfigError, match="dummy_tokens must be"):
        StepBalance(dummy_tokens=-1)
    for wrong in (float("nan"), -1.0, float("inf")):
        with pytest.raises(ConfigError, match="must be finite and not negative"):
            StepBalance(cost=CostModel(tile=wrong))
    step = Groups(rows=np.arange(2), offsets=np.array([0, 1, 2]))
    arguments = {"num_tokens": np.ones(2, np.int32), "num_tiles": np.ones(2, np.int32),
                 "budget": Budget(tokens=5), "accumulation": 1}  # fmt: skip
    with pytest.raises(ConfigError, match="expected 3, got 2"):
        StepBalance()(step, dp_world_size=3, **arguments)
    arguments["num_tokens"] = arguments["num_tiles"] = np.ones(5, np.int32)
    with pytest.raises(ConfigError, match="one entry a row of the step: expected 2, got 5"):
        StepBalance()(step, dp_world_size=2, **arguments)
