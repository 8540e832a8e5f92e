"""Which layers are alike: by class and parameters, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omniload.errors import ConfigError
from omniload.pipeline.kinds import PARTS

__all__ = ["check_lists", "kind_names", "representatives", "tied_layers"]


def check_lists(
    layers: Sequence[Any], *, parts: Sequence[str], kinds: Sequence[str] | None, has_loss: bool
) -> None:
    """Check that the lists of `profile_layers` fit together.

    Raises:
        ConfigError: they don't.
    """
    if not layers:
        raise ConfigError("a profile needs at least one layer.")
    for place, layer in enumerate(layers):
        if not callable(layer):
            raise ConfigError(
                f"layers must be modules or functions, got {type(layer).__name__} (layer {place}). "
                "Build the layers that DeepSpeed specifies: layer.build()."
            )
    for name, given in (("parts", parts), ("kinds", kinds)):
        if given is not None and len(given) != len(layers):
            raise ConfigError(
                f"{name} must have one entry a layer: expected {len(layers)}, got {len(given)}."
            )
    for part in parts:
        if part not in PARTS:
            raise ConfigError(f"parts must be of {', '.join(PARTS)}, got {part!r}.")
    if kinds is not None and has_loss and list(kinds).count(kinds[-1]) > 1:
        raise ConfigError(
            "the last layer has the loss, so its kind must be its own: got "
            f"{list(kinds).count(kinds[-1])} layers of kind {kinds[-1]!r}."
        )


def kind_names(layers: Sequence[Any], parts: Sequence[str], *, has_loss: bool) -> list[str]:
    """Name the kind of each layer: its class, with a number where layers of it differ."""
    known: dict[Any, str] = {}
    numbers: dict[str, int] = {}
    for place, layer in enumerate(layers):
        key = _kind_key(layer, parts[place], has_loss and place == len(layers) - 1)
        if key not in known:
            name = key[0]
            numbers[name] = numbers.get(name, 0) + 1
            known[key] = name if numbers[name] == 1 else f"{name}-{numbers[name]}"
    return [
        known[_kind_key(layer, parts[place], has_loss and place == len(layers) - 1)]
        for place, layer in enumerate(layers)
    ]


def _kind_key(layer: Any, part: str, is_loss: bool) -> tuple[Any, ...]:
    if not hasattr(layer, "named_parameters"):
        return getattr(layer, "__name__", type(layer).__name__), part, is_loss
    weights = tuple(
        (name, tuple(weight.shape), weight.dtype, weight.requires_grad)
        for name, weight in layer.named_parameters()
    )
    return type(layer).__name__, part, is_loss, type(layer), weights


def representatives(names: Sequence[str]) -> list[int]:
    """Choose the layer of each kind to time: the second, as the first may have no gradient."""
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    return [found[min(1, len(found) - 1)] for found in places.values()]


def tied_layers(layers: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Find layers that share a parameter."""
    owners: dict[int, set[int]] = {}
    for place, layer in enumerate(layers):
        if hasattr(layer, "parameters"):
            for weight in layer.parameters():
                owners.setdefault(id(weight), set()).add(place)
    return tuple(sorted({tuple(sorted(group)) for group in owners.values() if len(group) > 1}))
