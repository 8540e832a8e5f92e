"""What each set gives to an epoch, in numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from omniload.mixture.rows import MixtureRows, OpenSet
from omniload.mixture.sets import Pace

__all__ = ["SetFigures", "measure_sets"]


@dataclass(frozen=True, kw_only=True)
class SetFigures:
    """What a set gives to one epoch.

    Args:
        name: of the set.
        location: where it lies.
        stored_rows: rows that it has.
        rows: rows of the epoch that are of it; one that comes twice counts twice.
        tokens: of these rows.
        tiles: of these rows.
        loss_tokens: of these rows.
        share_of_rows: `rows` over those of all sets.
        share_of_tokens: `tokens` over those of all sets.
        share_of_tiles: `tiles` over those of all sets; 0 where there are none.
        passes: times that the epoch goes through the set.
        passes_so_far: the same, all epochs up to the end of this one.
    """

    name: str
    location: str
    stored_rows: int
    rows: int
    tokens: int
    tiles: int
    loss_tokens: int
    share_of_rows: float
    share_of_tokens: float
    share_of_tiles: float
    passes: float
    passes_so_far: float

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        return asdict(self)


def measure_sets(
    rows: MixtureRows, sets: Sequence[OpenSet], walks: Sequence[Pace], *, epoch: int
) -> tuple[SetFigures, ...]:
    """Measure what each set gives to an epoch.

    Args:
        rows: of the epoch.
        sets: the sets.
        walks: how epochs walk through each.
        epoch: the epoch.
    """
    starts, index = rows.set_starts, rows.index
    sums = {
        name: [int(column[a:b].sum(dtype=np.int64)) for a, b in itertools.pairwise(starts)]
        for name, column in (
            ("tokens", index.num_tokens),
            ("tiles", index.num_tiles),
            ("loss_tokens", index.num_loss_tokens),
        )
    }
    counts = np.diff(starts).tolist()
    tokens, tiles = sum(sums["tokens"]), sum(sums["tiles"])
    return tuple(
        SetFigures(
            name=one.name,
            location=one.source.location,
            stored_rows=walk.num_rows,
            rows=counts[i],
            tokens=sums["tokens"][i],
            tiles=sums["tiles"][i],
            loss_tokens=sums["loss_tokens"][i],
            share_of_rows=counts[i] / max(len(rows), 1),
            share_of_tokens=sums["tokens"][i] / max(tokens, 1),
            share_of_tiles=sums["tiles"][i] / max(tiles, 1),
            passes=counts[i] / walk.num_rows,
            passes_so_far=walk.span(epoch)[1] / walk.num_rows,
        )
        for i, (one, walk) in enumerate(zip(sets, walks, strict=True))
    )
