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
    if isinstance(plan, (str, os.PathLike)):
        try:
            found = json.loads(Path(plan).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"plan {os.fspath(plan)!r} can't be read as JSON: {error}.") from None
    if not isinstance(found, Mapping) or not isinstance(found.get("parts"), (list, tuple)):
        raise ConfigError(
            "plan must be a PipelinePlan, a mapping with parts (the bounds of the stages), or the "
            f"path of a JSON file with one, got {type(found).__name__}."
        )
    parts = tuple(found["parts"])
    num_layers = parts[-1] if parts and isinstance(parts[-1], int) else 0
    given = found.get("recompute", [0] * num_layers)
    chosen = [int(each) if isinstance(each, bool) else each for each in given]
    try:
        for layer, name in dict(found.get("selective") or {}).items():
            chosen[int(layer)] = name
    except (IndexError, TypeError, ValueError):
        raise ConfigError(
            f"selective of a plan must map numbers of layers below {len(chosen)} to names, got "
            f"{found['selective']!r}."
        ) from None
    return PipelinePlan(parts=parts, recompute=tuple(chosen))
