"""WebDataset tars read in place, after `omniload index`.

tars = open_tars("folder/")
record = tars.read(41733)
"""

from __future__ import annotations

from omniload.tars.manifest import TarManifest, is_tar_set, read_tar_manifest
from omniload.tars.reader import TarSet, open_tars

__all__ = ["TarManifest", "TarSet", "is_tar_set", "open_tars", "read_tar_manifest"]
