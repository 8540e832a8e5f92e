"""One of several real gloo processes: makes loaders, iterates, prints what happened as JSON.

python -m tests.loader_ranks RANK SIZE RENDEZVOUS_FILE SHARDS CASE...
"""

import io
import json
import logging
import sys

import numpy as np
import torch.distributed as dist

from omniload import Budget, ConfigError, DataLoader, World
from omniload.loss import exact_factor
from omniload.packing import pack
from omniload.types import Sample, SkippedSample
from tests.loader_data import rows_of

BUDGET = Budget(tokens=800, tiles=12)


def make(case, rank, shards):
    if case == "seed":
        return DataLoader(shards, budget=BUDGET, seed=rank)
    if case == "dp_rank":
        return DataLoader(shards, budget=BUDGET, world=World(dp_rank=0, dp_world_size=2))
    if case == "alone":
        # a loader on one rank only must not wait for the others
        return DataLoader(shards, budget=BUDGET, world=World()) if rank == 1 else []
    if case == "one_loads":
        # last of all: the other process never comes
        loading = DataLoader(shards, budget=BUDGET)
        loading.load_state_dict(loading.state_dict())
        return loading if rank == 1 else []
    if case == "ledger":
        return DataLoader(shards, budget=BUDGET, on_bad_sample="skip")
    if case == "pad_to":
        return DataLoader(shards, budget=BUDGET, pad_to=8 if rank else None)
    loading = DataLoader(shards, budget=BUDGET)
    if case == "state" and rank == 1:
        loading.set_epoch(3)
    if case in ("rollback", "epoch", "one_moves"):
        states = [loading.state_dict() for _ in loading]  # ranks agree for an epoch
        if case == "rollback":
            loading.load_state_dict(states[rank])
        else:
            loading.set_epoch(5 + rank if case == "epoch" else 1 + rank)
    return loading


def exact(rank):
    """Two micro-steps on each rank; rank 1 skipped a sample of 30 loss tokens of the step's 120."""
    ids = np.ones(31, np.int32)
    batches = []
    for micro_step in range(2):
        is_bad = (rank, micro_step) == (1, 0)
        labels = np.full(31, -100, np.int32) if is_bad else ids
        reason = SkippedSample(
            row=3, key="", source="", shard="", shard_row=3, kind="damaged row", reason="",
            num_loss_tokens=30,
        )  # fmt: skip
        batches.append(
            pack(
                [Sample(sample_id=-1 if is_bad else rank, input_ids=ids, labels=labels)],
                micro_step=micro_step,
                num_loss_tokens_step=120,
                dp_world_size=2,
                accumulation=2,
                skipped_samples=[reason] if is_bad else [],
            )
        )
    return {"factor": exact_factor(batches)}


def run(case, early, rank, shards):
    if case == "exact":
        return exact(rank)
    loading = early.get(case) or make(case, rank, shards)
    if case == "stats":
        span = [loading.stats() for _ in loading][-1].this_epoch
        ranks = loading.stats(reduce=True).as_dict()["ranks"]
        return {"own": span.as_dict(), "ranks": ranks}
    if case != "ledger":
        return {"rows": rows_of(loading)}
    ledgers = []
    for batch in loading:
        if batch.step == 0:
            ledgers.append(loading.ledger(reduce=True).as_dict())
    return {"ledgers": [*ledgers, loading.ledger(reduce=True).as_dict()]}


def main(rank, size, rendezvous, shards, *cases):
    early = {
        "early": DataLoader(shards, budget=BUDGET),
        "early_alone": DataLoader(shards, budget=BUDGET, world=World()),
    }
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size)
    )
    results, log = {}, io.StringIO()
    logging.getLogger("omniload").addHandler(logging.StreamHandler(log))
    for case in cases:
        try:
            results[case] = run(case, early, int(rank), shards)
        except ConfigError as error:
            results[case] = {"error": str(error)}
    results["log"] = log.getvalue()
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
