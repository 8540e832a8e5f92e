"""`omniload inspect`: what a folder of shards holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.shards import ShardSet
    from omniload.types import Record

__all__ = ["describe", "inspect_shards"]

_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BINS = 12
_BAR_CHARS = 40
_TEXT_CHARS = 300


def inspect_shards(
    shards: Annotated[Path, typer.Argument(metavar="SHARDS", help="Folder that preprocess wrote.")],
    sample: Annotated[
        int, typer.Option("--sample", "-n", help="Samples to show, spread evenly over the rows.")
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what shards hold: facts, distributions of lengths, sources, a few samples.

    Example: `omniload inspect shards/ --sample 5`
    """
    from omniload.shards import open_shards

    if sample < 0:
        raise ConfigError(f"--sample must be at least 0, got {sample}.")
    facts = describe(open_shards(shards), num_samples=sample)
    if as_json:
        import json

        print(json.dumps(facts))
        return
    _print(facts)


def describe(shards: ShardSet, *, num_samples: int = 3) -> dict[str, Any]:
    """Collect what is shown.

    Args:
        shards: an open set.
        num_samples: rows to show.

    Returns:
        Plain JSON: facts of the manifest, distributions, samples.
    """
    manifest, index = shards.manifest, shards.index
    count = min(num_samples, len(shards))
    return {
        "path": str(shards.path),
        "schema_version": manifest.schema_version,
        "rows": manifest.num_rows,
        "shards": len(manifest.shards),
        "bytes": sum(shard.num_bytes for shard in manifest.shards),
        "fingerprint": manifest.fingerprint,
        "settings": dict(manifest.settings),
        "sources": dict(manifest.sources),
        "counts": dict(manifest.counts),
        "distributions": {
            name: _distribution(getattr(index, name))
            for name in ("num_tokens", "num_tiles", "num_loss_tokens")
        },
        "samples": [_sample(shards.read(i * len(shards) // count)) for i in range(count)],
    }


def _distribution(column: Any) -> dict[str, Any]:
    import numpy as np

    # equal bins up to the 99th percentile; the last one takes the long tail
    low, high = int(column.min()), max(int(np.percentile(column, 99)), int(column.min()))
    bins = min(_BINS, high - low + 1)
    edges = np.unique(np.linspace(low, high + 1, bins + 1).astype(np.int64))
    edges[-1] = int(column.max()) + 1
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
    from omniload.images import image_kind

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


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)

    def line(text: str = "") -> None:
        console.print(text, markup=False, soft_wrap=True)

    encoder = facts["settings"].get("encoder", {})
    line(f"{facts['path']}: {facts['rows']:,} rows in {facts['shards']:,} "
         f"{'shard' if facts['shards'] == 1 else 'shards'}, "
         f"{facts['bytes'] / (1 << 20):,.1f} MiB, schema {facts['schema_version']}")  # fmt: skip
    line(f"fingerprint {facts['fingerprint']}")
    line(
        "encoder     " + ", ".join(f"{name}={encoder[name]}" for name in _SHOWN if name in encoder)
    )
    tiling = facts["settings"].get("tiling", {})
    line("tiling      " + ", ".join(f"{name}={value}" for name, value in tiling.items()))
    if facts["counts"]:
        line("counts      " + ", ".join(f"{k} {v:,}" for k, v in facts["counts"].items() if v))
    line()
    line("sources")
    widest = max(map(len, facts["sources"]), default=0)
    for name, rows in sorted(facts["sources"].items(), key=lambda pair: -pair[1]):
        line(f"  {name:<{widest}} {rows:>12,}  {rows / facts['rows']:6.1%}")
    for name, distribution in facts["distributions"].items():
        line()
        for text in _histogram(name, distribution):
            line(text)
    for sample in facts["samples"]:
        line()
        for text in _sample_lines(sample):
            line(text)


_SHOWN = ("tokenizer", "template", "loss", "tokens_per_tile", "vocab_size")


def _histogram(name: str, facts: dict[str, Any]) -> list[str]:
    percentiles = "  ".join(f"p{p} {value:,}" for p, value in facts["percentiles"].items())
    lines = [f"{name}: sum {facts['sum']:,}, mean {facts['mean']:,.1f};  {percentiles}"]
    edges, counts = facts["histogram"]["edges"], facts["histogram"]["counts"]
    most = max(counts)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * round(_BAR_CHARS * count / most)
        lines.append(f"  {low:>9,} to {high - 1:>9,} {count:>12,} {bar}")
    return lines


def _sample_lines(sample: dict[str, Any]) -> list[str]:
    lines = [
        f"row {sample['row']}: {sample['key']} ({sample['source']}, {sample['shard']}), "
        f"{sample['num_tokens']:,} tokens, {sample['num_loss_tokens']:,} give loss"
    ]
    for image in sample["images"]:
        width, height = image["size"]
        lines.append(
            f"  {image['kind']} {width}x{height}, {image['bytes']:,} bytes, "
            f"{image['tiles']} {'tile' if image['tiles'] == 1 else 'tiles'}, "
            f"tokens {image['span'][0]} to {image['span'][1]}"
        )
    for message in sample["messages"] or ():
        text = " ".join(message["content"].split())
        text = text if len(text) <= _TEXT_CHARS else text[:_TEXT_CHARS] + " ..."
        lines.append(f"  {message['role']}: {text}")
    return lines
