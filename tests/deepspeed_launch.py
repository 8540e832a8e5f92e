"""Starts the programs of tests/deepspeed_ranks.py and collects what they saw."""

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent


def launch(folder, shards, size, *names, timeout=400):
    """Run programs in `size` processes: what each rank saw, and what all wrote to stderr.

    Programs called crash_... come last; there a process may be aborted by gloo.
    """
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.deepspeed_ranks"]
    logs = [(folder / f"{rank}.err").open("w") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(folder), str(shards), *names],
            stdout=subprocess.DEVNULL,
            stderr=logs[rank],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "DS_ACCELERATOR": "cpu",
            },
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.wait(timeout=timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    errors = [(folder / f"{rank}.err").read_text() for rank in range(size)]
    # the rank that failed first says why; the others lost their connection
    told = sorted(errors, key=lambda text: "Connection closed by peer" in text)
    codes = {process.returncode for process in processes}
    allowed = {0, -6} if any(name.startswith("crash") for name in names) else {0}
    assert codes <= allowed, told[0].split("[rank")[0][-5000:]
    results = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(size)]
    return results, "\n".join(errors)
