"""The tensors of a batch, and where they lie in its one buffer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from omniload._checks import check_device, check_flag
from omniload._memory import populate
from omniload.errors import ConfigError

__all__ = ["BatchSizes", "Reserved", "TensorBuffer", "allocate_buffer", "new_shared_buffer"]

_NUMPY_TYPES = {torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8}

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
    #: documents behind the samples: padding, and empty ones
    num_other_documents: int = 0

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of each tensor, in the order of the buffer."""
        tokens, images = (self.num_tokens,), self.num_images
        return {
            "input_ids": (torch.int64, tokens),
            "labels": (torch.int64, tokens),
            "position_ids": (torch.int64, tokens),
            "cu_seqlens": (torch.int32, (self.num_samples + self.num_other_documents + 1,)),
            "sample_ids": (torch.int64, (self.num_sample_ids,)),
            "image_num_tiles": (torch.int32, (images,)),
            "image_sizes": (torch.int32, (images, 2)),
            "image_grids": (torch.int32, (images, 2)),
            "image_spans": (torch.int32, (images, 2)),
            "tiles": (torch.uint8, (self.num_tiles, 3, self.tile_height, self.tile_width)),
        }

    def sections(self) -> tuple[dict[str, tuple[int, int]], int]:
        """Return first and last byte (exclusive) of each tensor, and the bytes of the buffer."""
        found, start = {}, 0
        for name, (dtype, shape) in self.shapes().items():
            stop = start + dtype.itemsize * math.prod(shape)
            found[name] = (start, stop)
            start = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return found, max(start, _ALIGNMENT_BYTES)


def allocate_buffer(sizes: BatchSizes) -> tuple[torch.Tensor, dict[str, npt.NDArray[Any]]]:
    """Make the buffer of a batch, and NumPy arrays that look into it, to be written.

    In a worker process of a torch DataLoader it is made in shared memory at once: sending it then
    copies nothing.

    Returns:
        uint8 (num_bytes,), zero between its sections; and name -> array.

    Raises:
        ConfigError: no shared memory is left.
    """
    sections, num_bytes = sizes.sections()
    info = torch.utils.data.get_worker_info()
    if info is None:
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
    else:
        # our loader's workers have memory that they use again
        buffer = getattr(info.dataset, "shared_buffer", new_shared_buffer)(num_bytes)
    raw = buffer.numpy()
    arrays, gap = {}, 0
    for name, (dtype, shape) in sizes.shapes().items():
        start, stop = sections[name]
        raw[gap:start] = 0
        arrays[name] = raw[start:stop].view(_NUMPY_TYPES[dtype]).reshape(shape)
        gap = stop
    raw[gap:] = 0
    return buffer, arrays


