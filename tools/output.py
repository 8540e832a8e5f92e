"""The output folder of a run: what may be written there, by one run at a time, and where it was."""

from __future__ import annotations

import errno
import fcntl
import glob
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from omniload.errors import ConfigError
from omniload.shards.manifest import (
    INDEX_NAME,
    MANIFEST_NAME,
    Manifest,
    read_manifest,
    write_atomic,
)
from omniload.tools.receipts import Work
from omniload.tools.replace import STAGING_NAME, swap_in
from omniload.tools.sources import InputFile

__all__ = [
    "REJECTED_NAME",
    "TOKENIZER_NAME",
    "check_places",
    "claim",
    "describe_run",
    "finished_before",
    "note_finished",
    "take_up",
]

REJECTED_NAME = "rejected.jsonl"
TOKENIZER_NAME = "tokenizer.json"
RUN_NAME = ".run.json"
_OUR_NAMES = (MANIFEST_NAME, INDEX_NAME, REJECTED_NAME, TOKENIZER_NAME, RUN_NAME)
_LAYOUT = 1


def check_places(src: str, out: str) -> None:
    """Refuse an OUT that is SRC or lies in it.

    Raises:
        ConfigError: writing there would mix output into the input.
    """
    base = src
    while glob.has_magic(base) and not Path(base).exists():
        base = os.path.dirname(base)  # noqa: PTH120 - "" for a glob in the working directory
    base, target = os.path.realpath(base), os.path.realpath(out)
    # a glob of one level takes files only, so a folder beside them is no part of it
    as_folder = Path(src).is_dir() or "**" in src
    if as_folder and os.path.commonpath([base, target]) == base:
        raise ConfigError(f"OUT must not be SRC or lie in it: SRC is {src}, OUT is {out}.")
    if base == target:
        raise ConfigError(f"OUT must be another place than SRC, got {out} for both.")


@contextmanager
def claim(out: str, *, overwrite: bool) -> Iterator[Work]:
    """Take the output folder for this run, and keep others out until the end.

    Args:
        out: the folder; made if it does not exist.
        overwrite: replace the shards that are there: unfinished ones at once, a complete set
            when the new one is complete.

    Yields:
        Where the run keeps its place; its folder exists.

    Raises:
        ConfigError: the folder can't be used, holds other things or a complete set, or another
            run is writing.
    """
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"OUT must be a folder, got the file {out}.")
    work = Work(out=os.fspath(folder.absolute()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "no right to write there")
    except OSError as error:
        raise ConfigError(
            f"OUT must be a folder that can be written, got {out}: {error.strerror}. Choose "
            "another one."
        ) from None
    # the folder itself is the lock: the system lets go of it when the process dies, however
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `omniload preprocess` is writing to {out}. Wait for its end."
            ) from None
        swap_in(folder, work.folder.name)  # of a run that was killed while it moved them
        _refuse_foreign(folder, work, overwrite=overwrite)
        if overwrite and (folder / MANIFEST_NAME).exists() and not work.folder.exists():
            work = Work(out=os.fspath(folder.absolute() / STAGING_NAME), final=work.out)
        elif overwrite:
            _remove_shards(folder, work)
        work.folder.mkdir(parents=True, exist_ok=True)
        _remove_partial(Path(work.out), work)
        yield work
        if work.final:
            swap_in(folder, work.folder.name)
    finally:
        os.close(lock)


def _refuse_foreign(folder: Path, work: Work, *, overwrite: bool) -> None:
    if not folder.exists() or work.folder.exists():
        return
    if all(path.name == REJECTED_NAME for path in folder.iterdir()):
        return  # all that a run leaves when it has nothing to write
    if not (folder / MANIFEST_NAME).exists():
        raise ConfigError(
            f"OUT must be a new or empty folder, or one that omniload wrote; {folder} holds other "
            "things. Choose another one."
        )
    if not overwrite:
        raise ConfigError(
            f"{folder} holds a complete set of shards. Choose another OUT, or replace it with "
            "--overwrite."
        )


def _remove_partial(folder: Path, work: Work) -> None:
    """Remove what a killed run left half written."""
    for pattern in ("shard-*", *_OUR_NAMES):
        for path in folder.glob(f"{pattern}.*.partial"):
            path.unlink(missing_ok=True)
    for path in work.folder.glob("*.partial"):
        path.unlink(missing_ok=True)
    for path in work.folder.glob("spill-*"):
        shutil.rmtree(path, ignore_errors=True)


