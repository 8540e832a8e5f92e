"""Files on a server, and a cache folder looked at from outside."""

import time

import xxhash

from omniload.cache import Cache, CacheClient, Entry, Storage
from omniload.cache.folder import CacheFolder

QUICK = Storage(timeout_s=2.0, retries=2, backoff_s=0.01)

SIZE = 10_000


def add(server, number, size=SIZE):
    """Put a file on the server."""
    data = bytes([number]) * size
    name = f"{number}.arrow"
    (server.folder / name).write_bytes(data)
    return Entry(
        url=f"{server.url}/{name}", num_bytes=size, xxh3_128=xxhash.xxh3_128_hexdigest(data)
    )


def client_of(server, folder, max_bytes=None):
    return CacheClient(server.url, cache=Cache(folder=folder, max_bytes=max_bytes), storage=QUICK)


def first_byte(client, entry):
    return client.get(entry, bytes)[0]


def here(folder, *entries):
    """Numbers of the files that the cache holds."""
    return [i for i, entry in enumerate(entries) if (folder / f"{entry.name}.shard").exists()]


def used(folder):
    cache = CacheFolder(Cache(folder=folder))
    with cache.space():  # else a file may be seen under two names
        return sum(found.num_bytes for found in cache.scan())


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
