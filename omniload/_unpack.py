"""A packed row taken apart again: one row a sample, or the samples as they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from omniload._checks import check_choice, check_count
from omniload._layout import TensorBuffer
from omniload._step import StepRow
from omniload.errors import ConfigError
from omniload.types import IGNORE_INDEX, Sample

__all__ = ["SampleRow"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SampleRow(StepRow):
    """A row that knows its samples; the base of `PackedBatch`, which says more."""

    sample_lengths: tuple[int, ...]
    sample_images: tuple[int, ...]
    document_multiple: int = 1

    @property
    def num_padding_tokens(self) -> int:
        """Tokens that are padding; those of a filler's own document are not counted."""
        return self.num_tokens - sum(self.sample_lengths)

    @property
    def pad_ratio(self) -> float:
        """Share of the row that is padding, 0 to 1; 0.0 for a row without tokens."""
        return self.num_padding_tokens / max(self.num_tokens, 1)

    def padded(
        self, *, pad_token_id: int = 0, side: str = "right", multiple: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return one row a sample, for models that must not be packed; see `omniload.pack_for`.

        Tiles and their order are those of the packed row: take `pixel_values` of `model_inputs`.

        Args:
            pad_token_id: what stands in `input_ids` behind the samples; not an image token.
            side: "right" or "left", where the padding is.
            multiple: the rows are as long as the longest sample, rounded up to a multiple.

        Returns:
            input_ids, labels, attention_mask (1 at tokens), position_ids (0 at padding): int64
            (num_samples, length).

        Raises:
            ConfigError: a setting out of range.
        """
        return _pad_rows(
            self, self.sample_lengths, pad_token_id=pad_token_id, side=side, multiple=multiple
        )

    def unpack(self) -> list[Sample]:
        """Copy the samples out, on the CPU: what was packed, with the first label of each -100."""
        return _to_samples(self, self.sample_lengths, self.sample_images)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Cut what a model gave for each token into samples, padding left out.

        Args:
            values: (num_tokens, ...), for example hidden states.

        Returns:
            Views (length, ...), one a sample.

        Raises:
            ConfigError: not one entry a token.
        """
        is_tensor = isinstance(values, torch.Tensor)
        if not is_tensor or values.ndim == 0 or len(values) != self.num_tokens:
            got = tuple(values.shape) if is_tensor else type(values).__name__
            raise ConfigError(
                "values must be a tensor with one entry a token: expected "
                f"{self.num_tokens}, got {got}. For a batch dimension of 1 pass values[0]."
            )
        parts, start = [], 0
        for length in self.sample_lengths:
            parts.append(values[start : start + length])
            start += -(-length // self.document_multiple) * self.document_multiple
        return parts


def _pad_rows(
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


def _to_samples(
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
