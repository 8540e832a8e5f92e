"""WebDataset tars read in place, after `omniload index`; or front to back, without an index.

tars = open_tars("folder/")
record = tars.read(41733)

`SampleMaker` and `stream_tars` load on first use: they need the tokenizers library, and opening an
index does not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omniload.tars.manifest import TarManifest, is_tar_set, read_tar_manifest
from omniload.tars.open import open_folder
from omniload.tars.reader import TarSet, open_tars
from omniload.tars.verify import damaged_rows, verify_tars

if TYPE_CHECKING:
    from omniload.tars.maker import SampleMaker
    from omniload.tars.walk import stream_tars

__all__ = [
    "SampleMaker",
    "TarManifest",
    "TarSet",
    "damaged_rows",
    "is_tar_set",
    "open_folder",
    "open_tars",
    "read_tar_manifest",
    "stream_tars",
    "verify_tars",
]

_LAZY = {"SampleMaker": "omniload.tars.maker", "stream_tars": "omniload.tars.walk"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'omniload.tars' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
