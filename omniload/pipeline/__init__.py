"""Pipelines: what layers cost, where to cut, what to recompute, in which order to run."""

from __future__ import annotations
