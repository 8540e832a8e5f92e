"""What memory there is and who has it: processes, the limit of the container, /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

__all__ = ["memory_limit", "memory_text", "oom_kills"]

_MIB = 2**20
#: Limits above it mean that there is none.
_NO_LIMIT = 2**60
_ROOT = Path("/")
#: files of the limit and of the use in both versions of control groups
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def memory_text(alive: Iterable[int], *, kills_before: int = 0, root: Path = _ROOT) -> str:
    """Say in one sentence what memory this process and its workers have, and what there is.

    Args:
        alive: process ids of the workers that live.
        kills_before: what `oom_kills` said at the start.
        root: where the system's files lie.
    """
    others = [_own_bytes(pid) for pid in alive]
    parts = [f"this process {_mib(_own_bytes(os.getpid()))} MiB of its own"]
    if others:
        parts.append(f"{len(others)} other workers {_mib(sum(others))} MiB")
    limit, used = memory_limit(root)
    if limit:
        parts.append(f"limit of the container {_mib(limit)} MiB, {_mib(used)} used")
    else:
        parts.append(f"free on the machine {_mib(psutil.virtual_memory().available)} MiB")
    if (kills := oom_kills(root) - kills_before) > 0:
        parts.append(f"killed for memory since the start: {kills}")
    try:
        shared = os.statvfs(root / "dev/shm")
    except OSError:  # only Linux has it
        pass
    else:
        free, total = shared.f_bavail * shared.f_frsize, shared.f_blocks * shared.f_frsize
        parts.append(f"/dev/shm {_mib(free)} MiB free of {_mib(total)}")
    return f"Memory: {', '.join(parts)}."


def memory_limit(root: Path = _ROOT) -> tuple[int, int]:
    """Return the tightest limit on the memory of this container, and what is used of it.

    Args:
        root: where the system's files lie.

    Returns:
        Bytes, bytes; (0, 0): no limit.
    """
    found = [
        (limit, _number(folder / used))
        for folder in _groups(root)
        for most, used in _FILES
        if 0 < (limit := _number(folder / most)) < _NO_LIMIT
    ]
    return min(found, default=(0, 0))


def oom_kills(root: Path = _ROOT) -> int:
    """Count the processes of this container that the kernel has killed for memory so far.

    Args:
        root: where the system's files lie.
    """
    found = [0]
    for folder in _groups(root):
        for name in ("memory.events", "memory.oom_control"):
            for line in _text(folder / name).splitlines():
                field, _, value = line.partition(" ")
                if field == "oom_kill" and value.isdecimal():
                    found.append(int(value))
    return max(found)


def _groups(root: Path) -> list[Path]:
    """Folders of the control groups that this process is in, and of all above them."""
    found: dict[Path, None] = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = base / group.strip("/")
        found |= dict.fromkeys([own, *(p for p in own.parents if p.is_relative_to(base))])
    return list(found)


def _own_bytes(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_full_info().uss)
    except (psutil.Error, OSError):
        return 0


def _mib(size: int) -> str:
    return f"{size / _MIB:.0f}"


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
