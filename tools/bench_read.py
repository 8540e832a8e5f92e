"""`omniload bench read`: what it costs to read a sample, beside other ways to store it."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from omniload.shards import ShardSet
    from omniload.types import Record

__all__ = ["read"]

_OURS = "omniload, any order"
_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def read(
    samples: Annotated[int, typer.Option(min=100, help="Samples of the data set.")] = 6000,
    kb: Annotated[float, typer.Option(min=0.1, help="Mean size of an image, KB.")] = 28.0,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 5,
    folder: Annotated[
        Path | None, typer.Option(help="Where to write the data; a temporary folder by default.")
    ] = None,
    s3: Annotated[
        bool, typer.Option("--s3", help="Read from an S3 server on loopback too (needs moto).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare the cost of reading a sample: image file, tokens, labels and text, nothing decoded.

    All ways read the same bytes from a local disk, warm. Each reads every sample once a round:
    "any order" by a permutation, "in order" as they lie. CPU time of one process. With --s3: the
    first epoch fills the cache, the second reads from it; its speed is set against local files.

    Example: `omniload bench read --samples 6000 --s3`
    """
    from omniload.tools.bench_common import emit, measure

    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="omniload-read-")))
        records = list(_records(samples, kb))
        ways = _ways(folder, records)
        timings = measure(ways, repeats=repeats, clock=time.process_time)
        base = timings[_OURS].median_s
        rows: list[dict[str, Any]] = [
            {
                "way": name,
                "us a sample": timing.median_s / samples * 1e6,
                "times ours": timing.median_s / base,
                "least us": timing.min_s / samples * 1e6,
            }
            for name, timing in timings.items()
        ]
        notes = (
            f"{samples} samples with an image of {kb:g} KB on average; median and least of "
            f"{repeats} rounds, CPU time of one process."
        )
        if s3:
            notes += " " + _from_s3(folder, samples, repeats)
    emit("read", rows, as_json, notes)


def _records(count: int, kb: float) -> Iterator[Record]:
    """Make samples of noise with the sizes of real ones."""
    import numpy as np

    from omniload.types import Message, Record

    rng = np.random.default_rng(0)
    for i in range(count):
        tokens = int(rng.integers(400, 900))
        ids = rng.integers(0, 30_000, tokens).astype(np.int32)
        labels = np.where(np.arange(tokens) < tokens // 2, -100, ids).astype(np.int32)
        yield Record(
            row=-1,
            key=f"sample-{i:08d}",
            source="bench",
            shard="",
            images=(rng.bytes(int(kb * 1000 * rng.uniform(0.5, 1.5))),),
            image_sizes=np.array([[640, 480]], np.int32),
            image_num_tiles=np.array([3], np.int32),
            image_spans=np.array([[10, 200]], np.int32),
            input_ids=ids,
            labels=labels,
            messages=(
                Message(role="user", content="<image>\nWhat can be seen here? " * 3),
                Message(role="assistant", content="A dog lies on a red sofa. " * 8),
            ),
        )


def _ways(folder: Path, records: list[Record]) -> dict[str, Callable[[], object]]:
    """Write the samples in all formats; returns a function for each that reads them all."""
    import numpy as np

    from omniload.shards import open_shards, write_shards

    write_shards(folder / "shards", records, settings={}, max_bytes=64 << 20)
    shards = open_shards(folder / "shards")
    order = np.random.default_rng(1).permutation(len(records)).tolist()
    ways: dict[str, Callable[[], object]] = {
        _OURS: lambda: _read_all(shards, order),
        "omniload, in order": lambda: _read_all(shards, range(len(records))),
        **_files(folder / "files", records, order),
        **_arrow(folder / "table.arrow", records, order),
    }
    if importlib.util.find_spec("webdataset") is not None:
        ways |= _webdataset(folder / "tars", records)
    return ways


def _read_all(shards: ShardSet, rows: Any) -> int:
    size = 0
    for row in rows:
        size += len(shards.read(row).images[0])
    return size


def _use_all(shards: ShardSet, rows: Any) -> int:
    """Read rows, and copy their numbers into a row to be packed."""
    import numpy as np

    packed, size = np.empty(4096, np.int64), 0
    for row in rows:
        record = shards.read(row)
        # a view of a map costs nothing before it is used, and what a cache gives is no view
        packed[: len(record.input_ids)] = record.input_ids
        packed[: len(record.labels)] = record.labels
        size += len(record.images[0])
    return size


def _text(record: Record) -> str:
    return "".join(message.content for message in record.messages or ())


def _files(folder: Path, records: list[Record], order: list[int]) -> dict[str, Any]:
    """A file for each image and one for the rest, as ImageFolder and many recipes have them."""
    folder.mkdir()
    for i, record in enumerate(records):
        (folder / f"{i:06d}.jpg").write_bytes(record.images[0])
        rest = record.input_ids.tobytes() + record.labels.tobytes() + _text(record).encode()
        (folder / f"{i:06d}.bin").write_bytes(rest)

    def read_files() -> int:
        size = 0
        for i in order:
            size += len((folder / f"{i:06d}.jpg").read_bytes())
            size += len((folder / f"{i:06d}.bin").read_bytes())
        return size

    return {"two files a sample, any order": read_files}


def _arrow(path: Path, records: list[Record], order: list[int]) -> dict[str, Any]:
    """A mapped Arrow table, read a row at a time, as Hugging Face datasets does."""
    import pyarrow as pa

    def batch(part: list[Record]) -> Any:
        columns = {
            "image": pa.array([record.images[0] for record in part], pa.large_binary()),
            "input_ids": pa.array([record.input_ids for record in part], pa.list_(pa.int32())),
            "labels": pa.array([record.labels for record in part], pa.list_(pa.int32())),
            "text": pa.array([_text(record) for record in part]),
        }
        return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))

    batches = [batch(records[i : i + 1000]) for i in range(0, len(records), 1000)]
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, batches[0].schema) as writer:
        for each in batches:
            writer.write_batch(each)
    table: Any = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()

    def read_rows() -> int:
        size = 0
        for i in order:
            row = table.slice(i, 1)
            size += len(row.column("image")[0].as_py())
            size += len(row.column("text")[0].as_py())
            for name in ("input_ids", "labels"):
                size += len(row.column(name).chunk(0).flatten().to_numpy())
        return size

    return {"Arrow table through pyarrow, any order": read_rows}


