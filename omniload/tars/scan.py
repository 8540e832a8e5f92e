"""Indexing one tar: where its members are, what they sum to, and how long its samples are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from omniload.conversations import (
    RefusedError,
    bounded,
    data_uri,
    read_conversation,
    record_key,
    refusal,
)
from omniload.errors import SampleError
from omniload.shards.manifest import settings_fingerprint, write_atomic
from omniload.tars.archive import Archive, has_image, refuse_no_tar
from omniload.tars.facts import TarFacts
from omniload.tars.maker import SampleMaker
from omniload.tars.members import FILE, Damage, Member
from omniload.tars.samples import (
    TarRecord,
    group_members,
    read_group,
    split_name,
)
from omniload.tars.side_file import SideFile, TableWriter

__all__ = ["index_tar", "read_sample", "scan_members"]

#: Parts that are damaged, of which the places are kept; all are counted.
_MOST_DAMAGE = 1000


def index_tar(
    path: Path,
    side_path: Path,
    *,
    maker: SampleMaker,
    source: str,
    known: SideFile | None = None,
    tick: Callable[[int], None] = lambda _: None,
) -> TarFacts:
    """Index a tar and write its side file, atomically.

    Args:
        path: the tar.
        side_path: the side file to be.
        maker: measures samples.
        source: name of the data set.
        known: the side file of the same tar, from other settings; its offsets are used again.
        tick: called with the byte that was reached, after each sample.

    Returns:
        What the side file says of the tar.

    Raises:
        ShardError: it can't be read.
        ConfigError: it is no tar, or compressed as a whole.
    """
    with Archive(path) as archive:
        table = TableWriter()
        counts = _Counts()
        has_images = _lazily(lambda: has_image(path))
        for group, checksums in counts.of(_groups(archive, known)):
            key = split_name(group[0].name)[0]
            lengths, refused, images = (0, 0, 0), ("", ""), 0
            try:
                found = read_group(group, archive.content, has_images=has_images)
                key = record_key(found.record) or key
                messages, files = read_sample(found)
                _, prepared = maker.prepare(messages, files)
                lengths = (prepared.num_tokens, prepared.num_tiles, prepared.num_loss_tokens)
                images = len(files)
            except SampleError as error:
                refused = refusal(error)
            counts.add(lengths, refused[0], images)
            table.add(group, checksums, key=_text(key), lengths=lengths, refusal=refused)
            tick(group[-1].stop)
        if not counts.samples and known is None:
            refuse_no_tar(archive)
        facts, data = table.finish(counts.facts(archive, known, maker, source))
    write_atomic(side_path, data)
    return facts


def scan_members(
    archive: Archive, *, with_checksums: bool = True
) -> Iterator[tuple[list[Member], list[int]] | Damage]:
    """Walk an archive once: its samples, each with the checksums of its members, and its damage.

    Args:
        archive: the archive.
        with_checksums: False: leave them at 0.
    """
    checksums: list[int] = []

    def note(member: Member) -> None:
        # while the content still lies in the window of the walk
        wanted = with_checksums and member.kind == FILE
        checksums.append(archive.digest(member) if wanted else 0)

    for group in group_members(archive.members(), on_member=note):
        if isinstance(group, Damage):
            yield group
            continue
        yield group, checksums[: len(group)]
        del checksums[: len(group)]


def read_sample(found: TarRecord) -> tuple[Any, tuple[bytes, ...]]:
    """Read the turns and the images of a sample; all of them lie in the tar.

    Raises:
        RefusedError: it can't be used, or an image lies elsewhere.
    """

    def load(value: Any) -> bytes:
        data = found.image(value)
        if data is not None:
            return bounded(data, f"the image {value!r:.200}")
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path") or value.get("url")
        if isinstance(value, str) and value[:5].lower() == "data:":
            return bounded(data_uri(value), "the data: URI")
        raise RefusedError(
            "image outside the tar",
            f"an image must be a member of its tar, or a data: URI, got {value!r:.200}. Pack the "
            "images into the tar, or make shards with `omniload preprocess`",
        )

    return read_conversation(found.record, load=load)


class _Counts:
    def __init__(self) -> None:
        self.samples = 0
        self._members = 0
        self._damage: list[Damage] = []
        self._reasons: Counter[str] = Counter()
        self._totals = dict.fromkeys(("tokens", "tiles", "loss_tokens", "images"), 0)
        self._rows = 0

    def of(
        self, found: Iterable[tuple[list[Member], list[int]] | Damage]
    ) -> Iterator[tuple[list[Member], list[int]]]:
        for entry in found:
            if isinstance(entry, Damage):
                self._damage.append(entry)
            else:
                self.samples += 1
                self._members += len(entry[0])
                yield entry

    def add(self, lengths: tuple[int, int, int], category: str, images: int) -> None:
        if category:
            self._reasons[category] += 1
            return
        self._rows += 1
        for name, value in zip(self._totals, (*lengths, images), strict=True):
            self._totals[name] += value

    def facts(
        self, archive: Archive, known: SideFile | None, maker: SampleMaker, source: str
    ) -> TarFacts:
        before = None if known is None else known.facts
        damage = tuple((part.start, part.stop, part.reason) for part in self._damage[:_MOST_DAMAGE])
        return TarFacts(
            num_bytes=archive.size,
            changed_ns=archive.changed_ns,
            xxh3_128=archive.whole_digest() if before is None else before.xxh3_128,
            source=source,
            settings_fingerprint=settings_fingerprint(maker.settings()),
            num_members=self._members,
            num_samples=self.samples,
            num_rows=self._rows,
            bytes_skipped=(
                sum(part.stop - part.start for part in self._damage)
                if before is None
                else before.bytes_skipped
            ),
            damage=damage if before is None else before.damage,
            num_damaged=len(self._damage) if before is None else before.num_damaged,
            reasons=dict(self._reasons.most_common()),
            totals=self._totals,
        )


def _groups(
    archive: Archive, known: SideFile | None
) -> Iterator[tuple[list[Member], list[int]] | Damage]:
    if known is None:
        return scan_members(archive)
    return (known.group(line) for line in range(len(known)))


def _lazily(ask: Callable[[], bool]) -> Callable[[], bool]:
    answers: list[bool] = []

    def answer() -> bool:
        if not answers:
            answers.append(ask())
        return answers[0]

    return answer


def _text(name: str) -> str:
    """A name as text that can be stored: a tar's names need not be UTF-8."""
    return name.encode("utf-8", "replace").decode()
