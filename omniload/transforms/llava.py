"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: the names that their models take."""

from __future__ import annotations

from typing import Any

from omniload.images import AnyResTiles, SquarePad
from omniload.transforms.shared import CLIP_MEAN, CLIP_STD, HALF, require_policy
from omniload.transforms.tile import TileTransform

__all__ = ["LlavaTransform"]


class LlavaTransform(TileTransform):
    """A `TileTransform` for LLaVA: `SquarePad` tiles for 1.5, `AnyResTiles` for NeXT.

    Pixels are normalised as CLIP's; with `max_crops`, which LLaVA-OneVision has, with mean and
    standard deviation 0.5, as SigLIP's. `mean` and `std` go before both. The image token is the one
    of the template, `<image>` in "vicuna", and its id has to be the model's `image_token_id`.
    """

    def _check_policy(self) -> None:
        require_policy(self, SquarePad, AnyResTiles)

    def _normalisation(self) -> tuple[Any, Any]:
        is_onevision = isinstance(self.policy, AnyResTiles) and self.policy.max_crops is not None
        mean, std = (HALF, HALF) if is_onevision else (CLIP_MEAN, CLIP_STD)
        return self.mean or mean, self.std or std

    def model_inputs(self, batch: Any, *, dtype: Any = None, loss: str = "sum") -> dict[str, Any]:
        """Name the tensors of a packed batch as LLaVA in transformers wants them.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: as in `PackedBatch.model_inputs`.

        Returns:
            As `PackedBatch.model_inputs`; for NeXT and OneVision also image_sizes: int64
            (num_images, 2), (height, width) of each original image, None without images. The tiles
            of all images lie in one tensor: the model tells them apart by image_sizes.
        """
        inputs = self._named(batch, dtype=dtype, loss=loss)
        if isinstance(self.policy, AnyResTiles):
            sizes = batch.image_sizes.flip(1).long()
            inputs["image_sizes"] = sizes if len(sizes) else None
        return inputs
