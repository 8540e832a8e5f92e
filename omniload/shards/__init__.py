"""Shards on disk: Arrow files of samples, the length index, and the manifest that describes them.

shards = open_shards("out/")
record = shards.read(41733)
"""

from __future__ import annotations

from omniload.shards.arrow import FinishedShard, ShardWriter
from omniload.shards.manifest import (
    SCHEMA_VERSION,
    Manifest,
    ShardInfo,
    read_manifest,
    settings_fingerprint,
    write_manifest,
)
from omniload.shards.reader import ShardSet, open_shards
from omniload.shards.remote import rows_per_window
from omniload.shards.verify import fault_of_file, verify_shards
from omniload.shards.write import finish_shards, write_index, write_shards

__all__ = [
    "SCHEMA_VERSION",
    "FinishedShard",
    "Manifest",
    "ShardInfo",
    "ShardSet",
    "ShardWriter",
    "fault_of_file",
    "finish_shards",
    "open_shards",
    "read_manifest",
    "rows_per_window",
    "settings_fingerprint",
    "verify_shards",
    "write_index",
    "write_manifest",
    "write_shards",
]
