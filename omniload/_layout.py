"""The tensors of a batch, and where they lie in its one buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch

__all__ = ["BatchSizes", "TensorBuffer", "allocate_buffer"]

#: Sections start at multiples of a cache line, which is also what vector loads like.
_ALIGNMENT_BYTES = 64


class BatchSizes(NamedTuple):
    """The numbers from which the place of every tensor in the buffer follows."""

    num_tokens: int
    num_samples: int
    num_sample_ids: int
    num_images: int
    num_tiles: int
    tile_height: int
    tile_width: int

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each tensor, in the order of the buffer."""
        tokens, images = (self.num_tokens,), self.num_images
        return {
            "input_ids": (torch.int64, tokens),
            "labels": (torch.int64, tokens),
            "position_ids": (torch.int64, tokens),
            "cu_seqlens": (torch.int32, (self.num_samples + 1,)),
            "sample_ids": (torch.int64, (self.num_sample_ids,)),
            "image_num_tiles": (torch.int32, (images,)),
            "image_sizes": (torch.int32, (images, 2)),
            "image_grids": (torch.int32, (images, 2)),
            "image_spans": (torch.int32, (images, 2)),
            "tiles": (torch.uint8, (self.num_tiles, 3, self.tile_height, self.tile_width)),
        }

    def num_bytes(self) -> int:
        """Return the bytes of the buffer, at least one line."""
        total = sum(
            _round_up(dtype.itemsize * math.prod(shape)) for dtype, shape in self.shapes().values()
        )
        return max(total, _ALIGNMENT_BYTES)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut the buffer into typed tensors, without a copy."""
        found, start = {}, 0
        for name, (dtype, shape) in self.shapes().items():
            stop = start + dtype.itemsize * math.prod(shape)
            found[name] = buffer[start:stop].view(dtype).view(shape)
            start = _round_up(stop)
        return found


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def allocate_buffer(sizes: BatchSizes) -> torch.Tensor:
    """Make the buffer of a batch; the gaps between its sections are zero.

    In a worker process of a torch DataLoader it is made in shared memory at once: sending it then
    copies nothing.

    Returns:
        uint8 (sizes.num_bytes(),), not initialised except for the gaps.
    """
    num_bytes = sizes.num_bytes()
    if torch.utils.data.get_worker_info() is None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
    else:
        storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
        buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    stop = 0
    for dtype, shape in sizes.shapes().values():
        stop += dtype.itemsize * math.prod(shape)
        buffer[stop : (stop := _round_up(stop))] = 0
    buffer[stop:] = 0
    return buffer


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TensorBuffer(Mapping[str, torch.Tensor]):
    """Tensors of one packed row, as attributes and as a mapping by name.

    Args:
        buffer: uint8 (num_bytes,), holds all of them.
        sizes: where they lie in it.
    """

    buffer: torch.Tensor
    sizes: BatchSizes
    _views: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_views", self.sizes.views(self.buffer))

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 (num_tokens,)."""
        return self._views["input_ids"]

    @property
    def labels(self) -> torch.Tensor:
        """int64 (num_tokens,), -100 where there is no loss; the first of each sample always is.

        Not shifted: the model compares the output at t with the label at t + 1. Because the first
        label is ignored, no sample is asked to predict the next one.
        """
        return self._views["labels"]

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 (num_tokens,), restarts at 0 with each sample."""
        return self._views["position_ids"]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 (num_samples + 1,), where the samples begin; the last is num_tokens."""
        return self._views["cu_seqlens"]

    @property
    def sample_ids(self) -> torch.Tensor:
        """int64 (num_samples,), rows of the index; (0,) in a filler."""
        return self._views["sample_ids"]

    @property
    def tiles(self) -> torch.Tensor:
        """uint8 (num_tiles, 3, height, width), RGB, in the order of the samples."""
        return self._views["tiles"]

    @property
    def image_num_tiles(self) -> torch.Tensor:
        """int32 (num_images,), sums to num_tiles."""
        return self._views["image_num_tiles"]

    @property
    def image_sizes(self) -> torch.Tensor:
        """int32 (num_images, 2), (width, height) of the original image, pixels."""
        return self._views["image_sizes"]

    @property
    def image_grids(self) -> torch.Tensor:
        """int32 (num_images, 2), (columns, rows) of the tile grid, thumbnail left out."""
        return self._views["image_grids"]

    @property
    def image_spans(self) -> torch.Tensor:
        """int32 (num_images, 2), [start, end) of the image's tokens in the packed row."""
        return self._views["image_spans"]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    __eq__ = object.__eq__  # a mapping would compare tensors and fail
    __hash__ = object.__hash__

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return self.sizes.num_tokens

    @property
    def num_samples(self) -> int:
        """Samples of the row; a filler holds one that is none of the data."""
        return self.sizes.num_samples

    @property
    def num_tiles(self) -> int:
        """Tiles of all images."""
        return self.sizes.num_tiles

    @property
    def num_images(self) -> int:
        """Images of all samples."""
        return self.sizes.num_images

    @property
    def device(self) -> torch.device:
        """Where the buffer lies."""
        return self.buffer.device

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Copy the batch to a device: one transfer; itself if it is there already."""
        return self._with_buffer(self.buffer.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory, from which a GPU reads without waiting."""
        return self._with_buffer(self.buffer.pin_memory())

    def is_pinned(self) -> bool:
        """Say whether the buffer is page-locked."""
        return self.buffer.is_pinned()

    def _with_buffer(self, buffer: torch.Tensor) -> Self:
        return self if buffer is self.buffer else replace(self, buffer=buffer)
