"""What a setting must be: checks that the parts about packed rows share, and one form of words.

Each returns the value that is meant, or raises: what must hold, what was given, what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from omniload.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "MAX_INT32",
    "MAX_INT63",
    "check_choice",
    "check_count",
    "check_device",
    "check_flag",
    "check_optional_count",
]

#: Offsets and tokens are int32.
MAX_INT32 = 2**31 - 1
#: Seeds and rows are int64.
MAX_INT63 = 2**63 - 1

_WIDTHS = (MAX_INT32, MAX_INT63)


def check_count(
    name: str,
    value: Any,
    *,
    least: int = 0,
    most: int = MAX_INT32,
    of: str = "",
    remedy: str = "",
    or_none: bool = False,
) -> int:
    """Check a whole number; NumPy's are taken too, bool is none.

    Args:
        name: of the setting.
        value: what was given.
        least: the smallest that is valid.
        most: the largest; named where it is a choice of ours, or was passed.
        of: what is counted.
        remedy: a sentence, after the message.
        or_none: say that None is valid too, which the caller has dealt with.

    Raises:
        ConfigError: another type, or out of range.
    """
    is_whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:
        raise ConfigError(
            f"{name} must be an integer of at least {least}"
            f"{f' and at most {most}' if most not in _WIDTHS or _is_above(value, most) else ''}"
            f"{f' {of}' if of else ''}{', or None' if or_none else ''}, got {value!r}."
            f"{f' {remedy}' if remedy else ''}"
        )
    return int(value)


def check_optional_count(
    name: str,
    value: Any,
    *,
    least: int = 0,
    most: int = MAX_INT32,
    of: str = "",
    remedy: str = "",
) -> int | None:
    """Check a whole number, or None; see `check_count`."""
    if value is None:
        return None
    return check_count(name, value, least=least, most=most, of=of, remedy=remedy, or_none=True)


def check_choice(name: str, value: Any, valid: Sequence[str], remedy: str = "") -> str:
    """Check one of some names.

    Raises:
        ConfigError: none of them.
    """
    if not isinstance(value, str) or value not in valid:
        raise ConfigError(
            f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}."
            f"{f' {remedy}' if remedy else ''}"
        )
    return value


def check_flag(name: str, value: Any) -> bool:
    """Check True or False; other values that Python takes for one are mostly mistakes.

    Raises:
        ConfigError: neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{name} must be True or False, got {value!r}.")
    return bool(value)


def check_device(device: Any, kinds: Sequence[str] = ()) -> torch.device:
    """Check a device, which must be here.

    Args:
        device: what torch takes for one.
        kinds: types of devices that are valid, as "cpu"; none: all that torch has.

    Raises:
        ConfigError: torch doesn't know it, it is of another type, or not here.
    """
    # here, since most of a program never needs it
    import torch

    try:
        found = None if isinstance(device, bool) else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        found = None
    if found is None or (kinds and found.type not in kinds):
        raise ConfigError(
            "device must be a device of torch, as 'cpu', 'cuda' or 'cuda:1'"
            f"{f' (of type {chr(44).join(kinds)})' if kinds else ''}, got {device!r}."
        )
    if found.type in ("cpu", "meta"):
        return found
    home: Any = getattr(torch, found.type, None)
    count = home.device_count() if hasattr(home, "device_count") else 0
    if (found.index or 0) >= count:
        raise ConfigError(
            f"device must be one that is here: expected 'cpu', or one of {count} of type "
            f"{found.type!r}, got {str(found)!r}. `omniload doctor` says what torch finds."
        )
    return found


def _is_above(value: Any, most: int) -> bool:
    return isinstance(value, (int, np.integer)) and bool(value > most)
