"""Checks that are made before the first batch: transform, image kinds, and agreement of the ranks.

Each finds in seconds what would else be found in the middle of a run, or never.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed

from omniload._checksum import CHECKSUM
from omniload.errors import ConfigError, SampleError, ShardError
from omniload.images import image_kind, missing_codecs
from omniload.index import LengthIndex
from omniload.loader.sources import wants_prefetch
from omniload.loader.transform import check_fingerprint, given_lengths
from omniload.source import RowSource, shard_starts
from omniload.transforms import Transform, transform_from_settings
from omniload.types import Record
from omniload.world import World

__all__ = [
    "check_codecs",
    "check_transform",
    "choose_transform",
    "compare_over_ranks",
    "gather_over_ranks",
    "has_images",
    "says_that_it_waits",
]

_log = logging.getLogger(__name__)

#: Rows looked at before the start; each costs tens of microseconds.
_NUM_PROBES = 8
#: Seconds after which a rank says that it waits for the others.
_WAIT_S = 30.0


def has_images(index: LengthIndex, *, left_out: npt.NDArray[np.int64]) -> bool:
    """Say whether any row that is planned has a tile.

    Args:
        index: lengths of all rows.
        left_out: int64 (n,), rows that are not planned.
    """
    tiles = index.num_tiles
    return int(np.count_nonzero(tiles)) > int(np.count_nonzero(tiles[left_out]))


def choose_transform(source: RowSource, transform: Transform | None) -> Transform:
    """Return the user's transform, checked against the shards, or the one they were made for.

    Raises:
        ConfigError: it is no transform, doesn't fit the shards, or can't read their images here.
    """
    if transform is None:
        check_codecs(source, missing_codecs())
        return transform_from_settings(dict(source.settings))
    if not isinstance(transform, Transform):
        raise ConfigError(
            "transform must follow omniload.transforms.Transform (callable, fingerprint, filler, "
            f"lengths, model_inputs), got {type(transform).__name__}."
        )
    check_fingerprint(transform)
    try:
        default: Transform | None = transform_from_settings(dict(source.settings))
    except ConfigError:
        default = None  # shards that only the user's transform understands
    check_transform(source, transform, default)
    return transform


def check_transform(source: RowSource, transform: Transform, default: Transform | None) -> None:
    """Check that a transform gives the lengths that the shards were measured with.

    Args:
        source: the data.
        transform: the user's.
        default: the one that the shards were made for, where their settings say it.

    Raises:
        ConfigError: it has other settings than the shards, or other lengths in one of a few rows.
    """
    if type(transform) is type(default) and transform.fingerprint != default.fingerprint:
        made, given = vars(default), vars(transform)
        differences = "; ".join(
            f"{name}: {made[name]!r} in the shards, {given.get(name)!r} in the transform"
            for name in made
            if made[name] != given.get(name)
        )
        raise ConfigError(
            "the transform must have the settings that the shards were made with, because the plan "
            f"is made from their lengths: {differences or 'fingerprints differ'}. Use these "
            "settings, leave transform= out, or preprocess again."
        )
    index = source.index
    for record in _probes(source):
        planned = tuple(
            int(column[record.row])
            for column in (index.num_tokens, index.num_tiles, index.num_loss_tokens)
        )
        got = given_lengths(transform, record)
        if got != planned:
            raise ConfigError(
                "the transform must give the lengths of the index: expected (tokens, tiles, loss "
                f"tokens) {planned}, got {got} (row={record.row}, shard={record.shard!r}). "
                "Preprocess again with the settings of this transform."
            )


def check_codecs(source: RowSource, missing: Mapping[str, str]) -> None:
    """Check that the image kinds in a few rows can be decoded here.

    Args:
        source: the data.
        missing: kind that can't be read -> remedy; see `omniload.images.missing_codecs`.

    Raises:
        ConfigError: a kind that the installed libraries don't read; names the remedy.
    """
    if not missing:
        return
    for record in _probes(source):
        for image in record.images:
            kind = image_kind(image)
            if kind in missing:
                raise ConfigError(
                    f"the data has {kind} images, which the installed image libraries can't read "
                    f"(row={record.row}, key={record.key!r}, shard={record.shard!r}): "
                    f"{missing[kind]}."
                )


def compare_over_ranks(facts: Mapping[str, Any], world: World, *, world_is_given: bool) -> None:
    """Compare this rank's plan with those of all other ranks; a collective over all processes.

    Nothing is compared where torch.distributed is not initialised, or where `world` is not about
    all of its processes: a loader on one rank alone must not wait for the others.

    Args:
        facts: what must be the same on all ranks: plain values by name.
        world: who this rank is.
        world_is_given: whether the user gave `world`; else it was found when the loader was made.

    Raises:
        ConfigError: on all ranks alike, when ranks differ or a data-parallel rank is missing; or
            the world that was found is not that of torch.distributed.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    size = distributed.get_world_size()
    if size > 1 and size != world.world_size:
        _check_world(world, size, is_given=world_is_given)
    if size == 1 or size != world.world_size:
        return
    own = {name: value for name, value in facts.items() if name != CHECKSUM}  # differs with any
    gathered: list[Any] = [None] * size
    with says_that_it_waits("compare its place with theirs", world):
        distributed.all_gather_object(gathered, (world.dp_rank, own))
    reference = gathered[0][1]
    wrong = [rank for rank in range(size) if gathered[rank][1] != reference]
    if wrong:
        raise ConfigError(
            "all ranks must follow the same plan, but these differ from rank 0: "
            + "; ".join(_rank_difference(rank, gathered[rank][1], reference) for rank in wrong[:8])
            + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            + ". Give every rank the same data, arguments and loader state."
        )
    held = Counter(dp_rank for dp_rank, _ in gathered)
    absent = sorted(set(range(world.dp_world_size)) - set(held))
    if absent:
        raise ConfigError(
            f"each of the {world.dp_world_size} data-parallel ranks must be held by a process, but "
            f"none has dp_rank {absent[:8]}: their rows would be lost. The dp_rank of each process "
            f"is {[dp_rank for dp_rank, _ in gathered][:32]}; check world=."
        )


