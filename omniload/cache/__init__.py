"""Files from elsewhere, kept in a folder of this machine that all its processes share.

A file is known by its checksum and size. It has its name in the folder only once it is there in
full and verified, so whatever happens to a process or the machine, nothing is trusted wrongly.
"""

from __future__ import annotations

from omniload.cache.client import CacheClient
from omniload.cache.config import Cache, Storage
from omniload.cache.entry import Entry
from omniload.cache.remote import RemoteFolder, make_client
from omniload.cache.transport import MissingFileError
from omniload.cache.url import check_path, is_url, join_url, shown_url

__all__ = [
    "Cache",
    "CacheClient",
    "Entry",
    "MissingFileError",
    "RemoteFolder",
    "Storage",
    "check_path",
    "is_url",
    "join_url",
    "make_client",
    "shown_url",
]
