"""Samples of webdataset: ours as theirs, theirs as ours, and packing inside one of its pipelines.

A sample of webdataset is a dict: `__key__`, and the bytes of each member by its extension. What
they mean is decided as for indexed tars: see `omniload.tars.samples`.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omniload.batch import PackedBatch
from omniload.conversations import record_key, refusal
from omniload.errors import ConfigError, SampleError, ShardError
from omniload.images import image_kind
from omniload.padding import Padding
from omniload.source import RowSource
from omniload.stream import StreamPart, StreamSettings, pack_stream
from omniload.tars.maker import SampleMaker
from omniload.tars.members import Member
from omniload.tars.samples import read_group
from omniload.tars.scan import read_sample
from omniload.transforms import Transform, transform_from_settings
from omniload.types import Budget, Record, Sample

__all__ = [
    "SampleMaker",
    "as_is",
    "open_webdataset",
    "pack_stage",
    "records_stage",
    "to_webdataset",
]

#: Kind of image -> extension.
_ENDS = {
    "jpeg": "jpg", "png": "png", "gif": "gif", "webp": "webp", "tiff": "tiff", "avif": "avif",
    "jpeg2000": "jp2", "bmp": "bmp", "ppm": "ppm",
}  # fmt: skip


class to_webdataset:  # noqa: N801 - used as a function
    """Give the rows of a source as samples of webdataset: for its pipelines and its writers.

    `__key__` is the row number; the key of the record, which may have dots, is "id" in its JSON.
    Images are `jpg` (or `png`, ...), several are `0.jpg`, `1.jpg`, ... It can be iterated again and
    again, and can be the first stage of a `webdataset.DataPipeline`: put its `split_by_node` and
    `split_by_worker` behind it, as behind any list.

    Args:
        source: shards, indexed tars, a mixture.
        rows: which rows, in this order; None: all.
    """

    def __init__(self, source: RowSource, rows: Sequence[int] | None = None) -> None:
        if not isinstance(source, RowSource):
            raise ConfigError(
                "source must be an opened set of rows, as omniload.shards.open_shards(folder) or "
                f"omniload.tars.open_tars(folder), got {type(source).__name__}."
            )
        self._source = source
        self._rows = rows

    def __len__(self) -> int:
        return len(self._source if self._rows is None else self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = range(len(self._source)) if self._rows is None else self._rows
        return (_sample_of(self._source.read(int(row))) for row in rows)

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Begin anew; webdataset calls the first stage of a pipeline."""
        return iter(self)


def as_is(batch: Any) -> Any:
    """Give a batch back: the `collate_fn` of a torch or webdataset loader of packed batches.

    Without it, torch takes a batch for a dict of tensors and makes a plain one of it.
    """
    return batch


def _sample_of(record: Record) -> dict[str, Any]:
    where = f"row={record.row}, key={record.key!r}, shard={record.shard!r}"
    if record.messages is None:
        raise ConfigError(
            f"samples of webdataset need the conversations, and these were left out ({where}). "
            "Preprocess again without --drop-text."
        )
    turns = []
    for message in record.messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        turns.append(turn if message.weight is None else turn | {"weight": message.weight})
    talk = {"id": record.key, "source": record.source, "messages": turns}
    sample: dict[str, Any] = {"__key__": f"{record.row:09d}", "__url__": record.shard}
    for number, image in enumerate(record.images):
        end = _ENDS.get(image_kind(image))
        if end is None:
            raise ConfigError(
                f"an image of kind {image_kind(image)!r} can't be given to webdataset ({where}): "
                f"known are {', '.join(_ENDS)}."
            )
        sample[end if len(record.images) == 1 else f"{number}.{end}"] = image
    sample["json"] = json.dumps(talk, ensure_ascii=False).encode()
    return sample


def records_stage(
    maker: SampleMaker, *, on_bad_sample: str = "raise", source: str = "webdataset"
) -> Callable[[Iterable[Any]], Iterator[Record]]:
    """Make a pipeline stage: samples of webdataset, not decoded, to records.

    Args:
        maker: tokenizer, template and tiling.
        on_bad_sample: a sample that can't be used is an error ("raise"), or passed over ("skip").
        source: name of the data set.

    Returns:
        A function for `webdataset.WebDataset(...).compose(...)`, or for any iterable of samples.

    Raises:
        ConfigError: an unknown `on_bad_sample`.
    """
    if on_bad_sample not in ("raise", "skip"):
        raise ConfigError(f"on_bad_sample must be 'raise' or 'skip', got {on_bad_sample!r}.")
    return _Records(maker, on_bad_sample, source)


