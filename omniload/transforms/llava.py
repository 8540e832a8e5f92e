"""LLaVA-1.5 and LLaVA-NeXT: the names that their models take."""

from __future__ import annotations

from typing import Any, ClassVar

from omniload.images import AnyResTiles, SquarePad
from omniload.transforms.shared import CLIP_MEAN, CLIP_STD, require_policy
from omniload.transforms.tile import TileTransform

__all__ = ["LlavaTransform"]


class LlavaTransform(TileTransform):
    """A `TileTransform` for LLaVA: `SquarePad` tiles for 1.5, `AnyResTiles` for NeXT.

    Pixels are normalised as CLIP's. The image token is the one of the template, `<image>` in
    "vicuna", and its id has to be the model's `image_token_id`.
    """

    default_mean: ClassVar[tuple[float, float, float]] = CLIP_MEAN
    default_std: ClassVar[tuple[float, float, float]] = CLIP_STD

    def _check_policy(self) -> None:
        require_policy(self, SquarePad, AnyResTiles)

    def model_inputs(self, batch: Any, *, dtype: Any = None, loss: str = "sum") -> dict[str, Any]:
        """Name the tensors of a packed batch as LLaVA in transformers wants them.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: as in `PackedBatch.model_inputs`.

        Returns:
            As `PackedBatch.model_inputs`, pixels normalised as CLIP's; for NeXT also image_sizes:
            int64 (num_images, 2), (height, width) of each original image, None without images. The
            tiles of all images lie in one tensor: the model tells them apart by image_sizes.
        """
        inputs = self._named(batch, dtype=dtype, loss=loss)
        if isinstance(self.policy, AnyResTiles):
            sizes = batch.image_sizes.flip(1).long()
            inputs["image_sizes"] = sizes if len(sizes) else None
        return inputs
