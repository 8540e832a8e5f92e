"""DeepSpeed: pipelines by plan, fed with packed batches; and ZeRO with a loader that resumes."""

from __future__ import annotations

from omniload.adapters.deepspeed.batches import PipelineBatches, pipeline_batches
from omniload.adapters.deepspeed.engine import prepare_engine
from omniload.adapters.deepspeed.losses import token_loss
from omniload.adapters.deepspeed.module import BalancedPipelineModule
from omniload.adapters.deepspeed.saving import load_checkpoint, save_checkpoint

__all__ = [
    "BalancedPipelineModule",
    "PipelineBatches",
    "load_checkpoint",
    "pipeline_batches",
    "prepare_engine",
    "save_checkpoint",
    "token_loss",
]
