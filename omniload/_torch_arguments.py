"""Arguments of torch's DataLoader that ours have not, and what takes their place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from omniload.errors import ConfigError

__all__ = ["refuse_torch_arguments"]

Init = TypeVar("Init", bound=Callable[..., None])

_INSTEAD = {
    "batch_size": "a batch is what fits budget=omniload.Budget(tokens=..., tiles=...)",
    "sampler": "the plan chooses the rows: see seed, grouping, exclude and omniload.Mixture; for a "
    "loader of your own, omniload.PlanBatchSampler",
    "batch_sampler": "the plan chooses the rows: see seed, grouping, exclude and omniload.Mixture; "
    "for a loader of your own, omniload.PlanBatchSampler",
    "collate_fn": "samples are packed; give transform= to change them, pad_to= to pad rows",
    "drop_last": "no row is lost: fillers without loss make the last step whole",
    "worker_init_fn": "workers need none; what a transform needs it can make at its first call",
    "generator": "seed= gives order and random draws, and a transform gets its own generator",
    "pin_memory_device": "pin_memory=True is enough",
    "in_order": "batches always come in order",
    "shuffle": "a stream comes in the order in which it is read",
    "persistent_workers": "a stream's workers start with each iter()",
}


def refuse_torch_arguments(init: Init) -> Init:
    """Decorate `__init__`: an argument of torch's DataLoader that it lacks is explained."""
    known = set(init.__kwdefaults__ or {}) | {"budget"}

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **arguments: Any) -> None:
        for name in arguments:
            if name in _INSTEAD and name not in known:
                raise ConfigError(
                    f"{type(self).__name__} has no {name}, as torch's DataLoader has: "
                    f"{_INSTEAD[name]}. Leave {name} out."
                )
        if len(args) > 1 and "budget" not in arguments:
            raise ConfigError(
                f"{type(self).__name__} takes its data by position and all else by name, got "
                f"{len(args)} positional arguments: {_INSTEAD['batch_size']}."
            )
        init(self, *args, **arguments)

    return checked  # type: ignore[return-value]
