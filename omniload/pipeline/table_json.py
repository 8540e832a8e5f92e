"""Cost tables as plain JSON: versioned, and checked when read."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError
from omniload.pipeline.kinds import LayerKind, Linear, ParamBytes, Selective

if TYPE_CHECKING:
    from omniload.pipeline.table import CostTable

__all__ = ["read_object", "table_from_dict", "table_to_dict"]

_FORMAT, _VERSION = "omniload.cost_table", 1
_LINEARS = {"forward_s", "backward_s", "kept_bytes", "output_bytes", "recompute_s",
            "kept_bytes_recompute", "backward_frozen_s", "kept_frozen_bytes"}  # fmt: skip
_PLAIN = ("tensor_parallel", "data_parallel", "zero_stage", "reserve_bytes", "p2p_bytes_per_s",
          "p2p_latency_s", "source", "name")  # fmt: skip


def table_to_dict(table: CostTable) -> dict[str, Any]:
    """Turn a table into an object of JSON."""
    kinds = [asdict(kind) for kind in table.kinds]
    return {
        "format": _FORMAT,
        "version": _VERSION,
        **{name: getattr(table, name) for name in _PLAIN},
        "param_bytes": asdict(table.param_bytes),
        "tied": [list(group) for group in table.tied],
        "pinned": {str(layer): stage for layer, stage in sorted(table.pinned.items())},
        "layers": list(table.layers),
        "kinds": kinds,
    }


def table_from_dict(text: str) -> dict[str, Any]:
    """Read the JSON of a table into the arguments of `CostTable`.

    Raises:
        ConfigError: not such a table, or one of another version.
    """
    found = read_object(text, what="a cost table", form=_FORMAT, version=_VERSION)
    wanted = {*_PLAIN, "param_bytes", "tied", "pinned", "layers", "kinds"}
    _check_keys(found, needed=wanted, known=wanted, where="the cost table")
    try:
        return {
            **{name: found[name] for name in _PLAIN},
            "param_bytes": ParamBytes(**_object(found["param_bytes"], ParamBytes)),
            "tied": tuple(tuple(int(layer) for layer in group) for group in found["tied"]),
            "pinned": {int(layer): int(stage) for layer, stage in found["pinned"].items()},
            "layers": tuple(found["layers"]),
            "kinds": tuple(_kind(each) for each in found["kinds"]),
        }
    except ConfigError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"a field of the cost table has the wrong type: {error}.") from error


def read_object(text: str, *, what: str, form: str, version: int) -> dict[str, Any]:
    """Parse JSON, and check that it is an object of a format and version.

    Returns:
        The object, without `format` and `version`.

    Raises:
        ConfigError: not JSON, not an object, or of another format or version.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{what} must be JSON: {error}.") from error
    if not isinstance(found, dict) or found.get("format") != form:
        got = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ConfigError(f"{what} must be an object of format {form!r}, got {got!r}.")
    if found.get("version") != version:
        raise ConfigError(
            f"{what} must be of version {version}, got {found.get('version')!r}. Make it anew."
        )
    return {name: value for name, value in found.items() if name not in ("format", "version")}


def _kind(found: Any) -> LayerKind:
    plain = _object(found, LayerKind)
    values: dict[str, Any] = {}
    for name, value in plain.items():
        if name in _LINEARS:
            values[name] = None if value is None else Linear(**_object(value, Linear))
        elif name == "selective":
            values[name] = tuple(_selective(each) for each in value)
        else:
            values[name] = value
    return LayerKind(**values)


def _selective(found: Any) -> Selective:
    plain = _object(found, Selective)
    return Selective(
        name=plain["name"],
        recompute_s=Linear(**_object(plain["recompute_s"], Linear)),
        kept_bytes=Linear(**_object(plain["kept_bytes"], Linear)),
    )


def _object(found: Any, of: type) -> dict[str, Any]:
    """Check that JSON has the fields of a dataclass."""
    if not isinstance(found, dict):
        raise ConfigError(f"{of.__name__} must be an object, got {found!r}.")
    known = {entry.name: entry.default is MISSING for entry in fields(of)}
    needed = {name for name, required in known.items() if required}
    _check_keys(found, needed=needed, known=set(known), where=of.__name__)
    return found


def _check_keys(found: dict[str, Any], *, needed: set[str], known: set[str], where: str) -> None:
    missing, unknown = sorted(needed - set(found)), sorted(set(found) - known)
    if missing or unknown:
        raise ConfigError(
            f"{where} must have the fields {', '.join(sorted(known))}: missing {missing}, "
            f"unknown {unknown}."
        )
