"""Files that `omniload plan-pipeline` writes: exports for engines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.pipeline.plan import PipelinePlan
    from omniload.tools.pipeline_planning import Planned

__all__ = ["FORMATS", "check_export", "module_names", "write_export", "write_text"]

#: Values of --export.
FORMATS = ("json", "deepspeed", "megatron", "colossalai", "torch")


def check_export(form: str, modules: str) -> None:
    """Check the name of a format, and names of modules.

    Raises:
        ConfigError: an unknown one.
    """
    from omniload.pipeline.export import MODULE_NAMES

    if form not in FORMATS:
        raise ConfigError(f"--export must be one of {', '.join(FORMATS)}, got {form!r}.")
    names = module_names(modules)
    if isinstance(names, str) and names not in MODULE_NAMES:
        raise ConfigError(
            f"--modules must be one of {', '.join(MODULE_NAMES)}, or part=path pairs: got "
            f"{modules!r}."
        )


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        ConfigError: it can't be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} must be a file that can be written: {error.strerror}.") from None


def write_export(planned: Planned, form: str, path: Path, *, modules: str) -> dict[str, Any]:
    """Write a plan for an engine.

    Args:
        planned: the plan and what belongs to it.
        form: one of `FORMATS`.
        path: the file.
        modules: for "torch": a family, or part=path pairs.

    Returns:
        What was written, and `lost`: what it can't express, in words.

    Raises:
        ConfigError: it can't be written, or a plan that can't be expressed.
    """
    content, lost = _content(planned, form, modules)
    text = planned.plan.to_json() if form == "json" else json.dumps(content, indent=1) + "\n"
    write_text(path, text)
    return {"format": form, "file": str(path), "content": content, "lost": lost}


def _content(planned: Planned, form: str, modules: str) -> tuple[dict[str, Any], list[str]]:
    from omniload.pipeline import export

    plan, table = planned.plan, planned.table
    if form == "json":
        return plan.to_dict(), []
    if form == "deepspeed":
        found = export.deepspeed_arguments(
            plan,
            num_micro_batches=planned.micro_batches,
            zero_stage=planned.parallel.zero,
            data_parallel=planned.parallel.data,
        )
        return dict(found), []
    if form == "torch":
        return dict(export.module_policy(plan, table, module_names(modules))), []
    if form == "colossalai":
        lists = asdict(export.colossalai_lists(plan, table))
        return lists, list(lists["lost"])
    pinned, words = _pinned(planned)
    arguments = export.megatron_arguments(pinned, table)
    lost = [*words, *arguments.lost]
    return {"layout": arguments.layout, "flags": list(arguments.flags), "lost": lost}, lost


def _pinned(planned: Planned) -> tuple[PipelinePlan, list[str]]:
    """Plan again as Megatron-Core can: all before the language model on the first stage."""
    from omniload.pipeline.export import megatron_table
    from omniload.pipeline.partition import plan_pipeline

    plan = planned.plan
    selective = any(isinstance(choice, str) for choice in plan.recompute)
    try:
        found = plan_pipeline(
            megatron_table(planned.table),
            planned.data.shapes,
            num_stages=plan.num_stages,
            num_micro_batches=planned.micro_batches,
            memory_gb=plan.memory_limit_gb,
            worst=planned.data.worst,
            selective=selective,
            frozen_stages=planned.frozen_stages,
        )
    except ConfigError as error:
        words = f"the encoder doesn't fit the first stage, where Megatron-Core has it: {error}"
        return plan, [words]
    assert found.step_ms is not None  # plans are made with predictions
    words = (
        "Megatron-Core has the encoder on the first stage, so this is another plan: parts "
        f"{list(found.parts)}, {found.step_ms / 1e3:.3f} s a step instead of "
        f"{planned.step_ms / 1e3:.3f} s."
    )
    return found, [words] if found.parts != plan.parts else []


def module_names(modules: str) -> str | Mapping[str, str]:
    """Read --modules: a family, or part=path pairs.

    Raises:
        ConfigError: a pair without =.
    """
    if "=" not in modules:
        return modules
    found = {}
    for pair in modules.split(","):
        part, sign, path = pair.partition("=")
        if not sign or not part.strip() or not path.strip():
            raise ConfigError(f"--modules must be a family or part=path pairs, got {pair!r}.")
        found[part.strip()] = path.strip()
    return found
