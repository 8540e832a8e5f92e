"""The default transform: stored tokens as they are, images decoded and cut into tiles."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from omniload.errors import ConfigError, SampleError
from omniload.images import (
    TilePolicy,
    count_tokens,
    cut_stored,
    cut_tiles,
    decode,
    image_size,
    is_stored,
    policy_from_settings,
)
from omniload.transforms.planned import check_source_policies, planned_policy
from omniload.transforms.shared import (
    CutTiles,
    channels,
    integer,
    stored_lengths,
    token_ids,
    unlabelled,
)
from omniload.types import Record, Sample

__all__ = ["TileTransform"]


class TileTransform:
    """Uses the token ids of the record and cuts each image into the planned number of tiles.

    Args:
        policy: the tiling policy that the shards were made with.
        tokens_per_tile: tokens the language model sees for one tile; not used for a policy that
            decides the tokens of an image itself (`num_tokens`).
        image_token_id: id of the image token; at least 0.
        pad_token_id: id of the padding token.
        image_start_ids: token ids before an image's tokens; for the filler.
        image_end_ids: token ids after an image's tokens; for the filler.
        filler_ids: ids of some plain text, for the filler; None: the padding token.
        fewer_tiles: whether preprocessing may have given an image fewer tiles than the policy does
            (`oversize="fewer-tiles"`).
        source_policies: name of a data set -> policy of its records, where it is another one: an
            InternVL meta file may give each set limits of its own.
        mean: per-channel mean for `model_inputs`, RGB, pixels scaled to [0, 1]; None: that of the
            model family, or of ImageNet.
        std: per-channel standard deviation.

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
        source_policies: Mapping[str, TilePolicy] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        if not callable(getattr(policy, "num_tiles", None)):
            raise ConfigError(f"policy must be a tiling policy, got {policy!r}.")
        self.policy = policy
        self.source_policies = check_source_policies(policy, source_policies or {})
        self.tokens_per_tile = integer("tokens_per_tile", tokens_per_tile, 1)
        self.image_token_id = integer("image_token_id", image_token_id, 0)
        self.pad_token_id = integer("pad_token_id", pad_token_id, 0)
        self.image_start_ids = token_ids("image_start_ids", image_start_ids)
        self.image_end_ids = token_ids("image_end_ids", image_end_ids)
        self.filler_ids = token_ids("filler_ids", filler_ids or [pad_token_id])
        if not isinstance(fewer_tiles, bool):
            raise ConfigError(f"fewer_tiles must be a bool, got {fewer_tiles!r}.")
        self.fewer_tiles = fewer_tiles
        self.mean = channels("mean", mean)
        self.std = channels("std", std)
        self._cut: CutTiles = cut_tiles
        self._pixels = ""
        self._check_policy()

    def _check_policy(self) -> None:
        """Check that the policy is one that this transform is for."""

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> Self:
        """Make the transform that fits shards with these settings.

        Args:
            settings: `manifest.settings` of the shards: "encoder", "tiling", "source_tilings" and
                "oversize" are used.

        Raises:
            ConfigError: a setting is missing or out of range, or a policy that the class is not
                for.
        """
        try:
            encoder = settings["encoder"]
            tilings = settings.get("source_tilings", {})
            return cls(
                policy_from_settings(settings["tiling"]),
                tokens_per_tile=encoder["tokens_per_tile"],
                image_token_id=encoder["image_token_id"],
                pad_token_id=encoder["pad_token_id"],
                image_start_ids=encoder["image_start_ids"],
                image_end_ids=encoder["image_end_ids"],
                filler_ids=encoder["filler_ids"],
                fewer_tiles=settings.get("oversize") == "fewer-tiles",
                source_policies={name: policy_from_settings(tilings[name]) for name in tilings},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"the settings of the shards lack what the transform needs ({error}). Preprocess "
                "them again, or give the loader a transform."
            ) from error

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
        if self.source_policies:
            settings["source_tilings"] = {
                name: policy.settings() for name, policy in self.source_policies.items()
            }
        if self._pixels:
            settings["pixels"] = self._pixels
        text = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def with_pixels(
        self,
        cut: CutTiles,
        *,
        fingerprint: str,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> Self:
        """Make the same transform with another way from pixels to tiles.

        Args:
            cut: (image, policy, out=) writes the tiles, as `omniload.images.cut_tiles` does.
            fingerprint: a text that changes whenever what `cut` does changes.
            mean: as in the constructor; None: as here.
            std: as in the constructor.
        """
        other = copy.copy(self)
        other._cut, other._pixels = cut, fingerprint
        other.mean = self.mean if mean is None else channels("mean", mean)
        other.std = self.std if std is None else channels("std", std)
        return other

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
        num_tiles = int(record.image_num_tiles.sum())
        tiles = np.empty((num_tiles, 3, *self.tile_shape), dtype=np.uint8)
        return self.write(record, rng, tiles=tiles)

    @property
    def tile_shape(self) -> tuple[int, int]:
        """(height, width) of all tiles, pixels."""
        return self.policy.size, self.policy.size

    def write(
        self,
        record: Record,
        rng: np.random.Generator,
        *,
        tiles: np.ndarray[Any, np.dtype[np.uint8]],
    ) -> Sample:
        """Make the sample as `__call__` does, in memory that is already there.

        Args:
            record: as stored.
            rng: not used.
            tiles: uint8 (num_tiles, 3, size, size), all tiles of the record, filled here.

        Returns:
            The sample, with this array as its tiles.

        Raises:
            SampleError: as `__call__`.
        """
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
        # an image stored resized is cut as it lies
        image = None if is_stored(data) else _decoded(data)
        width, height = image_size(data) if image is None else image.shape[1::-1]
        stored = tuple(record.image_sizes[index].tolist())
        if stored != (width, height):
            raise SampleError(
                f"its size must be the one it was stored with: expected {stored[0]}x{stored[1]}, "
                f"got {width}x{height}."
            )
        start, end = record.image_spans[index].tolist()
        policy = planned_policy(
            self.source_policies.get(record.source, self.policy),
            width,
            height,
            num_tiles=len(out),
            num_tokens=end - start,
            tokens_per_tile=self.tokens_per_tile,
            fewer_tiles=self.fewer_tiles,
        )
        if image is not None:
            self._cut(image, policy, out=out)
        elif self._pixels:
            raise SampleError(
                "it was stored resized, so that only the tiling's own rule can cut it. Preprocess "
                "with --store original to use another way to make pixels."
            )
        else:
            cut_stored(data, policy, out=out)
        return policy.grid(width, height)

    def filler(self, with_image: bool) -> Sample:
        """Make a short document that trains nothing.

        Args:
            with_image: whether it has an image: blank, as small as the policy can, and its tokens.

        Returns:
            A sample with all labels -100 and `sample_id` -1.
        """
        text = list(self.filler_ids)
        if not with_image:
            return unlabelled(text + text)
        size = self.policy.size
        policy = self.policy.limited(1)  # the smallest image there is
        num_tiles = policy.num_tiles(size, size)
        start = len(text) + len(self.image_start_ids)
        image = [self.image_token_id] * count_tokens(
            policy, size, size, tokens_per_tile=self.tokens_per_tile
        )
        ids = [*text, *self.image_start_ids, *image, *self.image_end_ids, *text]
        return unlabelled(
            ids,
            tiles=np.zeros((num_tiles, 3, size, size), dtype=np.uint8),
            image_num_tiles=np.full(1, num_tiles, dtype=np.int32),
            image_sizes=np.full((1, 2), size, dtype=np.int32),
            image_grids=np.array([policy.grid(size, size)], dtype=np.int32),
            image_spans=np.array([[start, start + len(image)]], dtype=np.int32),
        )

    def lengths(self, record: Record) -> tuple[int, int, int]:
        """Say what the sample of a record will have.

        Args:
            record: as stored.

        Returns:
            (num_tokens, num_tiles, num_loss_tokens), the first label left out of the last.
        """
        return stored_lengths(record)

    def model_inputs(self, batch: Any, *, dtype: Any = None, loss: str = "sum") -> dict[str, Any]:
        """Name the tensors of a packed batch as `PackedBatch.model_inputs` does.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: what the model returns, "sum", "mean" or "step"; see `PackedBatch.loss_scale`.
        """
        return self._named(batch, dtype=dtype, loss=loss)

    def _named(self, batch: Any, *, dtype: Any, loss: str) -> dict[str, Any]:
        mean, std = self._normalisation()
        given = {"dtype": dtype, "mean": mean, "std": std}
        options = {name: value for name, value in given.items() if value is not None}
        if loss != "sum":
            options["loss"] = loss
        return dict(batch.model_inputs(**options))

    def _normalisation(self) -> tuple[Any, Any]:
        """Mean and standard deviation of the model family; None: those of the batch."""
        return self.mean, self.std


def _decoded(data: bytes) -> Any:
    try:
        return decode(data)
    except SampleError as error:
        text = str(error).removesuffix(".")
        raise SampleError(
            f"{text}. To leave such samples out, preprocess again with --check-images."
        ) from error