def _webdataset(folder: Path, records: list[Record]) -> dict[str, Any]:
    """Tars of the same bytes, streamed."""
    import webdataset

    folder.mkdir()
    paths = []
    for number in range(0, len(records), 2000):
        paths.append(str(folder / f"{number:06d}.tar"))
        with tarfile.open(paths[-1], "w") as tar:
            for i, record in enumerate(records[number : number + 2000], number):
                for suffix, data in (
                    ("jpg", record.images[0]),
                    ("ids", record.input_ids.tobytes()),
                    ("labels", record.labels.tobytes()),
                    ("txt", _text(record).encode()),
                ):
                    member = tarfile.TarInfo(f"{i:06d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))

    def stream() -> int:
        data = webdataset.WebDataset(paths, shardshuffle=False, empty_check=False)
        return sum(len(sample["jpg"]) for sample in data)

    return {"webdataset, in order": stream}


def _from_s3(folder: Path, samples: int, repeats: int) -> str:
    """Read two epochs from S3 through a cache; returns a sentence."""
    import numpy as np

    from omniload.cache import Cache, Storage
    from omniload.shards import open_shards
    from omniload.tools.bench_common import measure

    with _s3_server() as options:
        url = _upload(folder / "shards", options)
        cache = Cache(folder=folder / "cache")
        begin = time.perf_counter()
        remote = open_shards(url, cache=cache, storage=Storage(options=options))
        remote.prefetch(range(len(remote.shard_names)))
        _read_all(remote, range(samples))
        first_s = time.perf_counter() - begin
        local = open_shards(folder / "shards")
        order = np.random.default_rng(2).permutation(samples).tolist()
        timings = measure(
            {"local": lambda: _use_all(local, order), "s3": lambda: _use_all(remote, order)},
            repeats=repeats,
            clock=time.process_time,
        )
    ratio = timings["local"].median_s / timings["s3"].median_s
    return (
        f"From S3 on loopback: first epoch {first_s / samples * 1e6:.0f} us a sample, wall time; "
        f"second epoch, any order, tokens and labels copied as packing does, "
        f"{timings['s3'].median_s / samples * 1e6:.1f} us of CPU time, {100 * ratio:.0f} % of the "
        "speed of local files."
    )


@contextlib.contextmanager
def _s3_server() -> Iterator[dict[str, str]]:
    from omniload.errors import ConfigError

    missing = [name for name in ("moto", "s3fs") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--s3 needs the packages moto[server] and s3fs; missing: {', '.join(missing)}."
        )
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _MOTO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdout is not None
    try:
        port = child.stdout.readline().strip()
        yield {"key": "bench", "secret": "bench", "endpoint_url": f"http://127.0.0.1:{port}"}
    finally:
        child.kill()
        child.communicate()


def _upload(folder: Path, options: dict[str, str]) -> str:
    import fsspec

    system = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    system.mkdir("bench")
    for path in folder.iterdir():
        system.put_file(str(path), f"bench/shards/{path.name}")
    return "s3://bench/shards"
