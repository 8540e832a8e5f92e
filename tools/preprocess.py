"""`omniload preprocess`: raw image-text data to shards."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.tools.preprocess_run import Summary

__all__ = ["parse_bytes", "preprocess"]

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class Format(StrEnum):
    """What the input is."""

    LLAVA = "llava"
    SHAREGPT = "sharegpt"
    INTERNVL_META = "internvl-meta"
    WEBDATASET = "webdataset"
    PARQUET = "parquet"
    SHARDS = "shards"


class Tiling(StrEnum):
    """How images become tiles or patches."""

    INTERNVL = "internvl"
    ANYRES = "anyres"
    SQUARE = "square"
    QWEN = "qwen"
    NAVIT = "navit"


class Store(StrEnum):
    """What is stored of an image."""

    ORIGINAL = "original"
    RESIZED = "resized"


class LossOn(StrEnum):
    """Which tokens give loss."""

    ASSISTANT = "assistant"
    LAST = "last"
    ALL = "all"


class Oversize(StrEnum):
    """What becomes of a sample over --max-tokens."""

    TRUNCATE = "truncate"
    FEWER_TILES = "fewer-tiles"
    REJECT = "reject"


def preprocess(
    src: Annotated[str, typer.Argument(metavar="SRC", help="A file, a folder or a glob.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the shards; new or empty.")],
    format_: Annotated[
        Format | None,
        typer.Option(
            "--format",
            metavar="KIND",
            help="llava, sharegpt, internvl-meta, webdataset, parquet or shards. "
            "[default: by its content]",
        ),
    ] = None,
    image_root: Annotated[
        Path | None,
        typer.Option(help="Folder of image paths. [default: the folder of the annotation]"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json or a folder with one. [default: byte-level, built in]"),
    ] = None,
    template: Annotated[
        str,
        typer.Option(
            help="Chat template: chatml, qwen-vl, vicuna, llama3, pixtral, tokenizer, file."
        ),
    ] = "chatml",
    loss: Annotated[
        LossOn, typer.Option(metavar="TURNS", help="Turns that give loss: assistant, last or all.")
    ] = LossOn.ASSISTANT,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a sample.")] = None,
    oversize: Annotated[
        Oversize,
        typer.Option(
            metavar="HOW",
            help="Samples over --max-tokens: truncate, fewer-tiles or reject. An image is never "
            "cut.",
        ),
    ] = Oversize.TRUNCATE,
    tiling: Annotated[
        Tiling,
        typer.Option(
            metavar="NAME",
            help="Images as these take them: internvl, anyres (LLaVA-NeXT, OneVision), square "
            "(LLaVA-1.5), qwen (Qwen2-VL and later) or navit (Pixtral).",
        ),
    ] = Tiling.INTERNVL,
    tile_size: Annotated[
        int | None,
        typer.Option(help="Side of a tile, pixels. [default: internvl 448, anyres, square 336]"),
    ] = None,
    min_tiles: Annotated[
        int | None, typer.Option(help="internvl: least tiles of an image. [default: 1]")
    ] = None,
    max_tiles: Annotated[
        int | None, typer.Option(help="internvl: most tiles of an image. [default: 12]")
    ] = None,
    thumbnail: Annotated[
        bool | None,
        typer.Option(
            "--thumbnail/--no-thumbnail",
            help="internvl: add a thumbnail to several tiles. [default: thumbnail]",
        ),
    ] = None,
    patch_size: Annotated[
        int | None,
        typer.Option(help="Side of a patch, pixels. [default: anyres, qwen 14, navit 16]"),
    ] = None,
    merge: Annotated[
        int | None, typer.Option(help="qwen: side of the patches of a token. [default: 2]")
    ] = None,
    min_pixels: Annotated[
        int | None, typer.Option(help="qwen: least pixels of an image. [default: 3136]")
    ] = None,
    max_pixels: Annotated[
        int | None, typer.Option(help="qwen: most pixels of an image. [default: 1003520]")
    ] = None,
    max_side: Annotated[
        int | None, typer.Option(help="navit: longest side, pixels. [default: 1024]")
    ] = None,
    max_patches: Annotated[
        int | None, typer.Option(help="navit: most patches of an image. [default: no limit]")
    ] = None,
    row_breaks: Annotated[
        bool | None,
        typer.Option(
            "--row-breaks",
            help="navit: a token between rows of patches, as Pixtral has; see --template pixtral.",
        ),
    ] = None,
    pinpoints: Annotated[
        str | None,
        typer.Option(metavar="HxW,...", help="anyres: resolutions. [default: those of LLaVA-NeXT]"),
    ] = None,
    max_crops: Annotated[
        int | None,
        typer.Option(
            help="anyres: tiles whose tokens an image's crops may have; LLaVA-OneVision 9. "
            "[default: no limit]"
        ),
    ] = None,
    tokens_per_tile: Annotated[
        int | None,
        typer.Option(
            help="Tokens the model sees for a tile. [default: internvl 256, square 576; one for 28 "
            "or 14 pixels squared at another --tile-size]"
        ),
    ] = None,
    store: Annotated[
        Store,
        typer.Option(
            metavar="FORM",
            help="internvl: original images, or resized to their grid where that is less to "
            "decode; needs the same tiling for good.",
        ),
    ] = Store.ORIGINAL,
    store_quality: Annotated[
        str,
        typer.Option(
            metavar="Q",
            help="Of resized images: JPEG quality 1 to 100, or lossless: PNG (slow to decode for "
            "photos).",
        ),
    ] = "95",
    shard_bytes: Annotated[
        str, typer.Option(metavar="SIZE", help="Size at which a shard is closed.")
    ] = "256MiB",
    workers: Annotated[int | None, typer.Option(help="Processes. [default: one a core]")] = None,
    seed: Annotated[int, typer.Option(help="Of the order of rows.")] = 0,
    keep_order: Annotated[bool, typer.Option("--keep-order", help="Don't shuffle rows.")] = False,
    drop_text: Annotated[
        bool, typer.Option("--drop-text", help="Don't store the conversations.")
    ] = False,
    check_images: Annotated[
        bool, typer.Option("--check-images", help="Decode each image in full, not its header only.")
    ] = False,
    allow_outside_root: Annotated[
        bool, typer.Option("--allow-outside-root", help="Read image paths that leave the root.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="End at the first rejected sample.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the shards in OUT, finished or not.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Turn raw image-text data into shards, ready to train on.

    Reads LLaVA and ShareGPT JSON or JSON lines, InternVL meta files, WebDataset tars, Hugging Face
    Parquet, and its own shards (to encode them with other settings). A killed run goes on where it
    was: run the same command again. Rejected samples are in OUT/rejected.jsonl, with reasons.

    Example: `omniload preprocess llava_v1_5_mix665k.json shards/ --image-root images/ --tokenizer
    Qwen2.5-0.5B/ --max-tokens 4096`
    """
    from omniload.tools.preprocess_run import preprocess_data
    from omniload.tools.recipe import Recipe, RunOptions

    recipe = Recipe(
        tokenizer=None if tokenizer is None else os.fspath(tokenizer.absolute()),
        template=template,
        loss=loss.value,
        tiling=tiling.value,
        tokens_per_tile=tokens_per_tile,
        tile_size=tile_size,
        min_tiles=min_tiles,
        max_tiles=max_tiles,
        thumbnail=thumbnail,
        patch_size=patch_size,
        merge=merge,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_side=max_side,
        max_patches=max_patches,
        row_breaks=row_breaks,
        pinpoints=pinpoints,
        max_crops=max_crops,
        max_tokens=max_tokens,
        oversize=oversize.value,
        store=store.value,
        store_quality=store_quality,
    )
    options = RunOptions(
        seed=seed,
        keep_order=keep_order,
        drop_text=drop_text,
        shard_bytes=parse_bytes(shard_bytes),
        strict=strict,
        check_images=check_images,
        allow_outside_root=allow_outside_root,
    )
    try:
        summary = preprocess_data(
            src,
            out,
            recipe=recipe,
            options=options,
            format_name=None if format_ is None else format_.value,
            image_root=image_root,
            workers=_cores() if workers is None else workers,
            overwrite=overwrite,
            show_progress=not as_json,
            note=_note,
        )
    except (KeyboardInterrupt, RuntimeError) as error:
        # Ctrl-C while a thread starts ends in the RuntimeError of who waits for that thread
        if not isinstance(error, KeyboardInterrupt) and not isinstance(
            error.__context__, KeyboardInterrupt
        ):
            raise
        typer.echo("stopped; run the same command again to go on", err=True)
        raise KeyboardInterrupt from None
    _report(summary, out, as_json=as_json)


