"""Settings of attention for each type of layer of a model: checked, and equal ones found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from omniload.attention import AttentionOptions
from omniload.errors import ConfigError

__all__ = ["check_layers", "same_settings"]


def check_layers(layers: Any) -> None:
    """Check that each type of layer has settings that `PackedBatch.attention` knows.

    Raises:
        ConfigError: no mapping of names to settings, or an unknown setting.
    """
    known = tuple(AttentionOptions.__dataclass_fields__)
    is_mapping = isinstance(layers, Mapping) and len(layers) > 0
    if not is_mapping or not all(isinstance(given, Mapping) for given in layers.values()):
        raise ConfigError(
            "layers must map each type of layer to its settings, as {'full_attention': {}, "
            f"'sliding_attention': {{'window': 512}}}}, got {layers!r}."
        )
    for layer, given in layers.items():
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ConfigError(
                f"the settings of a layer must be of {', '.join(known)}: got {unknown[0]!r} for "
                f"{layer!r}."
            )


def same_settings(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Say whether both give the same arguments; tensors are the same if they are one object."""
    return one.keys() == other.keys() and all(
        value is other[name]
        or (
            not isinstance(value, torch.Tensor)
            and type(value) is type(other[name])
            and value == other[name]
        )
        for name, value in one.items()
    )
