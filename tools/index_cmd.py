"""`omniload index`: WebDataset tars made ready to be trained on where they lie."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omniload.tools.preprocess import LossOn, Oversize, Tiling

if TYPE_CHECKING:
    from omniload.tools.index_run import IndexSummary

__all__ = ["index"]


def index(
    tars: Annotated[list[str], typer.Argument(metavar="TARS...", help="Tars, folders or globs.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the index. [default: the folder of the tars]"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json or a folder with one. [default: byte-level, built in]"),
    ] = None,
    template: Annotated[
        str, typer.Option(help="Chat template: chatml, qwen-vl, vicuna, llama3, tokenizer, file.")
    ] = "chatml",
    loss: Annotated[
        LossOn, typer.Option(metavar="TURNS", help="Turns that give loss: assistant, last or all.")
    ] = LossOn.ASSISTANT,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of a sample.")] = None,
    oversize: Annotated[
        Oversize,
        typer.Option(
            metavar="HOW", help="Samples over --max-tokens: truncate, fewer-tiles or reject."
        ),
    ] = Oversize.TRUNCATE,
    tiling: Annotated[
        Tiling,
        typer.Option(metavar="NAME", help="internvl, anyres, square, qwen or navit."),
    ] = Tiling.INTERNVL,
    tile_size: Annotated[int | None, typer.Option(help="Side of a tile, pixels.")] = None,
    min_tiles: Annotated[int | None, typer.Option(help="internvl: least tiles.")] = None,
    max_tiles: Annotated[int | None, typer.Option(help="internvl: most tiles.")] = None,
    thumbnail: Annotated[
        bool | None, typer.Option("--thumbnail/--no-thumbnail", help="internvl: add a thumbnail.")
    ] = None,
    patch_size: Annotated[int | None, typer.Option(help="Side of a patch, pixels.")] = None,
    merge: Annotated[int | None, typer.Option(help="qwen: side of the patches of a token.")] = None,
    min_pixels: Annotated[int | None, typer.Option(help="qwen: least pixels.")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="qwen: most pixels.")] = None,
    max_side: Annotated[int | None, typer.Option(help="navit: longest side, pixels.")] = None,
    max_patches: Annotated[int | None, typer.Option(help="navit: most patches.")] = None,
    row_breaks: Annotated[
        bool | None,
        typer.Option("--row-breaks", help="navit: a token between rows of patches; Pixtral."),
    ] = None,
    pinpoints: Annotated[
        str | None, typer.Option(metavar="HxW,...", help="anyres: resolutions.")
    ] = None,
    max_crops: Annotated[
        int | None, typer.Option(help="anyres: tiles whose tokens crops may have; OneVision 9.")
    ] = None,
    tokens_per_tile: Annotated[
        int | None, typer.Option(help="Tokens the model sees for a tile.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes. [default: one a core]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Index WebDataset tars: training reads them in place, and no image is copied.

    Writes a side file for each tar: places and checksums of its members, and the lengths of its
    samples, measured as `omniload preprocess` does with the options of the same names. Damaged
    parts are passed over and reported. A killed run goes on where it was; with other settings only
    the lengths are measured again. Refused samples are in omniload-tars.rejected.jsonl.

    Example: `omniload index laion/*.tar --tokenizer Qwen2.5-0.5B/ --max-tokens 4096`
    """
    from omniload.tools.index_run import index_tars
    from omniload.tools.recipe import Recipe

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
    )
    try:
        summary = index_tars(
            tars,
            out=out,
            recipe=recipe,
            workers=len(os.sched_getaffinity(0)) if workers is None else workers,
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
    _report(summary, as_json=as_json)


def _note(text: str) -> None:
    typer.secho(f"note: {text}", fg="yellow", err=True)


def _report(summary: IndexSummary, *, as_json: bool) -> None:
    from omniload.tars.manifest import REJECTED_NAME
    from omniload.tools.notes import added_tokens, plural

    facts = summary.as_dict()
    if as_json:
        import json

        print(json.dumps(facts))
        return
    states = ", ".join(
        f"{facts[f'tars_{name}']} {words}"
        for name, words in (
            ("indexed", "indexed"),
            ("measured", "measured again, offsets were known"),
            ("kept", "kept"),
        )
        if facts[f"tars_{name}"]
    )
    lines = [
        f"tars        {plural(facts['tars'], 'tar')}, {facts['bytes'] / (1 << 20):,.1f} MiB, "
        f"{facts['members']:,} members: {states} in {facts['seconds']:.1f} s",
        f"rows        {facts['rows']:,} of {plural(facts['samples'], 'sample')}, "
        f"index in {facts['path']}",
        f"tokens      {facts['tokens']:,} (mean {facts['mean_tokens']:,.1f}), "
        f"{facts['loss_tokens']:,} give loss",
        f"tiles       {facts['tiles']:,} (mean {facts['mean_tiles']:.2f}) "
        f"of {plural(facts['images'], 'image')}",
    ]
    lines += [
        f"vocabulary  {text}" for text in added_tokens(facts["added_tokens"], facts["vocab_size"])
    ]
    for line in lines:
        typer.echo(line)
    if facts["damaged"]:
        typer.secho(
            f"damaged     {plural(facts['damaged'], 'part')}, {facts['bytes_skipped']:,} bytes "
            "passed over",
            fg="yellow",
        )
    if facts["rejected"] or facts["damaged"]:
        path = summary.folder / REJECTED_NAME
        typer.secho(f"rejected    {facts['rejected']:,}, see {path}", fg="yellow")
        for reason, count in facts["reasons"].items():
            typer.echo(f"            {count:,} {reason}")
