"""Checks of a user's transform before the first batch: fingerprint, filler, lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

from omniload.errors import ConfigError, OmniloadError
from omniload.padding import Padding
from omniload.rng import sample_generator
from omniload.source import RowSource
from omniload.transforms import Transform, transform_from_settings
from omniload.types import IGNORE_INDEX, Budget, Record, Sample

__all__ = ["check_filler", "check_fingerprint", "given_lengths"]

#: It stands in every state, which stays below one kilobyte.
_LONGEST_FINGERPRINT = 64


def check_fingerprint(transform: Transform) -> None:
    """Check that a transform names its settings by a short text.

    Raises:
        ConfigError: it doesn't.
    """
    fingerprint = transform.fingerprint
    if not isinstance(fingerprint, str) or not 0 < len(fingerprint) <= _LONGEST_FINGERPRINT:
        shown = repr(fingerprint)
        raise ConfigError(
            "the fingerprint of the transform must be a str of 1 to "
            f"{_LONGEST_FINGERPRINT} characters, because it is stored in every state, got "
            f"{shown if len(shown) <= 80 else f'{shown[:80]}...'}. Use the hexadecimal digits of a "
            "hash over its settings."
        )


def given_lengths(transform: Transform, record: Record) -> tuple[int, int, int]:
    """Ask a transform for the lengths of a record.

    Raises:
        ConfigError: it fails, or gives something else than three integers; names the row.
    """
    where = f"row={record.row}, key={record.key!r}, shard={record.shard!r}"
    try:
        found: Any = transform.lengths(record)
    except OmniloadError:
        raise
    except Exception as error:
        raise ConfigError(
            f"lengths of the transform failed with {type(error).__name__}: {error} ({where})."
        ) from error
    fits = isinstance(found, (tuple, list)) and len(found) == 3
    if not fits or not all(_is_integer(number) for number in found):
        raise ConfigError(
            "lengths of the transform must return the integers (num_tokens, num_tiles, "
            f"num_loss_tokens), got {found!r} ({where})."
        )
    return int(found[0]), int(found[1]), int(found[2])


def check_filler(
    transform: Transform,
    source: RowSource,
    *,
    with_image: bool,
    budget: Budget,
    padding: Padding,
) -> None:
    """Make a filler and check that it trains nothing and fits, which else the last step would find.

    Args:
        transform: makes it.
        source: the data.
        with_image: whether it needs an image, since the data has some.
        budget: what it has to fit.
        padding: what rows are padded to.

    Raises:
        ConfigError: it fails, or isn't such a sample.
    """
    try:
        filler: Any = transform.filler(with_image=with_image)
    except Exception as error:
        raise ConfigError(
            f"filler(with_image={with_image}) of the transform failed with "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(filler, Sample):
        raise _wrong_filler(with_image, "be an omniload.Sample", type(filler).__name__)
    if filler.sample_id != -1:
        raise _wrong_filler(with_image, "have sample_id -1", repr(filler.sample_id))
    if (filler.labels != IGNORE_INDEX).any():
        count = int(np.count_nonzero(filler.labels != IGNORE_INDEX))
        raise _wrong_filler(with_image, f"have only labels {IGNORE_INDEX}", f"{count} others")
    if with_image != (filler.num_tiles > 0):
        wanted = "have a tile, because the data has images" if with_image else "have no tile"
        raise _wrong_filler(with_image, wanted, f"{filler.num_tiles} tiles")
    unit = padding.document_multiple
    tokens = -(-filler.num_tokens // unit) * unit
    if tokens > budget.tokens or (budget.tiles is not None and filler.num_tiles > budget.tiles):
        raise ConfigError(
            f"the filler of the transform must fit the budget: expected at most {budget}, got "
            f"{tokens} tokens and {filler.num_tiles} tiles. Raise the budget, make the filler "
            "shorter, or use tail='empty' for evaluation."
        )
    if filler.num_tiles:
        got = filler.tiles.shape[-2:]
        expected = _tile_shape(transform, source, got)
        if got != expected:
            raise _wrong_filler(
                with_image, f"have tiles of {expected} pixels, as the samples have", f"{got}"
            )


def _tile_shape(
    transform: Transform, source: RowSource, filler: tuple[int, ...]
) -> tuple[int, ...]:
    """Say what height and width the tiles of samples have; where nobody knows, those of `filler`.

    Policies say it. A transform without one has most likely the tiles of the shards; where its
    filler has others, only a sample can tell which of the two is right.
    """
    size = getattr(getattr(transform, "policy", None), "size", None)
    if isinstance(size, int):
        return (size, size)
    try:
        default = transform_from_settings(dict(source.settings))
        if filler == (default.policy.size, default.policy.size):
            return filler
        tiles = source.index.num_tiles
        row = int(np.argmin(np.where(tiles > 0, tiles, np.iinfo(np.int32).max)))
        sample: Any = transform(source.read(row), sample_generator(0, 0, row))
        return tuple(sample.tiles.shape[-2:])
    except Exception:  # whatever fails here is reported when its row comes, with its place
        return filler


def _wrong_filler(with_image: bool, wanted: str, got: str) -> ConfigError:
    return ConfigError(
        f"filler(with_image={with_image}) of the transform must {wanted}, got {got}."
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
