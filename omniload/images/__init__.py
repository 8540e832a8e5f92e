"""Images: size from the header, decoding to RGB, tiling; one rule for lengths and for pixels.

width, height = image_size(data)            # header only, after EXIF orientation
policy = InternVLTiles(size=448, max_tiles=12)
policy.num_tiles(width, height)             # what the length index holds
tiles(data, policy)                         # uint8 (num_tiles, 3, 448, 448)

`InternVLTiles` (InternVL), `AnyResTiles` (LLaVA-NeXT), `SquarePad` (LLaVA-1.5), `QwenPatches`
(Qwen2-VL and later) and `NaViTPatches` (Pixtral's rule) are the policies.
"""

from __future__ import annotations

from omniload.images.anyres import AnyResTiles, SquarePad
from omniload.images.decode import decode
from omniload.images.header import MAX_PIXELS, image_size
from omniload.images.internvl import InternVLTiles
from omniload.images.kinds import PilInfo, image_kind, missing_codecs, pil_info
from omniload.images.navit import NaViTPatches
from omniload.images.policies import POLICIES, Policy, policy_from_settings
from omniload.images.qwen import QwenPatches
from omniload.images.resize import resize, resize_backend, torch_is_quick
from omniload.images.stored import check_stored, cut_stored, is_stored, store_tiles
from omniload.images.tiling import (
    TilePolicy,
    TokenPolicy,
    count_tokens,
    cut_tiles,
    tiles,
)

__all__ = [
    "MAX_PIXELS",
    "POLICIES",
    "AnyResTiles",
    "InternVLTiles",
    "NaViTPatches",
    "PilInfo",
    "Policy",
    "QwenPatches",
    "SquarePad",
    "TilePolicy",
    "TokenPolicy",
    "check_stored",
    "count_tokens",
    "cut_stored",
    "cut_tiles",
    "decode",
    "image_kind",
    "image_size",
    "is_stored",
    "missing_codecs",
    "pil_info",
    "policy_from_settings",
    "resize",
    "resize_backend",
    "store_tiles",
    "tiles",
    "torch_is_quick",
]
