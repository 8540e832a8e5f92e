"""Shards on disk: Arrow files of samples, the length index, and the manifest that describes them.

shards = open_shards("out/")
record = shards.read(41733)

shards = open_shards("s3://bucket/out", cache=Cache(folder="/nvme/cache", max_bytes=500 << 30))
"""

from __future__ import annotations

from omniload.cache import Cache, Storage, is_url
from omniload.shards.arrow import FinishedShard, ShardWriter
from omniload.shards.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    Manifest,
    ShardInfo,
    read_manifest,
    settings_fingerprint,
    write_manifest,
)
from omniload.shards.reader import ShardSet, open_shards
from omniload.shards.remote import rows_per_window
from omniload.shards.verify import RowFault, fault_of_file, faults_of_rows, verify_shards
from omniload.shards.write import finish_shards, write_index, write_shards

__all__ = [
    "MANIFEST_NAME",
    "SCHEMA_VERSION",
    "Cache",
    "FinishedShard",
    "Manifest",
    "RowFault",
    "ShardInfo",
    "ShardSet",
    "ShardWriter",
    "Storage",
    "fault_of_file",
    "faults_of_rows",
    "finish_shards",
    "is_url",
    "open_shards",
    "read_manifest",
    "rows_per_window",
    "settings_fingerprint",
    "verify_shards",
    "write_index",
    "write_manifest",
    "write_shards",
]
