"""Tars of image-text samples for the tests of indexing, and damage done to them."""

import io
import tarfile
from functools import lru_cache

import numpy as np

from omniload.tools.index_run import index_tars
from omniload.tools.recipe import Recipe
from tests.data_makers import image_bytes, turns, write_tar

#: Small tiles, so that lengths vary with the size of an image.
RECIPE = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)


@lru_cache(maxsize=256)
def picture(seed):
    return image_bytes(seed, (32 + 16 * (seed % 5), 48))


def tar_members(count, first=0):
    """Members of samples: with one image, with two, with none, and captions."""
    members = []
    for i in range(first, first + count):
        key = f"{i:04d}"
        if i % 4 == 0:
            talk = turns("<image>\nWhat?", f"Picture {i}. " * (1 + i % 3))
            members += [(f"{key}.jpg", picture(i)), (f"{key}.json", {"conversations": talk})]
        elif i % 4 == 1:
            talk = turns("<image><image>\nCompare.", f"They differ: {i}")
            members += [(f"{key}.0.jpg", picture(i)), (f"{key}.1.jpg", picture(i + 1))]
            members.append((f"{key}.json", {"conversations": talk}))
        elif i % 4 == 2:
            members.append((f"{key}.json", {"conversations": turns(f"And {i}?", "A number.")}))
        else:
            members += [(f"{key}.jpg", picture(i)), (f"{key}.txt", f"Caption {i}".encode())]
    return members


def tar_folder(folder, counts=(20, 12)):
    """A folder of tars; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, count in enumerate(counts):
        write_tar(folder / f"{number:05d}.tar", tar_members(count, first))
        first += count
    return folder


def indexed(folder, counts=(20, 12), **options):
    """The same, indexed."""
    index_tars([tar_folder(folder, counts)], recipe=RECIPE, **options)
    return folder


def header_of(path, name):
    """Byte where the header of a member stands."""
    with tarfile.open(path) as tar:
        return tar.getmember(name).offset


def overwrite(path, start, data):
    whole = bytearray(path.read_bytes())
    whole[start : start + len(data)] = data
    path.write_bytes(bytes(whole))


def by_tarfile(path):
    """Names that Python's tarfile finds."""
    with tarfile.open(path) as tar:
        return tar.getnames()


def raw_tar(path, *infos, end=True):
    """A tar of (TarInfo, content), written block by block, whatever the headers say."""
    with path.open("wb") as file:
        for info, content in infos:
            file.write(info if isinstance(info, bytes) else info.tobuf(tarfile.GNU_FORMAT))
            file.write(content + bytes(-len(content) % 512))
        if end:
            file.write(bytes(10240))
    return path


def info(name, size=0, kind=tarfile.REGTYPE):
    found = tarfile.TarInfo(name)
    found.size, found.type = size, kind
    return found


def flipped(data, rng, most=4):
    """Bytes with some places overwritten, zeroed or flipped, and perhaps cut; (bytes, places)."""
    data = bytearray(data)
    places = []
    for _ in range(int(rng.integers(1, most + 1))):
        at = int(rng.integers(len(data)))
        length = int(rng.choice([1, 40, 700, 5000]))
        stop = min(at + length, len(data))
        kind = int(rng.integers(3))
        if kind == 0:
            data[at:stop] = rng.bytes(stop - at)
        elif kind == 1:
            data[at:stop] = bytes(stop - at)
        else:
            data[at] ^= 1 << int(rng.integers(8))
            stop = at + 1
        places.append((at, stop))
    if rng.random() < 0.3:
        cut = int(rng.integers(len(data) // 2, len(data)))
        places.append((cut, len(data)))
        data = data[:cut]
    return bytes(data), places


def tar_bytes(members):
    """A tar in memory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in members:
            tar.addfile(info(name, len(content)), io.BytesIO(content))
    return buffer.getvalue()


def lengths_of(source):
    index = source.index
    return np.stack([index.num_tokens, index.num_tiles, index.num_loss_tokens], axis=1).tolist()