def gather_over_ranks(
    facts: Mapping[str, Any], world: World, *, what: str = "ledger"
) -> dict[int, Mapping[str, Any]]:
    """Gather what each data-parallel rank says; a collective over all processes.

    Args:
        facts: plain values by name.
        world: who this rank is.
        what: name of the facts, for messages: "ledger" or "stats".

    Returns:
        dp_rank -> its facts; of ranks that share a dp_rank, those of the first. This rank alone
        where torch.distributed is not initialised with the processes of the world.

    Raises:
        ConfigError: the collective failed or timed out.
    """
    distributed = torch.distributed
    initialised = distributed.is_available() and distributed.is_initialized()
    size = distributed.get_world_size() if initialised else 1
    if size == 1 or size != world.world_size:
        return {world.dp_rank: facts}
    gathered: list[Any] = [None] * size
    with says_that_it_waits(f"add its {what} to theirs", world):
        distributed.all_gather_object(gathered, (world.dp_rank, dict(facts)))
    return dict(reversed(gathered))


@contextlib.contextmanager
def says_that_it_waits(what: str, world: World, *, seconds: float = _WAIT_S) -> Iterator[None]:
    """Log a warning while this rank waits for the others, and explain a failure.

    A collective that only some ranks call would else hang without a word until the process group
    times out. Whether the others are late or never come can't be known here.

    Args:
        what: what it waits for, after "to".
        world: who this rank is.
        seconds: after which it says so.

    Raises:
        ConfigError: the collective failed or timed out.
    """
    remedy = (
        "All ranks must call iter() alike, and load_state_dict, set_epoch, ledger(reduce=True) and "
        "stats(reduce=True): where one rank alone did, the others never come."
    )
    warning = threading.Timer(
        seconds,
        _log.warning,
        (f"rank {world.rank} has waited {seconds:g} s for the other ranks to {what}. {remedy}",),
    )
    warning.daemon = True
    warning.start()
    try:
        yield
    except RuntimeError as error:
        raise ConfigError(
            f"rank {world.rank} could not {what} over all ranks: {error}. {remedy}"
        ) from error
    finally:
        warning.cancel()


def _check_world(world: World, size: int, *, is_given: bool) -> None:
    if not is_given:
        raise ConfigError(
            f"the loader was made for {world.world_size} process(es), but torch.distributed has "
            f"{size} of them now: every process would read the rows of others. Make the loader "
            "after init_process_group, or pass world=World(dp_rank=, dp_world_size=)."
        )
    if world.world_size == 1:
        _warn_once(
            f"world= says that this process is alone, while torch.distributed has {size} of them: "
            "it reads all rows, and no other rank is compared with it"
        )


@functools.cache  # once a process: an evaluation on one rank is no mistake
def _warn_once(message: str) -> None:
    _log.warning(message)


def _rank_difference(rank: int, facts: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    names = [name for name in reference if facts.get(name) != reference[name]]
    # the hash differs whenever anything does: it is worth a word only when nothing else explains it
    names = [name for name in names if name != "plan"] or names
    return f"rank {rank} in " + ", ".join(
        f"{name} ({facts.get(name)!r} against {reference[name]!r})" for name in names[:4]
    )


def _probes(source: RowSource) -> Iterator[Record]:
    tiles = source.index.num_tiles
    if wants_prefetch(source):
        # a shard far away has to be fetched in full: the rows of one will do
        starts = shard_starts(source)
        shard = int(np.searchsorted(starts, np.argmax(tiles > 0), side="right")) - 1
        spread = np.linspace(starts[shard], starts[shard + 1] - 1, _NUM_PROBES).astype(np.int64)
        rows = {int(row) for row in spread}
    else:
        rows = {0, len(source) - 1}
        if len(tiles) and tiles.any():
            rows |= {int(np.argmax(tiles)), int(np.argmax(tiles > 0))}
            spread = np.linspace(0, len(source) - 1, _NUM_PROBES).astype(np.int64)
            rows |= {int(row) for row in spread}
    for row in sorted(rows):
        try:
            yield source.read(row)
        except (ShardError, SampleError):
            # a damaged row is reported when its turn comes, in the way that the user chose
            continue
