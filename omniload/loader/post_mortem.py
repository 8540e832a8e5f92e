"""What is known of workers: where each one is, how one has died, and what memory there was."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping

from omniload.errors import OmniloadError
from omniload.loader.machine_memory import memory_text, oom_kills
from omniload.loader.notes import Note, Phase, WorkerNotes
from omniload.source import RowSource

__all__ = ["PostMortem"]

_DOING = {
    Phase.READ: "reading",
    Phase.TRANSFORM: "transforming",
}
_REMEDIES = {
    "SIGKILL": "SIGKILL comes from the kernel where memory ends, or from a person: lower "
    "num_workers, prefetch_factor or the budget, or give the container more memory.",
    "SIGBUS": "SIGBUS means that /dev/shm is full (docker run --shm-size), or that a file became "
    "shorter while it was mapped.",
    "SIGTERM": "SIGTERM comes from outside: a scheduler, or a person.",
}
_CRASH = (
    "Native code has crashed, mostly in the decoder or the transform, at the row named: leave that "
    "out with exclude= if it is damaged."
)
_EXIT = "The transform has ended its process: look for sys.exit or os._exit there."
_START = (
    "The process has ended before its first row. A program that starts workers must do it under "
    'if __name__ == "__main__":, because spawn and forkserver import it again in each of them; its '
    "own message stands above."
)
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGFPE", "SIGILL")
_MIB = 2**20


class PostMortem:
    """Puts the notes of workers into words.

    Args:
        notes: what the workers note.
        rows: epoch -> the rows of it, to name shards; nothing is read from them.
        kind: what the workers are: "worker process" or "worker thread".
    """

    def __init__(
        self, notes: WorkerNotes, rows: Callable[[int], RowSource], *, kind: str = "process"
    ) -> None:
        self._notes = notes
        self._rows = rows
        self._kind = kind
        self._oom_kills = oom_kills()

    def places(self) -> str:
        """Say where each worker is, and for how long."""
        found = []
        for worker in range(self._notes.num_workers):
            note = self._notes.read(worker)
            who = f"worker {worker}" + (f" (pid {note.pid})" if self._kind == "process" else "")
            found.append(f"{who}: {self._place(note)} for {note.since_s:.1f} s")
        return "; ".join(found)

    def deaths(self, exit_codes: Mapping[int, int], alive: Mapping[int, int]) -> str:
        """Say who has died, how, where, and with what memory.

        Args:
            exit_codes: worker -> exit code of its process, negative for a signal.
            alive: worker -> pid of those that live.
        """
        found: list[str] = []
        remedies: dict[str, None] = {}
        for worker, code in sorted(exit_codes.items()):
            note = self._notes.read(worker)
            how, remedy = _cause(code)
            if code >= 0 and _is_starting(note):
                remedy = _START
            remedies[remedy] = None
            found.append(
                f"worker {worker} (pid {note.pid}) {how} while {self._place(note)}"
                f"{_memory_of(note)}"
            )
        memory = memory_text(alive.values(), kills_before=self._oom_kills)
        return f"{'; '.join(found)}. {memory} {' '.join(remedies)}"

    def _place(self, note: Note) -> str:
        batch = f"step {note.step}, micro-step {note.micro_step} of epoch {note.epoch}"
        if _is_starting(note):
            return "starting"
        if note.phase == Phase.DONE:
            return f"idle after the batch of {batch}"
        if note.phase == Phase.PACK:
            return f"packing {note.num_rows} rows for {batch}"
        doing = _DOING[note.phase]
        return f"{doing} row {note.row} ({self._where(note)}; one of {note.num_rows} for {batch})"

    def _where(self, note: Note) -> str:
        key = f"key {note.key!r}" if note.key else "key not read yet"
        try:
            source = self._rows(note.epoch)
            shard, inside = source.locate(note.row)
            return f"shard {source.shard_names[shard]!r}, row {inside} there, {key}"
        except OmniloadError:  # whatever the note says, it must not hide how the worker ended
            return key


def _is_starting(note: Note) -> bool:
    return note.pid == 0 or note.phase == Phase.START


def _cause(code: int) -> tuple[str, str]:
    if code >= 0:
        return f"ended with exit code {code}", _EXIT
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    remedy = _CRASH if name in _CRASHES else _REMEDIES.get(name, "")
    return f"was killed by {name}", remedy


def _memory_of(note: Note) -> str:
    if not note.resident_bytes:
        return ""
    return (
        f" (its memory shortly before: {note.resident_bytes / _MIB:.0f} MiB, of that "
        f"{note.own_bytes / _MIB:.0f} MiB not shared)"
    )
