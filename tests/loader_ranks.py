"""One of several real gloo processes: makes loaders, iterates, prints what happened as JSON.

python -m tests.loader_ranks RANK SIZE RENDEZVOUS_FILE SHARDS CASE...
"""

import json
import sys

import torch.distributed as dist

from omniload import Budget, ConfigError, DataLoader, World
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
    loading = DataLoader(shards, budget=BUDGET)
    if case == "state" and rank == 1:
        loading.set_epoch(3)
    return loading


def main(rank, size, rendezvous, shards, *cases):
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=int(rank), world_size=int(size)
    )
    results = {}
    for case in cases:
        try:
            results[case] = {"rows": rows_of(make(case, int(rank), shards))}
        except ConfigError as error:
            results[case] = {"error": str(error)}
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