class _Records:
    """A stage as an object, so that it can be sent to worker processes."""

    def __init__(self, maker: SampleMaker, on_bad_sample: str, source: str) -> None:
        if not isinstance(maker, SampleMaker):
            raise ConfigError(
                f"maker must be an omniload.interop.SampleMaker, got {type(maker).__name__}."
            )
        self._maker = maker
        self._skips = on_bad_sample == "skip"
        self._source = source

    def __call__(self, samples: Iterable[Any]) -> Iterator[Record]:
        for sample in samples:
            try:
                yield self.record(sample)
            except SampleError as error:
                if self._skips:
                    continue
                raise SampleError(f"{refusal(error)[1]} ({_where(sample)})") from None

    def record(self, sample: Any) -> Record:
        members: list[Member] = []
        contents: dict[int, bytes] = {}
        key = str(sample.get("__key__", "")) if isinstance(sample, Mapping) else ""
        if not key:
            raise ConfigError(
                "a sample of webdataset must be a dict with '__key__', got "
                f"{type(sample).__name__}."
            )
        for name, value in sample.items():
            if name.startswith("__"):
                continue
            if not isinstance(value, (bytes, bytearray)):
                raise ConfigError(
                    f"samples must come before .decode(), as bytes: {name!r} is of type "
                    f"{type(value).__name__} ({_where(sample)})."
                )
            place = len(members)
            members.append(Member(f"{key}.{name}", place, place, len(value)))
            contents[place] = bytes(value)
        if not members:
            raise SampleError("a sample must have members, got none")
        found = read_group(members, lambda m: contents[m.start], has_images=lambda: False)
        messages, images = read_sample(found)
        return self._maker.record(
            messages,
            images,
            row=-1,
            key=record_key(found.record) or key,
            source=self._source,
            shard=str(sample.get("__url__", "")),
        )


def pack_stage(
    *,
    budget: Budget,
    maker: SampleMaker | None = None,
    transform: Transform | None = None,
    buffer: int = 1024,
    pad_to: int | Padding | None = None,
    oversize: str = "error",
    on_bad_sample: str = "raise",
    seed: int = 0,
) -> Callable[[Iterable[Any]], Iterator[PackedBatch]]:
    """Make a pipeline stage that packs: samples of webdataset, records or samples to batches.

        pipeline = wds.WebDataset(urls).compose(pack_stage(budget=budget, maker=maker))
        loader = wds.WebLoader(pipeline, batch_size=None, collate_fn=as_is, num_workers=4)

    Each worker packs what it reads. Nothing is agreed between ranks, so they may take different
    numbers of steps: to train on several, give `open_webdataset` to `omniload.StreamLoader`.

    Args:
        budget: upper bounds of a batch.
        maker: makes records of samples of webdataset; None: the stage gets records or samples.
        transform: from record to sample; None: the one that fits the maker.
        buffer: samples that each worker keeps to choose from.
        pad_to: see `omniload.DataLoader`.
        oversize: a sample over budget is an "error", or left out ("drop").
        on_bad_sample: a sample that can't be used is an error ("raise"), or left out ("skip").
        seed: seeds the transform.

    Raises:
        ConfigError: a value is wrong.
    """
    if transform is None and maker is not None:
        transform = transform_from_settings(maker.settings())
    settings = StreamSettings(
        budget=budget,
        transform=transform,
        buffer=buffer,
        pad_to=pad_to,
        oversize=oversize,
        on_bad_sample=on_bad_sample,
        seed=seed,
    )
    records = None if maker is None else _Records(maker, on_bad_sample, "webdataset")
    return _Packed(settings, records)


