"""The exceptions that omniload raises: one tree, so that one `except OmniloadError` catches all.

A message says what must hold, what was found, where, and the remedy.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "LedgerError",
    "NativeUnavailableError",
    "OmniloadError",
    "SampleError",
    "ShardError",
    "StateError",
    "WorkerError",
]


class OmniloadError(Exception):
    """Base of every error that omniload raises on purpose."""


class ConfigError(OmniloadError, ValueError):
    """A setting or an argument is wrong, alone or together with the data."""


class ShardError(OmniloadError):
    """A file of samples is missing, damaged, or not what its manifest says."""


class SampleError(OmniloadError):
    """One sample can't be used: damaged image, wrong length, failing transform.

    Attributes:
        kind: what is wrong with it, in two words, for counts.
    """

    kind: str = "damaged sample"


class StateError(OmniloadError):
    """A loader state doesn't fit the loader that is asked to take it up."""


class LedgerError(OmniloadError, RuntimeError):
    """Rows of an epoch came twice or not at all: a defect, in omniload or in what it runs on."""


class NativeUnavailableError(OmniloadError):
    """The C++ extension was asked for by name, but is not built."""


class WorkerError(OmniloadError, RuntimeError):
    """A worker process ended, or gave no batch in time."""
