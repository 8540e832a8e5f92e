"""A whole run of `omniload preprocess`: find, scan, cut, do the pieces, complete the folder."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.shards import FinishedShard, Manifest, finish_shards, settings_fingerprint
from omniload.shards.manifest import partial_name, write_atomic
from omniload.tools.chunks import SpanTable, cut_pieces, scan_input
from omniload.tools.notes import end_notes, start_notes
from omniload.tools.output import (
    REJECTED_NAME,
    TOKENIZER_NAME,
    check_places,
    claim,
    describe_run,
    finished_before,
    note_finished,
    take_up,
)
from omniload.tools.pieces import PieceJob, strict_message
from omniload.tools.processes import run_pieces
from omniload.tools.progress_bar import progress_bar, shown_files
from omniload.tools.receipts import COUNTS, Receipt, Work, read_receipt, rejection_line
from omniload.tools.recipe import Recipe, RunOptions, make_encoder
from omniload.tools.sources import InputFile, Rejection
from omniload.tools.sources.detect import find_input
from omniload.tools.stored_images import check_stored_input
from omniload.tools.tilings import source_tilings, tiling_notes

__all__ = ["Summary", "preprocess_data"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run did.

    Args:
        manifest: of the finished folder.
        reasons: category of rejection -> records.
        seconds: wall time of this run; a run that went on counts its own part.
        resumed_pieces: pieces that an earlier run had done.
        pieces: all pieces.
        already_complete: whether an earlier run had done it all.
    """

    manifest: Manifest
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    resumed_pieces: int = 0
    pieces: int = 0
    already_complete: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain JSON."""
        counts = dict(self.manifest.counts)
        written = max(counts["written"], 1)
        return {
            **counts,
            "reasons": self.reasons,
            "shards": len(self.manifest.shards),
            "bytes": sum(shard.num_bytes for shard in self.manifest.shards),
            "mean_tokens": counts["tokens"] / written,
            "mean_tiles": counts["tiles"] / written,
            "sources": dict(self.manifest.sources),
            "fingerprint": self.manifest.fingerprint,
            "vocab_size": self.manifest.settings["encoder"]["vocab_size"],
            "added_tokens": self.manifest.settings["encoder"]["added_tokens"],
            "notes": list(end_notes(counts, self.reasons)),
            "seconds": round(self.seconds, 3),
            "samples_per_second": round(counts["read"] / max(self.seconds, 1e-9), 1),
            "pieces": self.pieces,
            "resumed_pieces": self.resumed_pieces,
            "already_complete": self.already_complete,
        }


def preprocess_data(
    src: str | Path,
    out: str | Path,
    *,
    recipe: Recipe | None = None,
    options: RunOptions | None = None,
    format_name: str | None = None,
    image_root: str | Path | None = None,
    workers: int = 1,
    overwrite: bool = False,
    show_progress: bool = False,
    note: Callable[[str], None] | None = None,
) -> Summary:
    """Turn raw data into shards; goes on where a killed run was.

    Args:
        src: a file, a folder or a glob.
        out: the folder of the shards.
        recipe: what makes a row.
        options: how the run is done.
        format_name: name of the input format; None: decided by content.
        image_root: folder that image paths are relative to; None: that of each file.
        workers: processes. With more than one, a script must call this under
            `if __name__ == "__main__":`.
        overwrite: replace the shards that are there.
        show_progress: show a bar on standard error.
        note: called with each note for people before the work begins; None: logged.

    Returns:
        What was done.

    Raises:
        ConfigError: a wrong setting, or an input or output that can't be used.
        SampleError: a rejected sample, if strict.
        ShardError: the output can't be written.
    """
    begin = time.monotonic()
    recipe, options = recipe or Recipe(), options or RunOptions()
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}.")
    check_places(str(src), str(out))
    files = find_input(src, format_name=format_name, image_root=image_root)
    tilings = source_tilings(files, recipe.policy())
    check_stored_input(files, recipe.policy())
    settings = recipe.settings()
    if tilings:
        settings["source_tilings"] = tilings
    run = describe_run(files, settings, options.that_decide_bytes())
    finished = None if overwrite else finished_before(str(out), run)
    if finished is not None:
        return _already_complete(finished, Path(out), strict=options.strict)
    with claim(str(out), overwrite=overwrite) as work:
        going_on = take_up(work, run)
        job = _Run(files=files, recipe=recipe, options=options, work=work, settings=settings)
        job.plan(going_on, show=show_progress)
        for notes in (
            tiling_notes(recipe.tiling, recipe.template, tilings),
            start_notes(files, make_encoder(recipe)),
        ):
            for text in notes:
                (note or _LOG.warning)(text)
        resumed = job.pieces_done()
        if options.strict:
            job.refuse_rejected()
        job.do_pieces(workers, show=show_progress)
        manifest, reasons = job.finish(run)
        shutil.rmtree(work.folder)
    return Summary(
        manifest=manifest,
        reasons=reasons,
        seconds=time.monotonic() - begin,
        resumed_pieces=resumed,
        pieces=job.num_pieces,
    )


def _already_complete(manifest: Manifest, out: Path, *, strict: bool) -> Summary:
    rejected = _rejected_lines(out / REJECTED_NAME)
    if strict and rejected:
        raise SampleError(strict_message(Rejection(number=-1, **rejected[0])))
    reasons = Counter(line["category"] for line in rejected)
    return Summary(manifest=manifest, reasons=dict(reasons.most_common()), already_complete=True)


def _rejected_lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class _Run:
    def __init__(
        self,
        *,
        files: Sequence[InputFile],
        recipe: Recipe,
        options: RunOptions,
        work: Work,
        settings: dict[str, Any],
    ) -> None:
        self._files = files
        self._recipe = recipe
        self._options = options
        self._work = work
        self._settings = settings
        self._fingerprint = settings_fingerprint(recipe.settings())
        self._table = SpanTable(columns=np.zeros((0, 8), np.int64))
        self._pieces: list[npt.NDArray[np.int64]] = []
        self._done: dict[int, Receipt] = {}

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def plan(self, going_on: bool, *, show: bool) -> None:
        """Scan the input, or take the scan of the run that was killed."""
        path = self._work.folder / "spans.npy"
        lost_path = self._work.folder / "scan.rejected.jsonl"
        if going_on and path.exists():
            self._table = SpanTable(columns=np.load(path))
        else:
            shown = shown_files(self._files) if show else None
            self._table, lost = scan_input(self._files, shown)
            if lost and self._options.strict:
                raise SampleError(strict_message(lost[0]))
            write_atomic(lost_path, "".join(map(rejection_line, lost)).encode())
            partial_path = partial_name(path)
            with partial_path.open("wb") as file:
                np.save(file, self._table.columns)
            partial_path.replace(path)
        if not len(self._table):
            self._give_up()
            names = ", ".join(file.label for file in self._files[:3])
            raise ConfigError(f"the data set is empty: no record found in {names}.")
        self._pieces = cut_pieces(
            self._table, seed=self._options.seed, keep_order=self._options.keep_order
        )

    def pieces_done(self) -> int:
        """Take up the receipts that are there."""
        for piece in range(self.num_pieces):
            receipt = read_receipt(self._work, piece, verify=True)
            if receipt is not None:
                self._done[piece] = receipt
        return len(self._done)

    def refuse_rejected(self) -> None:
        """End a strict run that goes on after one that wasn't, and that rejected something."""
        paths = [self._work.rejected(piece) for piece in sorted(self._done)]
        for path in (self._work.folder / "scan.rejected.jsonl", *paths):
            for line in _rejected_lines(path)[:1]:
                raise SampleError(strict_message(Rejection(number=-1, **line)))

    def do_pieces(self, workers: int, *, show: bool) -> None:
        """Do the pieces that have no receipt."""
        progress = self._work.progress(self.num_pieces, "w+")
        for piece, receipt in self._done.items():
            progress[piece + 1] = (receipt.counts["read"], receipt.counts["rejected"])
        total = int(self._table.num_used.sum())
        with progress_bar(total, progress, show=show) as tick:
            jobs = [partial(self._job, p) for p in range(self.num_pieces) if p not in self._done]
            for _ in run_pieces(
                jobs, workers=min(workers, max(len(jobs), 1)), progress=progress, tick=tick
            ):
                pass

    def _job(self, piece: int) -> PieceJob:
        spans = self._table.spans(self._pieces[piece], self._options.seed)
        return PieceJob(
            number=piece,
            pieces=self.num_pieces,
            work=self._work,
            parts=tuple((self._files[number], span) for number, span in spans),
            recipe=self._recipe,
            options=self._options,
            fingerprint=self._fingerprint,
        )

    def finish(self, run: dict[str, Any]) -> tuple[Manifest, dict[str, int]]:
        """Write tokenizer, rejections, index, and last the manifest."""
        out = Path(self._work.out)
        counts = Counter(dict.fromkeys(COUNTS, 0))
        reasons: Counter[str] = Counter()
        shards: list[FinishedShard] = []
        for piece in range(self.num_pieces):
            receipt = read_receipt(self._work, piece)
            if receipt is None:
                raise ConfigError(
                    f"shards of piece {piece} have vanished from {out} while the run was going on. "
                    "Run the same command again."
                )
            counts.update(receipt.counts)
            reasons.update(receipt.reasons)
            shards += receipt.shards
        lost = (self._work.folder / "scan.rejected.jsonl").read_bytes().splitlines()
        reasons.update(json.loads(line)["category"] for line in lost)
        counts["rejected"] += len(lost)
        self._join_rejected(out / REJECTED_NAME)
        ordered = dict(reasons.most_common())
        if not shards:
            first = _rejected_lines(out / REJECTED_NAME)[0]["reason"].removesuffix(".")
            self._give_up()
            raise ConfigError(
                f"all {counts['read']} records are rejected: "
                f"{', '.join(f'{count} {reason}' for reason, count in ordered.items())}. The "
                f"first: {first}. See {out / REJECTED_NAME} for each of them."
                + "".join(f" Note: {text}." for text in end_notes(counts, ordered))
            )
        used = {shard.info.name for shard in shards}
        for path in out.glob("shard-*.arrow"):
            if path.name not in used:  # of a run with other settings that got nowhere
                path.unlink()
        write_atomic(out / TOKENIZER_NAME, make_encoder(self._recipe).tokenizer_json().encode())
        note_finished(self._work, run)
        manifest = finish_shards(out, shards, settings=self._settings, counts=dict(counts))
        return manifest, ordered

    def _join_rejected(self, path: Path) -> None:
        partial_path = partial_name(path)
        with partial_path.open("wb") as target:
            parts = [self._work.rejected(piece) for piece in range(self.num_pieces)]
            for part in (self._work.folder / "scan.rejected.jsonl", *parts):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)
        partial_path.replace(path)

    def _give_up(self) -> None:
        """Leave no unfinished run behind that could not be gone on with."""
        shutil.rmtree(self._work.folder, ignore_errors=True)
