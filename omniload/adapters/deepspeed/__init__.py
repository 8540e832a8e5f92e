"""DeepSpeed: pipelines by plan, fed with packed batches; and ZeRO with a loader that resumes."""

from __future__ import annotations

from importlib.util import find_spec

from omniload.errors import ConfigError

if find_spec("deepspeed") is None:
    raise ConfigError("deepspeed is not installed: pip install 'omniload-vlm[deepspeed]'.")

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
