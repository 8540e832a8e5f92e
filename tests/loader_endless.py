"""Iterates for ever with two workers; prints a line with the ids of worker processes each epoch.

python -m tests.loader_endless SHARDS [process|thread] [fork|spawn|forkserver] [hang]

With "hang" each worker stops at its third row, deaf to interrupts; the line comes before that.
"""

import multiprocessing
import signal
import threading
import time

from omniload import Budget, DataLoader, World
from omniload.shards import open_shards
from omniload.transforms import transform_from_settings
from tests.loader_data import Wrapped


class Deaf(Wrapped):
    """Hangs at its third row."""

    fingerprint = "deaf/1"
    calls = 0

    def __call__(self, record, rng):
        self.calls += 1
        if self.calls > 2:
            if threading.current_thread() is threading.main_thread():
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            time.sleep(600)
        return self.inner(record, rng)


def main(shards, worker_type="process", method="fork", hangs=""):
    transform = transform_from_settings(open_shards(shards).manifest.settings)
    loading = DataLoader(
        shards,
        budget=Budget(tokens=400, tiles=12),
        num_workers=2,
        worker_type=worker_type,
        multiprocessing_context=method,
        transform=Deaf(transform) if hangs else transform,
        world=World(),
    )
    while True:
        batches = iter(loading)
        if not hangs:
            next(batches)
        print(*(process.pid for process in multiprocessing.active_children()), flush=True)
        for _ in batches:
            pass


if __name__ == "__main__":
    import sys

    main(*sys.argv[1:])
