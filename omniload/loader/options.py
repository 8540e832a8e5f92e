"""How workers run, as checked values; and the checks that all arguments share."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import numpy as np
import torch.multiprocessing

from omniload.errors import ConfigError

__all__ = ["WorkerOptions", "check_count", "check_flag"]

_INT63_MAX = 2**63 - 1
#: beyond these no run makes sense, and memory ends before any error
_MOST_PREFETCHED = 1024
_MOST_WORKERS = 4096
#: threads can't wait longer than some hundred years; a year is longer than any run
_LONGEST_WAIT_S = 366 * 24 * 3600
#: how long the workers are waited for until it is looked if they live
_SLICE_S = 1.0
_WORKER_TYPES = ("auto", "process", "thread")


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How workers run; the arguments of `omniload.DataLoader` of the same names.

    Raises:
        ConfigError: a value is wrong.
    """

    num_workers: int
    pin_memory: bool
    prefetch_factor: int
    persistent_workers: bool
    timeout: float
    multiprocessing_context: str | BaseContext | None
    worker_type: str = "auto"

    def __post_init__(self) -> None:
        check_count("num_workers", self.num_workers, least=0, most=_MOST_WORKERS)
        check_count("prefetch_factor", self.prefetch_factor, least=1, most=_MOST_PREFETCHED)
        check_flag("pin_memory", self.pin_memory)
        check_flag("persistent_workers", self.persistent_workers)
        if not isinstance(self.worker_type, str) or self.worker_type not in _WORKER_TYPES:
            raise ConfigError(
                f"worker_type must be one of {', '.join(map(repr, _WORKER_TYPES))}, got "
                f"{self.worker_type!r}."
            )
        timeout = self.timeout
        is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
        if not is_number or not 0 <= timeout <= _LONGEST_WAIT_S:
            raise ConfigError(
                f"timeout must be seconds, at least 0 (no limit) and at most {_LONGEST_WAIT_S}, "
                f"got {timeout!r}."
            )
        context = self.multiprocessing_context
        if isinstance(context, str):
            known = torch.multiprocessing.get_all_start_methods()
            if context not in known:
                raise ConfigError(
                    f"multiprocessing_context must be one of {', '.join(known)}, got {context!r}."
                )
        elif context is not None and not isinstance(context, BaseContext):
            raise ConfigError(
                "multiprocessing_context must be the name of a start method or a context of "
                f"multiprocessing, got {type(context).__name__}."
            )

    @property
    def uses_threads(self) -> bool:
        """Whether workers are threads of this process."""
        return self.num_workers > 0 and self.worker_type == "thread"

    @property
    def uses_processes(self) -> bool:
        """Whether workers are processes."""
        return self.num_workers > 0 and not self.uses_threads

    @property
    def kind(self) -> str:
        """What workers are: "process", "thread", or "none"."""
        return "none" if self.num_workers == 0 else "thread" if self.uses_threads else "process"

    @property
    def slice_s(self) -> float:
        """Seconds to wait for a batch before it is looked if the workers live."""
        return min(self.timeout or _SLICE_S, _SLICE_S)

    def torch_arguments(self) -> dict[str, Any]:
        """Return the arguments for torch's DataLoader, which refuses some without workers."""
        if self.num_workers == 0:
            return {"num_workers": 0, "pin_memory": self.pin_memory}
        return {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "timeout": self.slice_s,
            "multiprocessing_context": self.multiprocessing_context,
        }


def check_count(name: str, value: Any, *, least: int, most: int = _INT63_MAX) -> None:
    """Check that an argument is an integer from `least` to `most`.

    Raises:
        ConfigError: it is not.
    """
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not least <= value <= most:
        limit = "" if most == _INT63_MAX else f" and at most {most}"
        raise ConfigError(f"{name} must be an integer of at least {least}{limit}, got {value!r}.")


def check_flag(name: str, value: Any) -> None:
    """Check that an argument is True or False.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
