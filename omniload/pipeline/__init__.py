"""Pipelines: what layers cost, where to cut, what to recompute, in which order to run.

    table = cost_table(preset("internvl-6b-20b"), tensor_parallel=2, data_parallel=4)
    shapes = Shapes.from_groups(groups, num_tiles=index.num_tiles, num_tokens=index.num_tokens)
    plan = plan_pipeline(table, shapes, num_stages=4, num_micro_batches=16, memory_gb=80)

Names load on first use: torch with `profile_layers` only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {
    "CostTable": "table",
    "Encoder": "models",
    "LayerKind": "kinds",
    "Linear": "kinds",
    "Machine": "models",
    "ModelDescription": "models",
    "ParamBytes": "kinds",
    "PipelineOrder": "order",
    "PipelinePlan": "plan",
    "ProfileBatch": "profile",
    "RecomputeBySize": "by_size",
    "Selective": "kinds",
    "Shapes": "kinds",
    "StagePlan": "plan",
    "compare": "baselines",
    "cost_table": "analytic",
    "fit_budget": "budget",
    "from_hf_config": "hf_config",
    "plan_pipeline": "partition",
    "plan_recompute": "recompute",
    "preset": "presets",
    "profile_layers": "profile",
    "recompute_by_size": "by_size",
}

__all__ = [
    "CostTable",
    "Encoder",
    "LayerKind",
    "Linear",
    "Machine",
    "ModelDescription",
    "ParamBytes",
    "PipelineOrder",
    "PipelinePlan",
    "ProfileBatch",
    "RecomputeBySize",
    "Selective",
    "Shapes",
    "StagePlan",
    "compare",
    "cost_table",
    "fit_budget",
    "from_hf_config",
    "plan_pipeline",
    "plan_recompute",
    "preset",
    "profile_layers",
    "recompute_by_size",
]

if TYPE_CHECKING:
    from omniload.pipeline.analytic import cost_table
    from omniload.pipeline.baselines import compare
    from omniload.pipeline.budget import fit_budget
    from omniload.pipeline.by_size import RecomputeBySize, recompute_by_size
    from omniload.pipeline.hf_config import from_hf_config
    from omniload.pipeline.kinds import LayerKind, Linear, ParamBytes, Selective, Shapes
    from omniload.pipeline.models import Encoder, Machine, ModelDescription
    from omniload.pipeline.order import PipelineOrder
    from omniload.pipeline.partition import plan_pipeline
    from omniload.pipeline.plan import PipelinePlan, StagePlan
    from omniload.pipeline.presets import preset
    from omniload.pipeline.profile import ProfileBatch, profile_layers
    from omniload.pipeline.recompute import plan_recompute
    from omniload.pipeline.table import CostTable


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'omniload.pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(f"omniload.pipeline.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
