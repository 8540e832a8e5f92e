"""The data loader: where plan, shards, transforms and packing meet."""

from __future__ import annotations

from omniload.loader.loader import DataLoader
from omniload.loader.reports import Metrics

__all__ = ["DataLoader", "Metrics"]
