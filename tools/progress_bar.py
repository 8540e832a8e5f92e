"""How far a run is, for people who wait."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from omniload.tools.sources import InputFile

__all__ = ["bytes_bar", "progress_bar", "rows_bar", "shown_files"]


def shown_files(files: Sequence[InputFile]) -> Iterator[InputFile]:
    """Go through files and show how far it is, on standard error."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(files, description="scan", console=console, transient=True)


@contextlib.contextmanager
def bytes_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how many bytes are done, on standard error.

    Args:
        name: what is done.
        show: False: show nothing.

    Yields:
        A function to call with (bytes done, bytes in all).
    """
    if not show:
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(name), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def rows_bar(name: str, *, show: bool) -> Iterator[Callable[[int, int], None]]:
    """Show how many rows are done, as `bytes_bar` does for bytes."""
    if not show:
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(name), BarColumn(), MofNCompleteColumn(), TextColumn("rows"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextlib.contextmanager
def progress_bar(
    total: int, progress: npt.NDArray[np.int64], *, show: bool
) -> Iterator[Callable[[], None]]:
    """Show how far all pieces are, on standard error.

    Args:
        total: records of the input.
        progress: the shared counters, int64 (pieces + 1, 2).
        show: False: show nothing.

    Yields:
        A function to call several times a second.
    """
    if not show:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    bar = Progress(
        TextColumn("preprocess"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]} samples/s, {task.fields[rejected]} rejected"),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    )
    begin, before = time.monotonic(), int(progress[1:, 0].sum())
    with bar:
        task = bar.add_task("preprocess", total=total, completed=before, rate="-", rejected=0)

        def tick() -> None:
            read, rejected = (int(value) for value in progress[1:].sum(axis=0))
            rate = (read - before) / max(time.monotonic() - begin, 1e-3)
            bar.update(task, completed=read, rate=f"{rate:,.0f}", rejected=rejected)

        yield tick
