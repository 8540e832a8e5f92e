"""Mixtures: several data sets as one, with exact shares in every part of an epoch.

mixture = Mixture([
    MixtureSet(source="shards/captions", repeat=0.5),
    MixtureSet(source="s3://bucket/charts", repeat=2, cache=Cache(folder="/nvme/cache")),
])
loader = omniload.DataLoader(mixture, budget=Budget(tokens=4096, tiles=16))
"""

from __future__ import annotations

from omniload.mixture.figures import SetFigures
from omniload.mixture.file import MixtureFile, open_mixture, read_mixture_file
from omniload.mixture.mixture import Mixture
from omniload.mixture.rows import MixtureRows
from omniload.mixture.sets import MixtureSet

__all__ = [
    "Mixture",
    "MixtureFile",
    "MixtureRows",
    "MixtureSet",
    "SetFigures",
    "open_mixture",
    "read_mixture_file",
]
