"""`omniload inspect`: what a data set holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from omniload.errors import ConfigError

__all__ = ["inspect_data"]

_BAR_CHARS = 40
_TEXT_CHARS = 300
_SHOWN = ("tokenizer", "template", "loss", "tokens_per_tile", "vocab_size")


def inspect_data(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Folder of shards or of indexed tars, URL of shards, or .yaml file of a mixture.",
        ),
    ],
    sample: Annotated[
        int, typer.Option("--sample", "-n", help="Samples to show, spread evenly over the rows.")
    ] = 3,
    scan: Annotated[
        bool,
        typer.Option("--scan", help="Read all rows: images of a sample, and figures by source."),
    ] = False,
    epoch: Annotated[int, typer.Option(min=0, help="Of a mixture: the epoch to show.")] = 0,
    workers: Annotated[
        int | None, typer.Option(min=1, help="For --scan: processes; without it: where it pays.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="For URLs: folder of this machine that holds copies.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what data holds: facts, distributions of lengths, sets and sources, a few samples.

    Only the index is read, and the samples that are shown. Whether the data is damaged is what
    `omniload verify` says.

    Example: `omniload inspect shards/ --sample 5`
    """
    from omniload.cache import Cache
    from omniload.tools.data import open_data
    from omniload.tools.inspect_facts import describe

    if sample < 0:
        raise ConfigError(f"--sample must be at least 0, got {sample}.")
    opened = open_data(data, cache=None if cache is None else Cache(folder=cache))
    facts = describe(opened, num_samples=sample, epoch=epoch)
    if scan:
        from omniload.tools.inspect_scan import scan as scan_rows
        from omniload.tools.progress_bar import rows_bar

        with rows_bar("scan", show=not as_json) as tick:
            facts["scan"] = scan_rows(opened, workers=workers, tick=tick)
    if as_json:
        import json

        print(json.dumps(facts))
        return
    _print(facts)


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    blocks = [_head(facts), _sources(facts)]
    if facts["sets"] is not None:
        blocks.append(_sets(facts["sets"]))
    blocks += [_histogram(name, one) for name, one in facts["distributions"].items()]
    scanned = facts.get("scan")
    if scanned is not None and scanned["images"] is not None:
        blocks.append(_histogram("images", scanned["images"]))
    by_source = facts["by_source"] if scanned is None else scanned["by_source"]
    if by_source:
        blocks.append(_by_source(by_source))
    blocks += [_sample_lines(sample) for sample in facts["samples"]]
    for number, lines in enumerate(blocks):
        for text in [""] * bool(number) + lines:
            console.print(text, markup=False, soft_wrap=True)


def _head(facts: dict[str, Any]) -> list[str]:
    schema = facts["schema_version"]
    shards = f"{facts['shards']:,} {'shard' if facts['shards'] == 1 else 'shards'}"
    lines = [
        f"{facts['path']}: {facts['rows']:,} rows in {shards}, "
        f"{facts['bytes'] / (1 << 20):,.1f} MiB"
        + (f", schema {schema}" if schema is not None else f", {facts['kind']}"),
        f"fingerprint {facts['fingerprint']}",
    ]
    encoder = facts["settings"].get("encoder", {})
    lines.append(
        "encoder     " + ", ".join(f"{name}={encoder[name]}" for name in _SHOWN if name in encoder)
    )
    lines.append("tiling      " + _pairs(facts["settings"].get("tiling", {})))
    for name, tiling in facts["source_tilings"].items():
        lines.append(f"  {name}: {_pairs(tiling)}")
    if facts["counts"]:
        lines.append(
            "counts      " + ", ".join(f"{k} {v:,}" for k, v in facts["counts"].items() if v)
        )
    return lines


def _pairs(tiling: Any) -> str:
    return ", ".join(f"{name}={value}" for name, value in dict(tiling or {}).items())


def _sources(facts: dict[str, Any]) -> list[str]:
    stored = sum(facts["sources"].values())
    widest = max(map(len, facts["sources"]), default=0)
    return ["sources (rows that are stored)"] + [
        f"  {name:<{widest}} {rows:>12,}  {rows / max(stored, 1):6.1%}"
        for name, rows in sorted(facts["sources"].items(), key=lambda pair: -pair[1])
    ]


def _sets(sets: list[dict[str, Any]]) -> list[str]:
    widest = max(len(one["name"]) for one in sets)
    return [
        f"{'sets of this epoch':<{max(widest, 16) + 2}} {'rows':>12} {'share':>7} {'tokens':>16} "
        f"{'share':>7} {'tiles':>14} {'share':>7} {'passes':>8} {'so far':>8}"
    ] + [
        f"  {one['name']:<{max(widest, 16)}} {one['rows']:>12,} {one['share_of_rows']:>7.1%} "
        f"{one['tokens']:>16,} {one['share_of_tokens']:>7.1%} {one['tiles']:>14,} "
        f"{one['share_of_tiles']:>7.1%} {one['passes']:>8.3g} {one['passes_so_far']:>8.3g}"
        for one in sets
    ]


def _by_source(by_source: dict[str, Any]) -> list[str]:
    lines = []
    for name, columns in by_source.items():
        lines.append(name)
        for column, found in columns.items():
            if isinstance(found, dict):
                percentiles = "  ".join(f"p{p} {v:,}" for p, v in found["percentiles"].items())
                lines.append(
                    f"  {column}: sum {found['sum']:,}, mean {found['mean']:,.1f};  {percentiles}"
                )
    return lines


def _histogram(name: str, facts: dict[str, Any]) -> list[str]:
    percentiles = "  ".join(f"p{p} {value:,}" for p, value in facts["percentiles"].items())
    lines = [f"{name}: sum {facts['sum']:,}, mean {facts['mean']:,.1f};  {percentiles}"]
    edges, counts = facts["histogram"]["edges"], facts["histogram"]["counts"]
    most = max(counts)
    for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True):
        bar = "#" * round(_BAR_CHARS * count / most)
        is_tail = high - low > edges[1] - edges[0]  # the other bins are even
        upper = "and more    " if is_tail else f"to {high - 1:>9,}"
        lines.append(f"  {low:>9,} {upper} {count:>12,} {bar}")
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
