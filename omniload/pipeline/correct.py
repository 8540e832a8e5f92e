"""Corrects analytic costs by measured ones: the form of a cost stays, its size is scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from omniload.errors import ConfigError
from omniload.pipeline.kinds import LayerKind, Linear, Shapes

__all__ = ["corrected_kinds"]

_TIMES = ("forward_s", "backward_s", "backward_frozen_s", "recompute_s")


def corrected_kinds(
    kinds: Sequence[LayerKind],
    measured: Sequence[LayerKind],
    shapes: Shapes,
    *,
    names: Mapping[str, str] | None = None,
) -> tuple[LayerKind, ...]:
    """Scale every figure so that its sum over micro-batches is the measured one.

    Kinds that were not measured get the ratio of all times that were, and keep their bytes.

    Args:
        kinds: what to correct.
        measured: measured kinds.
        shapes: micro-batches as they will come.
        names: name of the measured kind of each kind; None: the one of its name, or else the only
            one of its part.

    Returns:
        The corrected kinds, in the order of `kinds`.

    Raises:
        ConfigError: names of kinds that aren't there, or no kind was measured.
    """
    pairs = _pairs(kinds, measured, names)
    if not pairs:
        raise ConfigError(
            "measured kinds must belong to kinds of the table: got "
            f"{', '.join(kind.name for kind in measured)} for "
            f"{', '.join(kind.name for kind in kinds)}. Say which by names={{...}}."
        )
    sums = [
        (_total(getattr(kind, name), shapes), _total(getattr(pairs[kind.name], name), shapes))
        for kind in kinds
        if kind.name in pairs
        for name in ("forward_s", "backward_s")
        if kind.trainable or name == "forward_s"
    ]
    was, took = (sum(column) for column in zip(*sums, strict=True))
    overall = took / was if was > 0 and took > 0 else 1.0
    return tuple(
        _corrected(kind, pairs[kind.name], shapes) if kind.name in pairs else _scaled(kind, overall)
        for kind in kinds
    )


def _pairs(
    kinds: Sequence[LayerKind], measured: Sequence[LayerKind], names: Mapping[str, str] | None
) -> dict[str, LayerKind]:
    by_name = {kind.name: kind for kind in measured}
    if names is not None:
        known = {kind.name for kind in kinds}
        for name, other in names.items():
            if name not in known or other not in by_name:
                raise ConfigError(
                    f"names must lead from {', '.join(sorted(known))} to {', '.join(by_name)}, "
                    f"got {name!r}: {other!r}."
                )
        return {name: by_name[other] for name, other in names.items()}
    pairs = {}
    for kind in kinds:
        alike = [other for other in measured if other.part == kind.part]
        is_alone = sum(other.part == kind.part for other in kinds) == 1
        if kind.name in by_name:
            pairs[kind.name] = by_name[kind.name]
        elif len(alike) == 1 and is_alone:
            pairs[kind.name] = alike[0]
    return pairs


def _corrected(kind: LayerKind, measured: LayerKind, shapes: Shapes) -> LayerKind:
    def ratio(name: str, otherwise: float = 1.0) -> float:
        was, took = (_total(getattr(each, name), shapes) for each in (kind, measured))
        return took / was if was > 0 and took > 0 else otherwise

    forward = ratio("forward_s")
    # what was measured frozen has figures for that only
    trained = measured.trainable or kind.backward_frozen_s is None
    backward = ratio("backward_s" if trained else "backward_frozen_s", forward)
    bytes_trained = measured.trainable or kind.kept_frozen_bytes is None
    kept = ratio("kept_bytes" if bytes_trained else "kept_frozen_bytes")
    again = ratio("recompute_s", forward)
    figures: dict[str, Any] = {
        "forward_s": kind.forward_s.scaled(forward),
        "backward_s": kind.backward_s.scaled(backward),
        "recompute_s": kind.recompute_s.scaled(again),
        "kept_bytes": kind.kept_bytes.scaled(kept),
        "kept_bytes_recompute": kind.kept_bytes_recompute.scaled(ratio("kept_bytes_recompute")),
        "output_bytes": kind.output_bytes.scaled(ratio("output_bytes")),
    }
    frozen, frozen_bytes = kind.backward_frozen_s, kind.kept_frozen_bytes
    return replace(
        kind,
        **figures,
        backward_frozen_s=None if frozen is None else frozen.scaled(backward),
        kept_frozen_bytes=None if frozen_bytes is None else frozen_bytes.scaled(kept),
        selective=tuple(
            replace(
                option,
                recompute_s=option.recompute_s.scaled(again),
                kept_bytes=option.kept_bytes.scaled(kept),
            )
            for option in kind.selective
        ),
    )


def _scaled(kind: LayerKind, factor: float) -> LayerKind:
    given = {name: getattr(kind, name) for name in _TIMES}
    times: dict[str, Any] = {
        name: None if time is None else time.scaled(factor) for name, time in given.items()
    }
    return replace(
        kind,
        **times,
        selective=tuple(
            replace(option, recompute_s=option.recompute_s.scaled(factor))
            for option in kind.selective
        ),
    )


def _total(cost: Linear | None, shapes: Shapes) -> float:
    if cost is None:
        return 0.0
    return float(np.sum(cost.at(shapes.num_tiles, shapes.num_tokens, shapes.sum_squares)))
