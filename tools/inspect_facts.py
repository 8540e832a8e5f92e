"""What `omniload inspect` shows of a data set, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from omniload.images import image_kind
from omniload.source import RowSource
from omniload.types import Record

__all__ = ["LENGTHS", "describe", "distribution"]

LENGTHS = ("num_tokens", "num_tiles", "num_loss_tokens")

_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BINS = 12


def describe(data: RowSource, *, num_samples: int = 3, epoch: int = 0) -> dict[str, Any]:
    """Collect what is shown; reads the index, and the rows that are shown.

    Args:
        data: an open set, or a mixture.
        num_samples: rows to show.
        epoch: of a mixture.

    Returns:
        Plain JSON: facts of the manifest, distributions, samples.
    """
    rows: Any = data.at_epoch(epoch)
    manifest = getattr(data, "manifest", None)
    count = min(num_samples, len(rows))
    settings = dict(data.settings)
    figures = getattr(data, "figures", None)
    return {
        "path": data.location,
        "kind": {"ShardSet": "shards", "TarSet": "tars"}.get(type(data).__name__, "mixture"),
        "schema_version": getattr(manifest, "schema_version", None),
        "rows": len(rows),
        "shards": len(rows.shard_names),
        "bytes": _bytes(data),
        "fingerprint": data.fingerprint,  # as states hold it
        "settings": settings,
        "source_tilings": settings.get("source_tilings", {}),
        "sources": dict(data.sources),
        "counts": dict(getattr(manifest, "counts", {})),
        "sets": None if figures is None else [one.as_dict() for one in figures(epoch)],
        "distributions": _distributions(rows, slice(None)),
        "by_source": {
            name: _distributions(rows, part) for name, part in _parts(data, rows) if name
        },
        "samples": [_sample(rows.read(i * len(rows) // count)) for i in range(count)],
    }


def _bytes(data: Any) -> int:
    files: Any
    if (sets := getattr(data, "sets", None)) is not None:
        return sum(_bytes(one) for one in sets.values())
    manifest = getattr(data, "manifest", None)
    files = getattr(manifest, "shards", None) or getattr(manifest, "tars", ())
    return sum(file.num_bytes for file in files)


def _distributions(rows: RowSource, part: Any) -> dict[str, Any]:
    columns = {name: getattr(rows.index, name)[part] for name in LENGTHS}
    return {name: distribution(column) for name, column in columns.items() if len(column)}


def _parts(data: Any, rows: Any) -> Iterable[tuple[str, Any]]:
    """Give the rows of each set of a mixture, or of each source where tars say it."""
    starts = getattr(rows, "set_starts", None)
    if starts is not None:
        bounds = starts.tolist()
        for name, first, end in zip(rows.set_names, bounds, bounds[1:], strict=False):
            yield name, slice(first, end)
        return
    tars = getattr(getattr(data, "manifest", None), "tars", ())
    if tars and len(data.sources) > 1:
        sources = np.repeat([tar.source for tar in tars], [tar.num_rows for tar in tars])
        for name in data.sources:
            yield name, sources == name


def distribution(column: Any) -> dict[str, Any]:
    # equal bins up to the 99th percentile; the last one takes the long tail
    low, high = int(column.min()), max(int(np.percentile(column, 99)), int(column.min()))
    width = -(-(high - low + 1) // _BINS)
    edges = np.arange(low, high + width + 1, width)
    if column.max() >= edges[-1]:
        edges = np.append(edges, int(column.max()) + 1)
    counts, _ = np.histogram(column, edges)
    return {
        "mean": float(column.mean()),
        "sum": int(column.sum(dtype=np.int64)),
        "percentiles": {
            str(p): int(value)
            for p, value in zip(_PERCENTILES, np.percentile(column, _PERCENTILES), strict=True)
        },
        "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }


def _sample(record: Record) -> dict[str, Any]:
    messages = record.messages
    return {
        "row": record.row,
        "key": record.key,
        "source": record.source,
        "shard": record.shard,
        "num_tokens": len(record.input_ids),
        "num_loss_tokens": int((record.labels[1:] >= 0).sum()),
        "images": [
            {
                "kind": image_kind(data),
                "bytes": len(data),
                "size": size,
                "tiles": tiles,
                "span": span,
            }
            for data, size, tiles, span in zip(
                record.images,
                record.image_sizes.tolist(),
                record.image_num_tiles.tolist(),
                record.image_spans.tolist(),
                strict=True,
            )
        ],
        "messages": None
        if messages is None
        else [
            {"role": message.role, "content": message.content, "weight": message.weight}
            for message in messages
        ],
    }
