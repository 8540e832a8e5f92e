"""Goes through epochs and prints the private memory of all its processes after each.

python -m tests.workers_memory SHARDS WORKER_TYPE EPOCHS
"""

import gc
import json
import sys

import psutil

from omniload import Budget, DataLoader, World


def own_bytes():
    own = psutil.Process()
    # not USS: pages of libraries and shards are in it or not, by what else runs on the machine
    return [
        sum(part.private_dirty + part.swap for part in process.memory_maps(grouped=True))
        for process in (own, *own.children(recursive=True))
    ]


def main(shards, worker_type, epochs):
    loading = DataLoader(
        shards,
        budget=Budget(tokens=400, tiles=12),
        num_workers=1,
        worker_type=worker_type,
        persistent_workers=True,
        world=World(),
    )
    for _ in range(int(epochs)):
        last = None
        for batch in loading:
            last = batch
        del batch, last
        gc.collect()
        print(json.dumps(own_bytes()), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
