"""WebDataset tars: files that share a name up to the first dot of its last part are one sample.

Images are `key.jpg`, or `key.0.jpg`, `key.1.jpg`, ... in the order of their numbers, or in the
order in which the sample's JSON names them. The conversation is `key.json`; a `key.txt` is a
caption. Links are not followed: a sample with one is rejected, and so is a caption that has no
image although others in its tar have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from omniload.errors import ConfigError
from omniload.tools.sources.base import (
    SPAN_RECORDS,
    InputFile,
    RawSample,
    RefusedError,
    Rejection,
    Span,
)
from omniload.tools.sources.conversation import (
    IMAGE_FIELDS,
    caption_turns,
    listed_images,
    record_key,
)
from omniload.tools.sources.media import MAX_IMAGE_BYTES, ImageLoader
from omniload.tools.sources.records import parse_json, read_record, reject
from omniload.tools.sources.tar_members import Damage, Member, members

__all__ = ["read", "scan"]

_IMAGE_ENDS = (
    "jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm",
)  # fmt: skip
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def scan(file: InputFile) -> Iterator[Span | Rejection]:
    """Find the spans of an archive by its headers; damaged parts become rejections.

    Raises:
        ConfigError: the archive is compressed as a whole.
    """
    path = Path(file.path)
    size = path.stat().st_size
    with path.open("rb") as stream:
        _refuse_packed(file, stream.read(8))
        stream.seek(0)
        head = stream.read(512)
        open_span: list[list[Member]] = []
        first = 0
        for group in _samples(stream, 0, size):
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
        if not first and not open_span and head.strip(b"\0") and head[257:262] != b"ustar":
            raise ConfigError(f"{file.path} is not a tar: it has no whole member.")
        if open_span:
            yield _span(open_span, first)


def read(file: InputFile, span: Span, loader: ImageLoader) -> Iterator[RawSample | Rejection]:
    """Read the samples of a span."""
    with Path(file.path).open("rb") as stream:
        number = span.first
        for group in _samples(stream, span.start, span.stop):
            if isinstance(group, Damage):
                yield _lost(file, group)
                continue
            if span.wants(number):
                yield _sample(file, stream, group, number, loader)
            number += 1


def _refuse_packed(file: InputFile, head: bytes) -> None:
    for magic, name in _PACKED.items():
        if head.startswith(magic):
            raise ConfigError(
                f"{file.path} is compressed with {name}, so its samples can't be reached one by "
                "one. Unpack it to a plain .tar first; image files don't get smaller anyway."
            )


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
    last = groups[-1][-1]
    stop = last.start + -(-last.num_bytes // 512) * 512
    start = groups[0][0].header
    return Span(start=start, stop=stop, first=first, count=len(groups), num_bytes=stop - start)


def _samples(stream: BinaryIO, start: int, stop: int) -> Iterator[list[Member] | Damage]:
    """Group neighbours with the same key."""
    group: list[Member] = []
    for member in members(stream, start, stop):
        if isinstance(member, Damage):
            if group:
                yield group
                group = []
            yield member
            continue
        key, end = _split(member.name)
        if not end or key.rpartition("/")[2].startswith("."):
            continue  # no extension, or a hidden file such as "._0001.jpg"
        if group and _split(group[0].name)[0] != key:
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def _split(name: str) -> tuple[str, str]:
    """Split a member's name into key and extension at the first dot of its last part."""
    folder, slash, base = name.rpartition("/")
    if base.startswith("."):
        return name, base
    stem, _, end = base.partition(".")
    return folder + slash + stem, end.lower()


def _sample(
    file: InputFile, stream: BinaryIO, group: list[Member], number: int, loader: ImageLoader
) -> RawSample | Rejection:
    key = _split(group[0].name)[0]
    where = f"{file.label} sample at byte {group[0].header}"
    try:
        _refuse_links(group)
        record = _record(stream, group)
        images = sorted((m for m in group if _is_image(m)), key=_image_order)
        if not images and _is_caption(record) and _has_images(file.path, *_state(stream)):
            raise RefusedError(
                "caption without image",
                "a caption must have an image where others in the tar have: the files of a key "
                f"must lie next to each other; it has {_names(group)}",
            )
        record, lookup = _resolve_images(stream, record, images, group)
    except RefusedError as error:
        return reject(error, file=file, number=number, where=where, key=key)
    return read_record(
        record,
        file=file,
        number=number,
        where=where,
        loader=loader,
        key=record_key(record) or key,
        members=lookup,
    )


