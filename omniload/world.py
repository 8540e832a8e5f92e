"""Who this process is among all training processes; the only reader of RANK and WORLD_SIZE."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from omniload.errors import ConfigError

__all__ = ["World"]


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank facts as a value; pass it along instead of asking the environment again.

    Ranks of one tensor-, context- or pipeline-parallel group need the same batch: they share a
    `dp_rank` and differ in `replica_rank`.

    Args:
        dp_rank: data-parallel rank of this process: which part of each step it gets.
        dp_world_size: number of data-parallel ranks.
        rank: rank over all processes; None: `dp_rank * replica_size + replica_rank`.
        world_size: number of processes; None: `dp_world_size * replica_size`.
        local_rank: rank on this node.
        node_rank: rank of this node.
        replica_rank: rank among the processes that share this batch.
        replica_size: number of processes that share a batch.

    Raises:
        ConfigError: not an integer, or a rank that is not below its size.
    """

    dp_rank: int = 0
    dp_world_size: int = 1
    rank: int | None = None
    world_size: int | None = None
    local_rank: int = 0
    node_rank: int = 0
    replica_rank: int = 0
    replica_size: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None and name in ("rank", "world_size"):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise ConfigError(f"World.{name} must be an integer, got {value!r}.")
            object.__setattr__(self, name, int(value))
        if self.rank is None:
            object.__setattr__(self, "rank", self.dp_rank * self.replica_size + self.replica_rank)
        if self.world_size is None:
            object.__setattr__(self, "world_size", self.dp_world_size * self.replica_size)
        for name, size_name in (
            ("dp_rank", "dp_world_size"),
            ("rank", "world_size"),
            ("replica_rank", "replica_size"),
        ):
            position, size = getattr(self, name), getattr(self, size_name)
            if size < 1 or not 0 <= position < size:
                raise ConfigError(
                    f"World.{name} must be at least 0 and below World.{size_name}: got {position} "
                    f"of {size}."
                )
        if self.local_rank < 0 or self.node_rank < 0:
            raise ConfigError(
                "World.local_rank and World.node_rank must not be negative, got "
                f"{self.local_rank} and {self.node_rank}."
            )

    @classmethod
    def from_env(cls) -> World:
        """Read the facts from torch.distributed where it is initialised, else from the environment.

        Every process counts as a data-parallel rank of its own. With tensor, context or pipeline
        parallelism that is wrong: use `from_mesh`, or give the facts.

        Returns:
            The world; one rank when nothing is set.

        Raises:
            ConfigError: a variable is not a number, or only one of RANK and WORLD_SIZE is set.
        """
        local_rank = _env_int("LOCAL_RANK", 0)
        node_rank = _env_int("GROUP_RANK", _env_int("NODE_RANK", 0))
        distributed = _initialised_distributed()
        if distributed is not None:
            rank, world_size = int(distributed.get_rank()), int(distributed.get_world_size())
        else:
            # set to nothing is not set: a launcher that lost one of them must not start N loaders
            # that each read all of the data
            if bool(os.environ.get("RANK")) != bool(os.environ.get("WORLD_SIZE")):
                raise ConfigError(
                    "RANK and WORLD_SIZE must be set together: got RANK="
                    f"{os.environ.get('RANK')!r}, WORLD_SIZE={os.environ.get('WORLD_SIZE')!r}. "
                    "Start the program with torchrun, unset both, or pass "
                    "world=World(dp_rank=, dp_world_size=)."
                )
            rank, world_size = _env_int("RANK", 0), _env_int("WORLD_SIZE", 1)
        return cls(
            dp_rank=rank,
            dp_world_size=world_size,
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            node_rank=node_rank,
        )

    @classmethod
    def from_mesh(cls, mesh: Any, dp_dims: str | Sequence[str]) -> World:
        """Read the facts from a `torch.distributed.device_mesh.DeviceMesh`.

        Args:
            mesh: the whole mesh, with named dimensions.
            dp_dims: the dimensions over which the data differs, for example ("replicate", "shard").

        Returns:
            The world: `dp_rank` counts over `dp_dims` in mesh order, `replica_rank` over the rest.

        Raises:
            ConfigError: the mesh has no such dimension, or this process is not in it.
        """
        names = tuple(mesh.mesh_dim_names or ())
        wanted = (dp_dims,) if isinstance(dp_dims, str) else tuple(dp_dims)
        missing = [name for name in wanted if name not in names]
        if missing or not wanted:
            raise ConfigError(f"dp_dims must name dimensions of the mesh {names}, got {wanted}.")
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ConfigError("this process is not part of the mesh it was given.")
        position = {True: 0, False: 0}
        extent = {True: 1, False: 1}
        for name, size, place in zip(names, mesh.mesh.shape, coordinate, strict=True):
            varies = name in wanted
            position[varies] = position[varies] * int(size) + int(place)
            extent[varies] *= int(size)
        local = cls.from_env()
        return cls(
            dp_rank=position[True],
            dp_world_size=extent[True],
            rank=local.rank,
            world_size=local.world_size,
            local_rank=local.local_rank,
            node_rank=local.node_rank,
            replica_rank=position[False],
            replica_size=extent[False],
        )


def _initialised_distributed() -> Any:
    # torch is not imported for this: where nobody has, it can't be initialised
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed
    return None


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must be an integer, got {text!r}.") from None
