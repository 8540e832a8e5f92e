"""The plan as a batch sampler for torch's own DataLoader."""

from __future__ import annotations

from omniload.sampler.sampler import PlanBatchSampler

__all__ = ["PlanBatchSampler"]
