"""Where an unfinished run keeps its place: a receipt for each piece that is done."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.shards import FinishedShard, ShardInfo, fault_of_file
from omniload.shards.manifest import write_atomic
from omniload.tools.sources import Rejection

__all__ = ["COUNTS", "Receipt", "Work", "read_receipt", "rejection_line", "write_receipt"]

#: What is counted, for the summary and the manifest.
COUNTS = (
    "read", "written", "rejected", "tokens", "tiles", "loss_tokens", "images", "image_bytes",
    "images_resized", "image_bytes_saved", "truncated", "tiles_reduced",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Work:
    """The folder where an unfinished run keeps its place, `OUT/.preprocess`.

    Args:
        out: the output folder, or the one where a set is made that will replace a complete one.
        final: where it goes in that case; "" else.
    """

    out: str
    final: str = ""

    @property
    def folder(self) -> Path:
        """The folder itself."""
        return Path(self.out) / ".preprocess"

    def receipt(self, piece: int) -> Path:
        """Written last by a piece."""
        return self.folder / f"{piece:05d}.json"

    def lengths(self, piece: int) -> Path:
        """Length columns of a piece."""
        return self.folder / f"{piece:05d}.npy"

    def rejected(self, piece: int) -> Path:
        """Rejections of a piece, JSON lines."""
        return self.folder / f"{piece:05d}.rejected.jsonl"

    def progress(self, pieces: int, mode: str = "r+") -> npt.NDArray[np.int64]:
        """Counters shared by all processes: row 0 tells to stop, row p + 1 is (read, rejected)."""
        path = self.folder / "progress"
        array: npt.NDArray[np.int64] = np.memmap(path, np.int64, mode, shape=(pieces + 1, 2))  # type: ignore[call-overload]
        return array


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """What a piece has written.

    Args:
        shards: its complete shards.
        counts: read, written, rejected, tokens, ...
        reasons: category of rejection -> records.
    """

    shards: tuple[FinishedShard, ...]
    counts: dict[str, int]
    reasons: dict[str, int]


def write_receipt(
    work: Work, piece: int, receipt: Receipt, rejections: Sequence[Rejection]
) -> None:
    """Note that a piece is done; the receipt itself comes last."""
    columns = [np.zeros((3, 0), np.int32)]
    columns += [np.stack([s.num_tokens, s.num_tiles, s.num_loss_tokens]) for s in receipt.shards]
    write_atomic(work.lengths(piece), np.concatenate(columns, axis=1).tobytes())
    lines = "".join(rejection_line(rejection) for rejection in rejections)
    write_atomic(work.rejected(piece), lines.encode())
    facts = {
        "shards": [{"info": asdict(s.info), "sources": s.sources} for s in receipt.shards],
        "counts": receipt.counts,
        "reasons": receipt.reasons,
    }
    write_atomic(work.receipt(piece), json.dumps(facts).encode())


def read_receipt(work: Work, piece: int, *, verify: bool = False) -> Receipt | None:
    """Read the receipt of a piece; None if it is not done, or its shards are not there.

    Args:
        work: where.
        piece: its number.
        verify: compare checksums too, not sizes only.
    """
    try:
        facts: dict[str, Any] = json.loads(work.receipt(piece).read_bytes())
        raw = np.frombuffer(work.lengths(piece).read_bytes(), np.int32).reshape(3, -1)
        infos = [ShardInfo(**shard["info"]) for shard in facts["shards"]]
        for info in infos:
            if (Path(work.out) / info.name).stat().st_size != info.num_bytes:
                return None
            if verify and fault_of_file(Path(work.out), info):
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    cuts = np.cumsum([info.num_rows for info in infos])[:-1]
    shards = [
        FinishedShard(
            info=info,
            num_tokens=columns[0],
            num_tiles=columns[1],
            num_loss_tokens=columns[2],
            sources=shard["sources"],
        )
        for info, shard, columns in zip(
            infos, facts["shards"], np.split(raw, cuts, axis=1) if infos else [], strict=True
        )
    ]
    return Receipt(shards=tuple(shards), counts=facts["counts"], reasons=facts["reasons"])


def rejection_line(rejection: Rejection) -> str:
    """Write a rejection as one line of `rejected.jsonl`."""
    facts = {
        "key": rejection.key,
        "source": rejection.source,
        "where": rejection.where,
        "category": rejection.category,
        "reason": rejection.reason,
    }
    return json.dumps(facts) + "\n"
