"""Random faults of all kinds against epochs whose ledger must balance.

A few rounds run always; `pytest -m chaos` runs many, with other seeds each time it is asked to:
OMNILOAD_CHAOS_SEED=12345 repeats one.
"""

import json
import os
import random
import shutil
import time
from collections import Counter

import pytest

from omniload import Budget, DataLoader, SampleError, World
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import (
    Noisy,
    changed,
    flip_until_a_row_is_damaged,
    rows_of_shard,
    unreadable_rows,
    write_data,
)

NUM_ROWS = 60
BUDGET = Budget(tokens=700, tiles=12)
#: Seconds that the marked part takes.
LONG_S = 180


class Moody(Noisy):
    """Fails on some rows, in several ways, always on the same ones."""

    fingerprint = "moody/1"
    salt = 0

    def __call__(self, record, rng):
        sample = super().__call__(record, rng)
        mood = random.Random(f"{self.salt} {record.row}").randrange(20)
        if mood == 0:
            raise KeyError("no such colour")
        if mood == 1:
            raise SampleError("too dark")
        if mood == 2:
            return changed(sample, labels=sample.labels * 0 - 100)
        if mood == 3:
            return None
        return sample


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Shards whose images were partly cut before they were written."""
    return write_data(tmp_path_factory.mktemp("chaos") / "shards", num_rows=NUM_ROWS, damage=7)


def damage(whole, folder, chance):
    """Copy shards and flip bytes so that some rows can't be read, but no shard is lost."""
    shutil.copytree(whole, folder)
    for _ in range(chance.randrange(3)):
        flip_until_a_row_is_damaged(folder, seed=chance.random())
    bad = set(unreadable_rows(folder))
    lost = [
        name for name in open_shards(folder).shard_names if set(rows_of_shard(folder, name)) <= bad
    ]
    for name in lost:  # two flips can hit one shard
        shutil.copy(whole / name, folder / name)
    return folder


def one_round(whole, folder, seed):
    """Go through an epoch with random stops, ranks, workers and bad rows; check every count."""
    chance = random.Random(seed)
    data = damage(whole, folder / "shards", chance)
    transform = Moody(transform_from_settings(open_shards(data).settings))
    vars(transform)["salt"] = seed
    same = {
        "budget": BUDGET,
        "transform": transform,
        "on_bad_sample": "skip",
        "max_bad_samples": 1.0,
        "seed": seed,
        "window_rows": chance.choice([None, 11, 25]),
        "uniform_modality": chance.random() < 0.5,
    }
    bad = {
        sample.row
        for batch in DataLoader(data, world=World(), **same)
        for sample in batch.skipped_samples
    }
    seen, skipped, state = Counter(), Counter(), None
    size, accumulation, sync = 1, 1, "step"
    quarantine = folder / "bad.jsonl"
    while state is None or state["epoch"] == 0:
        if state is None or state["micro_step"] == 0:
            size, accumulation = chance.randint(1, 4), chance.randint(1, 3)
            sync = chance.choice(["step", "micro-step", None])
        stop, states, shares = chance.randint(1, 7), [], {}
        for rank in range(size):
            loading = DataLoader(
                data,
                world=World(dp_rank=rank, dp_world_size=size),
                accumulation=accumulation,
                sync=sync,
                quarantine=quarantine,
                num_workers=chance.choice([0, 0, 0, 1, 2]),
                worker_type=chance.choice(["process", "thread"]),
                multiprocessing_context="fork",
                **same,
            )
            if state is not None:
                loading.load_state_dict(state)
            batches = iter(loading)
            for batch in (batch for _, batch in zip(range(stop), batches, strict=False)):
                seen.update(row for row in batch.sample_ids.tolist() if row >= 0)
                skipped.update(batch.skipped.tolist())
            states.append(loading.state_dict())
            shares[rank] = loading._course.account.of_rank()
            del batches
        total = loading._course.account.ledger(shares)
        assert total.balanced, (seed, total.faults)
        assert total.planned == NUM_ROWS
        assert all(other == states[0] for other in states), seed
        state = json.loads(json.dumps(states[0]))
    assert set(skipped) == bad, seed
    assert seen + skipped == Counter(range(NUM_ROWS)), seed
    assert total.is_complete, seed
    check_exclusion(data, quarantine, bad, same)
    return len(bad)


def check_exclusion(data, quarantine, bad, same):
    lines = [json.loads(line) for line in quarantine.read_text().splitlines()]
    assert sorted(line["row"] for line in lines) == sorted(bad)
    strict = {**same, "on_bad_sample": "raise"}
    clean = DataLoader(data, world=World(), exclude=quarantine, **strict)
    rows = [row for batch in clean for row in batch.sample_ids.tolist()]
    assert sorted(rows) == sorted(set(range(NUM_ROWS)) - bad)
    assert clean.ledger().dropped["excluded"] == len(bad)


def test_epochs_full_of_faults_balance(whole, tmp_path):
    found = [one_round(whole, tmp_path / str(seed), seed) for seed in range(3)]
    assert sum(found) > 10


@pytest.mark.chaos
@pytest.mark.timeout(LONG_S + 300)
def test_many_epochs_full_of_faults_balance(whole, tmp_path):
    first = int(os.environ.get("OMNILOAD_CHAOS_SEED", time.time_ns() % 10**9))
    end, rounds = time.monotonic() + LONG_S, 0
    while time.monotonic() < end and (rounds == 0 or "OMNILOAD_CHAOS_SEED" not in os.environ):
        folder = tmp_path / str(rounds)
        one_round(whole, folder, first + rounds)
        shutil.rmtree(folder)
        rounds += 1
