"""`--store resized`: images of a sample encoded at their final size, or held against the tiling."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omniload.conversations import refused_image
from omniload.errors import ConfigError, SampleError
from omniload.images import Policy, TilePolicy, check_stored, is_stored, store_tiles
from omniload.shards.manifest import read_manifest
from omniload.tools.sources.base import InputFile

__all__ = [
    "DEFAULT_QUALITY",
    "check_store",
    "check_stored_input",
    "images_to_store",
    "parse_quality",
    "store_settings",
]

DEFAULT_QUALITY = "95"

_STORES = ("original", "resized")


def parse_quality(text: str) -> int | None:
    """Read a quality: 1 to 100, or None for "lossless".

    Raises:
        ConfigError: neither.
    """
    if text == "lossless":
        return None
    if text.isdecimal() and 1 <= int(text) <= 100:
        return int(text)
    raise ConfigError(f"--store-quality must be 1 to 100 or 'lossless', got {text!r}.")


def check_store(store: str, quality: str, *, tiling: str) -> None:
    """Check that images can be stored this way.

    Raises:
        ConfigError: an unknown way or quality, a quality that would be ignored, or a tiling that is
            not a plain grid.
    """
    parse_quality(quality)
    if store not in _STORES:
        raise ConfigError(f"--store must be one of {', '.join(_STORES)}, got {store!r}.")
    if store == "original" and quality != DEFAULT_QUALITY:
        raise ConfigError(f"--store-quality {quality} is for --store resized, got {store}.")
    if store == "resized" and tiling != "internvl":
        raise ConfigError(
            f"--store resized is for --tiling internvl, got {tiling}. Store the original images."
        )


def check_stored_input(files: Sequence[InputFile], policy: Policy) -> None:
    """Check that shards whose images are stored resized are encoded again for the same tiling.

    Args:
        files: the input.
        policy: the tiling policy of the run.

    Raises:
        ConfigError: another tiling; shows both.
    """
    for file in files:
        if file.kind != "shards":
            continue
        settings = read_manifest(file.path).settings
        if settings.get("store", {}).get("images") != "resized":
            continue
        for tiling in (settings.get("tiling"), *settings.get("source_tilings", {}).values()):
            if tiling != policy.settings():
                raise ConfigError(
                    f"the images of {file.path} were stored resized for their tiling, and can't be "
                    f"cut for another: expected {tiling}, got {policy.settings()}. Preprocess the "
                    "original images again, or keep the tiling."
                )


def store_settings(store: str, quality: str) -> dict[str, Any]:
    """Give what the manifest says about stored images: nothing where they are the originals."""
    if store == "original":
        return {}
    from omniload.images import pil_info, resize_backend

    # torch and Pillow-SIMD give the same pixels
    is_plain = resize_backend() == "pillow" and not pil_info().simd
    return {
        "store": {
            "images": store,
            "quality": parse_quality(quality),
            "resize": "pillow" if is_plain else "torch",
        }
    }


def images_to_store(
    images: Sequence[bytes],
    sizes: Sequence[tuple[int, int]],
    num_tiles: Sequence[int],
    *,
    policy: Policy | TilePolicy,
    store: str,
    quality: int | None,
) -> tuple[bytes, ...]:
    """Make the images of a row.

    Args:
        images: encoded images of a sample.
        sizes: (width, height) of each.
        num_tiles: tiles planned for each.
        policy: the tiling policy.
        store: "original" or "resized".
        quality: for "resized"; None: without loss.

    Returns:
        As many images; with "original" those that were given.

    Raises:
        RefusedError: an image that can't be decoded, or is stored already for another tiling.
    """
    found = []
    for number, (data, size, count) in enumerate(zip(images, sizes, num_tiles, strict=True)):
        try:
            if store == "resized" or is_stored(data):
                planned: Any = policy
                if policy.num_tiles(*size) != count:  # an image with fewer tiles, to fit its sample
                    planned = policy.for_num_tiles(*size, count)
                if store == "resized":
                    data = store_tiles(data, planned, quality=quality)
                else:
                    check_stored(data, planned, count)
        except SampleError as error:
            raise refused_image(error, number, len(images)) from None
        found.append(data)
    return tuple(found)
