"""The ledger balances for every epoch, and names what is wrong where it doesn't."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import Budget, DataLoader, LedgerError, World
from omniload.index import LengthIndex
from omniload.loader.account import Account
from omniload.loader.row_sum import RowSum
from omniload.loader.tasks import Walk
from omniload.plan import make_plan
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import Failing, write_data

BUDGET = Budget(tokens=800, tiles=12)
NUM_ROWS = 24


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("ledger") / "shards", num_rows=NUM_ROWS)


def loader(data, **arguments):
    return DataLoader(data, **{"budget": BUDGET, "world": World(), **arguments})


def world(rank, size):
    return World(dp_rank=rank, dp_world_size=size)


def check_identity(ledger):
    assert ledger.num_rows == ledger.planned + sum(ledger.dropped.values())
    assert ledger.planned == (
        ledger.before
        + ledger.seen
        + sum(ledger.skipped.values())
        + ledger.elsewhere
        + ledger.remaining
    )


# --- sums of rows


@given(st.lists(st.integers(0, 10**9), max_size=50), st.randoms())
def test_the_hash_of_rows_is_free_of_order_and_splits_into_parts(rows, chance):
    array = np.array(rows, np.int64)
    shuffled = rows[:]
    chance.shuffle(shuffled)
    whole = RowSum.of(array)
    assert RowSum.of(np.array(shuffled, np.int64)) == whole
    cut = chance.randint(0, len(rows))
    first, rest = RowSum.of(array[:cut]), RowSum.of(array[cut:])
    assert first.plus(rest) == whole == RowSum.of_parts([array[:cut], array[cut:]])
    assert whole.minus(rest) == first


def test_a_row_instead_of_another_or_twice_changes_the_hash():
    assert RowSum.of_range(3_000_000) == RowSum.of(np.arange(3_000_000))
    rows = np.arange(1000)
    sums = {RowSum.of(rows)}
    for change in range(1000):
        other = rows.copy()
        other[change] = rows[change - 1]
        sums.add(RowSum.of(other))
    assert len(sums) == 1001


# --- whole epochs


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_ledger_of_an_epoch_balances_at_every_batch(data, num_workers):
    loading = loader(data, num_workers=num_workers, prefetch_factor=4)
    assert loading.ledger().remaining == NUM_ROWS
    for _ in range(2):
        seen = 0
        for batch in loading:
            seen += len(batch.sample_ids)
            ledger = loading.ledger()
            check_identity(ledger)
            assert (ledger.seen, ledger.remaining) == (seen, NUM_ROWS - seen)
            assert ledger.is_complete == (seen == NUM_ROWS)
        ledger = loading.ledger()
        assert ledger.balanced
        assert ledger.is_complete
        assert (ledger.epoch, ledger.seen) == (loading.epoch - 1, NUM_ROWS)
    assert json.loads(json.dumps(ledger.as_dict()))["planned"] == NUM_ROWS
    assert str(ledger) == ("epoch 1, all ranks: planned 24 of 24 rows, seen 24: balanced")


@pytest.mark.parametrize("tail", ["filler", "empty"])
@pytest.mark.parametrize(("size", "accumulation"), [(2, 1), (3, 2), (7, 1)])
def test_ledgers_of_all_ranks_add_up_to_the_plan(data, size, accumulation, tail):
    shares, loaders = {}, []
    for rank in range(size):
        loading = loader(
            data, world=world(rank, size), accumulation=accumulation, tail=tail,
            uniform_modality=True,
        )  # fmt: skip
        batches = list(loading)
        ledger = loading.ledger()
        check_identity(ledger)
        assert ledger.is_complete
        assert ledger.fillers == sum(batch.is_filler for batch in batches)
        assert ledger.dummies == sum(
            not batch.is_filler and batch.num_samples > len(batch.sample_ids) for batch in batches
        )
        assert ledger.seen + ledger.elsewhere == NUM_ROWS
        shares[rank] = loading._course.account.of_rank()
        loaders.append(loading)
    total = loaders[0]._course.account.ledger(shares)
    check_identity(total)
    assert total.balanced, total.faults
    assert (total.seen, total.elsewhere, total.ranks) == (NUM_ROWS, 0, size)


def test_what_is_dropped_skipped_and_excluded_is_counted(data):
    tokens = int(np.sort(open_shards(data).index.num_tokens)[-3])
    over = np.flatnonzero(open_shards(data).index.num_tokens > tokens)
    kept = next(row for row in range(NUM_ROWS) if row not in over and row != Failing.row)
    loading = loader(
        data,
        budget=Budget(tokens=tokens),
        oversize="drop",
        exclude=[kept],
        on_bad_sample="skip",
        transform=Failing(transform_from_settings(open_shards(data).settings)),
    )
    list(loading)
    ledger = loading.ledger()
    check_identity(ledger)
    assert ledger.balanced
    assert ledger.dropped == {"oversize": len(over), "excluded": 1}
    assert ledger.skipped == {"failed transform": 1}
    assert ledger.num_loss_tokens_missing == loading.index.num_loss_tokens[Failing.row]
    assert f"dropped {len(over)} (oversize), dropped 1 (excluded)" in str(ledger)
    assert "skipped 1 (failed transform)" in str(ledger)


@pytest.mark.parametrize("window_rows", [None, 7])
def test_a_ledger_survives_resuming_at_every_micro_step(data, window_rows):
    arguments = {"accumulation": 2, "window_rows": window_rows}
    states, counts = [], []
    unbroken = loader(data, **arguments)
    for _ in unbroken:
        states.append(unbroken.state_dict())
        counts.append(unbroken.ledger().seen)
    for state, count in zip(states[:-1], counts, strict=False):
        resumed = loader(data, **arguments)
        resumed.load_state_dict(state)
        ledger = resumed.ledger()
        assert (ledger.before, ledger.seen) == (count, 0)
        assert ledger.resumed_from == (state["step"], state["micro_step"])
        list(resumed)
        ledger = resumed.ledger()
        check_identity(ledger)
        assert ledger.balanced
        assert (ledger.before, ledger.seen) == (count, NUM_ROWS - count)
        assert f"{count} before step {state['step']}, micro-step" in str(ledger)
        list(resumed)
        assert resumed.ledger().resumed_from is None
        assert resumed.ledger().seen == NUM_ROWS


def test_a_ledger_survives_resuming_on_other_ranks(data):
    loading = loader(data)
    batches = iter(loading)
    for _ in range(2):
        next(batches)
    state, fed = loading.state_dict(), loading.ledger().seen
    shares = {}
    for rank in range(3):
        resumed = loader(data, world=world(rank, 3))
        resumed.load_state_dict(state)
        list(resumed)
        shares[rank] = resumed._course.account.of_rank()
    total = resumed._course.account.ledger(shares)
    check_identity(total)
    assert total.balanced
    assert (total.before, total.seen) == (fed, NUM_ROWS - fed)


def test_an_epoch_that_begins_anew_has_a_new_ledger(data):
    loading = loader(data)
    next(iter(loading))
    assert loading.ledger().seen > 0
    iter(loading)
    assert loading.ledger().seen == 0
    loading.set_epoch(3)
    list(loading)
    assert loading.ledger().epoch == 3


# --- what is wrong is named


def hand_out_all(course, batches):
    for batch in batches:
        course.hand_out(batch)
    course.end()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run: run[:1] + run[2:], r"expected step 1, micro-step 0, got step 2"),
        (lambda run: run[:1] + run, r"expected step 1, micro-step 0, got step 0"),
        (lambda run: run[:-1], r"ended before its last batch: 1 are missing, from step \d+.*rows"),
        (lambda run: [*run, run[-1]], r"expected none, got step"),
        (
            lambda run: [run[0], dataclasses.replace(run[2], step=1), *run[2:]],
            r"missing \[\d.*not planned \[\d.*step 1, micro-step 0",
        ),
    ],
)
def test_lost_doubled_and_other_batches_are_errors(data, change, message):
    course = loader(data)._course
    assert len(list(course.begin())) > 3  # as many tasks as go to the workers
    with pytest.raises(LedgerError, match=message):
        hand_out_all(course, change(list(loader(data))))


def walked(plan, index, size):
    """The accounts of all ranks, each told of its slots, and what batches would say."""
    accounts = []
    for rank in range(size):
        account = Account(epoch=0, num_rows=len(index), plan=plan)
        list(Walk(plan=plan, index=index, epoch=0, dp_rank=rank, on_slot=account.expect))
        for slot in account.pending:
            account.handed = account.handed.plus(RowSum.of(slot.rows))
            account.passed = account.passed.plus(RowSum.of(slot.all_rows))
        account.pending.clear()
        accounts.append(account)
    return accounts


def an_index(count):
    generator = np.random.default_rng(0)
    return LengthIndex.from_arrays(
        num_tokens=generator.integers(2, 60, count), num_tiles=generator.integers(0, 5, count)
    )


def test_a_plan_that_loses_or_doubles_rows_is_found_at_the_end():
    index = an_index(200)
    plan = make_plan(index, budget=Budget(tokens=100))
    (account,) = walked(plan, index, 1)
    account.close()
    rows = plan._order.windows.rows
    broken = make_plan(index, budget=Budget(tokens=100))
    broken._order.windows.rows = lambda window: np.where(rows(window) == 5, 6, rows(window))
    (account,) = walked(broken, index, 1)
    with pytest.raises(LedgerError, match=r"1 rows are missing \[5\], 1 came more than once \[6\]"):
        account.close()
    assert not account.ledger().balanced


def test_ranks_that_do_not_add_up_are_named():
    index = an_index(200)
    plan = make_plan(index, budget=Budget(tokens=100), dp_world_size=2)
    first, second = walked(plan, index, 2)
    shares = {0: first.of_rank(), 1: second.of_rank()}
    assert first.ledger(shares).balanced
    lost = {**shares, 1: {**shares[1], "handed": (shares[1]["handed"][0] - 3, 0)}}
    assert "3 rows too few" in first.ledger(lost).faults[0]
    other = {**shares, 1: {**shares[1], "handed": (shares[1]["handed"][0], 0)}}
    assert "other rows" in first.ledger(other).faults[0]
    assert "ranks [1] are missing" in first.ledger({0: shares[0]}).faults
    away = {**shares, 1: {**shares[1], "epoch": 4}}
    assert "rank 1 stands elsewhere: epoch is 4, not 0" in first.ledger(away).faults
    assert "NOT balanced: rank 1 stands elsewhere" in str(first.ledger(away))
