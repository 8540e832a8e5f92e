"""`omniload bench pack`: how fast a packed row is written, next to other ways and a plain copy."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from omniload.packing import ListColumn, TokenRow

__all__ = ["pack"]

_IGNORE = -100
_TURN_S = 0.005


def pack(
    documents: Annotated[
        list[int] | None, typer.Option(min=1, help="Documents of a row; may be repeated.")
    ] = None,
    min_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the shortest document.")] = 200,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest.")] = 2500,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of lengths and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare ways to pack rows of two Arrow list columns, ids and labels, into one row.

    All but memcpy write the same: ids, labels and positions as int64, offsets as int32. Native,
    NumPy and memcpy write to memory that is there; the others allocate, as they do in a collate
    function. M-RoPE: three rows of positions for documents as long, half of them images, against
    the loop over pieces that is usual. CPU time of one thread, which is what a worker process has,
    with warm caches.

    Example: `omniload bench pack --documents 16 --documents 64`
    """
    from omniload import _native
    from omniload.errors import ConfigError
    from omniload.tools.bench_common import emit, one_thread

    if max_tokens < min_tokens:
        raise ConfigError(
            f"--max-tokens must be at least --min-tokens={min_tokens}, got {max_tokens}."
        )
    with one_thread():
        rows = [
            row
            for count in documents or [4, 16, 64]
            for row in _figures(count, min_tokens, max_tokens, seed, repeats)
        ]
    reference = "native" if _native.available() else "numpy: the C++ extension is not built"
    notes = (
        f"us: CPU time of one thread, median of {repeats} rounds. GB/s: bytes written, 24 a token. "
        f"times: time by that of {reference}; of M-RoPE by that of its first way. lists: from "
        "Python lists, whose making from Arrow is not counted."
    )
    emit("pack", rows, as_json, notes)


def _figures(
    count: int, min_tokens: int, max_tokens: int, seed: int, repeats: int
) -> list[dict[str, Any]]:
    from omniload.tools.bench_mrope import mrope_candidates

    ids, labels, picked = _columns(count, min_tokens, max_tokens, seed)
    lengths = ids.offsets[picked + 1] - ids.offsets[picked]
    size = {"documents": count, "tokens": int(lengths.sum())}
    packing = _candidates(ids, labels, picked)
    base = "native" if "native" in packing else "numpy"
    positions = mrope_candidates(lengths.tolist(), seed)
    num_bytes = 24 * size["tokens"] + 4 * count + 4
    return [
        *_timed(packing, base, size, num_bytes, repeats),
        *_timed(positions, next(iter(positions)), size, 24 * size["tokens"], repeats),
    ]


def _timed(
    calls: dict[str, Callable[[], object]],
    base: str,
    size: dict[str, int],
    num_bytes: int,
    repeats: int,
) -> list[dict[str, Any]]:
    from omniload.tools.bench_common import measure

    turns = {name: _turn(call) for name, call in calls.items()}
    timings = measure(
        {name: turn for name, (turn, _) in turns.items()},
        repeats=repeats,
        clock=time.thread_time,
    )
    medians = {name: timings[name].median_s / turns[name][1] for name in calls}
    return [
        {
            "way": name,
            **size,
            "us": seconds * 1e6,
            "min_us": timings[name].min_s / turns[name][1] * 1e6,
            "GB/s": num_bytes / seconds / 1e9,
            "times": seconds / medians[base],
        }
        for name, seconds in medians.items()
    ]


def _turn(call: Callable[[], object]) -> tuple[Callable[[], None], int]:
    """Repeat a call until a turn lasts some milliseconds; return the turn, and how often it is."""
    call()
    begin = time.thread_time()
    call()
    often = max(1, round(_TURN_S / max(time.thread_time() - begin, 1e-6)))

    def turn() -> None:
        for _ in range(often):
            call()

    return turn, often


