"""The processes that read a stream, or this one itself, through torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from omniload._memory import keep_freed_memory
from omniload._workers import WorkerOptions
from omniload.rng import derive
from omniload.stream.packer import Made, make_batches
from omniload.stream.settings import Samples, StreamPart, StreamSettings, open_part

__all__ = ["start_stream"]


def start_stream(
    samples: Samples, settings: StreamSettings, part: StreamPart, options: WorkerOptions
) -> Iterator[Made]:
    """Start to read the part of this rank.

    What fails here, or where the stream is opened, is raised when the first batch is asked for:
    there all ranks hear of it.

    Args:
        samples: the stream.
        settings: how it is packed.
        part: of this rank; each worker gets its own of that.
        options: of the workers.
    """
    generator = torch.Generator()
    # torch would else draw a seed from the user's global generator
    generator.manual_seed(derive(settings.seed, part.epoch, part.rank) >> 1)
    try:
        loader: DataLoader[Made] = DataLoader(
            _Stream(samples, settings, part),
            batch_size=None,
            collate_fn=_identity,
            generator=generator,
            worker_init_fn=_start_worker,
            **options.torch_arguments(timeout_s=options.timeout),
        )
        return iter(loader)
    except Exception as error:
        return _Failing(error)


class _Stream(IterableDataset[Made]):
    """What each worker process holds: its part of the stream, and how it is packed."""

    def __init__(self, samples: Samples, settings: StreamSettings, part: StreamPart) -> None:
        self._samples = samples
        self._part = part
        self._settings = settings

    def __iter__(self) -> Iterator[Made]:
        info = get_worker_info()
        part = self._part if info is None else replace(self._part, worker=info.id)
        yield from make_batches(open_part(self._samples, part), self._settings, part)


class _Failing(Iterator[Made]):
    """What could not start: it says so when it is asked for a batch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Made:
        raise self._error


def _start_worker(worker: int) -> None:
    keep_freed_memory()


def _identity(made: Any) -> Any:
    return made
