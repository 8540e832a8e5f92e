"""`omniload plan-pipeline`: stages, recompute and order of a pipeline, for a model and its data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.tools.pipeline_planning import Planned

__all__ = ["plan_pipeline"]

_RECOMPUTE_HELP = (
    "auto: as few whole layers as the memory asks for; selective: or parts of them, attention or "
    "MLP; full: all; none."
)


def plan_pipeline(
    model: Annotated[
        str | None,
        typer.Option(help="A known model, such as internvl-6b-20b, or encoder+language."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="config.json of a model of Hugging Face, or its folder."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(
            help="Measured cost table, from profile_layers. With --model or --config, it corrects "
            "the counted costs; by itself, it has all layers."
        ),
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Stages of the pipeline.")] = 4,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a GPU, such as 80GB. Without it: no limit.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of shards, .yaml of a mixture, or Parquet or CSV file of lengths; may "
            "be repeated. Without it: made-up lengths."
        ),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that share a layer.")] = 1,
    data_parallel: Annotated[
        int | None, typer.Option(min=1, help="Copies of the pipeline.  [default: 1]")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="All GPUs; instead of --data-parallel.")
    ] = None,
    zero: Annotated[int, typer.Option(min=0, max=1, help="ZeRO stage.")] = 1,
    micro_batches: Annotated[
        int | None,
        typer.Option(min=1, help="Micro-batches of a step on each rank.  [default: 4 a stage]"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a micro-batch may hold.")] = 4096,
    tiles: Annotated[
        int | None,
        typer.Option(min=0, help="Tiles a micro-batch may hold. Without it: matched to the data."),
    ] = None,
    freeze: Annotated[
        str, typer.Option(help="Frozen parts, such as vision or vision,language.")
    ] = "",
    recompute: Annotated[
        str, typer.Option(metavar="auto|selective|full|none", help=_RECOMPUTE_HELP)
    ] = "auto",
    trained_stages: Annotated[
        bool,
        typer.Option("--trained-stages", help="Let each stage have a layer that is trained."),
    ] = False,
    tflops: Annotated[float, typer.Option(help="Peak of a GPU, 10^12 operations a second.")] = 312,
    vision_efficiency: Annotated[
        float, typer.Option(help="Share of the peak that the encoder reaches.")
    ] = 0.45,
    language_efficiency: Annotated[
        float, typer.Option(help="Share of the peak that the language model reaches.")
    ] = 0.50,
    link: Annotated[float, typer.Option(help="GB a second between stages.")] = 20.0,
    image_patches: Annotated[
        int,
        typer.Option(min=1, help="For Qwen and Pixtral with --config: mean patches of an image."),
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the order of the data.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the plan to this JSON file, for training.")
    ] = None,
    gantt: Annotated[Path | None, typer.Option(help="Draw a step to this HTML file.")] = None,
    export: Annotated[
        tuple[str, Path] | None,
        typer.Option(
            metavar="FORMAT FILE",
            help="Write the plan for an engine: json, deepspeed, megatron, colossalai or torch.",
        ),
    ] = None,
    modules: Annotated[
        str,
        typer.Option(
            help="For --export torch, where blocks are: internvl, llava, qwen, or "
            "vision=PATH.{},language=PATH.{}"
        ),
    ] = "internvl",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Cut a model into pipeline stages, and choose what they recompute, so that a step is short.

    Micro-batches are those that the loader plans for the data. All cuts are searched together with
    what each stage recomputes under the memory limit; those near the best are simulated with the
    micro-batches as they come. Other ways to cut stand beside it, simulated alike.

    Examples:

    `omniload plan-pipeline --model internvl-6b-20b --stages 4 --memory 80GB --gpus 32
    --tensor-parallel 2 --data shards/ --out plan.json`

    `omniload plan-pipeline --config model/ --stages 2 --freeze vision --gantt step.html`

    Train with it: `BalancedPipelineModule(layers, plan="plan.json")` of
    `omniload.adapters.deepspeed`.
    """
    from omniload.pipeline.budget import parse_memory
    from omniload.pipeline.models import Machine
    from omniload.tools.pipeline_inputs import (
        Parallel,
        corrected,
        describe,
        read_shapes,
        read_table,
    )
    from omniload.tools.pipeline_planning import RECOMPUTE, Request, plan_all
    from omniload.tools.pipeline_write import check_export

    # what is wrong is said before the work, not after it
    if recompute not in RECOMPUTE:
        raise ConfigError(f"--recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}.")
    check_export(export[0] if export else "json", modules)
    limit = None if memory is None else parse_memory(memory) / 1e9
    parallel = Parallel.of(
        stages=stages, tensor=tensor_parallel, data=data_parallel, gpus=gpus, zero=zero
    )
    machine = Machine(
        flops_per_s=tflops * 1e12,
        vision_efficiency=vision_efficiency,
        language_efficiency=language_efficiency,
        p2p_bytes_per_s=link * 1e9,
    )
    frozen = [part for part in freeze.replace(" ", "").split(",") if part]
    described = describe(model, config, image_patches=image_patches, freeze=frozen)
    counted = read_table(described, table, machine=machine, parallel=parallel)
    slots = micro_batches or 4 * stages
    with _status(show=not as_json) as tell:
        tell("read and plan the data")
        shapes = read_shapes(
            data or [],
            tokens=tokens,
            tiles=tiles,
            parallel=parallel,
            micro_batches=slots,
            seed=seed,
        )
        request = Request(
            table=corrected(counted, table, shapes.shapes) if described else counted,
            data=shapes,
            parallel=parallel,
            micro_batches=slots,
            memory_gb=limit,
            recompute=recompute,
            frozen_stages=not trained_stages,
        )
        planned = plan_all(request, progress=tell)
    _write_all(planned, out=out, gantt=gantt, export=export, modules=modules, as_json=as_json)


def _write_all(
    planned: Planned,
    *,
    out: Path | None,
    gantt: Path | None,
    export: tuple[str, Path] | None,
    modules: str,
    as_json: bool,
) -> None:
    from omniload.tools.pipeline_gantt import draw_step
    from omniload.tools.pipeline_report import as_dict, print_plan
    from omniload.tools.pipeline_write import write_export, write_text

    found = as_dict(planned)
    if out is not None:
        write_text(out, json.dumps(found, indent=1) + "\n")
    if gantt is not None:
        write_text(gantt, draw_step(planned))
    if export is not None:
        found["export"] = write_export(planned, *export, modules=modules)
    if as_json:
        print(json.dumps(found))
        return
    print_plan(planned)
    if export is not None and found["export"]["lost"]:
        print(f"{export[0]} can't express all of the plan:")
        for line in found["export"]["lost"]:
            print(f"- {line}")


@contextmanager
def _status(*, show: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done, on standard error."""
    if not show:
        yield lambda _what: None
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield status.update