class _Packed:
    def __init__(self, settings: StreamSettings, records: _Records | None) -> None:
        self._settings = settings
        self._records = records

    def __call__(self, samples: Iterable[Any]) -> Iterator[PackedBatch]:
        from torch.utils.data import get_worker_info

        info = get_worker_info()
        part = StreamPart()
        if info is not None:
            part = StreamPart(worker=info.id, num_workers=info.num_workers)
        return pack_stream(self._made(samples), self._settings, part=part)

    def _made(self, samples: Iterable[Any]) -> Iterator[Sample | Record]:
        for item in samples:
            if self._records is None or isinstance(item, (Sample, Record)):
                yield item
            else:
                yield from self._records([item])


def open_webdataset(
    urls: str | Sequence[str],
    *,
    maker: SampleMaker,
    allow_pipe: bool = False,
    on_bad_sample: str = "raise",
    source: str = "webdataset",
) -> Callable[[StreamPart], Iterable[Record]]:
    """Make a stream of shards that webdataset reads, for `omniload.StreamLoader`.

    Each rank and worker reads every n-th shard. Tars are read by webdataset, which takes a damaged
    header as the end of a shard, without a word; `omniload index` does not.

    Args:
        urls: shards, with braces such as "train-{000..127}.tar" or without.
        maker: tokenizer, template and tiling.
        allow_pipe: allow `pipe:` URLs, which webdataset gives to a shell as a command.
        on_bad_sample: see `records_stage`.
        source: name of the data set.

    Returns:
        A function of a `StreamPart`.

    Raises:
        ConfigError: no URL, or one that is not allowed.
        ShardError: a path where no tar is; later, a shard that can't be read.
    """
    stage = records_stage(maker, on_bad_sample=on_bad_sample, source=source)
    return _Shards(_checked_urls(urls, allow_pipe=allow_pipe), stage)


class _Shards:
    def __init__(
        self, urls: Sequence[str], stage: Callable[[Iterable[Any]], Iterator[Record]]
    ) -> None:
        self._urls = urls
        self._stage = stage

    def __call__(self, part: StreamPart) -> Iterable[Record]:
        import webdataset

        mine = list(self._urls[part.index :: part.count])
        if not mine:
            return ()
        # the part is already that of a rank and a worker: webdataset must not split it again
        samples = webdataset.DataPipeline(
            webdataset.SimpleShardList(mine), webdataset.tarfile_to_samples()
        )
        return self._stage(_read(samples))


def _read(samples: Iterable[Any]) -> Iterator[Any]:
    """Give what webdataset reads; what can't be read is an error of ours, which names the shard."""
    try:
        yield from samples
    except (OSError, ValueError, tarfile.TarError) as error:
        raise ShardError(
            "a shard must be a tar that webdataset can read, but it failed with "
            f"{type(error).__name__}: {error}."
        ) from error


def _checked_urls(urls: str | Sequence[str], *, allow_pipe: bool) -> list[str]:
    try:
        import braceexpand
    except ImportError:
        raise ConfigError(
            "webdataset is not installed: pip install 'omniload-vlm[webdataset]'."
        ) from None
    found: list[str] = []
    for url in [urls] if isinstance(urls, str) else urls:
        found += braceexpand.braceexpand(str(url))
    if not found:
        raise ConfigError("urls must name at least one shard, got none.")
    for url in found:
        # a scheme is read whatever its case, and after blanks
        is_command = url.strip().lower().startswith("pipe:")
        if is_command and not allow_pipe:
            raise ConfigError(
                f"a URL must name a shard, and not a command that is run: got {url!r:.200}. Give "
                "allow_pipe=True if you trust where it comes from."
            )
        if not is_command and "://" not in url and "*" in url:
            raise ConfigError(
                "urls must name each shard, or several by braces such as {000..127}: got "
                f"{url!r:.200}. Expand a pattern with glob.glob first."
            )
        # braces are easily counted wrong; others of webdataset's places show when they are read
        is_path = not is_command and ":" not in url
        if is_path and (Path(url).is_dir() or not Path(url).exists()):
            raise ShardError(
                f"a URL must name a tar, got {url!r:.200}, which "
                f"{'is a folder' if Path(url).is_dir() else 'is not there'} (in {Path.cwd()}). "
                "Name each tar of a folder, by braces or glob.glob."
            )
    return found


def _where(sample: Any) -> str:
    found = sample if isinstance(sample, Mapping) else {}
    return f"key={found.get('__key__')!r}, shard={found.get('__url__')!r}"
