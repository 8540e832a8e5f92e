"""The default transform: stored tokens as they are, images decoded and cut into tiles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from omniload.errors import ConfigError, SampleError
from omniload.images import TilePolicy, cut_tiles, decode, policy_from_settings
from omniload.types import IGNORE_INDEX, Record, Sample

__all__ = ["TileTransform", "transform_from_settings"]


class TileTransform:
    """Uses the token ids of the record and cuts each image into the planned number of tiles.

    Args:
        policy: the tiling policy that the shards were made with.
        tokens_per_tile: tokens the language model sees for one tile.
        image_token_id: id of the image token; at least 0.
        pad_token_id: id of the padding token.
        image_start_ids: token ids before an image's tokens; for the filler.
        image_end_ids: token ids after an image's tokens; for the filler.
        filler_ids: ids of some plain text, for the filler; None: the padding token.
        fewer_tiles: whether preprocessing may have given an image fewer tiles than the policy does
            (`oversize="fewer-tiles"`).

    Raises:
        ConfigError: a setting out of range.
    """

    def __init__(
        self,
        policy: TilePolicy,
        *,
        tokens_per_tile: int,
        image_token_id: int,
        pad_token_id: int,
        image_start_ids: Sequence[int] = (),
        image_end_ids: Sequence[int] = (),
        filler_ids: Sequence[int] | None = None,
        fewer_tiles: bool = False,
    ) -> None:
        if not callable(getattr(policy, "num_tiles", None)):
            raise ConfigError(f"policy must be a tiling policy, got {policy!r}.")
        self.policy = policy
        self.tokens_per_tile = _integer("tokens_per_tile", tokens_per_tile, 1)
        self.image_token_id = _integer("image_token_id", image_token_id, 0)
        self.pad_token_id = _integer("pad_token_id", pad_token_id, 0)
        self.image_start_ids = _ids("image_start_ids", image_start_ids)
        self.image_end_ids = _ids("image_end_ids", image_end_ids)
        self.filler_ids = _ids("filler_ids", filler_ids or [pad_token_id])
        if not isinstance(fewer_tiles, bool):
            raise ConfigError(f"fewer_tiles must be a bool, got {fewer_tiles!r}.")
        self.fewer_tiles = fewer_tiles

    @property
    def fingerprint(self) -> str:
        """32 hex digits of all settings."""
        settings = {
            "tiling": self.policy.settings(),
            "tokens_per_tile": self.tokens_per_tile,
            "image_token_id": self.image_token_id,
            "pad_token_id": self.pad_token_id,
            "image_start_ids": self.image_start_ids,
            "image_end_ids": self.image_end_ids,
            "filler_ids": self.filler_ids,
            "fewer_tiles": self.fewer_tiles,
        }
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __call__(self, record: Record, rng: np.random.Generator) -> Sample:
        """Decode the images of a record and cut them into tiles.

        Args:
            record: as stored.
            rng: not used: this transform is not random.

        Returns:
            The sample; tiles uint8 (num_tiles, 3, size, size).

        Raises:
            SampleError: an image that can't be decoded, or whose size, tiles or tokens are not
                those that the record was stored with; names the image.
        """
        size = self.policy.size
        num_tiles = int(record.image_num_tiles.sum())
        tiles = np.empty((num_tiles, 3, size, size), dtype=np.uint8)
        grids = np.zeros((len(record.images), 2), dtype=np.int32)
        if len(record.images) != len(record.image_num_tiles):
            raise SampleError(
                f"the record must have one number of tiles an image: expected "
                f"{len(record.images)}, got {len(record.image_num_tiles)}."
            )
        at = 0
        for index, data in enumerate(record.images):
            planned = int(record.image_num_tiles[index])
            try:
                grids[index] = self._image(record, index, data, tiles[at : at + planned])
            except SampleError as error:
                raise SampleError(f"image {index + 1} of {len(record.images)}: {error}") from error
            at += planned
        return Sample(
            sample_id=record.row,
            input_ids=record.input_ids,
            labels=record.labels,
            tiles=tiles,
            image_num_tiles=record.image_num_tiles,
            image_sizes=record.image_sizes,
            image_grids=grids,
            image_spans=record.image_spans,
        )

    def _image(
        self, record: Record, index: int, data: bytes, out: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> tuple[int, int]:
        image = decode(data)
        height, width = image.shape[:2]
        stored = tuple(record.image_sizes[index].tolist())
        if stored != (width, height):
            raise SampleError(
                f"its size must be the one it was stored with: expected {stored[0]}x{stored[1]}, "
                f"got {width}x{height}."
            )
        start, end = record.image_spans[index].tolist()
        if end - start != len(out) * self.tokens_per_tile:
            raise SampleError(
                f"its tokens must be {self.tokens_per_tile} a tile: expected "
                f"{len(out) * self.tokens_per_tile} for {len(out)} tiles, got {end - start}."
            )
        policy = self.policy
        realised = policy.num_tiles(width, height)
        if realised != len(out):
            if not self.fewer_tiles:
                raise SampleError(
                    f"its tiles must be those that the length index counted: expected {len(out)}, "
                    f"got {realised} with {policy}."
                )
            policy = policy.for_num_tiles(width, height, len(out))
        cut_tiles(image, policy, out=out)
        return policy.grid(width, height)

    def filler(self, with_image: bool) -> Sample:
        """Make a short document that trains nothing.

        Args:
            with_image: whether it has an image: one blank tile and its tokens.

        Returns:
            A sample with all labels -100 and `sample_id` -1.
        """
        text = list(self.filler_ids)
        if not with_image:
            return _unlabelled(text + text)
        start = len(text) + len(self.image_start_ids)
        image = [self.image_token_id] * self.tokens_per_tile
        ids = [*text, *self.image_start_ids, *image, *self.image_end_ids, *text]
        size = self.policy.size
        return _unlabelled(
            ids,
            tiles=np.zeros((1, 3, size, size), dtype=np.uint8),
            image_num_tiles=np.ones(1, dtype=np.int32),
            image_sizes=np.full((1, 2), size, dtype=np.int32),
            image_grids=np.ones((1, 2), dtype=np.int32),
            image_spans=np.array([[start, start + len(image)]], dtype=np.int32),
        )

    def lengths(self, record: Record) -> tuple[int, int, int]:
        """Say what the sample of a record will have.

        Args:
            record: as stored.

        Returns:
            (num_tokens, num_tiles, num_loss_tokens), the first label left out of the last.
        """
        loss = int(np.count_nonzero(record.labels[1:] != IGNORE_INDEX))
        return len(record.input_ids), int(record.image_num_tiles.sum()), loss

    def model_inputs(self, batch: Any) -> dict[str, Any]:
        """Name the tensors of a packed batch as `PackedBatch.model_inputs` does.

        Args:
            batch: a PackedBatch.
        """
        return dict(batch.model_inputs())


def transform_from_settings(settings: dict[str, Any]) -> TileTransform:
    """Make the transform that fits shards with these settings.

    Args:
        settings: `manifest.settings` of the shards: "encoder", "tiling" and "oversize" are used.

    Raises:
        ConfigError: a setting is missing or out of range.
    """
    try:
        encoder = settings["encoder"]
        return TileTransform(
            policy_from_settings(settings["tiling"]),
            tokens_per_tile=encoder["tokens_per_tile"],
            image_token_id=encoder["image_token_id"],
            pad_token_id=encoder["pad_token_id"],
            image_start_ids=encoder["image_start_ids"],
            image_end_ids=encoder["image_end_ids"],
            filler_ids=encoder["filler_ids"],
            fewer_tiles=settings.get("oversize") == "fewer-tiles",
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the settings of the shards lack what the transform needs ({error}). Preprocess them "
            "again, or give the loader a transform."
        ) from error


def _unlabelled(ids: list[int], **arrays: Any) -> Sample:
    input_ids = np.array(ids, dtype=np.int32)
    labels = np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    return Sample(sample_id=-1, input_ids=input_ids, labels=labels, **arrays)


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)


def _ids(name: str, values: Sequence[int]) -> tuple[int, ...]:
    return tuple(_integer(name, value, 0) for value in values)
