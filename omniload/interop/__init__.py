"""Data of other libraries in omniload, and omniload's data in theirs."""

from __future__ import annotations

from omniload.interop.webdataset import (
    SampleMaker,
    as_is,
    open_webdataset,
    pack_stage,
    records_stage,
    to_webdataset,
)

__all__ = [
    "SampleMaker",
    "as_is",
    "open_webdataset",
    "pack_stage",
    "records_stage",
    "to_webdataset",
]
