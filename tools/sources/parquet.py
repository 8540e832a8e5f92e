"""Hugging Face Parquet: a row a sample, images as bytes or as `{bytes, path}`.

A span is a row group: that is the least that Parquet can read. A row group is streamed, so it is
never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from omniload.conversations import COLUMNS
from omniload.errors import ConfigError
from omniload.tools.sources.base import SPAN_RECORDS, InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader
from omniload.tools.sources.records import read_record

__all__ = ["read", "scan"]


def scan(file: InputFile) -> Iterator[Span | Rejection]:
    """Find the row groups of a file in its footer.

    Raises:
        ConfigError: not a Parquet file, or none of its columns is known.
    """
    with _opened(file) as parquet:
        _columns(file, parquet)
        first = 0
        for number in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(number)
            if group.num_rows:
                yield Span(
                    start=number,
                    stop=number + 1,
                    first=first,
                    count=group.num_rows,
                    num_bytes=group.total_byte_size,
                )
            first += group.num_rows


def read(file: InputFile, span: Span, loader: ImageLoader) -> Iterator[RawSample | Rejection]:
    """Read the rows of a row group.

    Raises:
        ConfigError: the file is damaged.
    """
    number = span.first
    with _opened(file) as parquet:
        batches = parquet.iter_batches(
            batch_size=SPAN_RECORDS,
            row_groups=list(range(span.start, span.stop)),
            columns=_columns(file, parquet),
            use_threads=False,
        )
        while True:
            try:
                batch = next(batches, None)
            except (pa.ArrowException, OSError) as error:
                raise _damaged(file, error) from None
            if batch is None:
                return
            for record in batch.to_pylist():
                if span.wants(number):
                    where = f"{file.label} row {number}"
                    yield read_record(record, file=file, number=number, where=where, loader=loader)
                number += 1


def _opened(file: InputFile) -> Any:
    try:
        return pyarrow.parquet.ParquetFile(file.path, memory_map=True)
    except (pa.ArrowException, OSError) as error:
        raise _damaged(file, error) from None


def _damaged(file: InputFile, error: Exception) -> ConfigError:
    return ConfigError(f"{file.path} can't be read as Parquet: {error}. Download it again.")


def _columns(file: InputFile, parquet: Any) -> list[str]:
    names = parquet.schema_arrow.names
    known = [name for name in names if name in COLUMNS]
    if not known:
        raise ConfigError(
            f"{file.path} has no column that omniload knows: got {names}. It takes conversations "
            "or messages, or question and answer, texts, caption; and image or images. Rename the "
            "columns."
        )
    return known
