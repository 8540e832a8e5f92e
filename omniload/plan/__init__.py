"""Which row goes where: a pure function of lengths, settings, seed and epoch."""

from __future__ import annotations

from omniload.plan.balance import Balance
from omniload.plan.step_plan import StepPlan, make_plan

__all__ = ["Balance", "StepPlan", "make_plan"]
