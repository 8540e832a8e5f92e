"""The door to the C++ extension `omniload._C`: the only module that imports it.

The extension is optional. Whoever has a NumPy twin asks `available()`; whoever was told to use the
extension calls `require()`, which says what to do when it is missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from omniload.errors import ConfigError, NativeUnavailableError

__all__ = ["available", "choose", "require"]


def available() -> bool:
    """Say whether the extension is built and can be loaded."""
    return _load() is not None


def require() -> ModuleType:
    """Return the extension; its functions are described in `_C.pyi`.

    Raises:
        NativeUnavailableError: it is not built, or it can't be loaded here.
    """
    module = _load()
    if module is None:
        raise NativeUnavailableError(
            "the C++ extension omniload._C must be built for backend='native', but it can't be "
            "imported. Install omniload again where a C++17 compiler is found "
            "(`pip install --force-reinstall --no-deps .`), or use backend='auto' or 'numpy': the "
            "results are the same."
        )
    return module


def choose(backend: str) -> ModuleType | None:
    """Turn the name of a backend into the extension, or into None for NumPy.

    Args:
        backend: "auto" (the extension where it is built), "native" or "numpy".

    Raises:
        ConfigError: an unknown name.
        NativeUnavailableError: "native" without the extension.
    """
    if backend == "auto":
        return _load()
    if backend == "native":
        return require()
    if backend == "numpy":
        return None
    raise ConfigError(f"backend must be one of 'auto', 'native', 'numpy', got {backend!r}.")


def _load() -> ModuleType | None:
    # a failed import is not cached by Python; a successful one is one dictionary look-up
    try:
        return importlib.import_module("omniload._C")
    except ImportError:
        return None
