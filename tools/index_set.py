"""Completing an index: what describes all tars together, written from their side files."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from omniload.errors import ConfigError
from omniload.shards import ShardInfo, settings_fingerprint
from omniload.shards.arrow import index_schema, seal
from omniload.shards.manifest import partial_name, write_atomic
from omniload.tars.facts import TarFacts
from omniload.tars.maker import encoder_to_json
from omniload.tars.manifest import (
    ENCODER_NAME,
    LENGTHS_NAME,
    REJECTED_NAME,
    TarEntry,
    TarManifest,
    write_tar_manifest,
)
from omniload.tars.side_file import SideFile, open_side
from omniload.tools.recipe import Recipe, make_encoder

__all__ = ["IndexedTar", "finish_index"]

_LENGTHS = ("num_tokens", "num_tiles", "num_loss_tokens")


@dataclass(frozen=True, kw_only=True)
class IndexedTar:
    """A tar of the set.

    Args:
        path: where it lies.
        name: its path below the root of the set, with "/".
        side: its side file.
        source: name of its data set.
    """

    path: Path
    name: str
    side: Path
    source: str


def finish_index(
    folder: Path,
    root: Path | None,
    tars: Sequence[IndexedTar],
    settings: dict[str, Any],
    recipe: Recipe,
) -> tuple[TarManifest, dict[str, int]]:
    """Write lengths, encoder and rejections, and last the description of the set.

    Args:
        folder: the index folder.
        root: folder of the tars, if it is another one.
        tars: in row order; their side files are there.
        settings: what lengths were measured with.
        recipe: what they were made of.

    Returns:
        The description, and category of refusal -> samples.

    Raises:
        ConfigError: no sample can be used.
        ShardError: a side file is missing or damaged.
    """
    entries: list[TarEntry] = []
    counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
    reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    columns: dict[str, list[npt.NDArray[np.int32]]] = {name: [] for name in _LENGTHS}
    with _written(folder / REJECTED_NAME) as rejected:
        for tar in tars:
            side = open_side(tar.side)
            facts = side.facts
            rejected.writelines(_rejected_lines(tar, side))
            counts.update(_counts(facts))
            reasons.update(facts.reasons)
            sources[tar.source] += facts.num_rows
            for name, parts in columns.items():
                parts.append(getattr(side, name)[side.rows])
            entries.append(
                TarEntry(
                    name=tar.name,
                    num_bytes=facts.num_bytes,
                    xxh3_128=facts.xxh3_128,
                    num_rows=facts.num_rows,
                    digest=facts.digest,
                    side_bytes=tar.side.stat().st_size,
                    side_xxh3_128=xxhash.xxh3_128_hexdigest(tar.side.read_bytes()),
                    source=tar.source,
                )
            )
    if counts["damaged"]:
        reasons["damaged tar"] = counts["damaged"]
    ordered = dict(reasons.most_common())
    if not sum(sources.values()):
        raise ConfigError(
            f"no sample can be used of {counts['samples']} in {len(tars)} tars: "
            f"{', '.join(f'{count} {reason}' for reason, count in ordered.items()) or 'all empty'}."
            f"{_first_reason(folder / REJECTED_NAME)} See {folder / REJECTED_NAME} for all of them."
        )
    lengths = _write_lengths(folder, {name: np.concatenate(columns[name]) for name in _LENGTHS})
    encoder = json.dumps(encoder_to_json(make_encoder(recipe)), sort_keys=True)
    write_atomic(folder / ENCODER_NAME, encoder.encode() + b"\n")
    manifest = TarManifest(
        root="." if root is None else os.fspath(root),
        tars=tuple(entries),
        num_rows=lengths.num_rows,
        lengths=lengths,
        settings=settings,
        fingerprint=settings_fingerprint(settings),
        sources={name: rows for name, rows in sorted(sources.items()) if rows},
        counts=dict(counts),
    )
    write_tar_manifest(folder, manifest)
    return manifest, ordered


_COUNTS = (
    "members", "samples", "rejected", "damaged", "bytes_skipped", "bytes",
    "tokens", "tiles", "loss_tokens", "images",
)  # fmt: skip


def _counts(facts: TarFacts) -> dict[str, int]:
    return {
        "members": facts.num_members,
        "samples": facts.num_samples,
        "rejected": facts.num_samples - facts.num_rows,
        "damaged": facts.num_damaged,
        "bytes_skipped": facts.bytes_skipped,
        "bytes": facts.num_bytes,
        **facts.totals,
    }


@contextlib.contextmanager
def _written(path: Path) -> Iterator[Any]:
    partial = partial_name(path)
    with partial.open("w", encoding="utf-8") as file:
        yield file
    partial.replace(path)


def _rejected_lines(tar: IndexedTar, side: SideFile) -> Iterator[str]:
    def line(key: str, where: str, category: str, reason: str) -> str:
        facts = {"key": key, "source": tar.source, "where": where}
        return json.dumps({**facts, "category": category, "reason": reason}) + "\n"

    for part in side.damage():
        where = f"{tar.name} bytes {part.start} to {part.stop}"
        yield line("", where, "damaged tar", f"{part.reason}; the samples in it are lost")
    for number in np.flatnonzero(side.num_tokens == 0).tolist():
        place = side.group(number)[0][0].header
        where = f"{tar.name} sample at byte {place}"
        yield line(side.key(number), where, *side.refusal(number))


def _first_reason(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        line = file.readline()
    return f" The first: {json.loads(line)['reason'].removesuffix('.')}." if line else ""


def _write_lengths(folder: Path, columns: Mapping[str, npt.NDArray[np.int32]]) -> ShardInfo:
    path = folder / LENGTHS_NAME
    partial = partial_name(path)
    arrays = [pa.array(columns[name], pa.int32()) for name in _LENGTHS]
    with (
        pa.OSFile(os.fspath(partial), "wb") as file,
        pa.ipc.new_file(file, index_schema()) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=index_schema()))
    return seal(partial, path, num_rows=len(arrays[0]))
