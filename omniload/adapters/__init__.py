"""What applies plans and loaders to training engines: import the module of the engine in use."""

from __future__ import annotations
