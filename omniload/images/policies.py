"""All tiling policies by name."""

from __future__ import annotations

import dataclasses
from typing import Any

from omniload.errors import ConfigError
from omniload.images.anyres import AnyResTiles, SquarePad
from omniload.images.internvl import InternVLTiles
from omniload.images.navit import NaViTPatches
from omniload.images.qwen import QwenPatches

__all__ = ["POLICIES", "Policy", "policy_from_settings"]

Policy = InternVLTiles | AnyResTiles | SquarePad | QwenPatches | NaViTPatches

#: Name in the settings, and of `omniload preprocess --tiling` -> policy.
POLICIES: dict[str, type[Policy]] = {
    "internvl": InternVLTiles,
    "anyres": AnyResTiles,
    "square": SquarePad,
    "qwen": QwenPatches,
    "navit": NaViTPatches,
}


def policy_from_settings(settings: dict[str, Any]) -> Policy:
    """Make a tiling policy from its `settings()`.

    Args:
        settings: plain JSON; "policy" names the kind.

    Raises:
        ConfigError: unknown policy, or settings that it doesn't have.
    """
    fields = dict(settings)
    name = fields.pop("policy", None)
    policy = POLICIES.get(name) if isinstance(name, str) else None
    if policy is None:
        raise ConfigError(f"unknown tiling policy {name!r}; known: {', '.join(POLICIES)}.")
    known = {field.name for field in dataclasses.fields(policy)}
    if fields.keys() - known:
        raise ConfigError(
            f"tiling policy {name!r} has the settings {sorted(known)}, got also "
            f"{sorted(fields.keys() - known)}."
        )
    return policy(**fields)
