"""The settings of `omniload preprocess`: what makes a row, and how the run is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError
from omniload.tools.stored_images import DEFAULT_QUALITY, check_store, store_settings
from omniload.tools.tilings import TILINGS, default_tokens_per_tile, make_policy

if TYPE_CHECKING:
    from omniload.images import Policy
    from omniload.transforms.text import ConversationEncoder

__all__ = ["Recipe", "RunOptions", "make_encoder"]

_OVERSIZE = ("truncate", "fewer-tiles", "reject")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What decides the content of a row; written to the manifest.

    Args:
        tokenizer: a `tokenizer.json` or a folder with one; None: the embedded byte-level one.
        template: name of a built-in chat template, or a file.
        loss: "assistant", "last" or "all".
        tiling: name of the tiling policy; each has some of the options from tile_size to max_crops,
            and its own defaults (None); see `omniload.images`.
        tokens_per_tile: tokens the language model sees for one tile.
        tile_size: side of a tile, pixels.
        min_tiles: least tiles of an image.
        max_tiles: most tiles of an image, thumbnail not counted.
        thumbnail: whether an image of several tiles gets a thumbnail.
        patch_size: side of a patch, pixels.
        merge: side of the square of patches that is one token.
        min_pixels: least pixels of an image after the resize.
        max_pixels: most pixels of an image after the resize.
        max_side: longest side after the resize, pixels.
        max_patches: most patches of an image.
        row_breaks: whether a token stands between the rows of an image's patches.
        pinpoints: "HEIGHTxWIDTH,..." of the resolutions to choose from.
        max_crops: tiles whose tokens the crops of an image may have.
        max_tokens: most tokens of a sample; None: no limit.
        oversize: "truncate", "fewer-tiles" or "reject", for samples over `max_tokens`.
        store: "original" images, or "resized" to their grid where that is less to decode.
        store_quality: of resized images, "1" to "100" or "lossless".
    """

    tokenizer: str | None = None
    template: str = "chatml"
    loss: str = "assistant"
    tiling: str = "internvl"
    tokens_per_tile: int | None = None
    tile_size: int | None = None
    min_tiles: int | None = None
    max_tiles: int | None = None
    thumbnail: bool | None = None
    patch_size: int | None = None
    merge: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_side: int | None = None
    max_patches: int | None = None
    row_breaks: bool | None = None
    pinpoints: str | None = None
    max_crops: int | None = None
    max_tokens: int | None = None
    oversize: str = "truncate"
    store: str = "original"
    store_quality: str = DEFAULT_QUALITY

    def __post_init__(self) -> None:
        if self.oversize not in _OVERSIZE:
            raise ConfigError(
                f"--oversize must be one of {', '.join(_OVERSIZE)}, got {self.oversize!r}."
            )
        if self.max_tokens is not None and self.max_tokens < 2:
            raise ConfigError(f"--max-tokens must be at least 2, got {self.max_tokens}.")
        check_store(self.store, self.store_quality, tiling=self.tiling)

    def policy(self) -> Policy:
        """Make the tiling policy.

        Raises:
            ConfigError: an unknown name, an option that this policy doesn't have, or a value out of
                range.
        """
        names = {name for fields in TILINGS.values() for name in fields}
        options = {name: getattr(self, name) for name in sorted(names)}
        return make_policy(self.tiling, options, oversize=self.oversize)

    def settings(self) -> dict[str, Any]:
        """Give the settings of the manifest: the loader makes its transform from them.

        Raises:
            ConfigError: as `policy`; a tokenizer or template that can't be used, or one that
                doesn't go with the tiling.
        """
        encoder, policy = make_encoder(self), self.policy()
        encoder.check_breaks(bool(getattr(policy, "row_breaks", False)))
        return {
            "encoder": encoder.settings(),
            "tiling": policy.settings(),
            "max_tokens": self.max_tokens,
            "oversize": self.oversize,
            **store_settings(self.store, self.store_quality),
        }


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a run is done.

    Args:
        seed: of the order of rows.
        keep_order: leave rows in input order.
        drop_text: leave the conversations out of the shards.
        shard_bytes: size at which a shard is closed.
        strict: one rejected sample ends the run.
        check_images: decode each image in full.
        allow_outside_root: read image paths that leave the image root.
    """

    seed: int = 0
    keep_order: bool = False
    drop_text: bool = False
    shard_bytes: int = 256 << 20
    strict: bool = False
    check_images: bool = False
    allow_outside_root: bool = False

    def __post_init__(self) -> None:
        if self.shard_bytes < 1 << 16:
            raise ConfigError(f"--shard-bytes must be at least 64 KiB, got {self.shard_bytes}.")

    def that_decide_bytes(self) -> dict[str, Any]:
        """Give those that the written files depend on."""
        values = asdict(self)
        del values["strict"]
        return values


@lru_cache(maxsize=2)
def make_encoder(recipe: Recipe) -> ConversationEncoder:
    """Make the encoder of a recipe; kept, because a large tokenizer takes a second to load."""
    from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer

    if recipe.tokens_per_tile is not None and not 1 <= recipe.tokens_per_tile <= 1 << 20:
        raise ConfigError(
            f"--tokens-per-tile must be between 1 and {1 << 20}, got {recipe.tokens_per_tile}."
        )
    tokenizer = load_tokenizer(recipe.tokenizer)
    return ConversationEncoder(
        tokenizer=tokenizer,
        template=load_template(recipe.template, tokenizer=tokenizer),
        loss=recipe.loss,  # type: ignore[arg-type]
        tokens_per_tile=default_tokens_per_tile(
            recipe.tiling, recipe.tokens_per_tile, recipe.tile_size
        ),
    )
