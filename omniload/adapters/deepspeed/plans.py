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
        return _read(found)
    except ConfigError as error:
        raise ConfigError(f"{name} is none: {error} {_REMEDY}.") from None


def _read(found: Mapping[str, Any]) -> PipelinePlan:
    parts = found.get("parts")
    if not isinstance(parts, (list, tuple)):
        raise ConfigError(
            "parts must be a list of layer numbers, the bounds of the stages, as [0, 2, 4]: got "
            f"{_shown(found, 'parts')}."
        )
    num_layers = parts[-1] if parts and isinstance(parts[-1], int) else 0
    given = found.get("recompute", [0] * num_layers)
    if not isinstance(given, (list, tuple)):
        raise ConfigError(
            f"recompute must be a list with 0 or 1 for each of {num_layers} layers: got "
            f"{_shown(found, 'recompute')}. Leave it out where nothing is recomputed."
        )
    chosen = [int(each) if isinstance(each, bool) else each for each in given]
    selective = found.get("selective")
    if selective is not None and not isinstance(selective, Mapping):
        raise ConfigError(
            "selective must be a mapping from numbers of layers to names: got "
            f"{_shown(found, 'selective')}. Leave it out where no layer recomputes a part."
        )
    for key, option in (selective or {}).items():
        layer = _as_layer(key)
        if layer is None or layer >= len(chosen) or not isinstance(option, str):
            raise ConfigError(
                f"selective must map numbers of layers from 0 to below {len(chosen)} to names: got "
                f"{key!r}: {option!r}."
            )
        chosen[layer] = option
    return PipelinePlan(parts=tuple(parts), recompute=tuple(chosen))


def _as_layer(key: object) -> int | None:
    """Return a layer's number, which is a string in JSON; None: it is no number from 0 on."""
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return key if is_number and key >= 0 else None  # type: ignore[operator,return-value]


def _shown(found: Mapping[str, Any], field: str) -> str:
    return repr(found[field]) if field in found else "none"
