"""Replacing a complete set of shards: the old one stays whole until the new one is.

The new set is made in `OUT/.overwrite` and moved in at the end. A kill in the middle of the moves
leaves a folder without a manifest; the next run ends the moves first.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from omniload.shards.manifest import MANIFEST_NAME, read_manifest, sync_folder

__all__ = ["STAGING_NAME", "swap_in"]

STAGING_NAME = ".overwrite"


def swap_in(folder: Path, work: str) -> bool:
    """Move a new set that is complete over the old one.

    Args:
        folder: of the old set.
        work: name of the folder where an unfinished run keeps its place.

    Returns:
        Whether there was one.
    """
    staging = folder / STAGING_NAME
    if not (staging / MANIFEST_NAME).exists():
        return False
    shutil.rmtree(staging / work, ignore_errors=True)
    manifest = read_manifest(staging, check_files=False)
    keep = {shard.name for shard in manifest.shards}
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
    sync_folder(folder)
    for path in folder.glob("shard-*.arrow"):
        if path.name not in keep:
            path.unlink()
    for path in sorted(staging.iterdir()):
        if path.name != MANIFEST_NAME:
            path.replace(folder / path.name)
    sync_folder(folder)
    (staging / MANIFEST_NAME).replace(folder / MANIFEST_NAME)
    staging.rmdir()
    sync_folder(folder)
    return True
