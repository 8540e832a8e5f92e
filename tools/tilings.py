"""The tiling options of `omniload preprocess`: which policy takes which, and the defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError
from omniload.tools.sources.base import InputFile

if TYPE_CHECKING:
    from omniload.images import Policy

__all__ = [
    "TILINGS",
    "default_tokens_per_tile",
    "file_policy",
    "make_policy",
    "parse_pinpoints",
    "source_tilings",
    "tiling_notes",
]

#: Name -> option -> field of the policy.
TILINGS: dict[str, dict[str, str]] = {
    "internvl": {
        "tile_size": "size",
        "min_tiles": "min_tiles",
        "max_tiles": "max_tiles",
        "thumbnail": "thumbnail",
    },
    "anyres": {
        "tile_size": "size",
        "patch_size": "patch_size",
        "pinpoints": "pinpoints",
        "max_crops": "max_crops",
    },
    "square": {"tile_size": "size"},
    "qwen": {
        "patch_size": "patch_size",
        "merge": "merge",
        "min_pixels": "min_pixels",
        "max_pixels": "max_pixels",
    },
    "navit": {
        "patch_size": "patch_size",
        "max_side": "max_side",
        "max_patches": "max_patches",
        "row_breaks": "row_breaks",
    },
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
    """Choose the tokens of a tile: one for 28 x 28 pixels in InternVL, for 14 x 14 in LLaVA-1.5.

    Args:
        tiling: name of the policy.
        tokens_per_tile: as given; None: not given.
        tile_size: as given; None: that of the policy.

    Returns:
        The tokens; 1, without a meaning, where the policy counts the tokens of an image itself.

    Raises:
        ConfigError: given for such a policy; or neither given nor to be told from the size.
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
    side, size = (28, 448) if tiling == "internvl" else (14, 336)
    tokens = ((tile_size or size) // side) ** 2
    if tokens < 1:
        raise ConfigError(
            f"--tokens-per-tile must be given for --tile-size {tile_size}: by default a token of "
            f"--tiling {tiling} stands for {side} x {side} pixels."
        )
    return tokens


def file_policy(file: InputFile, policy: Policy) -> Policy:
    """Give the policy of a file: that of the run, with the limits of its set in a meta file.

    Args:
        file: of the input.
        policy: of the run.

    Raises:
        ConfigError: limits that this tiling doesn't have, or that contradict each other.
    """
    given = {"max_tiles": file.max_tiles, "min_tiles": file.min_tiles}
    limits: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    keys = {"max_tiles": "max_dynamic_patch", "min_tiles": "min_dynamic_patch"}
    for name in limits:
        if not hasattr(policy, name):
            raise ConfigError(
                f"set {file.source!r} of the meta file has {keys[name]} {limits[name]}, but the "
                f"tiling of the run is {policy}. This tiling has no {_option(name)}: remove "
                f"{keys[name]}, or use --tiling internvl."
            )
    try:
        return replace(policy, **limits) if limits else policy
    except ConfigError as error:
        raise ConfigError(
            f"set {file.source!r} of the meta file has limits "
            f"({', '.join(f'{keys[name]} {value}' for name, value in limits.items())}) that don't "
            f"go with {policy}: {error}"
        ) from None


def source_tilings(files: Sequence[InputFile], policy: Policy) -> dict[str, dict[str, Any]]:
    """Give what the manifest says about sets with limits of their own.

    Args:
        files: the input.
        policy: of the run.

    Returns:
        Name of the set -> settings of its policy; those of the run's policy are left out.

    Raises:
        ConfigError: as `file_policy`, or two sets of one name with different limits.
    """
    found: dict[str, Policy] = {}
    for file in files:
        own = file_policy(file, policy)
        if found.setdefault(file.source, own) != own:
            raise ConfigError(
                f"sets of one name must have one tiling, because a record knows its set by name: "
                f"got {found[file.source]} and {own} for {file.source!r}. Rename one of them."
            )
    return {name: own.settings() for name, own in sorted(found.items()) if own != policy}


def tiling_notes(
    tiling: str, template: str, tilings: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    """Say what people should know about the tiling of a run.

    Args:
        tiling: name of the policy.
        template: name of the chat template.
        tilings: from `source_tilings`.
    """
    for name, own in tilings.items():
        yield (
            f"set {name!r} of the meta file has its own limits: min_tiles {own['min_tiles']}, "
            f"max_tiles {own['max_tiles']}"
        )
    if tiling == "qwen" and template in ("chatml", "vicuna", "llama3"):
        yield (
            f"--tiling qwen with --template {template}: images are not put between "
            "<|vision_start|> and <|vision_end|>, as Qwen-VL has them; its template is qwen-vl"
        )
    if template == "qwen-vl" and tiling != "qwen":
        yield (
            f"--template qwen-vl with --tiling {tiling}: Qwen-VL takes images as --tiling qwen "
            "cuts them"
        )


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
