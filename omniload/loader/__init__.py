"""The data loader: where plan, shards, transforms and packing meet."""

from __future__ import annotations

from omniload.loader.loader import DataLoader

__all__ = ["DataLoader"]
