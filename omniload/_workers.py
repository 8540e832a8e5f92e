"""How workers run, as checked values; what can be sent to them, and the errors that come back."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import traceback
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import torch.multiprocessing

from omniload._checks import check_choice, check_count, check_flag
from omniload.errors import ConfigError, OmniloadError

__all__ = ["WorkerOptions", "as_raised", "check_picklable", "release_frames"]

#: beyond these no run makes sense, and memory ends before any error
_MOST_PREFETCHED = 1024
_MOST_WORKERS = 4096
#: threads can't wait longer than some hundred years; a year is longer than any run
_LONGEST_WAIT_S = 366 * 24 * 3600
#: how long the workers are waited for until it is looked if they live
_SLICE_S = 1.0
_WORKER_TYPES = ("auto", "process", "thread")
#: how torch begins what a worker raised
_WRAPPED = "Caught "


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How workers run; the arguments of `omniload.DataLoader` of the same names.

    Raises:
        ConfigError: a value is wrong.
    """

    num_workers: int
    pin_memory: bool
    prefetch_factor: int
    timeout: float
    multiprocessing_context: str | BaseContext | None
    persistent_workers: bool = False
    worker_type: str = "auto"

    def __post_init__(self) -> None:
        check_count("num_workers", self.num_workers, least=0, most=_MOST_WORKERS)
        check_count("prefetch_factor", self.prefetch_factor, least=1, most=_MOST_PREFETCHED)
        check_flag("pin_memory", self.pin_memory)
        check_flag("persistent_workers", self.persistent_workers)
        check_choice("worker_type", self.worker_type, _WORKER_TYPES)
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

    def torch_arguments(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the arguments for torch's DataLoader, which refuses some without workers.

        Args:
            timeout_s: how long torch itself waits for a batch; 0: without end.
        """
        if self.num_workers == 0:
            return {"num_workers": 0, "pin_memory": self.pin_memory}
        return {
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers,
            "timeout": timeout_s,
            "multiprocessing_context": self.multiprocessing_context,
        }


def check_picklable(what: str, value: Any, context: str | BaseContext | None) -> None:
    """Check that a value can be sent to worker processes that are not forked.

    Args:
        what: what it is, for the message.
        value: the value.
        context: how worker processes start; None: as Python does by default.

    Raises:
        ConfigError: it can't be pickled.
    """
    method = context.get_start_method() if isinstance(context, BaseContext) else context
    # the first that is listed is the default where the program hasn't chosen one
    method = method or multiprocessing.get_start_method(allow_none=True)
    method = method or multiprocessing.get_all_start_methods()[0]
    if method == "fork":
        return
    try:
        pickle.Pickler(_Nowhere()).dump(value)
    except Exception as error:
        raise ConfigError(
            f"{what} must be picklable, because worker processes start by {method!r}: "
            f"{type(error).__name__}: {error}. Define its functions and classes at the top of a "
            "module, not inside a function and not as a lambda; or use "
            "multiprocessing_context='fork', or num_workers=0."
        ) from error


class _Nowhere:
    """Takes what is written and keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _WorkerTraceback(Exception):  # noqa: N818 - a text, and never raised
    """The traceback of a worker process as text, for the cause of an error."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def as_raised(error: Exception) -> Exception:
    """Give an error of ours as the worker process raised it, where torch wrapped its text.

    torch makes an error of the same type whose text is the whole traceback; here that becomes the
    cause, as in `concurrent.futures`.
    """
    said = str(error)
    if not isinstance(error, OmniloadError) or not said.startswith(_WRAPPED):
        return error
    kind = type(error)
    head = f"\n{kind.__module__}.{kind.__qualname__}: "
    _, mark, message = said.rpartition(head)
    if not mark:
        return error
    found = copy.copy(error)
    found.args = (message.strip(),)
    found.__cause__ = _WorkerTraceback(said)
    release_frames(error)  # torch's own frames hold it, and it holds them
    return found


def release_frames(error: BaseException) -> None:
    """Let go of what the frames of an error hold, as torch's iterator and with it processes.

    Whoever keeps the error (a notebook, a debugger) would else keep them; what went wrong in them
    is in its text.
    """
    left: list[BaseException | None] = [error]
    while left:
        seen = left.pop()
        if seen is not None:
            traceback.clear_frames(seen.__traceback__)
            left += [seen.__cause__, seen.__context__]
