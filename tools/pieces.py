"""One piece of the input to shards of its own: a pure function of input, settings and seed.

A piece that is done leaves a receipt; a run that was killed does the pieces without one again, and
since every file of a piece appears whole or not at all, the result is the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omniload.conversations import RefusedError, refusal, refused_image
from omniload.errors import ConfigError, OmniloadError, SampleError, ShardError
from omniload.images import Policy, decode, image_size, is_stored
from omniload.index import LengthIndex
from omniload.rng import permutation
from omniload.shards import FinishedShard, Manifest, ShardInfo, ShardSet, ShardWriter
from omniload.shards.manifest import settings_fingerprint
from omniload.tools.receipts import COUNTS, Receipt, Work, write_receipt
from omniload.tools.recipe import Recipe, RunOptions, make_encoder
from omniload.tools.sources import READERS, InputFile, RawSample, Rejection, Span
from omniload.tools.sources.media import ImageLoader
from omniload.tools.stored_images import images_to_store, parse_quality
from omniload.tools.tilings import file_policy
from omniload.transforms.prepare import Prepared, prepare_sample
from omniload.types import Record

__all__ = ["PieceJob", "Stopped", "run_piece", "strict_message"]

_ROW_KEY = 0x5AA5_0003
_SPILL_BYTES = 1 << 30


class Stopped(OmniloadError):  # noqa: N818 - not an error of the user
    """The run was told to end."""


@dataclass(frozen=True, kw_only=True)
class PieceJob:
    """All that a process needs to do a piece.

    Args:
        number: of the piece.
        pieces: how many there are.
        work: where.
        parts: file and span, in order.
        recipe: what makes a row.
        options: how the run is done.
        fingerprint: of the recipe's settings, as the main process knows them.
    """

    number: int
    pieces: int
    work: Work
    parts: tuple[tuple[InputFile, Span], ...]
    recipe: Recipe
    options: RunOptions
    fingerprint: str


def run_piece(job: PieceJob) -> Receipt:
    """Read, prepare and write one piece.

    Args:
        job: what to do.

    Returns:
        What was written; the same is in the receipt on disk.

    Raises:
        SampleError: a sample was rejected and the options are strict.
        ShardError: an output file can't be written.
        ConfigError: an input file or the tokenizer has changed since the run began.
        Stopped: the main process told all pieces to end.
    """
    if settings_fingerprint(job.recipe.settings()) != job.fingerprint:
        raise ConfigError("the tokenizer or the template has changed while the run was going on.")
    try:
        return _Piece(job).run()
    except OSError as error:
        raise ShardError(
            f"piece {job.number} failed: {error}. What is done is kept: make room, or repair the "
            "cause, and run the same command again."
        ) from error


class _Piece:
    def __init__(self, job: PieceJob) -> None:
        self._job = job
        self._loader = ImageLoader(allow_outside_root=job.options.allow_outside_root)
        self._progress = job.work.progress(job.pieces)
        self._rejections: list[Rejection] = []
        self._counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._encoder = make_encoder(job.recipe)

    def run(self) -> Receipt:
        job, options = self._job, self._job.options
        writer = ShardWriter(
            job.work.out,
            prefix=f"shard-{job.number:05d}",
            max_bytes=options.shard_bytes,
            with_messages=not options.drop_text,
        )
        with writer:
            for record in self._records() if options.keep_order else self._shuffled():
                writer.add(record)
        return self._sign(writer.finished)

    def _shuffled(self) -> Iterator[Record]:
        """All records of the piece in random order, by way of a file: memory stays flat."""
        job = self._job
        folder = job.work.folder / f"spill-{job.number:05d}-{os.getpid()}"
        folder.mkdir()
        try:
            writer = ShardWriter(
                folder,
                prefix="spill",
                max_bytes=_SPILL_BYTES,
                with_messages=not job.options.drop_text,
                durable=False,
            )
            with writer:
                for record in self._records():
                    writer.add(record)
            if writer.finished:
                spill = _spilled(folder, writer.finished)
                order = permutation(len(spill), job.options.seed, _ROW_KEY, job.number)
                for row in order.tolist():
                    self._stop_if_told()
                    yield spill.read(row)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _records(self) -> Iterator[Record]:
        for file, span in self._job.parts:
            policy = file_policy(file, self._job.recipe.policy())
            for found in READERS[file.kind].read(file, span, self._loader):
                self._stop_if_told()
                self._counts["read"] += found.number >= 0
                if isinstance(found, RawSample):
                    record = self._prepare(found, policy)
                    if record is not None:
                        yield record
                else:
                    self._reject(found)
                self._progress[self._job.number + 1] = (
                    self._counts["read"],
                    len(self._rejections),
                )

    def _stop_if_told(self) -> None:
        if self._progress[0, 0]:
            raise Stopped("stopped")

    def _prepare(self, sample: RawSample, policy: Policy) -> Record | None:
        recipe = self._job.recipe
        try:
            sizes = self._image_sizes(sample)
            prepared = prepare_sample(
                sample.messages,
                sizes,
                encoder=self._encoder,
                policy=policy,
                max_tokens=recipe.max_tokens,
                oversize=recipe.oversize,  # type: ignore[arg-type]
            )
            if prepared.num_loss_tokens == 0:
                raise RefusedError("no loss token", "no token of it gives loss")
            images = images_to_store(
                sample.images,
                sizes,
                prepared.image_num_tiles.tolist(),
                policy=policy,
                store=recipe.store,
                quality=parse_quality(recipe.store_quality),
            )
        except SampleError as error:
            category, reason = refusal(error)
            self._reject(
                Rejection(
                    number=sample.number,
                    key=sample.key,
                    where=sample.where,
                    source=sample.source,
                    reason=reason,
                    category=category,
                )
            )
            return None
        except Exception as error:
            raise SampleError(
                f"sample {sample.key!r} ({sample.where}) can't be prepared, and this is a fault of "
                f"omniload: {type(error).__name__}: {error}. Please report it; leave the sample "
                "out to go on."
            ) from error
        self._count(sample, prepared, images)
        return _record(sample, images, sizes, prepared)

    def _image_sizes(self, sample: RawSample) -> list[tuple[int, int]]:
        sizes = []
        for number, data in enumerate(sample.images):
            try:
                if self._job.options.check_images and not is_stored(data):
                    decode(data)
                sizes.append(image_size(data))
            except SampleError as error:
                raise refused_image(error, number, len(sample.images)) from None
        return sizes

    def _count(self, sample: RawSample, prepared: Prepared, images: tuple[bytes, ...]) -> None:
        stored_bytes = sum(map(len, images))
        resized = sum(map(is_stored, images)) - sum(map(is_stored, sample.images))
        for name, value in (
            ("written", 1),
            ("tokens", prepared.num_tokens),
            ("tiles", prepared.num_tiles),
            ("loss_tokens", prepared.num_loss_tokens),
            ("images", len(sample.images)),
            ("image_bytes", stored_bytes),
            ("images_resized", resized),
            ("image_bytes_saved", sum(map(len, sample.images)) - stored_bytes),
            ("truncated", int(prepared.truncated)),
            ("tiles_reduced", int(prepared.tiles_reduced)),
        ):
            self._counts[name] += value

    def _reject(self, rejection: Rejection) -> None:
        if self._job.options.strict:
            raise SampleError(strict_message(rejection))
        self._counts["rejected"] += 1
        self._rejections.append(rejection)

    def _sign(self, shards: tuple[FinishedShard, ...]) -> Receipt:
        job, work = self._job, self._job.work
        reasons: dict[str, int] = {}
        for rejection in self._rejections:
            reasons[rejection.category] = reasons.get(rejection.category, 0) + 1
        receipt = Receipt(shards=shards, counts=self._counts, reasons=reasons)
        write_receipt(work, job.number, receipt, self._rejections)
        return receipt


def strict_message(rejection: Rejection) -> str:
    """Say which sample ends a strict run."""
    return (
        f"sample {rejection.key!r} ({rejection.where}) is rejected: {rejection.reason} "
        "(--strict makes this fatal)."
    )


def _record(
    sample: RawSample,
    images: tuple[bytes, ...],
    sizes: list[tuple[int, int]],
    prepared: Prepared,
) -> Record:
    return Record(
        row=-1,
        key=sample.key,
        source=sample.source,
        shard="",
        images=images,
        image_sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
        image_num_tiles=prepared.image_num_tiles,
        image_spans=prepared.image_spans,
        input_ids=prepared.input_ids,
        labels=prepared.labels,
        messages=sample.messages,
    )


def _spilled(folder: Path, shards: tuple[FinishedShard, ...]) -> ShardSet:
    columns = {
        name: np.concatenate([getattr(shard, name) for shard in shards])
        for name in ("num_tokens", "num_tiles", "num_loss_tokens")
    }
    infos = tuple(shard.info for shard in shards)
    rows = sum(info.num_rows for info in infos)
    manifest = Manifest(
        num_rows=rows,
        shards=infos,
        index=ShardInfo(name="", num_rows=rows, num_bytes=0, xxh3_128=""),
        settings={},
        fingerprint="",
        sources={},
    )
    return ShardSet(folder, manifest, LengthIndex.from_arrays(**columns))
