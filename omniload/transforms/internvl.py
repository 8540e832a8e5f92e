"""InternVL 2, 2.5 and 3: the names that its models take."""

from __future__ import annotations

from typing import Any

from omniload.images import InternVLTiles
from omniload.transforms.shared import require_policy
from omniload.transforms.tile import TileTransform

__all__ = ["InternVLTransform"]


class InternVLTransform(TileTransform):
    """A `TileTransform` for InternVL: tiles of 448 pixels, normalised as ImageNet, 256 tokens each.

    `model_inputs` is for the model in transformers (`InternVLForConditionalGeneration`);
    `own_model_inputs` for the code that comes with the checkpoints (`InternVLChatModel`).
    """

    def _check_policy(self) -> None:
        require_policy(self, InternVLTiles)

    def own_model_inputs(
        self, batch: Any, *, dtype: Any = None, loss: str = "mean"
    ) -> dict[str, Any]:
        """Name the tensors of a packed batch as InternVL's own code wants them.

        That code always runs the vision encoder, and leaves out tiles whose flag is 0. So a batch
        without images gets one black tile with the flag 0: every rank then takes part in what the
        vision encoder communicates.

        Attention must know where samples begin: with the patches for packed training in InternVL's
        repository, the cumulative lengths are given as `attention_mask`.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: as in `PackedBatch.model_inputs`; that code returns a mean.

        Returns:
            - input_ids, labels, position_ids: int64 (1, num_tokens).
            - attention_mask: int32 (1, num_documents + 1), cumulative lengths.
            - pixel_values: (num_tiles, 3, size, size); at least one tile.
            - image_flags: int64 (num_tiles, 1), 1 for a tile of the data.
        """
        inputs = self._named(batch, dtype=dtype, loss=loss)
        pixels = inputs["pixel_values"]
        flag = 1
        if pixels is None:
            size = self.policy.size
            blank = batch.input_ids.new_zeros((1, 3, size, size))
            pixels, flag = blank.to(dtype or _float32(), non_blocking=True), 0
        return {
            "input_ids": inputs["input_ids"],
            "labels": inputs["labels"],
            "position_ids": inputs["position_ids"],
            "attention_mask": inputs["cu_seq_lens_q"][None],
            "pixel_values": pixels,
            "image_flags": batch.input_ids.new_full((len(pixels), 1), flag),
        }


def _float32() -> Any:
    import torch

    return torch.float32
