"""A plan in any of its forms: a value, a dict, a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omniload.errors import ConfigError
from omniload.pipeline.plan import PipelinePlan

__all__ = ["read_plan"]

_NEEDED = ("parts", "recompute", "selective")
_REMEDY = "Write one with `omniload plan-pipeline ... --out plan.json`"


def read_plan(plan: PipelinePlan | Mapping[str, Any] | str | os.PathLike[str]) -> PipelinePlan:
    """Read bounds and recompute of a plan; what was predicted of it is not needed here.

    Args:
        plan: the plan; a mapping with `parts` and, where anything is recomputed, `recompute` (and
            `selective`, names by layer), as `omniload plan-pipeline --json` prints it; or the path
            of such a JSON file.

    Raises:
        ConfigError: not a plan.
    """
    if isinstance(plan, PipelinePlan):
        return plan
    found: Any = plan
    name = "the plan"
    if isinstance(plan, (str, os.PathLike)):
        name = f"plan {os.fspath(plan)!r}"
        try:
            found = json.loads(Path(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{name} can't be read as JSON: {error}. {_REMEDY}.") from None
    if not isinstance(found, Mapping):
        raise ConfigError(
            f"{name} must be a PipelinePlan, a mapping with parts (the bounds of the stages), or "
            f"the path of a JSON file with one, got {type(found).__name__}. {_REMEDY}."
        )
    try:
        return PipelinePlan.from_dict({key: found[key] for key in _NEEDED if key in found})
    except ConfigError as error:
        raise ConfigError(f"{name} is none: {error} {_REMEDY}.") from None