def _remove_shards(folder: Path, work: Work) -> None:
    for name in _OUR_NAMES:
        (folder / name).unlink(missing_ok=True)
    for path in folder.glob("shard-*.arrow"):
        path.unlink(missing_ok=True)
    shutil.rmtree(work.folder, ignore_errors=True)


def describe_run(
    files: Sequence[InputFile], settings: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Say, as plain JSON, all that the written bytes depend on, but the image files.

    Files are known by name, size and time of change: to hash their content would take as long as
    to read them.
    """
    return {
        "layout": _LAYOUT,
        "settings": dict(settings),
        "options": dict(options),
        "input": [_describe_file(file) for file in files],
    }


def _describe_file(file: InputFile) -> list[Any]:
    path = Path(file.path)
    if file.kind == "shards":
        path /= MANIFEST_NAME
    try:
        facts = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}.") from None
    state = [facts.st_size, facts.st_mtime_ns]
    if file.kind == "shards":
        state = [facts.st_size, xxhash.xxh3_64_intdigest(path.read_bytes())]
    place = [file.kind, file.path, file.label, file.source, file.image_root, file.style]
    return [*place, repr(file.repeat), *state]


def finished_before(out: str, run: Mapping[str, Any]) -> Manifest | None:
    """Tell whether a folder holds what a run would write.

    Args:
        out: the folder.
        run: from `describe_run`.

    Returns:
        Its manifest; None if it is not complete, or of another input or other settings.
    """
    folder = Path(out)
    if (folder / Work(out=out).folder.name).exists() or not (folder / MANIFEST_NAME).exists():
        return None
    try:
        facts = json.loads((folder / RUN_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    return read_manifest(folder) if facts == _run_facts(run) else None


def note_finished(work: Work, run: Mapping[str, Any]) -> None:
    """Leave a note of what the run was, for `finished_before`."""
    write_atomic(Path(work.out) / RUN_NAME, json.dumps(_run_facts(run)).encode() + b"\n")


def _run_facts(run: Mapping[str, Any]) -> dict[str, Any]:
    return {"run_xxh3_128": xxhash.xxh3_128_hexdigest(json.dumps(run, sort_keys=True).encode())}


def take_up(work: Work, run: Mapping[str, Any]) -> bool:
    """Decide whether an unfinished run goes on, or a new one begins.

    Args:
        work: the claimed folder.
        run: from `describe_run`.

    Returns:
        True if an unfinished run with the same input and settings is there.

    Raises:
        ConfigError: one with another input or other settings is there; says what differs.
    """
    path = work.folder / "run.json"
    now = json.loads(json.dumps(run))
    try:
        before = json.loads(path.read_bytes())
    except (OSError, ValueError):
        before = None
    if before == now:
        return True
    if work.final or not any(work.folder.glob("[0-9]*.json")):
        # to be replaced anyway, or nothing was done yet that could be lost
        for path in work.folder.glob("[0-9]*"):
            path.unlink()
        (work.folder / "spans.npy").unlink(missing_ok=True)
        write_atomic(path, json.dumps(run).encode())
        return False
    raise ConfigError(
        f"{work.out} holds an unfinished run with another input or other settings: "
        f"{_difference(before, now)}. Run with the same ones to go on, or begin anew with "
        "--overwrite."
    )


def _difference(before: Any, now: Any) -> str:
    if not isinstance(before, dict) or before.get("layout") != now["layout"]:
        return "it was made by another version of omniload"
    found = []
    for part in ("settings", "options"):
        old, new = _flat(before.get(part, {})), _flat(now[part])
        found += [
            f"{name} was {old.get(name)!r:.60}, is {new.get(name)!r:.60}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
    old_input, new_input = before.get("input", []), now["input"]
    if old_input != new_input:
        changed = [new[2] for new in new_input if new not in old_input]
        named = ", ".join(map(str, changed[:3])) or "fewer files than before"
        found.append(f"input files have changed ({named})")
    return "; ".join(found[:6])


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": entry for inner, entry in _flat(value).items()}
        else:
            flat[name] = value
    return flat
