"""One small all-reduce a step: whether anybody has data left, and the denominators of the step."""

from __future__ import annotations

from typing import Any

import torch

from omniload.errors import ConfigError, OmniloadError
from omniload.world import World

__all__ = ["Agreement"]


class Agreement:
    """Sums a few numbers over the data-parallel ranks.

    Args:
        world: who this process is.
        group: torch process group of all its processes; None: the default one, or a gloo group
            beside it where the default one can't sum on the CPU.

    Raises:
        ConfigError: more than one rank without torch.distributed, or a group of another size.
    """

    def __init__(self, world: World, group: Any = None) -> None:
        self._replicas = world.replica_size
        self._group = group
        self._is_alone = world.dp_world_size == 1
        if self._is_alone:
            return
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            raise ConfigError(
                f"a stream for {world.dp_world_size} ranks needs torch.distributed, over which "
                "they agree on each step: call torch.distributed.init_process_group first."
            )
        size = distributed.get_world_size(group)
        expected = world.dp_world_size * world.replica_size
        if size != expected:
            raise ConfigError(
                f"the process group of a stream must have all its {expected} processes "
                f"({world.dp_world_size} data-parallel ranks of {world.replica_size}), got {size}. "
                "Give world= or process_group= to match."
            )
        if group is None and "gloo" not in distributed.get_backend_config():
            self._group = distributed.new_group(backend="gloo")

    def sum(self, values: list[float]) -> list[float]:
        """Sum numbers over the ranks; integers below 2**53 exactly. A collective.

        Args:
            values: as many on each rank; the first says whether this rank failed.

        Raises:
            OmniloadError: another rank failed.
        """
        if self._is_alone:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        torch.distributed.all_reduce(tensor, group=self._group)
        found = [value / self._replicas for value in tensor.tolist()]
        if found[0] and not values[0]:
            raise OmniloadError(
                "another rank failed while it made this step; its own error says why. All ranks "
                "end here, so that none waits for it."
            )
        return found