def _refuse_links(group: list[Member]) -> None:
    for member in group:
        if member.is_link and (_is_image(member) or _split(member.name)[1] in ("json", "txt")):
            raise RefusedError(
                "link in a tar",
                f"{member.name} is a link, and links in a tar are not followed. Pack the files "
                "that they point to (tar --dereference --hard-dereference)",
            )


def _is_caption(record: dict[str, Any]) -> bool:
    """Whether a record is nothing but the text of its images."""
    if any(record.get(name) for name in IMAGE_FIELDS):
        return False  # its images may lie outside the tar
    if any(record.get(name) is not None for name in _TALKS):
        return False
    turns = record.get("messages")
    return turns is None or (isinstance(turns, _Caption))


@lru_cache(maxsize=64)
def _has_images(path: str, size: int, changed_ns: int) -> bool:
    """Whether any member of an archive is an image; found at once where there are some."""
    with Path(path).open("rb") as stream:
        return any(
            isinstance(member, Member) and not member.is_link and _is_image(member)
            for member in members(stream, 0, size)
        )


def _state(stream: BinaryIO) -> tuple[int, int]:
    facts = os.fstat(stream.fileno())
    return facts.st_size, facts.st_mtime_ns


def _is_image(member: Member) -> bool:
    return _split(member.name)[1].rpartition(".")[2] in _IMAGE_ENDS


def _image_order(member: Member) -> tuple[int, int]:
    """`key.2.jpg` before `key.10.jpg`; others as they lie in the archive."""
    number = _split(member.name)[1].rpartition(".")[0].rpartition(".")[2]
    return (int(number) if number.isascii() and number.isdigit() else -1, member.header)


def _record(stream: BinaryIO, group: list[Member]) -> dict[str, Any]:
    texts = {}
    for member in group:
        end = _split(member.name)[1]
        if end in ("json", "txt"):
            stream.seek(member.start)
            if member.num_bytes > MAX_IMAGE_BYTES:
                raise RefusedError("broken JSON", f"{member.name} has {member.num_bytes} bytes")
            texts[end] = stream.read(member.num_bytes)
    if "json" in texts:
        record = parse_json(texts["json"], f"{group[0].name}: its .json")
        record = {"conversations": record} if isinstance(record, list) else record
        if not isinstance(record, dict):
            raise RefusedError("not a record", "the .json of a sample must be an object")
        if "txt" not in texts or any(name in record for name in _TURNS):
            return record
    if "txt" not in texts:
        raise RefusedError(
            "no turn",
            f"a sample needs a .json or a .txt beside it; it has {_names(group)}. The files of a "
            "key must lie next to each other",
        )
    try:
        text = texts["txt"].decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise RefusedError("not a record", f"the .txt must be UTF-8: {error}") from None
    return {"messages": _Caption(caption_turns(text))}


class _Caption(list[dict[str, str]]):
    """The turns made of a caption."""


_TALKS = ("conversations", "conversation", "texts", "question", "query")
_TURNS = ("conversations", "conversation", "messages", "texts", "question", "query", "caption")


def _names(group: list[Member]) -> list[str]:
    return [member.name for member in group[:8]]


def _resolve_images(
    stream: BinaryIO, record: dict[str, Any], images: list[Member], group: list[Member]
) -> tuple[dict[str, Any], Callable[[Any], bytes | None]]:
    """Decide which members are the images, and how an image value finds its member."""
    by_name: dict[Any, Member] = {}
    for member in group:
        base = member.name.rpartition("/")[2]
        by_name |= dict.fromkeys((_split(member.name)[1], base, member.name), member)

    def content(value: Any) -> bytes | None:
        member = by_name.get(value) if isinstance(value, str) else None
        if member is None:
            return None
        if member.num_bytes > MAX_IMAGE_BYTES:
            raise RefusedError("damaged image", f"{member.name} has {member.num_bytes} bytes")
        stream.seek(member.start)
        return stream.read(member.num_bytes)

    named = listed_images(record)
    if named and (not images or all(isinstance(v, str) and v in by_name for v in named)):
        return record, content
    if named and len(named) != len(images):
        raise RefusedError(
            "image is missing",
            f"its .json names {len(named)} images, which are not members of the sample: "
            f"{named[:4]!s:.200}; it has {_names(group)}",
        )
    # no names, or names from before packing: the members stand for them, in order
    rest = {name: value for name, value in record.items() if name not in IMAGE_FIELDS}
    return rest | {"images": [member.name for member in images]}, content
