"""Transforms: a stored record to a sample; and the making of records from conversations.

`Transform` says what a transform is, `TileTransform` is the default one. Tokenising is in
`omniload.transforms.text`, the planning of a sample in `omniload.transforms.prepare`; they need the
tokenizers library, which the loader does not load.
"""

from __future__ import annotations

from omniload.transforms.base import Transform
from omniload.transforms.tile import TileTransform, transform_from_settings

__all__ = ["TileTransform", "Transform", "transform_from_settings"]
