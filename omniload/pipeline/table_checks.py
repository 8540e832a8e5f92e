"""Checks of cost tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.pipeline.table import CostTable

__all__ = ["check_layers", "check_machine"]

_SOURCES = ("analytic", "measured", "corrected")


def check_layers(table: CostTable) -> None:
    """Check that layers, tied groups and pins name what is there."""
    names = [kind.name for kind in table.kinds]
    if len(set(names)) != len(names):
        raise ConfigError(f"kinds of a cost table must have different names, got {names}.")
    if not table.layers:
        raise ConfigError("a cost table needs at least one layer.")
    for layer, name in enumerate(table.layers):
        if name not in names:
            raise ConfigError(
                f"layer {layer} must be of a known kind ({', '.join(names)}), got {name!r}."
            )
    for group in table.tied:
        if len(set(group)) < 2 or not all(0 <= layer < len(table.layers) for layer in group):
            raise ConfigError(
                f"a tied group must name two or more of {len(table.layers)} layers, got "
                f"{list(group)}."
            )
    for layer, stage in table.pinned.items():
        if not 0 <= layer < len(table.layers) or stage < 0:
            raise ConfigError(
                f"a pin must name one of {len(table.layers)} layers and a stage, got layer "
                f"{layer} on stage {stage}."
            )


def check_machine(table: CostTable) -> None:
    """Check the numbers of the machine."""
    for name in ("tensor_parallel", "data_parallel"):
        value = getattr(table, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"CostTable.{name} must be an integer of at least 1, got {value!r}.")
    if table.zero_stage not in (0, 1):
        raise ConfigError(
            f"CostTable.zero_stage must be 0 or 1 (a pipeline has no more), got "
            f"{table.zero_stage!r}."
        )
    for name, above in (("reserve_bytes", False), ("p2p_latency_s", False),
                        ("p2p_bytes_per_s", True)):  # fmt: skip
        value = getattr(table, name)
        if not np.isfinite(value) or value < 0 or (above and value == 0):
            least = "above 0" if above else "at least 0"
            raise ConfigError(f"CostTable.{name} must be finite and {least}, got {value!r}.")
    if table.source not in _SOURCES:
        raise ConfigError(
            f"CostTable.source must be one of {', '.join(_SOURCES)}, got {table.source!r}."
        )
