"""A whole run of `omniload index`: find the tars, index those that have no valid side file."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, ShardError
from omniload.shards import settings_fingerprint
from omniload.tars.manifest import TarManifest
from omniload.tars.side_file import SUFFIX, open_side
from omniload.tools.index_jobs import IndexJob, run_index_jobs
from omniload.tools.index_set import IndexedTar, finish_index
from omniload.tools.notes import start_notes
from omniload.tools.progress_bar import bytes_bar
from omniload.tools.recipe import Recipe, make_encoder
from omniload.tools.sources import InputFile
from omniload.tools.tilings import tiling_notes

__all__ = ["IndexSummary", "index_tars"]


@dataclass(frozen=True, kw_only=True)
class IndexSummary:
    """What a run did.

    Args:
        manifest: of the set.
        folder: where the index lies.
        tars: what became of the tars: "indexed", "measured" (offsets were known, lengths were
            measured anew) or "kept" -> how many.
        reasons: category of refusal -> samples.
        seconds: wall time.
    """

    manifest: TarManifest
    folder: Path
    tars: dict[str, int]
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Give it as plain JSON."""
        counts = dict(self.manifest.counts)
        rows = max(self.manifest.num_rows, 1)
        return {
            "path": os.fspath(self.folder),
            "tars": len(self.manifest.tars),
            **{f"tars_{name}": count for name, count in self.tars.items()},
            "rows": self.manifest.num_rows,
            **counts,
            "reasons": self.reasons,
            "mean_tokens": counts["tokens"] / rows,
            "mean_tiles": counts["tiles"] / rows,
            "sources": dict(self.manifest.sources),
            "fingerprint": self.manifest.fingerprint,
            "vocab_size": self.manifest.settings["encoder"]["vocab_size"],
            "added_tokens": self.manifest.settings["encoder"]["added_tokens"],
            "seconds": round(self.seconds, 3),
        }


def index_tars(
    srcs: Sequence[str | Path],
    *,
    out: str | Path | None = None,
    recipe: Recipe | None = None,
    workers: int = 1,
    show_progress: bool = False,
    note: Callable[[str], None] | None = None,
) -> IndexSummary:
    """Index tars, so that they are read in place; goes on where a killed run was.

    Args:
        srcs: tars, folders or globs.
        out: index folder; None: the folder of the tars.
        recipe: how lengths are measured.
        workers: processes.
        show_progress: a bar on standard error.
        note: called with what a user should know before the work begins.

    Returns:
        What was done.

    Raises:
        ConfigError: no tar, an index folder that can't be used, or no sample that can be used.
        ShardError: a tar can't be read.
    """
    recipe = recipe or Recipe()
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, got {workers}.")
    begin = time.monotonic()
    found = _find(srcs)
    if note is not None:
        for text in _notes(recipe, *found[0]):
            note(text)
    root = Path(os.path.commonpath([path.parent for path, _ in found]))
    folder = root if out is None else Path(out).absolute()
    settings = {name: recipe.settings()[name] for name in _SETTINGS}
    with _claimed(folder, given=out is not None):
        tars = []
        for path, source in found:
            name = path.relative_to(root).as_posix()
            tars.append(
                IndexedTar(path=path, name=name, side=folder / (name + SUFFIX), source=source)
            )
        _refuse_odd_names(tars)
        states = {tar.name: _state(tar, settings_fingerprint(settings)) for tar in tars}
        _do(tars, states, recipe, workers=workers, show=show_progress)
        manifest, reasons = finish_index(
            folder, root if folder != root else None, tars, settings, recipe
        )
    return IndexSummary(
        manifest=manifest,
        folder=folder,
        tars=dict.fromkeys(("indexed", "measured", "kept"), 0) | Counter(states.values()),
        reasons=reasons,
        seconds=time.monotonic() - begin,
    )


#: What of a recipe an index depends on: images are never stored anew.
_SETTINGS = ("encoder", "tiling", "max_tokens", "oversize")


