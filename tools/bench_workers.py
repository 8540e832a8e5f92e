"""`omniload bench workers`: worker processes beside worker threads, from shards to batches."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["workers"]

#: name of the data -> samples of it, and image of each
_DATA = {"text": (3000, None), "photo:640x480": (160, "photo"), "page:1654x2339": (32, "page")}
#: images that are rendered for a data set; samples take them in turn
_RENDERED = 8
#: small operations of a step of the simulated training loop; each lets go of the GIL for a moment
_LAUNCHES = 300
_EPOCHS = 3


@dataclass(frozen=True, kw_only=True)
class _Case:
    folder: str
    worker_type: str
    num_workers: int
    start_method: str


def workers(
    data: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(_DATA)}; may be repeated."),
    ] = None,
    num_workers: Annotated[
        list[int] | None, typer.Option(min=1, help="Workers; may be repeated.")
    ] = None,
    start_method: Annotated[
        str, typer.Option(help="How processes start: fork, spawn or forkserver.")
    ] = "fork",
    scale: Annotated[
        float, typer.Option(min=0.01, max=100, help="Samples, as a multiple of the usual.")
    ] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case, in turns.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare worker processes and worker threads on the whole way from shards to batches.

    Each case is a program of its own over three epochs with workers that persist. In the second
    epoch batches are only taken; in the third a training loop of 300 small torch operations a step
    runs beside: it holds the GIL most of the time, as the launching of kernels does. Medians over
    the runs.

    Example: `omniload bench workers --data text --num-workers 2`
    """
    from omniload.errors import ConfigError
    from omniload.tools.bench_common import emit

    for name in data or ():
        if name not in _DATA:
            raise ConfigError(f"--data must be one of {', '.join(_DATA)}, got {name!r}.")
    ways = [("none", 0)]
    for count in num_workers or [1, 2]:
        ways += [("process", count), ("thread", count)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="omniload-workers-") as folder:
        for name in data or _DATA:
            path = Path(folder) / name.replace(":", "-")
            _write(path, name, scale)
            found: dict[tuple[str, int], list[dict[str, float]]] = {way: [] for way in ways}
            for _ in range(repeats):
                for kind, count in ways:
                    case = _Case(
                        folder=str(path),
                        worker_type=kind,
                        num_workers=count,
                        start_method=start_method,
                    )
                    found[kind, count].append(_in_process(case))
            rows += [_row(name, *way, runs) for way, runs in found.items()]
    notes = (
        f"{os.cpu_count()} cores; {repeats} runs of each case; processes by {start_method}. "
        "samples/s, CPU ms: batches only taken. looping samples/s, step ms: beside a training "
        "loop, step ms being the time of its own work. MiB: memory of all processes that no "
        "file holds, at the end of the first epoch; growth %: until the end of the third. start "
        "ms: from iter() to the first batch."
    )
    emit("workers", rows, as_json, notes)


def _row(name: str, kind: str, count: int, runs: list[dict[str, float]]) -> dict[str, Any]:
    label = {"none": "none", "process": f"{count} processes", "thread": f"{count} threads"}[kind]
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return {"data": name, "workers": label, **medians}


def _in_process(case: _Case) -> dict[str, float]:
    """Run a case in a new program, so that it has no memory of others."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, case))
    process.start()
    there.close()
    try:
        found: dict[str, float] = here.recv()
    finally:
        process.join()
    return found


def _send(to: Any, case: _Case) -> None:
    to.send(_figures(case))


def _figures(case: _Case) -> dict[str, float]:
    import torch

    from omniload.loader import DataLoader
    from omniload.types import Budget
    from omniload.world import World

    torch.set_num_threads(1)
    loading = DataLoader(
        case.folder,
        budget=Budget(tokens=8192, tiles=32),
        world=World(),
        num_workers=case.num_workers,
        multiprocessing_context=case.start_method,
        worker_type="thread" if case.worker_type == "thread" else "process",
        persistent_workers=case.worker_type == "process",
    )
    own_bytes, figures = [], {}
    for epoch in range(_EPOCHS):
        begin, used = time.perf_counter(), _cpu_s()
        step_s, samples = [], 0
        for number, batch in enumerate(loading):
            if epoch == 0 and number == 0:
                figures["start ms"] = (time.perf_counter() - begin) * 1e3
            samples += batch.num_samples
            if epoch == 2:
                step_s.append(_train())
            last = number
        took = time.perf_counter() - begin
        del batch
        own_bytes.append(_own_bytes())
        if epoch == 1:
            figures["samples/s"] = samples / took
            figures["CPU ms"] = (_cpu_s() - used) / samples * 1e3
        if epoch == 2:
            figures["looping samples/s"] = samples / took
            figures["step ms"] = statistics.median(step_s) * 1e3
            figures["batches"] = last + 1
    figures["MiB"] = own_bytes[0] / 2**20
    figures["growth %"] = (own_bytes[-1] / own_bytes[0] - 1) * 100
    return figures


def _train() -> float:
    """Do the work of a training loop for one batch; returns seconds."""
    import torch

    begin = time.perf_counter()
    value = torch.zeros(64)
    for _ in range(_LAUNCHES):
        value = value + 1
    return time.perf_counter() - begin


def _processes() -> list[Any]:
    import psutil

    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _cpu_s() -> float:
    times = [process.cpu_times() for process in _processes()]
    return float(sum(found.user + found.system for found in times))


def _own_bytes() -> int:
    # not USS: pages of libraries and shards are in it or not, by what else runs on the machine
    maps = (part for process in _processes() for part in process.memory_maps(grouped=True))
    return sum(part.private_dirty + part.swap for part in maps)


def _write(folder: Path, name: str, scale: float) -> None:
    """Write shards of rendered images, each with little text; or of text."""
    import numpy as np

    from omniload.images import InternVLTiles, image_size
    from omniload.shards import write_shards
    from omniload.tools.bench_images import _encoded
    from omniload.transforms.prepare import prepare_sample
    from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer
    from omniload.types import Message, Record

    count, kind = _DATA[name]
    policy = InternVLTiles()
    encoder = ConversationEncoder(
        tokenizer=load_tokenizer(None),
        template=load_template("chatml"),
        loss="assistant",
        tokens_per_tile=256,
    )
    images = [] if kind is None else [_encoded(name, seed) for seed in range(_RENDERED)]
    rng = np.random.default_rng(0)

    def record(row: int) -> Record:
        own = (images[row % _RENDERED],) if images else ()
        messages = (
            Message(role="user", content="<image>\n" * len(own) + "What is it? "),
            Message(role="assistant", content="It is one of many. " * int(rng.integers(2, 60))),
        )
        sizes = [image_size(image) for image in own]
        ready = prepare_sample(messages, sizes, encoder=encoder, policy=policy)
        return Record(
            row=row,
            key=f"sample-{row:08d}",
            source="bench",
            shard="",
            images=own,
            image_sizes=np.array(sizes, np.int32).reshape(-1, 2),
            image_num_tiles=np.asarray(ready.image_num_tiles, np.int32),
            image_spans=np.asarray(ready.image_spans, np.int32).reshape(-1, 2),
            input_ids=ready.input_ids,
            labels=ready.labels,
            messages=messages,
        )

    settings = {
        "encoder": encoder.settings(),
        "tiling": policy.settings(),
        "max_tokens": None,
        "oversize": "truncate",
    }
    records = (record(row) for row in range(max(round(count * scale), 4)))
    write_shards(folder, records, settings=settings, max_bytes=64 << 20)
