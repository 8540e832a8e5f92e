"""Pixtral: patches put together to images again, padded to one size, as its model takes them."""

from __future__ import annotations

from typing import Any

from omniload.errors import ConfigError
from omniload.images import NaViTPatches
from omniload.transforms.shared import CLIP_MEAN, CLIP_STD, require_policy
from omniload.transforms.tile import TileTransform

__all__ = ["PixtralTransform"]


class PixtralTransform(TileTransform):
    """A `TileTransform` for Pixtral: `NaViTPatches` with a token between rows of patches.

    Pixels are normalised as CLIP's, unless `mean` and `std` say otherwise.
    """

    def _check_policy(self) -> None:
        require_policy(self, NaViTPatches)
        if not self.policy.row_breaks:  # type: ignore[attr-defined]  # checked
            raise ConfigError(
                "PixtralTransform is for NaViTPatches(row_breaks=True), got "
                f"{self.policy!r}. Preprocess with --row-breaks, or use TileTransform."
            )

    def _normalisation(self) -> tuple[Any, Any]:
        return self.mean or CLIP_MEAN, self.std or CLIP_STD

    def model_inputs(self, batch: Any, *, dtype: Any = None, loss: str = "sum") -> dict[str, Any]:
        """Name the tensors of a packed batch as Pixtral in transformers wants them.

        Waits for the device once, for the grids: the size of the images decides shapes. Call it
        before the batch goes there to avoid that.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: as in `PackedBatch.model_inputs`.

        Returns:
            As `PackedBatch.model_inputs`, but
            - pixel_values: (num_images, 3, height, width) of the largest image, 0 around smaller
              ones; None without images.
            - image_sizes: int64 (num_images, 2), (height, width) of each resized image, pixels;
              None without images.
        """
        inputs = self._named(batch, dtype=dtype, loss=loss)
        patches = inputs["pixel_values"]
        inputs["image_sizes"] = None
        if patches is None:
            return inputs
        size = self.policy.size
        grids = batch.image_grids.tolist()
        columns, rows = (max(sides) for sides in zip(*grids, strict=True))
        images = patches.new_zeros((len(grids), 3, rows, size, columns, size))
        start = 0
        for image, (wide, high) in zip(images, grids, strict=True):
            cells = patches[start : start + high * wide].reshape(high, wide, 3, size, size)
            image[:, :high, :, :wide] = cells.permute(2, 0, 3, 1, 4)
            start += high * wide
        inputs["pixel_values"] = images.reshape(len(grids), 3, rows * size, columns * size)
        inputs["image_sizes"] = batch.image_grids.flip(1).long() * size
        return inputs
