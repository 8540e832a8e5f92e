"""Whether sets can lie in one batch, and the settings of their mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omniload.errors import ConfigError
from omniload.images import policy_from_settings
from omniload.source import RowSource

__all__ = ["mixed_settings", "source_name"]

#: settings of the encoder that may differ: labels are stored with the tokens
_FREE = ("loss",)


def source_name(name: str, source: RowSource, inner: str) -> str:
    """Name a data set of a mixture: by the set it lies in, and where that has several, by both.

    Args:
        name: of the set in the mixture.
        source: the set.
        inner: `Record.source` there.
    """
    return name if len(source.sources) <= 1 else f"{name}/{inner}"


def mixed_settings(names: Sequence[str], sources: Sequence[RowSource]) -> dict[str, Any]:
    """Put the settings of sets together.

    Args:
        names: of the sets.
        sources: the sets.

    Returns:
        Settings as those of shards. `source_tilings` has the tiling of every data set for which it
        isn't that of the first set.

    Raises:
        ConfigError: encoders that differ, or tiles of another kind or size; shows both.
    """
    first = dict(sources[0].settings)
    for name, source in zip(names, sources, strict=True):
        _check_encoder(names[0], first.get("encoder"), name, source.settings.get("encoder"))
    kept = ("encoder", "tiling", "max_tokens")
    found: dict[str, Any] = {key: first[key] for key in kept if key in first}
    policies = {source.settings.get("oversize") for source in sources}
    if "oversize" in first:
        # only this one says that images may have fewer tiles than their policy gives them
        found["oversize"] = "fewer-tiles" if "fewer-tiles" in policies else first["oversize"]
    tilings = _tilings(names, sources)
    own = {key: tiling for key, tiling in tilings.items() if tiling != first.get("tiling")}
    _check_tilings(names[0], first.get("tiling"), own)
    return {**found, "source_tilings": own} if own else found


def _check_encoder(first: str, expected: Any, name: str, got: Any) -> None:
    if expected == got:
        return
    if not isinstance(expected, Mapping) or not isinstance(got, Mapping):
        raise ConfigError(
            f"all sets of a mixture must have the same encoder: {first!r} and {name!r} differ in "
            "having one at all."
        )
    names = [key for key in {**expected, **got} if key not in _FREE]
    different = [key for key in names if expected.get(key) != got.get(key)]
    if different:
        shown = "; ".join(
            f"{key}: {expected.get(key)!r:.80} in {first!r}, {got.get(key)!r:.80} in {name!r}"
            for key in different
        )
        raise ConfigError(
            "all sets of a mixture must have the tokens of one encoder, because they lie in one "
            f"batch: {shown}. Preprocess one of them again with the settings of the other."
        )


def _tilings(names: Sequence[str], sources: Sequence[RowSource]) -> dict[str, Any]:
    """Give the tiling of every data set, by its name in the mixture."""
    found = {}
    for name, source in zip(names, sources, strict=True):
        own = source.settings.get("source_tilings", {})
        for inner in source.sources or ("",):
            found[source_name(name, source, inner)] = own.get(inner, source.settings.get("tiling"))
    return found


def _check_tilings(first: str, expected: Any, own: Mapping[str, Any]) -> None:
    if not own:
        return
    if not isinstance(expected, dict) or not all(isinstance(t, dict) for t in own.values()):
        raise ConfigError(
            "all sets of a mixture must say how images are tiled, or none: got a tiling of "
            f"{expected!r:.80} in {first!r}, and others in {sorted(own)}."
        )
    policy = policy_from_settings(expected)
    for name, tiling in own.items():
        other = policy_from_settings(tiling)
        if type(other) is not type(policy) or other.size != policy.size:
            raise ConfigError(
                "all sets of a mixture must have tiles of one kind and size, because they lie in "
                f"one batch: expected those of {policy} ({first!r}), got {other} ({name!r}). "
                "Preprocess one of them again."
            )
