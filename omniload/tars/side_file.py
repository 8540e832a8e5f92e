"""The side file of a tar: one Arrow table, a line a sample, with the places of its members.

`x.tar.omniload-index` states offsets, sizes and checksums of members, which depend on the tar
alone, and lengths or the reason of a refusal, which depend on the settings too. It is checked when
it is read: a byte that changed in it is noticed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from omniload.errors import ShardError
from omniload.shards.layout import refuse_compressed
from omniload.tars.facts import TarFacts
from omniload.tars.members import Damage, Member

__all__ = ["SUFFIX", "SideFile", "TableWriter", "open_side"]

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


_DAMAGE = (
    pa.ArrowException, OSError, ValueError, TypeError, LookupError, RecursionError, struct.error,
)  # fmt: skip


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
            refuse_compressed(data)
            batch = reader.get_batch(0)
            batch.validate(full=True)
            self._take(batch)
        except _DAMAGE as error:
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
        if (starts[1:] < starts[:-1] + sizes[:-1]).any():  # or a few bytes could be read as many
            raise ValueError("its members must lie one behind the other")
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
    if not isinstance(data, dict) or data.pop("version", None) != _VERSION:
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
