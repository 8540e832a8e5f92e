"""Makes `omniload.kernels` and `omniload.tools` importable from a plain checkout.

An installed package has both as ordinary folders; in a checkout they lie beside `omniload/`, mapped
by setup.py. The finder answers for exactly these two names.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__all__ = ["install"]

_PACKAGE = Path(__file__).resolve().parent
_MOUNTED = {f"omniload.{name}": _PACKAGE.parent / name for name in ("kernels", "tools")}


class _CheckoutFinder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = _MOUNTED.get(name)
        if folder is None or not (folder / "__init__.py").is_file():
            return None
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


def install() -> None:
    """Add the finder where the package lies in a checkout; last, so that an install wins."""
    if (_PACKAGE / "kernels").exists() or not (_PACKAGE.parent / "setup.py").is_file():
        return
    if not any(getattr(f, "__name__", "") == _CheckoutFinder.__name__ for f in sys.meta_path):
        sys.meta_path.append(_CheckoutFinder)
