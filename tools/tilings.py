"""The tiling options of `omniload preprocess`: which policy takes which, and the defaults."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.images import Policy

__all__ = ["TILINGS", "default_tokens_per_tile", "make_policy", "parse_pinpoints"]

#: Name -> option -> field of the policy.
TILINGS: dict[str, dict[str, str]] = {
    "internvl": {
        "tile_size": "size",
        "min_tiles": "min_tiles",
        "max_tiles": "max_tiles",
        "thumbnail": "thumbnail",
    },
    "anyres": {"tile_size": "size", "patch_size": "patch_size", "pinpoints": "pinpoints"},
    "square": {"tile_size": "size"},
    "qwen": {
        "patch_size": "patch_size",
        "merge": "merge",
        "min_pixels": "min_pixels",
        "max_pixels": "max_pixels",
    },
    "navit": {"patch_size": "patch_size", "max_side": "max_side", "max_patches": "max_patches"},
}

_DECIDE_TOKENS = ("anyres", "qwen", "navit")
_WITHOUT_LIMIT = ("anyres", "square")


def make_policy(tiling: str, options: dict[str, Any], *, oversize: str = "truncate") -> Policy:
    """Make a tiling policy from command-line options.

    Args:
        tiling: its name.
        options: name of the option, with underscores -> value; None: not given.
        oversize: what becomes of samples that are too long.

    Raises:
        ConfigError: an unknown name, an option that this policy doesn't have, or a value out of
            range.
    """
    from omniload.images import POLICIES

    fields = TILINGS.get(tiling)
    if fields is None:
        raise ConfigError(f"--tiling must be one of {', '.join(TILINGS)}, got {tiling!r}.")
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if name not in fields:
            raise ConfigError(
                f"{_option(name)} is not an option of --tiling {tiling}, which has "
                f"{', '.join(map(_option, fields))}."
            )
    if oversize == "fewer-tiles" and tiling in _WITHOUT_LIMIT:
        raise ConfigError(
            f"--oversize fewer-tiles does nothing with --tiling {tiling}: the number of tiles of "
            "an image is fixed by its size, in the model too. Use truncate or reject."
        )
    if "pinpoints" in given:
        given["pinpoints"] = parse_pinpoints(given["pinpoints"])
    try:
        return POLICIES[tiling](**{fields[name]: value for name, value in given.items()})
    except ConfigError as error:
        raise ConfigError(_with_options(str(error), fields)) from None


def _with_options(text: str, fields: dict[str, str]) -> str:
    """Say an error of a policy in terms of the command line."""
    for name, field in fields.items():
        text = re.sub(rf"\b[A-Z]\w+\.{field}\b", _option(name), text)
    return text


def default_tokens_per_tile(tiling: str, tokens_per_tile: int | None, tile_size: int | None) -> int:
    """Choose the tokens of a tile: 256 for InternVL, one for 14 x 14 pixels for a padded square.

    Args:
        tiling: name of the policy.
        tokens_per_tile: as given; None: not given.
        tile_size: as given.

    Returns:
        The tokens; 1, without a meaning, where the policy counts the tokens of an image itself.

    Raises:
        ConfigError: given for such a policy.
    """
    if tiling in _DECIDE_TOKENS:
        if tokens_per_tile is not None:
            raise ConfigError(
                f"--tokens-per-tile is not an option of --tiling {tiling}, which counts the tokens "
                "of an image itself."
            )
        return 1
    if tokens_per_tile is not None:
        return tokens_per_tile
    return 256 if tiling == "internvl" else ((tile_size or 336) // 14) ** 2


def parse_pinpoints(text: Any) -> tuple[tuple[int, int], ...]:
    """Read resolutions such as "336x672,672x336", height first.

    Raises:
        ConfigError: not pairs of numbers.
    """
    try:
        pairs = [pair.lower().split("x") for pair in str(text).split(",")]
        return tuple((int(height), int(width)) for height, width in pairs)
    except ValueError:
        raise ConfigError(
            f"--pinpoints must be HEIGHTxWIDTH, separated by commas, got {text!r}."
        ) from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
