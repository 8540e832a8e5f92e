"""Tars without an index, front to back: for streams, past the damage, with nothing hidden."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omniload.conversations import record_key, refusal
from omniload.errors import ConfigError, SampleError
from omniload.tars.archive import Archive, has_image
from omniload.tars.maker import SampleMaker
from omniload.tars.members import Damage, Member
from omniload.tars.samples import group_members, read_group, split_name
from omniload.tars.scan import read_sample
from omniload.types import Record

__all__ = ["stream_tars"]

_log = logging.getLogger(__name__)


def stream_tars(
    paths: Sequence[str | os.PathLike[str]],
    *,
    maker: SampleMaker,
    on_bad_sample: str = "raise",
    source: str = "tars",
) -> Callable[[Any], Iterator[Record]]:
    """Make a stream of tars, for `omniload.StreamLoader`: no index is needed, and none is made.

    Part i of n reads every n-th tar, front to back. Damage is passed over as in `omniload index`,
    with a warning in the log for each part that is lost.

    Args:
        paths: local tars.
        maker: tokenizer, template and tiling.
        on_bad_sample: a sample that can't be used is an error ("raise"), or passed over with a
            warning ("skip").
        source: name of the data set.

    Returns:
        A function of a `omniload.stream.StreamPart`; it can be pickled.

    Raises:
        ConfigError: no tar, or an unknown `on_bad_sample`.
    """
    if on_bad_sample not in ("raise", "skip"):
        raise ConfigError(f"on_bad_sample must be 'raise' or 'skip', got {on_bad_sample!r}.")
    if not paths:
        raise ConfigError("paths must name at least one tar, got none.")
    return _TarStream([Path(path).absolute() for path in paths], maker, on_bad_sample, source)


class _TarStream:
    def __init__(
        self, paths: Sequence[Path], maker: SampleMaker, on_bad_sample: str, source: str
    ) -> None:
        self._paths = paths
        self._maker = maker
        self._skips = on_bad_sample == "skip"
        self._source = source

    def __call__(self, part: Any) -> Iterator[Record]:
        for path in self._paths[part.index :: part.count]:
            with Archive(path) as archive:
                for group in group_members(archive.members()):
                    record = self._record(archive, group)
                    if record is not None:
                        yield record

    def _record(self, archive: Archive, group: list[Member] | Damage) -> Record | None:
        if isinstance(group, Damage):
            _log.warning(
                "%s is damaged (%s): its bytes %d to %d are lost",
                archive.path, group.reason, group.start, group.stop,
            )  # fmt: skip
            return None
        key = split_name(group[0].name)[0]
        try:
            found = read_group(group, archive.content, has_images=lambda: has_image(archive.path))
            key = record_key(found.record) or key
            messages, images = read_sample(found)
            key = key.encode("utf-8", "replace").decode()
            return self._maker.record(
                messages,
                images,
                row=-1,
                key=key,
                source=self._source,
                shard=archive.path.name,
            )
        except SampleError as error:
            said = f"{refusal(error)[1]} (tar={archive.path}, key={key!r})"
            if not self._skips:
                raise SampleError(said) from None
            _log.warning("a sample is passed over: %s", said)
            return None
