"""A packed row taken apart again: one row a sample, or the samples as they were."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from omniload._checks import check_choice, check_count
from omniload._layout import TensorBuffer
from omniload.types import IGNORE_INDEX, Sample

__all__ = ["pad_rows", "to_samples"]


def pad_rows(
    row: TensorBuffer,
    lengths: Sequence[int],
    *,
    pad_token_id: int,
    side: str,
    multiple: int,
) -> dict[str, torch.Tensor]:
    """Copy each sample into a row of its own; see `PackedBatch.padded`."""
    check_choice("side", side, ("right", "left"))
    multiple = check_count("multiple", multiple, least=1, of="token")
    pad_token_id = check_count(
        "pad_token_id", pad_token_id, remedy="It goes through the model's embedding."
    )
    device = row.device
    width = -(-max(lengths, default=0) // multiple) * multiple
    counts = torch.tensor(lengths, dtype=torch.int64).to(device, non_blocking=True)[:, None]
    places = torch.arange(width, device=device)[None].expand(len(lengths), width)
    if side == "left":
        places = places - (width - counts)
    is_real = (places >= 0) & (places < counts)
    starts = row.cu_seqlens[: len(lengths), None].long()
    source = torch.where(is_real, starts + places, 0)
    return {
        "input_ids": torch.where(is_real, row.input_ids[source], pad_token_id),
        "labels": torch.where(is_real, row.labels[source], IGNORE_INDEX),
        "attention_mask": is_real.long(),
        "position_ids": torch.where(is_real, places, 0),
    }


def to_samples(
    row: TensorBuffer, lengths: Sequence[int], num_images: Sequence[int]
) -> list[Sample]:
    """Copy the samples out; see `PackedBatch.unpack`."""
    arrays: dict[str, Any] = {name: tensor.cpu().numpy() for name, tensor in row.items()}
    starts = arrays["cu_seqlens"].tolist()
    ids = arrays["sample_ids"].tolist()
    ids += [-1] * (len(lengths) - len(ids))  # fillers and dummies
    first_tiles = np.concatenate([[0], np.cumsum(arrays["image_num_tiles"], dtype=np.int64)])
    samples, image = [], 0
    for index, (length, images) in enumerate(zip(lengths, num_images, strict=True)):
        start, end = starts[index], starts[index] + length
        own = slice(image, image + images)
        image += images
        samples.append(
            Sample(
                sample_id=ids[index],
                input_ids=arrays["input_ids"][start:end].astype(np.int32),
                labels=arrays["labels"][start:end].astype(np.int32),
                tiles=arrays["tiles"][first_tiles[own.start] : first_tiles[own.stop]].copy(),
                image_num_tiles=arrays["image_num_tiles"][own].copy(),
                image_sizes=arrays["image_sizes"][own].copy(),
                image_grids=arrays["image_grids"][own].copy(),
                image_spans=arrays["image_spans"][own] - np.int32(start),
            )
        )
    return samples
