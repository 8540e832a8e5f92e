"""WebDataset tars: see `omniload.tars.samples` for what their members mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from omniload.conversations import RefusedError, record_key
from omniload.tars.archive import Archive, has_image, refuse_no_tar
from omniload.tars.members import Damage, Member
from omniload.tars.samples import group_members, read_group, split_name
from omniload.tools.sources.base import SPAN_RECORDS, InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader
from omniload.tools.sources.records import read_record, reject

__all__ = ["read", "scan"]


def scan(file: InputFile) -> Iterator[Span | Rejection]:
    """Find the spans of an archive by its headers; damaged parts become rejections.

    Raises:
        ConfigError: the archive is compressed as a whole.
    """
    with Archive(Path(file.path)) as archive:
        open_span: list[list[Member]] = []
        first = 0
        for group in group_members(archive.members()):
            if isinstance(group, Damage):
                yield _lost(file, group)
                # spans are read again from start to stop: none may reach over the damage
                if open_span:
                    yield _span(open_span, first)
                    first += len(open_span)
                    open_span = []
                continue
            open_span.append(group)
            if len(open_span) == SPAN_RECORDS:
                yield _span(open_span, first)
                first += len(open_span)
                open_span = []
        if not first and not open_span:
            refuse_no_tar(archive)
        if open_span:
            yield _span(open_span, first)


def read(file: InputFile, span: Span, loader: ImageLoader) -> Iterator[RawSample | Rejection]:
    """Read the samples of a span."""
    with Archive(Path(file.path)) as archive:
        has_images = _asks(archive)
        number = span.first
        for group in group_members(archive.members(span.start, span.stop)):
            if isinstance(group, Damage):
                yield _lost(file, group)
                continue
            if span.wants(number):
                yield _sample(file, archive, group, number, loader, has_images)
            number += 1


def _lost(file: InputFile, damage: Damage) -> Rejection:
    return Rejection(
        number=-1,
        key="",
        where=f"{file.label} bytes {damage.start} to {damage.stop}",
        source=file.source,
        reason=f"{damage.reason}; the samples in these bytes are lost",
        category="damaged tar",
    )


def _span(groups: list[list[Member]], first: int) -> Span:
    start, stop = groups[0][0].header, groups[-1][-1].stop
    return Span(start=start, stop=stop, first=first, count=len(groups), num_bytes=stop - start)


def _sample(
    file: InputFile,
    archive: Archive,
    group: list[Member],
    number: int,
    loader: ImageLoader,
    has_images: Callable[[], bool],
) -> RawSample | Rejection:
    key = split_name(group[0].name)[0]
    where = f"{file.label} sample at byte {group[0].header}"
    try:
        found = read_group(group, archive.content, has_images=has_images)
    except RefusedError as error:
        return reject(error, file=file, number=number, where=where, key=key)
    return read_record(
        found.record,
        file=file,
        number=number,
        where=where,
        loader=loader,
        key=record_key(found.record) or key,
        members=found.image,
    )


def _asks(archive: Archive) -> Callable[[], bool]:
    """Make the question whether any member is an image; the answer is kept for later spans."""
    facts = os.fstat(archive.descriptor)
    return lambda: _has_images(archive.path, facts.st_size, facts.st_mtime_ns)


@lru_cache(maxsize=64)
def _has_images(path: Path, size: int, changed_ns: int) -> bool:
    return has_image(path)