def _find(srcs: Sequence[str | Path]) -> list[tuple[Path, str]]:
    """List the tars, each once, with the names of their data sets."""
    found: dict[Path, str] = {}
    for given in srcs:
        src = os.fspath(given)
        path = Path(src)
        if path.is_dir():
            paths: Iterable[Path] = sorted(
                inner
                for inner in path.rglob("*.tar")
                if inner.is_file() and not inner.name.startswith(".")
            )
            name = path.absolute().name
        elif path.exists():
            paths, name = [path], path.stem if len(srcs) == 1 else path.absolute().parent.name
        else:
            paths = map(Path, sorted(glob.glob(src, recursive=True)))  # noqa: PTH207
            name = path.absolute().parent.name
        for inner in paths:
            found.setdefault(inner.absolute(), _text(name))
    if not found:
        raise ConfigError(
            f"no tar found: expected tars, folders of .tar files or globs, got "
            f"{', '.join(repr(os.fspath(src)) for src in srcs):.200}. Only local files are indexed."
        )
    return list(found.items())


def _notes(recipe: Recipe, path: Path, source: str) -> Iterator[str]:
    yield from tiling_notes(recipe.tiling, recipe.template, {})
    first = InputFile(
        kind="tar",
        path=os.fspath(path),
        label=path.name,
        source=source,
        image_root=os.fspath(path.parent),
    )
    yield from start_notes([first], make_encoder(recipe))


def _refuse_odd_names(tars: Sequence[IndexedTar]) -> None:
    for tar in tars:
        try:
            tar.name.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the path of a tar must be UTF-8, got {tar.name!r}.") from None


@contextlib.contextmanager
def _claimed(folder: Path, *, given: bool) -> Iterator[None]:
    """Take the index folder for this run, and keep others out until the end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out must be a folder, got {folder}: {error.strerror}.") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder} can't be written. "
            + ("Choose another --out." if given else "Name another folder with --out.")
        )
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"another run is writing to {folder}. Wait for its end, or choose another --out."
        ) from None
    try:
        yield
    finally:
        os.close(lock)


def _state(tar: IndexedTar, fingerprint: str) -> str:
    """Say what has to be done: "kept" (nothing), "measured" (lengths) or "indexed" (all)."""
    try:
        facts, side = tar.path.stat(), open_side(tar.side).facts
    except (OSError, ShardError):
        return "indexed"
    if (side.num_bytes, side.changed_ns) != (facts.st_size, facts.st_mtime_ns):
        return "indexed"
    same = side.settings_fingerprint == fingerprint and side.source == tar.source
    return "kept" if same else "measured"


def _do(
    tars: Sequence[IndexedTar],
    states: Mapping[str, str],
    recipe: Recipe,
    *,
    workers: int,
    show: bool,
) -> None:
    sizes = [tar.path.stat().st_size for tar in tars]
    with tempfile.NamedTemporaryFile(prefix="omniload-index-") as file:
        file.truncate(8 * (len(tars) + 1))
        # slot 0 tells to stop, the others say how many bytes of a tar are done
        progress: npt.NDArray[np.int64] = np.memmap(file.name, np.int64, "r+")
        jobs = []
        for number, tar in enumerate(tars):
            if states[tar.name] == "kept":
                progress[number + 1] = sizes[number]
                continue
            tar.side.parent.mkdir(parents=True, exist_ok=True)
            jobs.append(
                IndexJob(
                    path=tar.path,
                    side=tar.side,
                    source=tar.source,
                    recipe=recipe,
                    again=states[tar.name] == "measured",
                    progress=Path(file.name),
                    slot=number + 1,
                )
            )
        with bytes_bar("index", show=show) as bar:

            def tick() -> None:
                bar(int(progress[1:].sum()), sum(sizes))

            run_index_jobs(jobs, workers=workers, progress=progress, tick=tick)


def _text(name: str) -> str:
    return name.encode("utf-8", "replace").decode()
