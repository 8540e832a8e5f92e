"""Transforms: a stored record to a sample; and the making of records from conversations.

`Transform` says what a transform is, `TileTransform` is the default one. `LlavaTransform`,
`InternVLTransform`, `PixtralTransform` and `QwenTransform` give the same samples and name a batch's
tensors as their models want them; `FunctionTransform` makes a transform of a function. One that
runs a Hugging Face processor is in `omniload.transforms.processor`. Tokenising is in
`omniload.transforms.text`, the planning of a sample in `omniload.transforms.prepare`; they need the
tokenizers library, which the loader does not load.
"""

from __future__ import annotations

from omniload.transforms.base import InPlaceTransform, Transform, in_place
from omniload.transforms.choose import family_transform, transform_from_settings
from omniload.transforms.function import FunctionTransform
from omniload.transforms.internvl import InternVLTransform
from omniload.transforms.llava import LlavaTransform
from omniload.transforms.pixtral import PixtralTransform
from omniload.transforms.qwen import QwenTransform
from omniload.transforms.tile import TileTransform

__all__ = [
    "FunctionTransform",
    "InPlaceTransform",
    "InternVLTransform",
    "LlavaTransform",
    "PixtralTransform",
    "QwenTransform",
    "TileTransform",
    "Transform",
    "family_transform",
    "in_place",
    "transform_from_settings",
]
