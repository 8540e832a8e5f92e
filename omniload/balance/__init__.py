"""Balance inside one step: swaps of samples between its groups, and who gets which group.

The samples of a step stay the same, so what the optimizer sees stays a plain sample of the data.
"""

from __future__ import annotations

from omniload.balance.step import StepBalance, dummy_slots

__all__ = ["StepBalance", "dummy_slots"]
