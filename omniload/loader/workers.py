"""The workers: started, fed with tasks, and forgotten when one of them is broken."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from omniload._workers import WorkerOptions
from omniload.batch import PackedBatch
from omniload.errors import WorkerError
from omniload.loader.interrupts import interrupts_held
from omniload.loader.notes import WorkerNotes
from omniload.loader.post_mortem import PostMortem
from omniload.loader.processes import (
    NotedDataset,
    ProcessRun,
    abandon,
    dead_workers,
    is_about_workers,
    share_temporary_folder,
    start_worker,
)
from omniload.loader.reads import empty_batches
from omniload.loader.run import InProcess, Run
from omniload.loader.segments import Segments
from omniload.loader.tasks import Task, Walk
from omniload.loader.threads import ThreadRun
from omniload.loader.worker import PackDataset
from omniload.plan.ahead import wait_for_plans

__all__ = ["TaskSampler", "Workers"]

_log = logging.getLogger(__name__)


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
    """Those that make the batches: torch's worker processes, threads, or this thread itself.

    Args:
        dataset: makes the batches.
        options: how the workers run.
    """

    def __init__(self, dataset: PackDataset, options: WorkerOptions) -> None:
        self._dataset: PackDataset | None = dataset
        self._options = options
        self._sampler = TaskSampler()
        self._generator = torch.Generator()
        self._loader: DataLoader[PackedBatch] | None = None
        self._segments: Segments | None = None
        #: what each worker is at, and has counted; one line for this thread where there are none
        self.notes = WorkerNotes(max(options.num_workers, 1))
        has_workers = options.num_workers > 0
        self._post_mortem = PostMortem(self.notes, dataset.rows) if has_workers else None

    def use(self, dataset: PackDataset | None) -> None:
        """Let another dataset make the batches from the next start on.

        Args:
            dataset: of the same rows; None: batches are empty, and nobody works.
        """
        self._dataset = dataset
        self.forget()

    def start(self, walk: Walk, *, seed: int) -> Run:
        """Start to work on the tasks of a walk.

        Args:
            walk: the tasks.
            seed: below 2**63; seeds the generators of torch, NumPy and Python in the processes.

        Raises:
            WorkerError: a new worker process ended at once.
        """
        if self._dataset is None:
            return InProcess(empty_batches(walk))
        if self._options.uses_threads:
            self.notes.clear()
            return ThreadRun(
                self._dataset,
                walk,
                notes=self.notes,
                prefetch_factor=self._options.prefetch_factor,
                pin_memory=self._options.pin_memory,
                slice_s=self._options.slice_s,
            )
        self._sampler.walk = walk
        self._generator.manual_seed(seed)
        if self._post_mortem is None:
            return InProcess(iter(self._torch_loader()))
        if self._will_fork():
            wait_for_plans()
            with interrupts_held():
                batches = self._processes()
        else:
            batches = self._processes()
        persist = self._options.persistent_workers
        segments = None if persist else self._segments
        return ProcessRun(batches, self._post_mortem, segments=segments)

    def forget(self) -> None:
        """Start with new processes next time: one of those that persist may be dead."""
        loader, self._loader, self._segments = self._loader, None, None
        running = getattr(loader, "_iterator", None)
        if running is not None and dead_workers(running):
            abandon(running)

    def _will_fork(self) -> bool:
        chosen = self._options.multiprocessing_context
        if chosen is None or isinstance(chosen, str):
            chosen = multiprocessing.get_context(chosen)
        is_running = getattr(self._loader, "_iterator", None) is not None
        return chosen.get_start_method() == "fork" and not is_running

    def _processes(self) -> Iterator[PackedBatch]:
        """Start worker processes, or take those that persist up again where they live."""
        running = getattr(self._loader, "_iterator", None)
        if running is not None and not dead_workers(running):
            try:
                return iter(self._torch_loader())
            except RuntimeError as error:
                if not is_about_workers(error):
                    raise
                abandon(running)
        if running is not None:
            _log.warning("workers of the last epoch have ended or still work on it: new ones start")
            self.forget()
        self.notes.clear()
        try:
            return iter(self._torch_loader())
        except RuntimeError as error:
            if not is_about_workers(error):
                raise
            raise WorkerError(
                f"a worker process must live to give batches, but ended while it started: {error}"
            ) from error

    def _torch_loader(self) -> DataLoader[PackedBatch]:
        if self._loader is None:
            assert self._dataset is not None  # start() says so
            self._segments = Segments(self._options.prefetch_factor)
            dataset = NotedDataset(self._dataset, self.notes, self._segments)
            if self._post_mortem is None:
                dataset.start(0, with_memory=False)
            else:
                share_temporary_folder()
            self._loader = DataLoader(
                dataset,
                batch_size=None,
                sampler=self._sampler,
                collate_fn=_identity,
                worker_init_fn=start_worker,
                # torch would else draw a seed from the user's global generator
                generator=self._generator,
                **self._options.torch_arguments(timeout_s=self._options.slice_s),
            )
        return self._loader


def _identity(batch: Any) -> Any:
    return batch
