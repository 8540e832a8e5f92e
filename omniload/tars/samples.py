"""What the members of a tar mean: files that share a name up to the first dot are one sample.

Images are `key.jpg`, or `key.0.jpg`, `key.1.jpg`, ... in the order of their numbers, or in the
order in which the sample's JSON names them. The conversation is `key.json`; a `key.txt` is a
caption. Links and files with holes are not read: a sample with one is refused, and so is a caption
that has no image although others in its tar have. Members of a key that do not lie next to each
other are samples of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from omniload.conversations import (
    IMAGE_FIELDS,
    MAX_IMAGE_BYTES,
    RefusedError,
    caption_turns,
    listed_images,
    parse_json,
)
from omniload.tars.members import FILE, LINK, Damage, Member

__all__ = ["Content", "TarRecord", "group_members", "is_image", "read_group", "split_name"]

#: Reads the bytes of a member.
Content = Callable[[Member], bytes]

_IMAGE_ENDS = frozenset(
    ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "jp2", "ppm")
)
_TALKS = ("conversations", "conversation", "texts", "question", "query")
_TURNS = ("conversations", "conversation", "messages", "texts", "question", "query", "caption")


class TarRecord:
    """The record of a sample, and its images by whatever name the record gives them.

    Args:
        record: a record of any style that `omniload.conversations` knows.
        content: reads members.
        group: the members of the sample.
    """

    def __init__(self, record: dict[str, Any], content: Content, group: Sequence[Member]) -> None:
        self.record = record
        self._content = content
        self._by_name: dict[str, Member] = {}
        for member in group:
            base = member.name.rpartition("/")[2]
            names = (split_name(member.name)[1], base, member.name)
            self._by_name |= dict.fromkeys(names, member)

    def has(self, value: Any) -> bool:
        """Tell whether an image value of the record is a member of the sample."""
        return isinstance(value, str) and value in self._by_name

    def image(self, value: Any) -> bytes | None:
        """Read an image value; None if it is no member.

        Raises:
            RefusedError: it is too large.
        """
        member = self._by_name.get(value) if isinstance(value, str) else None
        if member is None:
            return None
        if member.num_bytes > MAX_IMAGE_BYTES:
            raise RefusedError("damaged image", f"{member.name} has {member.num_bytes} bytes")
        return self._content(member)


def split_name(name: str) -> tuple[str, str]:
    """Split a member's name into key and extension at the first dot of its last part."""
    folder, slash, base = name.rpartition("/")
    if base.startswith("."):
        return name, base
    stem, _, end = base.partition(".")
    return folder + slash + stem, end.lower()


def is_image(member: Member) -> bool:
    """Tell by its name whether a member is an image."""
    return split_name(member.name)[1].rpartition(".")[2] in _IMAGE_ENDS


def group_members(
    found: Iterable[Member | Damage], *, on_member: Callable[[Member], None] | None = None
) -> Iterator[list[Member] | Damage]:
    """Group neighbours with the same key; damage parts them.

    Args:
        found: from a walk through an archive.
        on_member: called with each member that belongs to a sample, before the next is looked for.

    Yields:
        Samples and damage in archive order.
    """
    group: list[Member] = []
    current = ""
    for member in found:
        if isinstance(member, Damage):
            if group:
                yield group
                group = []
            yield member
            continue
        key, end = split_name(member.name)
        if not end or key.rpartition("/")[2].startswith("."):
            continue  # no extension, or a hidden file such as "._0001.jpg"
        if group and current != key:
            yield group
            group = []
        current = key
        if on_member is not None:
            on_member(member)
        group.append(member)
    if group:
        yield group


def read_group(
    group: Sequence[Member], content: Content, *, has_images: Callable[[], bool]
) -> TarRecord:
    """Read what the members of a sample say.

    Args:
        group: its members.
        content: reads members.
        has_images: tells whether any member of the archive is an image.

    Raises:
        RefusedError: it can't be used.
    """
    _refuse_links(group)
    record = _record(group, content)
    images = sorted((m for m in group if is_image(m)), key=_image_order)
    if not images and _is_caption(record) and has_images():
        raise RefusedError(
            "caption without image",
            "a caption must have an image where others in the tar have: the files of a key "
            f"must lie next to each other; it has {_names(group)}",
        )
    return _resolve_images(TarRecord(record, content, group), images, group)


def _refuse_links(group: Sequence[Member]) -> None:
    for member in group:
        if member.kind == FILE:
            continue
        if not is_image(member) and split_name(member.name)[1] not in ("json", "txt"):
            continue
        if member.kind == LINK:
            raise RefusedError(
                "link in a tar",
                f"{member.name} is a link, and links in a tar are not followed. Pack the files "
                "that they point to (tar --dereference --hard-dereference)",
            )
        raise RefusedError(
            "sparse file in a tar",
            f"{member.name} is stored with holes, which is not read. Pack it without --sparse",
        )


def _is_caption(record: dict[str, Any]) -> bool:
    """Whether a record is nothing but the text of its images."""
    if any(record.get(name) for name in IMAGE_FIELDS):
        return False  # its images may lie outside the tar
    if any(record.get(name) is not None for name in _TALKS):
        return False
    turns = record.get("messages")
    return turns is None or (isinstance(turns, _Caption))


def _image_order(member: Member) -> tuple[int, int]:
    """`key.2.jpg` before `key.10.jpg`; others as they lie in the archive."""
    number = split_name(member.name)[1].rpartition(".")[0].rpartition(".")[2]
    return (int(number) if number.isascii() and number.isdigit() else -1, member.header)


def _record(group: Sequence[Member], content: Content) -> dict[str, Any]:
    texts = {}
    for member in group:
        end = split_name(member.name)[1]
        if end in ("json", "txt"):
            if member.num_bytes > MAX_IMAGE_BYTES:
                raise RefusedError("broken JSON", f"{member.name} has {member.num_bytes} bytes")
            texts[end] = content(member)
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


def _names(group: Sequence[Member]) -> list[str]:
    return [member.name for member in group[:8]]


def _resolve_images(
    found: TarRecord, images: Sequence[Member], group: Sequence[Member]
) -> TarRecord:
    """Decide which members are the images."""
    named = listed_images(found.record)
    if named and (not images or all(found.has(value) for value in named)):
        return found
    if named and len(named) != len(images):
        raise RefusedError(
            "image is missing",
            f"its .json names {len(named)} images, which are not members of the sample: "
            f"{named[:4]!s:.200}; it has {_names(group)}",
        )
    # no names, or names from before packing: the members stand for them, in order
    rest = {name: value for name, value in found.record.items() if name not in IMAGE_FIELDS}
    found.record = rest | {"images": [member.name for member in images]}
    return found
