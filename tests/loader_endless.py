"""Iterates for ever with worker processes; prints their ids after the first batch of each epoch.

python -m tests.loader_endless SHARDS
"""

import multiprocessing
import sys

from omniload import Budget, DataLoader, World


def main(shards):
    loading = DataLoader(shards, budget=Budget(tokens=800), num_workers=2, world=World())
    while True:
        for number, _ in enumerate(loading):
            if number == 0:
                workers = multiprocessing.active_children()
                print(*(process.pid for process in workers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