def _note(text: str) -> None:
    typer.secho(f"note: {text}", fg="yellow", err=True)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # fewer than the machine has, in a container
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parse_bytes(text: str) -> int:
    """Read a size such as "256MiB", "64M" or "1000000".

    Raises:
        ConfigError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)i?b?\s*", text.lower())
    if match is None:
        raise ConfigError(f"a size must be a number with KiB, MiB or GiB, got {text!r}.")
    return int(float(match[1]) * _UNITS[match[2]])


def _report(summary: Summary, out: Path, *, as_json: bool) -> None:
    facts = summary.as_dict()
    if summary.already_complete and not as_json:
        typer.echo(f"already complete: {out} holds this input with these settings")
    if as_json:
        import json

        print(json.dumps(facts))
        return
    for line in _lines(facts, out):
        typer.echo(line)
    if facts["rejected"]:
        typer.secho(f"rejected    {facts['rejected']:,}, see {out / 'rejected.jsonl'}", fg="yellow")
        for reason, count in facts["reasons"].items():
            typer.echo(f"            {count:,} {reason}")
    for text in facts["notes"]:
        _note(text)


def _lines(facts: dict[str, Any], out: Path) -> list[str]:
    from omniload.tools.notes import added_tokens, plural

    lines = [
        f"read        {facts['read']:,} samples"
        + (
            ""
            if facts["already_complete"]
            else f" in {facts['seconds']:.1f} s ({facts['samples_per_second']:,.0f} samples/s)"
        ),
        f"written     {facts['written']:,} to {out}: {plural(facts['shards'], 'shard')}, "
        f"{facts['bytes'] / (1 << 20):,.1f} MiB",
        f"tokens      {facts['tokens']:,} (mean {facts['mean_tokens']:,.1f}), "
        f"{facts['loss_tokens']:,} give loss",
        f"tiles       {facts['tiles']:,} (mean {facts['mean_tiles']:.2f}) "
        f"of {plural(facts['images'], 'image')}",
    ]
    lines += [
        f"vocabulary  {text}" for text in added_tokens(facts["added_tokens"], facts["vocab_size"])
    ]
    for name, words in (("truncated", "truncated"), ("tiles_reduced", "with fewer tiles")):
        if facts[name]:
            lines.append(f"{words:<11} {facts[name]:,}")
    if facts["images_resized"]:
        saved = facts["image_bytes_saved"]
        before = max(facts["image_bytes"] + saved, 1)
        lines.append(
            f"resized     {facts['images_resized']:,} images; {saved / (1 << 20):,.1f} of "
            f"{before / (1 << 20):,.1f} MiB saved ({100 * saved / before:.0f} %)"
        )
    if facts["resumed_pieces"]:
        lines.append(
            f"went on     {facts['resumed_pieces']} of {facts['pieces']} pieces were done before"
        )
    return lines
