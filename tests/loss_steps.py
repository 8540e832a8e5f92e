"""One optimizer step on one rank or on two real ones, for the proofs about losses."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.nn.parallel import DistributedDataParallel


def run_step(case, rank, *, plain, micro_batch, loss_of):
    """Run one step as the engine that the case describes runs it.

    Args:
        case: has world, accumulation, ranks and divides.
        rank: this one.
        plain: the model.
        micro_batch: case, rank, micro-step -> batch.
        loss_of: model, batch, case -> what is added up, before an engine divides.

    Returns:
        The loss of the step, and the model with its gradients.
    """
    parallel = case.world > 1 and case.ranks == "mean"
    model = DistributedDataParallel(plain) if parallel else plain
    total = torch.zeros((), dtype=torch.float64)
    for micro_step in range(case.accumulation):
        batch = micro_batch(case, rank, micro_step)
        with nullcontext() if batch.is_last_micro_step or not parallel else model.no_sync():
            loss = loss_of(model, batch, case) / (case.accumulation if case.divides else 1)
            loss.backward()
        total += loss.detach()
    if case.world > 1:
        dist.all_reduce(total)
        if case.ranks == "mean":
            total /= case.world
        else:
            for weight in plain.parameters():
                dist.all_reduce(weight.grad)
    return total.item(), plain


def on_two_ranks(folder, run, cases):
    """Call run(case, rank) for each case in two processes; return for each rank name -> result."""
    multiprocessing.spawn(_work, (str(folder), run, cases), nprocs=2)
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(2)]


def _work(rank, folder, run, cases):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    torch.save({str(case): run(case, rank) for case in cases}, f"{folder}/rank-{rank}.pt")
    dist.destroy_process_group()