def new_shared_buffer(num_bytes: int) -> torch.Tensor:
    """Make shared memory: uint8 (num_bytes,), all zero, its pages there already.

    Raises:
        ConfigError: no shared memory is left.
    """
    storage = torch.UntypedStorage._new_shared(num_bytes)  # type: ignore[no-untyped-call]
    buffer = torch.empty(0, dtype=torch.uint8).set_(storage)
    if not populate(buffer.data_ptr(), num_bytes):
        raise ConfigError(
            f"a batch must fit in the shared memory that is free: expected {num_bytes} bytes. "
            "Give /dev/shm more (docker run --shm-size), or lower the budget, prefetch_factor "
            "or num_workers."
        )
    return buffer


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Reserved:
    """The buffer of a batch whose samples are still to be made.

    Args:
        sizes: where its tensors lie.
        buffer: uint8 (num_bytes,).
        arrays: NumPy views of its tensors.
        tiles: uint8 (n, 3, height, width) for each sample, in order: its part of `arrays["tiles"]`,
            for the transform to write to and to hand back in its sample.
    """

    sizes: BatchSizes
    buffer: torch.Tensor
    arrays: dict[str, npt.NDArray[Any]]
    tiles: tuple[npt.NDArray[np.uint8], ...]

    @classmethod
    def of(cls, sizes: BatchSizes, num_tiles: Sequence[int]) -> Self:
        """Allocate it.

        Args:
            sizes: of the batch.
            num_tiles: of each sample; sums to that of `sizes`.
        """
        buffer, arrays = allocate_buffer(sizes)
        bounds = itertools.pairwise(itertools.accumulate(num_tiles, initial=0))
        tiles = tuple([arrays["tiles"][start:stop] for start, stop in bounds])
        return cls(sizes=sizes, buffer=buffer, arrays=arrays, tiles=tiles)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class TensorBuffer(Mapping[str, torch.Tensor]):
    """Tensors of one packed row, as attributes and as a mapping by name, without a copy.

    Args:
        buffer: uint8 (num_bytes,), holds all of them.
        sizes: where they lie in it.
    """

    buffer: torch.Tensor
    sizes: BatchSizes
    # made when first asked for: a worker process never asks
    _views: dict[str, torch.Tensor] = field(init=False, default_factory=dict)

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 (num_tokens,)."""
        return self["input_ids"]

    @property
    def labels(self) -> torch.Tensor:
        """int64 (num_tokens,), -100 where there is no loss; the first of each sample always is.

        Not shifted: the model compares the output at t with the label at t + 1. Because the first
        label is ignored, no sample is asked to predict the next one.
        """
        return self["labels"]

    @property
    def position_ids(self) -> torch.Tensor:
        """int64 (num_tokens,), restarts at 0 with each document."""
        return self["position_ids"]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 (num_documents + 1,), where the documents begin; the last is num_tokens.

        The documents are the samples, then padding at the end of the row where there is some, then
        empty ones where `Padding.num_documents` asks for them.
        """
        return self["cu_seqlens"]

    @property
    def sample_ids(self) -> torch.Tensor:
        """int64 (num_samples,), rows of the index; those of fillers and dummies left out.

        -1 for a sample that was skipped: see `skipped`.
        """
        return self["sample_ids"]

    @property
    def tiles(self) -> torch.Tensor:
        """uint8 (num_tiles, 3, height, width), RGB, in the order of the samples."""
        return self["tiles"]

    @property
    def image_num_tiles(self) -> torch.Tensor:
        """int32 (num_images,), sums to num_tiles."""
        return self["image_num_tiles"]

    @property
    def image_sizes(self) -> torch.Tensor:
        """int32 (num_images, 2), (width, height) of the original image, pixels."""
        return self["image_sizes"]

    @property
    def image_grids(self) -> torch.Tensor:
        """int32 (num_images, 2), (columns, rows) of the tile grid, thumbnail left out."""
        return self["image_grids"]

    @property
    def image_spans(self) -> torch.Tensor:
        """int32 (num_images, 2), [start, end) of the image's tokens in the packed row."""
        return self["image_spans"]

    def __getitem__(self, name: str) -> torch.Tensor:
        view = self._views.get(name)
        if view is None:
            dtype, shape = self.sizes.shapes()[name]
            start, stop = self.sizes.sections()[0][name]
            view = self._views[name] = self.buffer[start:stop].view(dtype).view(shape)
        return view

    def __iter__(self) -> Iterator[str]:
        return iter(self.sizes.shapes())

    def __len__(self) -> int:
        return len(self.sizes.shapes())

    __eq__ = object.__eq__  # a mapping would compare tensors and fail
    __hash__ = object.__hash__

    @property
    def num_tokens(self) -> int:
        """Tokens of the row, padding included."""
        return self.sizes.num_tokens

    @property
    def num_samples(self) -> int:
        """Samples of the row; a filler holds one that is none of the data."""
        return self.sizes.num_samples

    @property
    def num_documents(self) -> int:
        """Documents of the row: samples, padding, and empty ones where they were asked for."""
        return self.sizes.num_samples + self.sizes.num_other_documents

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

    def to(
        self,
        device: torch.device | str | int,
        non_blocking: bool = False,
        *,
        dtype: None = None,
    ) -> Self:
        """Copy the batch to a device: one transfer; itself if it is there already.

        Args:
            device: where to; it must be here.
            non_blocking: don't wait for the copy, which goes on beside the host if the batch is
                pinned.
            dtype: none: the tensors of a batch keep theirs.

        Raises:
            ConfigError: a device that is not here, or a dtype.
        """
        if any(isinstance(given, torch.dtype) for given in (device, non_blocking, dtype)):
            raise ConfigError(
                "a batch can go to a device but not to a dtype, because its integers would be "
                f"lost: got {device!r}, {non_blocking!r}, {dtype!r}. Give the type of the pixels "
                "to batch.model_inputs(dtype=)."
            )
        target, waits_not = check_device(device), check_flag("non_blocking", non_blocking)
        return self._with_buffer(self.buffer.to(target, non_blocking=waits_not))

    def pin_memory(self) -> Self:
        """Copy the batch to page-locked memory, from which a GPU reads without waiting.

        Raises:
            ConfigError: no GPU, whose driver locks the pages.
        """
        if not torch.accelerator.is_available():
            raise ConfigError(
                "pin_memory needs a GPU that torch can use, got none. Leave it out on a CPU."
            )
        return self._with_buffer(self.buffer.pin_memory())

    def is_pinned(self) -> bool:
        """Say whether the buffer is page-locked."""
        return self.buffer.is_pinned()

    def _with_buffer(self, buffer: torch.Tensor) -> Self:
        return self if buffer is self.buffer else replace(self, buffer=buffer)
