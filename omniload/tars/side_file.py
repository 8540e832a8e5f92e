"""The side file of a tar: one Arrow table, a line a sample, with the places of its members.

`x.tar.omniload-index` states offsets, sizes and checksums of members, which depend on the tar
alone, and lengths or the reason of a refusal, which depend on the settings too. It is checked when
it is read: a byte that changed in it is noticed.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from omniload.errors import ShardError
from omniload.tars.members import Damage, Member

__all__ = ["SUFFIX", "SideFile", "TableWriter", "TarFacts", "open_side"]

SUFFIX = ".omniload-index"
_VERSION = 1
_FACTS = b"omniload.tar_index"

_MEMBER = (
    ("name", pa.binary()),
    ("header", pa.int64()),
    ("start", pa.int64()),
    ("num_bytes", pa.int64()),
    ("xxh3_64", pa.uint64()),
    ("kind", pa.uint8()),
)
_COLUMNS = (
    ("key", pa.string()),
    ("category", pa.string()),
    ("reason", pa.string()),
    ("num_tokens", pa.int32()),
    ("num_tiles", pa.int32()),
    ("num_loss_tokens", pa.int32()),
    ("members", pa.list_(pa.field("item", pa.struct(
        [pa.field(name, kind, nullable=False) for name, kind in _MEMBER]), nullable=False))),
)  # fmt: skip
_SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS])


@dataclass(frozen=True, kw_only=True)
class TarFacts:
    """What is known of a tar as a whole.

    Args:
        num_bytes: its size when it was indexed.
        changed_ns: when it was changed last, nanoseconds since 1970.
        xxh3_128: checksum of the whole tar, 32 hexadecimal digits.
        source: name of its data set.
        settings_fingerprint: of the settings that lengths were measured with.
        num_members: members of its samples.
        num_samples: samples in it, also those that were refused.
        num_rows: samples that are used.
        bytes_skipped: bytes that could not be read as members.
        damage: (start, stop, reason) of the first parts that are damaged.
        num_damaged: all such parts.
        reasons: category of refusal -> samples.
        totals: sums over the rows: tokens, tiles, loss_tokens, images.
        digest: over all that the table says but reasons, 32 hexadecimal digits.
    """

    num_bytes: int
    changed_ns: int
    xxh3_128: str
    source: str
    settings_fingerprint: str
    num_members: int
    num_samples: int
    num_rows: int
    bytes_skipped: int
    damage: tuple[tuple[int, int, str], ...]
    num_damaged: int
    reasons: dict[str, int] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    digest: str = ""


class TableWriter:
    """Collects the lines of a side file."""

    def __init__(self) -> None:
        self._samples: dict[str, list[Any]] = {name: [] for name, _ in _COLUMNS[:-1]}
        self._members: dict[str, list[Any]] = {name: [] for name, _ in _MEMBER}
        self._ends = [0]

    def add(
        self,
        group: Sequence[Member],
        checksums: Sequence[int],
        *,
        key: str,
        lengths: tuple[int, int, int] = (0, 0, 0),
        refusal: tuple[str, str] = ("", ""),
    ) -> None:
        """Add a sample.

        Args:
            group: its members.
            checksums: of each of them.
            key: its name.
            lengths: tokens, tiles and loss tokens; zeros if it was refused.
            refusal: category and reason; empty if it is used.
        """
        for name, value in zip(self._samples, (key, *refusal, *lengths), strict=True):
            self._samples[name].append(value)
        columns = self._members
        for member, checksum in zip(group, checksums, strict=True):
            columns["name"].append(member.name.encode("utf-8", "surrogateescape"))
            columns["header"].append(member.header)
            columns["start"].append(member.start)
            columns["num_bytes"].append(member.num_bytes)
            columns["xxh3_64"].append(checksum)
            columns["kind"].append(member.kind)
        self._ends.append(len(columns["start"]))

    def finish(self, facts: TarFacts) -> tuple[TarFacts, bytes]:
        """Give the facts with the digest, and the bytes of the file."""
        columns = [
            pa.array(self._samples[name], kind) for name, kind in _COLUMNS if name != "members"
        ]
        struct = pa.StructArray.from_arrays(
            [pa.array(self._members[name], kind) for name, kind in _MEMBER],
            fields=list(_COLUMNS[-1][1].value_type),
        )
        ends: Any = pa.array(np.array(self._ends, np.int32))
        kind: Any = _COLUMNS[-1][1]
        columns.append(pa.ListArray.from_arrays(ends, struct, type=kind))
        batch = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        signed = replace(facts, digest=_digest(batch))
        text = json.dumps({"version": _VERSION, **asdict(signed)})
        schema = _SCHEMA.with_metadata({_FACTS: text.encode()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, schema) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
        return signed, sink.getvalue().to_pybytes()


class SideFile:
    """A side file, checked; `open_side` maps one.

    Args:
        data: its bytes; views of them are kept.
        where: its path or URL, for messages.

    Attributes:
        facts: of the tar.
        rows: int64 (num_rows,), the lines of the samples that are used.
        num_tokens: int32 (num_samples,).
        num_tiles: int32 (num_samples,).
        num_loss_tokens: int32 (num_samples,).

    Raises:
        ShardError: it is damaged.
    """

    def __init__(self, data: Any, where: str) -> None:
        try:
            reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(data)))
            self.facts = _read_facts(reader.schema)
            if reader.schema.remove_metadata() != _SCHEMA or reader.num_record_batches != 1:
                raise ValueError("its columns are not those of an index")
            batch = reader.get_batch(0)
            batch.validate(full=True)
            self._take(batch)
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            raise ShardError(
                f"{where} is damaged or of another version: {error}. Run `omniload index` again."
            ) from None

    def __len__(self) -> int:
        return len(self.num_tokens)

    def _take(self, batch: Any) -> None:
        if _digest(batch) != self.facts.digest:
            raise ValueError("its digest is not the one that it states")
        self._keys = batch.column("key")
        self._reasons = (batch.column("category"), batch.column("reason"))
        for name in ("num_tokens", "num_tiles", "num_loss_tokens"):
            setattr(self, name, batch.column(name).to_numpy())
        listed = batch.column("members")
        self._ends = listed.offsets.to_numpy()
        inner = listed.values
        self._names = inner.field("name")
        self._numbers = {
            name: inner.field(name).to_numpy() for name, _ in _MEMBER if name != "name"
        }
        starts, sizes = self._numbers["start"], self._numbers["num_bytes"]
        room = self.facts.num_bytes
        # an index may come from elsewhere: it must not make us read what no tar has
        if len(starts) and not (
            min(starts.min(), sizes.min()) >= 0 and (sizes <= room).all()
            and (starts <= room - sizes).all()
        ):  # fmt: skip
            raise ValueError(f"its members must lie in the {room} bytes of the tar")
        if len(self._ends) and len(self) and not (np.diff(self._ends) > 0).all():
            raise ValueError("each of its samples must have a member")
        self.rows: npt.NDArray[np.int64] = np.flatnonzero(self.num_tokens > 0)
        if len(self.rows) != self.facts.num_rows or len(self) != self.facts.num_samples:
            raise ValueError(
                f"it must have {self.facts.num_rows} rows of {self.facts.num_samples} samples, got "
                f"{len(self.rows)} of {len(self)}"
            )

    num_tokens: npt.NDArray[np.int32]
    num_tiles: npt.NDArray[np.int32]
    num_loss_tokens: npt.NDArray[np.int32]

    def key(self, line: int) -> str:
        """Name of a sample."""
        return str(self._keys[line].as_py())

    def refusal(self, line: int) -> tuple[str, str]:
        """Category and reason of a sample that was refused; empty if it is used."""
        category, reason = self._reasons
        return category[line].as_py(), reason[line].as_py()

    def group(self, line: int) -> tuple[list[Member], list[int]]:
        """Members of a sample, and their checksums."""
        first, last = int(self._ends[line]), int(self._ends[line + 1])
        numbers = self._numbers
        found = [
            Member(
                self._names[i].as_py().decode("utf-8", "surrogateescape"),
                int(numbers["header"][i]),
                int(numbers["start"][i]),
                int(numbers["num_bytes"][i]),
                int(numbers["kind"][i]),
            )
            for i in range(first, last)
        ]
        return found, numbers["xxh3_64"][first:last].tolist()

    def damage(self) -> Iterator[Damage]:
        """Give the damaged parts that are listed."""
        return (Damage(*part) for part in self.facts.damage)


def open_side(path: Path) -> SideFile:
    """Map a side file.

    Raises:
        ShardError: it is missing or damaged.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ShardError(f"{path} can't be read: {error}. Run `omniload index` again.") from None
    return SideFile(mapped, os.fspath(path))


def _read_facts(schema: Any) -> TarFacts:
    data = json.loads((schema.metadata or {})[_FACTS])
    if data.pop("version") != _VERSION:
        raise ValueError(f"its version must be {_VERSION}")
    data["damage"] = tuple((int(a), int(b), str(reason)) for a, b, reason in data["damage"])
    return TarFacts(**data)


def _digest(batch: Any) -> str:
    digest = xxhash.xxh3_128()
    for name in ("key", "num_tokens", "num_tiles", "num_loss_tokens"):
        _feed(digest, batch.column(name))
    listed = batch.column("members")
    digest.update(np.ascontiguousarray(listed.offsets.to_numpy()).data)
    for name, _ in _MEMBER:
        _feed(digest, listed.values.field(name))
    return digest.hexdigest()


def _feed(digest: Any, column: Any) -> None:
    if column.type in (pa.string(), pa.binary()):
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int32, count=len(column) + 1)
        digest.update(ends.data)
        if data is not None:
            digest.update(memoryview(data)[: int(ends[-1])])
    elif len(column):
        digest.update(np.ascontiguousarray(column.to_numpy()).data)