def _columns(
    count: int, min_tokens: int, max_tokens: int, seed: int
) -> tuple[ListColumn, ListColumn, npt.NDArray[np.int64]]:
    """Make two columns of 8 times the documents, and pick `count` of them, in random order."""
    import numpy as np
    import pyarrow as pa

    from omniload.packing import ListColumn

    rng = np.random.default_rng(seed)
    lengths = rng.integers(min_tokens, max_tokens + 1, 8 * count)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    ids = rng.integers(0, 100_000, int(lengths.sum())).astype(np.int32)
    labels = np.where(rng.random(len(ids)) < 0.3, ids, np.int32(_IGNORE))
    columns = [
        ListColumn.from_arrow(pa.ListArray.from_arrays(offsets, pa.array(values)))
        for values in (ids, labels)
    ]
    return columns[0], columns[1], rng.choice(8 * count, count, replace=False)


def _candidates(
    ids: ListColumn, labels: ListColumn, picked: npt.NDArray[np.int64]
) -> dict[str, Callable[[], object]]:
    import numpy as np

    from omniload import _native
    from omniload.packing import TokenRow, pack_list

    tokens = int((ids.offsets[picked + 1] - ids.offsets[picked]).sum())
    out = TokenRow.empty(tokens, len(picked))
    source = np.zeros(sum(array.nbytes for array in out.arrays()), np.uint8)
    target = np.zeros_like(source)
    lists = [[part.tolist() for part in _parts(column, picked)] for column in (ids, labels)]
    calls: dict[str, Callable[[], object]] = {}
    if _native.available():
        calls["native"] = partial(pack_list, ids, labels, picked, out=out, backend="native")
    calls["numpy"] = partial(pack_list, ids, labels, picked, out=out, backend="numpy")
    calls["torch.cat"] = partial(_pack_torch, ids, labels, picked)
    calls["lists"] = partial(_pack_lists, *lists)
    calls["memcpy"] = partial(np.copyto, target, source)
    _check_equal(calls, out)
    return calls


def _parts(column: ListColumn, picked: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int32]]:
    bounds = zip(column.offsets[picked], column.offsets[picked + 1], strict=True)
    return [column.values[start:end] for start, end in bounds]


def _pack_torch(
    ids: ListColumn, labels: ListColumn, picked: npt.NDArray[np.int64]
) -> tuple[torch.Tensor, ...]:
    """Pack as a careful collate function in torch does."""
    import torch

    given = [torch.from_numpy(part) for part in _parts(ids, picked)]
    lengths = torch.tensor([len(part) for part in given])
    ends = lengths.cumsum(0)
    starts = ends - lengths
    row = torch.cat(given).long()
    row_labels = torch.cat([torch.from_numpy(part) for part in _parts(labels, picked)]).long()
    row_labels[starts] = _IGNORE
    positions = torch.arange(len(row)) - torch.repeat_interleave(starts, lengths)
    return row, row_labels, positions, torch.cat([starts[:1], ends]).int()


def _pack_lists(ids: list[list[int]], labels: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """Pack as a collate function that grows Python lists does."""
    import torch

    row: list[int] = []
    row_labels: list[int] = []
    positions: list[int] = []
    offsets = [0]
    for document, given in zip(ids, labels, strict=True):
        row += document
        row_labels += [_IGNORE, *given[1:]]
        positions += range(len(document))
        offsets.append(len(row))
    made = [torch.tensor(values) for values in (row, row_labels, positions)]
    return (*made, torch.tensor(offsets, dtype=torch.int32))


def _check_equal(calls: dict[str, Callable[[], object]], out: TokenRow) -> None:
    """Figures of ways that give different rows would say nothing."""
    import numpy as np

    calls["numpy"]()
    expected = [array.copy() for array in out.arrays()]
    for name in ("native", "torch.cat", "lists"):
        if name not in calls:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: Arrow's memory is read-only
            found: Any = calls[name]()
        arrays = out.arrays() if name == "native" else found
        if not all(np.array_equal(a, b) for a, b in zip(arrays, expected, strict=True)):
            raise RuntimeError(f"{name} packs another row than numpy.")
