"""The worker processes: started, fed with tasks, and forgotten when one of them is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from omniload._memory import keep_freed_memory
from omniload.batch import PackedBatch
from omniload.loader.options import WorkerOptions
from omniload.loader.tasks import Task, Walk
from omniload.loader.worker import PackDataset

__all__ = ["TaskSampler", "Workers"]


class TaskSampler(Sampler[Task]):
    """Gives torch's DataLoader the tasks of whatever walk is set.

    One object for the life of the loader, because persistent workers belong to one torch loader.
    It holds no reference to the loader: a cycle would keep worker processes until a collection.
    """

    def __init__(self) -> None:
        self.walk: Walk | None = None

    def __iter__(self) -> Iterator[Task]:
        return iter(()) if self.walk is None else iter(self.walk)


class Workers:
    """Torch's loader, set up so that each task becomes one batch without a collation.

    Args:
        dataset: makes the batches.
        options: how the worker processes run.
    """

    def __init__(self, dataset: PackDataset, options: WorkerOptions) -> None:
        self._dataset = dataset
        self._options = options
        self._sampler = TaskSampler()
        self._generator = torch.Generator()
        self._loader: DataLoader[PackedBatch] | None = None

    @property
    def are_processes(self) -> bool:
        """Whether batches are made in other processes."""
        return self._options.num_workers > 0

    def start(self, walk: Walk, *, seed: int) -> Iterator[PackedBatch]:
        """Start to work on the tasks of a walk.

        Args:
            walk: the tasks.
            seed: below 2**63; seeds the generators of torch, NumPy and Python in the processes.
        """
        if self._loader is None:
            self._loader = DataLoader(
                self._dataset,
                batch_size=None,
                sampler=self._sampler,
                collate_fn=_identity,
                worker_init_fn=_start_worker,
                # torch would else draw a seed from the user's global generator
                generator=self._generator,
                **self._options.torch_arguments(),
            )
        self._sampler.walk = walk
        self._generator.manual_seed(seed)
        return iter(self._loader)

    def forget(self) -> None:
        """Start with new processes next time: one of those that persist may be dead."""
        self._loader = None


def _start_worker(worker: int) -> None:
    """Set a new process up; called by torch there."""
    keep_freed_memory()


def _identity(batch: Any) -> Any:
    return batch
