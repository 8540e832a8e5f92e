"""The real pipeline engine with layers that sleep for planned times: what a simulator is held to.

From Python, `measure(forward_ms, backward_ms)` starts one process a stage and returns the seconds
of each step. By itself, with {"forward_ms": [[...], ...], "backward_ms": [[...], ...]} in a file:

    torchrun --nproc-per-node 4 -m tests.sleeping_pipeline times.json --steps 3

Entry [s][m] of a table is the time of stage s for micro-batch m; recomputation counts as backward.
A step is timed from a barrier until the slowest rank has finished it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
Table = Sequence[Sequence[float]]


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, forward_s, backward_s):
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, gradient.sum().reshape(1), None, None


class SleepingStage(nn.Module):
    """A stage that takes the planned time for each micro-batch of a step, in order."""

    def __init__(self, forward_ms: Sequence[float], backward_ms: Sequence[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.times = [(f / 1e3, b / 1e3) for f, b in zip(forward_ms, backward_ms, strict=True)]
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = self.times[self.num_calls % len(self.times)]
        self.num_calls += 1
        return _Slept.apply(x.requires_grad_(), self.weight, *times)


def measure(
    forward_ms: Table, backward_ms: Table, *, steps: int = 3, timeout: float = 240
) -> list[float]:
    """Run steps of the real engine, one process a stage.

    Args:
        forward_ms: [stage][micro-batch], milliseconds.
        backward_ms: likewise, recomputation included.
        steps: steps to time; one more runs before them.
        timeout: seconds for all of it.

    Returns:
        Seconds of each step.
    """
    size = len(forward_ms)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        file.write_text(
            json.dumps({"forward_ms": forward_ms, "backward_ms": backward_ms}), encoding="utf-8"
        )
        command = [sys.executable, "-m", "tests.sleeping_pipeline", str(file)]
        processes = [
            subprocess.Popen(
                [*command, "--steps", str(steps), "--rendezvous", f"{folder}/rendezvous"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
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
            outputs = [process.communicate(timeout=timeout)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        if any(codes):
            raise RuntimeError(f"the sleeping pipeline ended with {codes}: {outputs}")
        seconds: list[float] = json.loads(outputs[0].splitlines()[-1])["step_s"]
        return seconds


def run(times: dict[str, Any], steps: int) -> list[float]:
    """Time steps in this rank's process, inside an initialised group."""
    import deepspeed

    from omniload.adapters.deepspeed import BalancedPipelineModule, prepare_engine

    forward_ms, backward_ms = times["forward_ms"], times["backward_ms"]
    layers = [SleepingStage(f, b) for f, b in zip(forward_ms, backward_ms, strict=True)]
    module = BalancedPipelineModule(
        layers,
        plan={"parts": list(range(len(layers) + 1))},
        loss_fn=lambda output, labels: output.sum(),
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(forward_ms[0]),
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
    )
    prepare_engine(engine)
    batches = iter(lambda: (torch.ones(1), torch.ones(1)), None)
    found = []
    for _ in range(steps + 1):
        torch.distributed.barrier()
        start = time.perf_counter()
        engine.train_batch(batches)
        taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        torch.distributed.all_reduce(taken, op=torch.distributed.ReduceOp.MAX)
        found.append(float(taken))
    return found[1:]


def main() -> None:
    import deepspeed

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("times", type=Path, help="JSON with forward_ms and backward_ms")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rendezvous", help="file to meet at; None: as torchrun says")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # else DeepSpeed compiles an operator for shared memory, which takes minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    place = {}
    if options.rendezvous:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = {"init_method": f"file://{options.rendezvous}", "rank": rank, "world_size": size}
    deepspeed.init_distributed(
        dist_backend="gloo", auto_mpi_discovery=False, verbose=False, **place
    )
    seconds = run(json.loads(options.times.read_text(encoding="utf-8")), options.steps)
    if torch.distributed.get_rank() == 0:
        print(json.dumps({"step_s": seconds}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
