"""The transform that fits shards, by their tiling policy."""

from __future__ import annotations

from typing import Any

from omniload.transforms.internvl import InternVLTransform
from omniload.transforms.llava import LlavaTransform
from omniload.transforms.pixtral import PixtralTransform
from omniload.transforms.qwen import QwenTransform
from omniload.transforms.tile import TileTransform

__all__ = ["family_transform", "transform_from_settings"]

_FAMILIES: dict[str, type[TileTransform]] = {
    "internvl": InternVLTransform,
    "square": LlavaTransform,
    "anyres": LlavaTransform,
    "qwen": QwenTransform,
}


def transform_from_settings(settings: dict[str, Any]) -> TileTransform:
    """Make the plain transform that fits shards with these settings.

    Args:
        settings: `manifest.settings` of the shards: "encoder", "tiling" and "oversize" are used.

    Raises:
        ConfigError: a setting is missing or out of range.
    """
    return TileTransform.from_settings(settings)


def family_transform(settings: dict[str, Any]) -> TileTransform:
    """Make the transform whose `model_inputs` is for the models that the tiling policy comes from.

    Its samples are those of `transform_from_settings`.

    Args:
        settings: `manifest.settings` of the shards.

    Raises:
        ConfigError: a setting is missing or out of range.
    """
    try:
        name = settings["tiling"]["policy"]
        if name == "navit" and settings["tiling"].get("row_breaks") is True:
            return PixtralTransform.from_settings(settings)
    except (KeyError, TypeError):
        name = None
    family = _FAMILIES.get(name, TileTransform) if isinstance(name, str) else TileTransform
    return family.from_settings(settings)
