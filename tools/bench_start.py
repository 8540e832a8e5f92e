"""`omniload bench start`: how long until the first batch, and until a run goes on where it was."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from omniload.shards import ShardSet

__all__ = ["start"]

_SHARD_ROWS = 10_000
_TILE_SIDE = 2
_WARM_ROWS = 20_000


def start(
    rows: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of the data; may be repeated.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Data-parallel ranks.")] = 8,
    num_workers: Annotated[int, typer.Option(min=0, help="Worker processes.")] = 0,
    at: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the epoch after which a run goes on.")
    ] = 0.5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the start of a loader over very many rows, and how it goes on from a state.

    The index is a real one on disk, with made-up lengths; rows are made up when they are read, with
    blank tiles, so that reading and decoding don't count. Imports are done and compiled code is
    warm. `restored` is load_state_dict alone, `restored, batch` until the first batch after it.

    Example: `omniload bench start --rows 1000000 --rows 10000000`
    """
    from omniload.tools.bench_common import emit

    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="omniload-start-") as folder:
        for count in [_WARM_ROWS, *(rows or [1_000_000, 10_000_000])]:
            data = Path(folder) / f"{len(found)}-{count}"
            _write_index(data, count)
            found.append(_figures(data, ranks=ranks, num_workers=num_workers, part=at))
    emit(
        "start, seconds",
        found[1:],
        as_json,
        f"{ranks} ranks, {num_workers} worker processes; wall time, one run each",
    )


def _figures(folder: Path, *, ranks: int, num_workers: int, part: float) -> dict[str, Any]:
    from omniload.loader import DataLoader
    from omniload.shards import open_shards
    from omniload.types import Budget
    from omniload.world import World

    def loader() -> DataLoader:
        return DataLoader(
            _made_up(open_shards(folder)),
            budget=Budget(tokens=4096, tiles=16),
            transform=_Blank(),
            world=World(dp_rank=0, dp_world_size=ranks),
            num_workers=num_workers,
        )

    begin = time.perf_counter()
    open_shards(folder)
    opened = time.perf_counter()
    loading = loader()
    made = time.perf_counter()
    next(iter(loading))
    first = time.perf_counter()
    state = loading.state_dict()
    for thread in threading.enumerate():
        if thread.name == "omniload-plan":
            thread.join()  # a run that starts has no plan of another beside it
    # a place far into the epoch: what comes before it must not be planned again
    window = int(loading.plan.num_windows * part)
    state = _at_window(state, window)
    resumed = loader()
    again = time.perf_counter()
    resumed.load_state_dict(state)
    restored = time.perf_counter()
    next(iter(resumed))
    return {
        "rows": len(loading.index),
        "open": opened - begin,
        "loader": made - opened,
        "first batch": first - made,
        "restored": restored - again,
        "restored, batch": time.perf_counter() - again,
        "bytes of state": len(str(state)),
    }


def _at_window(state: dict[str, Any], window: int) -> dict[str, Any]:
    """Move a state to the beginning of a window, as if all before it was done."""
    from omniload._checksum import fields_checksum

    moved = {**state, "window": window, "groups": 0, "step": 1000 * window, "micro_step": 0}
    return {**moved, "checksum": fields_checksum(moved)}


def _write_index(folder: Path, count: int) -> None:
    import numpy as np

    from omniload.shards.manifest import Manifest, ShardInfo, settings_fingerprint, write_manifest
    from omniload.shards.write import write_index
    from omniload.tools.lengths import make_lengths

    folder.mkdir()
    lengths = make_lengths(min(count, 1_000_000), seed=0)
    columns = {
        name: np.resize(getattr(lengths, name), count)
        for name in ("num_tokens", "num_tiles", "num_loss_tokens")
    }
    index = write_index(folder, **columns)
    shards = []
    for number, first in enumerate(range(0, count, _SHARD_ROWS)):
        name = f"shard-{number:05d}.arrow"
        (folder / name).touch()
        size = min(_SHARD_ROWS, count - first)
        shards.append(ShardInfo(name=name, num_rows=size, num_bytes=0, xxh3_128="0" * 32))
    manifest = Manifest(
        num_rows=count,
        shards=tuple(shards),
        index=index,
        settings={},
        fingerprint=settings_fingerprint({}),
        sources={"made up": count},
    )
    write_manifest(folder, manifest)


def _made_up(shards: ShardSet) -> ShardSet:
    """Give a set that makes rows up instead of reading them."""
    import numpy as np

    from omniload.shards import ShardSet
    from omniload.types import Record

    class MadeUp(ShardSet):
        def read(self, row: int) -> Record:
            tokens, tiles = int(self.index.num_tokens[row]), int(self.index.num_tiles[row])
            ids = np.ones(tokens, np.int32)
            labels = ids.copy()
            labels[: tokens - int(self.index.num_loss_tokens[row])] = -100
            images = 1 if tiles else 0
            return Record(
                row=row,
                key=str(row),
                source="made up",
                shard=self.shard_names[self.locate(row)[0]],
                images=(),
                image_sizes=np.ones((images, 2), np.int32),
                image_num_tiles=np.full(images, tiles, np.int32),
                image_spans=np.array([[0, 1]] * images, np.int32).reshape(-1, 2),
                input_ids=ids,
                labels=labels,
            )

    return MadeUp(shards.path, shards.manifest, shards.index)


class _Blank:
    """A transform that decodes nothing: tiles are blank."""

    fingerprint = "blank/1"

    def __call__(self, record: Any, rng: Any) -> Any:
        import numpy as np

        from omniload.types import Sample

        num_tiles = int(record.image_num_tiles.sum())
        return Sample(
            sample_id=record.row,
            input_ids=record.input_ids,
            labels=record.labels,
            tiles=np.zeros((num_tiles, 3, _TILE_SIDE, _TILE_SIDE), np.uint8),
            image_num_tiles=record.image_num_tiles,
            image_sizes=record.image_sizes,
            image_grids=np.ones((len(record.image_num_tiles), 2), np.int32),
            image_spans=record.image_spans,
        )

    def filler(self, with_image: bool) -> Any:
        import numpy as np

        from omniload.types import Sample

        count = int(with_image)
        return Sample(
            sample_id=-1,
            input_ids=np.ones(2, np.int32),
            labels=np.full(2, -100, np.int32),
            tiles=np.zeros((count, 3, _TILE_SIDE, _TILE_SIDE), np.uint8),
            image_num_tiles=np.ones(count, np.int32),
            image_sizes=np.ones((count, 2), np.int32),
            image_grids=np.ones((count, 2), np.int32),
            image_spans=np.array([[0, 1]] * count, np.int32).reshape(-1, 2),
        )

    def lengths(self, record: Any) -> tuple[int, int, int]:
        loss = int((record.labels[1:] != -100).sum())
        return len(record.input_ids), int(record.image_num_tiles.sum()), loss

    def model_inputs(self, batch: Any) -> dict[str, Any]:
        return dict(batch.model_inputs())
