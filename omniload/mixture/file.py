"""A mixture as a YAML file."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omniload.cache import Cache, Storage, is_url
from omniload.errors import ConfigError
from omniload.mixture.mixture import Mixture
from omniload.mixture.sets import MixtureSet

__all__ = ["MixtureFile", "open_mixture", "read_mixture_file"]

#: bytes a file may have: thousands of sets
_LARGEST_FILE = 1 << 20
_KEYS = ("sets", "seed", "epoch_rows", "cache")
_SET_KEYS = ("source", "name", "repeat", "weight", "epochs", "cache")


def open_mixture(
    path: str | os.PathLike[str], *, cache: Cache | None = None, storage: Storage | None = None
) -> Mixture:
    """Open the mixture that a YAML file describes.

    Keys: `sets`, a list; `seed` and `epoch_rows`, as in `Mixture`; `cache`, with the fields of
    `omniload.Cache`. Keys of a set: `source`, `name`, `repeat`, `weight` and `epochs`, as in
    `MixtureSet`; and a `cache` of its own. Paths are relative to the file.

    Args:
        path: the file.
        cache: for sets at URLs; goes before what the file says. None: as the file says.
        storage: likewise.

    Raises:
        ConfigError: no such file, no YAML, an unknown key or a wrong value.
        ShardError: a set is missing or damaged.
    """
    file = Path(path).absolute()
    described = read_mixture_file(file, cache=cache, storage=storage)
    try:
        return Mixture(
            described.sets,
            seed=described.seed,
            epoch_rows=described.epoch_rows,
            location=str(file),
        )
    except ConfigError as error:
        raise error if str(file) in str(error) else ConfigError(f"{file}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class MixtureFile:
    """What a YAML file says: the arguments of `Mixture`, which checks them."""

    sets: tuple[MixtureSet, ...]
    seed: Any
    epoch_rows: Any


def read_mixture_file(
    path: str | os.PathLike[str], *, cache: Cache | None = None, storage: Storage | None = None
) -> MixtureFile:
    """Read what a YAML file says, without opening the sets; arguments as of `open_mixture`.

    Raises:
        ConfigError: no such file, no YAML, an unknown key or a wrong value.
    """
    file = Path(path).absolute()
    data = _mapping(_read(file), _KEYS, str(file))
    entries = data.get("sets")
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"sets must be a list of one or more sets ({file}).")
    shared = cache or _cache(data.get("cache"), file, str(file))
    sets = []
    for number, entry in enumerate(entries):
        where = f"sets[{number}] of {file}"
        try:
            sets.append(_set(entry, file, where, shared=shared, fixed=cache, storage=storage))
        except ConfigError as error:
            raise error if where in str(error) else ConfigError(f"{where}: {error}") from None
    if (cache, storage) != (None, None) and not any(isinstance(s.source, str) for s in sets):
        raise ConfigError(
            f"cache= and storage= are for sets at URLs, and {file} has none. Leave them out."
        )
    return MixtureFile(
        sets=tuple(sets), seed=data.get("seed", 0), epoch_rows=data.get("epoch_rows")
    )


def _set(
    entry: Any,
    file: Path,
    where: str,
    *,
    shared: Cache | None,
    fixed: Cache | None,
    storage: Storage | None,
) -> MixtureSet:
    found = dict(_mapping(entry, _SET_KEYS, where))
    source = found.pop("source", None)
    if not isinstance(source, str) or not source:
        raise ConfigError(f"source must be a path or URL, got {source!r:.80} ({where}).")
    own = _cache(found.pop("cache", None), file, where)
    if not is_url(source):
        if own is not None:
            raise ConfigError(f"cache is for a URL, got source={source!r:.80} ({where}).")
        path = file.parent / source
        # the name that the user wrote, also where a part of the path is ".."
        return MixtureSet(source=path, **found)
    return MixtureSet(source=source, cache=fixed or own or shared, storage=storage, **found)


def _cache(entry: Any, file: Path, where: str) -> Cache | None:
    if entry is None:
        return None
    found = dict(_mapping(entry, [field.name for field in fields(Cache)], f"cache of {where}"))
    folder = found.get("folder")
    if not isinstance(folder, str) or not folder:
        raise ConfigError(f"cache must have a folder, got {folder!r:.80} ({where}).")
    return Cache(**{**found, "folder": file.parent / folder})


def _mapping(value: Any, known: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where} must be a mapping with the keys {', '.join(known)}, got "
            f"{type(value).__name__}."
        )
    unknown = [key for key in value if key not in known]
    if unknown:
        shown = ", ".join(repr(key)[:40] for key in unknown[:5])
        raise ConfigError(f"unknown key {shown} in {where}: expected {', '.join(known)}.")
    return value


def _read(file: Path) -> Any:
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"the mixture {file} can't be read: {error.strerror}.") from None
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"a mixture file must have at most {_LARGEST_FILE} bytes ({file}).")
    import yaml

    try:
        # aliases could make a small file a huge value
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(data, yaml.SafeLoader)):
            raise ConfigError(f"a mixture file must not have aliases ({file}).")
        return yaml.load(data, _plain_loader(yaml))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file} must be YAML, but it can't be read: {error}") from None


def _plain_loader(yaml: Any) -> Any:
    """Make a SafeLoader that refuses a key that stands twice: the first would be lost."""

    class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            keys = [key.value for key, _ in node.value if isinstance(key.value, str)]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            if twice:
                raise yaml.YAMLError(f"key {twice[0]!r:.80} stands twice.{node.start_mark}")
            found: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
            return found

    return PlainLoader
