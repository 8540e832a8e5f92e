"""The plan of a pipeline: where it is cut, what is recomputed, and what is predicted of that."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

from omniload.errors import ConfigError
from omniload.pipeline.table_json import read_object

__all__ = ["PipelinePlan", "StagePlan"]

_FORMAT, _VERSION = "omniload.pipeline_plan", 1


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What is predicted of one stage.

    Args:
        layers: how many it has.
        forward_ms: forward pass of the mean micro-batch.
        backward_ms: its backward pass, recomputation included.
        memory_gb: memory of one GPU at its peak, the reserve included; 1 GB is 1e9 bytes.
        headroom_gb: what is left below the limit; None: there was no limit.
    """

    layers: int
    forward_ms: float
    backward_ms: float
    memory_gb: float
    headroom_gb: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.layers, bool) or not isinstance(self.layers, int) or self.layers < 1:
            raise ConfigError(f"a stage must have at least one layer, got {self.layers!r}.")
        for name in ("forward_ms", "backward_ms", "memory_gb"):
            _check_number(getattr(self, name), f"StagePlan.{name}", least=0.0)
        if self.headroom_gb is not None:
            _check_number(self.headroom_gb, "StagePlan.headroom_gb", least=-math.inf)


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """Bounds of the stages and what each layer recomputes: all that training needs.

    Args:
        parts: stage s has the layers `parts[s]` to `parts[s + 1] - 1`; N + 1 numbers.
        recompute: for each layer 0 (nothing), 1 (all) or the name of a selective option.
        stages: predictions, one a stage; empty: none were made.
        step_ms: predicted time of a step; None: not predicted.
        memory_limit_gb: the limit that the plan was made for; None: none.
        table_fingerprint: the cost table that it was made from; empty: none.

    Raises:
        ConfigError: bounds that leave out or repeat a layer, or entries that don't fit them.
    """

    parts: tuple[int, ...]
    recompute: tuple[int | str, ...]
    stages: tuple[StagePlan, ...] = ()
    step_ms: float | None = None
    memory_limit_gb: float | None = None
    table_fingerprint: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "recompute", tuple(self.recompute))
        object.__setattr__(self, "stages", tuple(self.stages))
        for bound in self.parts:
            if isinstance(bound, bool) or not isinstance(bound, int):
                raise ConfigError(f"parts must be integers, got {bound!r} in {self.parts}.")
        rising = all(low < high for low, high in pairwise(self.parts))
        if len(self.parts) < 2 or self.parts[0] != 0 or not rising:
            raise ConfigError(
                "parts must start with 0 and rise, one layer or more a stage: got "
                f"{list(self.parts)}."
            )
        if len(self.recompute) != self.parts[-1]:
            raise ConfigError(
                f"recompute must have one entry a layer: expected {self.parts[-1]}, got "
                f"{len(self.recompute)}."
            )
        for layer, choice in enumerate(self.recompute):
            if isinstance(choice, bool) or not (choice in (0, 1) or isinstance(choice, str)):
                raise ConfigError(
                    f"recompute of layer {layer} must be 0, 1 or the name of a selective option, "
                    f"got {choice!r}."
                )
        sizes = tuple(stage.layers for stage in self.stages)
        if self.stages and sizes != self.layers_per_stage:
            raise ConfigError(
                f"stages must have the layers that parts say: expected {self.layers_per_stage}, "
                f"got {sizes}."
            )
        for name in ("step_ms", "memory_limit_gb"):
            if getattr(self, name) is not None:
                _check_number(getattr(self, name), f"PipelinePlan.{name}", least=0.0)

    @property
    def num_layers(self) -> int:
        """Layers of the pipeline."""
        return self.parts[-1]

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.parts) - 1

    @property
    def layers_per_stage(self) -> tuple[int, ...]:
        """How many layers each stage has."""
        return tuple(high - low for low, high in pairwise(self.parts))

    def stage_of(self, layer: int) -> int:
        """Return the stage that has a layer, by number."""
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer must be below {self.num_layers}, got {layer}.")
        return sum(layer >= bound for bound in self.parts[1:])

    def to_dict(self) -> dict[str, Any]:
        """Turn the plan into an object of JSON.

        `recompute` there is 0 or 1 a layer. A layer that recomputes a part only has a 1, which
        needs less memory still, and the name of its option under `selective`.
        """
        names = {layer: name for layer, name in enumerate(self.recompute) if isinstance(name, str)}
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "parts": list(self.parts),
            "recompute": [0 if choice == 0 else 1 for choice in self.recompute],
            "selective": {str(layer): name for layer, name in names.items()},
            "stages": [asdict(stage) for stage in self.stages],
            "step_ms": self.step_ms,
            "memory_limit_gb": self.memory_limit_gb,
            "table_fingerprint": self.table_fingerprint,
        }

    def to_json(self) -> str:
        """Write the plan as a JSON object."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> PipelinePlan:
        """Read a plan that `to_json` wrote; fields that others added are ignored.

        Raises:
            ConfigError: not such a plan, or one of another version.
        """
        found = read_object(text, what="a pipeline plan", form=_FORMAT, version=_VERSION)
        missing = sorted({"parts", "recompute"} - set(found))
        if missing:
            raise ConfigError(f"a pipeline plan must have parts and recompute: missing {missing}.")
        return cls.from_dict(found)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> PipelinePlan:
        """Read a plan from the object that `to_dict` makes; only `parts` has to be there.

        Raises:
            ConfigError: a field that is no such thing; says which, and what was found.
        """
        return cls(
            parts=_parts(found),
            recompute=_recompute(found),
            stages=_stages(found.get("stages")),
            step_ms=found.get("step_ms"),
            memory_limit_gb=found.get("memory_limit_gb"),
            table_fingerprint=str(found.get("table_fingerprint", "")),
        )


def _parts(found: Mapping[str, Any]) -> tuple[int, ...]:
    parts = found.get("parts")
    if not isinstance(parts, (list, tuple)):
        raise ConfigError(
            "parts must be a list of layer numbers, the bounds of the stages, as [0, 2, 4]: got "
            f"{_shown(found, 'parts')}."
        )
    return tuple(parts)


def _recompute(found: Mapping[str, Any]) -> tuple[int | str, ...]:
    parts = _parts(found)
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
    return tuple(chosen)


def _stages(found: Any) -> tuple[StagePlan, ...]:
    if found is None:
        return ()
    names = {entry.name for entry in fields(StagePlan)}
    needed = names - {"headroom_gb"}
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(each, Mapping) and needed <= set(each) for each in found
    ):
        raise ConfigError(
            f"stages must be a list of objects with {', '.join(sorted(needed))}: got {found!r}."
        )
    return tuple(StagePlan(**{name: each[name] for name in names & set(each)}) for each in found)


def _as_layer(key: object) -> int | None:
    """Return a layer's number, which is a string in JSON; None: it is no number from 0 on."""
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    is_number = isinstance(key, int) and not isinstance(key, bool)
    return key if is_number and key >= 0 else None  # type: ignore[operator,return-value]


def _shown(found: Mapping[str, Any], field: str) -> str:
    return repr(found[field]) if field in found else "none"


def _check_number(value: Any, name: str, *, least: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < least:
        raise ConfigError(f"{name} must be a finite number of at least {least}, got {value!r}.")
