"""omniload: the data loader for training vision-language models.

    loader = omniload.DataLoader("shards/", budget=omniload.Budget(tokens=4096, tiles=16))
    for batch in loader:
        ...

Names load on first use: `import omniload` itself loads no torch, numba or pyarrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from omniload import _checkout

__version__ = "0.1.0"

_checkout.install()

_HOME = {
    "Budget": "omniload.types",
    "Cache": "omniload.cache",
    "ConfigError": "omniload.errors",
    "CostModel": "omniload.costs",
    "DataLoader": "omniload.loader",
    "Groups": "omniload.types",
    "LanguageModel": "omniload.flops",
    "LedgerError": "omniload.errors",
    "LengthIndex": "omniload.index",
    "Message": "omniload.types",
    "Metrics": "omniload.loader",
    "Mixture": "omniload.mixture",
    "MixtureSet": "omniload.mixture",
    "NativeUnavailableError": "omniload.errors",
    "OmniloadError": "omniload.errors",
    "PackedBatch": "omniload.batch",
    "Padding": "omniload.padding",
    "PlanBatchSampler": "omniload.sampler",
    "Record": "omniload.types",
    "Sample": "omniload.types",
    "SampleError": "omniload.errors",
    "ShardError": "omniload.errors",
    "StateError": "omniload.errors",
    "StepPlan": "omniload.plan",
    "Storage": "omniload.cache",
    "StreamLoader": "omniload.stream",
    "StreamPart": "omniload.stream",
    "VisionModel": "omniload.flops",
    "WorkerError": "omniload.errors",
    "World": "omniload.world",
    "check_isolation": "omniload.isolation",
    "make_plan": "omniload.plan",
    "pack_for": "omniload.model_check",
}
_MODULES = (
    "errors",
    "grouping",
    "images",
    "interop",
    "kernels",
    "loss",
    "masks",
    "metrics",
    "mixture",
    "pipeline",
    "shards",
    "stream",
    "tars",
    "tools",
    "transforms",
)

__all__ = [*_HOME, "metrics"]

if TYPE_CHECKING:
    from omniload import metrics
    from omniload.batch import PackedBatch
    from omniload.cache import Cache, Storage
    from omniload.costs import CostModel
    from omniload.errors import (
        ConfigError,
        LedgerError,
        NativeUnavailableError,
        OmniloadError,
        SampleError,
        ShardError,
        StateError,
        WorkerError,
    )
    from omniload.flops import LanguageModel, VisionModel
    from omniload.index import LengthIndex
    from omniload.isolation import check_isolation
    from omniload.loader import DataLoader, Metrics
    from omniload.mixture import Mixture, MixtureSet
    from omniload.model_check import pack_for
    from omniload.padding import Padding
    from omniload.plan import StepPlan, make_plan
    from omniload.sampler import PlanBatchSampler
    from omniload.stream import StreamLoader, StreamPart
    from omniload.types import Budget, Groups, Message, Record, Sample
    from omniload.world import World


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"omniload.{name}")
    else:
        raise AttributeError(f"module 'omniload' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_MODULES])
