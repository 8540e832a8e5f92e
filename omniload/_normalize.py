"""Pixels to floats with the quickest that is there; all ways give the bits of the reference."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from omniload import _native
from omniload.kernels import reference

__all__ = ["normalize_tiles"]

# values are moved, not computed with: an integer of the same size does for each floating type
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def normalize_tiles(
    tiles: torch.Tensor, table: torch.Tensor, *, backend: str = "auto"
) -> torch.Tensor:
    """Look every pixel up in the table of its channel.

    On a GPU a Triton kernel does it where Triton is installed, on a CPU the C++ extension where it
    is built; anywhere else, plain torch.

    Args:
        tiles: uint8 (num_tiles, 3, height, width).
        table: (3, 256), see `omniload.kernels.reference.normalize_table`; on the device of the
            tiles.
        backend: for tiles on a CPU: "auto", "native" or "numpy" (here: plain torch).

    Returns:
        dtype of the table, (num_tiles, 3, height, width).

    Raises:
        ConfigError: tiles that are not uint8 with 3 channels, or a table of another shape or place.
    """
    reference.check_tiles(tiles)
    reference.check_table(table, tiles.device)
    if tiles.device.type == "cuda":
        kernels = _triton()
        if kernels is not None:
            result: torch.Tensor = kernels.normalize_tiles(tiles, table)
            return result
    native = _native.choose(backend) if tiles.device.type == "cpu" else None
    integer = _INTEGERS.get(table.element_size())
    if native is None or integer is None:
        return reference.normalize_tiles(tiles, table)
    out = torch.empty(tiles.shape, dtype=table.dtype)
    arrays = [part.contiguous().view(integer).numpy() for part in (table, out)]
    native.normalize(tiles.contiguous().numpy(), *arrays)
    return out


def _triton() -> ModuleType | None:
    # once imported this is one dictionary look-up
    try:
        return importlib.import_module("omniload.kernels.tiles")
    except ImportError:
        return None
