"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: patches, their grids, and positions in three dimensions."""

from __future__ import annotations

from typing import Any

from omniload.images import QwenPatches
from omniload.transforms.shared import CLIP_MEAN, CLIP_STD, HALF, require_policy
from omniload.transforms.tile import TileTransform

__all__ = ["QwenTransform"]


class QwenTransform(TileTransform):
    """A `TileTransform` for Qwen: a sample's tiles are the patches of its images.

    `tiles` of sample and batch are uint8 (num_patches, 3, patch_size, patch_size) in merge order,
    `image_num_tiles` counts the patches of each image and `image_grids` is (columns, rows) of
    patches; a budget's tiles bound patches. The temporal pair of a patch, which is twice the same
    for an image, is made in `model_inputs`: it would double what crosses to the device.

    Pixels are normalised as CLIP's (Qwen2-VL, Qwen2.5-VL), or with mean and standard deviation 0.5
    where the patch size is 16 (Qwen3-VL), unless `mean` and `std` say otherwise.
    """

    temporal: int = 2

    def _check_policy(self) -> None:
        require_policy(self, QwenPatches)

    def _normalisation(self) -> tuple[Any, Any]:
        is_third = self.policy.size == 16
        mean, std = (HALF, HALF) if is_third else (CLIP_MEAN, CLIP_STD)
        return self.mean or mean, self.std or std

    def model_inputs(self, batch: Any, *, dtype: Any = None, loss: str = "sum") -> dict[str, Any]:
        """Name the tensors of a packed batch as Qwen in transformers wants them.

        Nothing waits for the device, wherever the batch lies.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: as in `PackedBatch.model_inputs`.

        Returns:
            As `PackedBatch.model_inputs`, but
            - position_ids: int64 (4, 1, num_tokens): the position in the sample, from which
              attention tells samples apart, and the three rows of M-RoPE.
            - pixel_values: (num_patches, 3 * 2 * patch_size ** 2), each patch twice in a channel;
              None without images.
            - image_grid_thw: int64 (num_images, 3), (1, rows, columns) in patches; None without
              images.
        """
        import torch  # not at the top: preprocessing does without it

        inputs = self._named(batch, dtype=dtype, loss=loss)
        positions = self.mrope_position_ids(batch)
        inputs["position_ids"] = torch.cat([inputs["position_ids"], positions])[:, None]
        pixels = inputs["pixel_values"]
        if pixels is not None:
            pairs = pixels[:, :, None].expand(-1, -1, self.temporal, -1, -1)
            inputs["pixel_values"] = pairs.reshape(len(pixels), -1)
        grid_thw = self.image_grid_thw(batch)
        inputs["image_grid_thw"] = grid_thw if len(grid_thw) else None
        return inputs

    def image_grid_thw(self, batch: Any) -> Any:
        """Give the grids of a batch: int64 (num_images, 3), (1, rows, columns) in patches.

        Args:
            batch: a PackedBatch.
        """
        import torch

        grids = batch.image_grids.flip(1).long()
        return torch.cat([torch.ones_like(grids[:, :1]), grids], dim=1)

    def mrope_position_ids(self, batch: Any) -> Any:
        """Give the positions of a batch in time, height and width: int64 (3, num_tokens).

        Args:
            batch: a PackedBatch.
        """
        from omniload.mrope import mrope_position_ids

        merge = self.policy.merge  # type: ignore[attr-defined]  # checked to be QwenPatches
        return mrope_position_ids(
            batch.cu_seqlens,
            batch.image_spans,
            self.image_grid_thw(batch),
            merge,
            num_tokens=batch.num_tokens,
        )
