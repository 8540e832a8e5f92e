"""A training run that can be killed at any point, and goes on where it stopped when run again.

After each batch one line is added to a file: the rows of the batch and the state behind it.
"""

import json
import logging
import os
import signal

from omniload import Budget, DataLoader, World


def run(data, log, *, num_workers, last_epoch, accumulation=2):
    """Train from the last line of a log, through `last_epoch`; leads a session of its own."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.disable()  # deaths are told of, and this is the process of a test
    loading = DataLoader(
        data,
        budget=Budget(tokens=400, tiles=12),
        num_workers=num_workers,
        accumulation=accumulation,
        world=World(),
    )
    done = lines(log)
    if done:
        loading.load_state_dict(done[-1]["state"])
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    # the end of a line that was cut off
    size = sum(len(json.dumps(line)) + 1 for line in done)
    os.ftruncate(out, size)
    while loading.epoch <= last_epoch:
        epoch = loading.epoch
        for batch in loading:
            line = {
                "epoch": epoch,
                "rows": batch.sample_ids.tolist(),
                "state": loading.state_dict(),
            }
            os.write(out, json.dumps(line).encode() + b"\n")


def lines(log):
    """Whole lines of a log."""
    if not log.exists():
        return []
    whole, _, _ = log.read_bytes().rpartition(b"\n")
    return [json.loads(line) for line in whole.splitlines()]
