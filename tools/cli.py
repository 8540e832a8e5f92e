"""The command `omniload`: one program, a subcommand a job."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

import omniload
from omniload.errors import OmniloadError
from omniload.tools import (
    bench_grouping,
    bench_images,
    bench_index,
    bench_masks,
    bench_pack,
    bench_pipeline,
    bench_read,
    bench_start,
    bench_tiles,
    bench_workers,
    doctor,
    explain_cmd,
    index_cmd,
    inspect_cmd,
    pipeline_cmd,
    plan_cmd,
    preprocess,
    state_cmd,
    verify_cmd,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="omniload",
    help="Prepare, look at and measure data for training vision-language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = typer.Typer(
    no_args_is_help=True,
    help="Measure: side by side in one run, ratios first.",
)

app.command()(preprocess.preprocess)
app.command("index")(index_cmd.index)
app.command("explain")(explain_cmd.explain_data)
app.command("inspect")(inspect_cmd.inspect_data)
app.command("plan")(plan_cmd.plan_data)
app.command("plan-pipeline")(pipeline_cmd.plan_pipeline)
app.command("state")(state_cmd.explain_state)
app.command("verify")(verify_cmd.verify_data)
app.command()(doctor.doctor)
bench.command("grouping")(bench_grouping.grouping)
bench.command("images")(bench_images.images)
bench.command("index")(bench_index.index)
bench.command("masks")(bench_masks.masks)
bench.command("pack")(bench_pack.pack)
bench.command("pipeline")(bench_pipeline.pipeline)
bench.command("read")(bench_read.read)
bench.command("start")(bench_start.start)
bench.command("tiles")(bench_tiles.tiles)
bench.command("workers")(bench_workers.workers)
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        print(omniload.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is done.")] = False,
) -> None:
    """Set up what all subcommands share."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )


def main() -> None:
    """Run the command line; errors of ours become one message and exit code 1."""
    try:
        app()
    except OmniloadError as error:
        from rich.console import Console

        console = Console(stderr=True)
        console.print(f"[bold red]{type(error).__name__}[/]", end=": ")
        console.print(str(error), markup=False, highlight=False)
        sys.exit(1)


if __name__ == "__main__":
    main()
