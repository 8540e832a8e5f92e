"""Memory of workers: flat over epochs, the index never copied, the limits of a container read."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from omniload import Budget, World
from omniload.grouping import DEFAULT_GROUPING
from omniload.loader.machine_memory import memory_limit, memory_text, oom_kills
from omniload.loader.settings import LoaderSettings
from omniload.loader.worker import PackDataset
from omniload.shards import open_shards
from omniload.tools.bench_start import _Blank, _write_index
from tests.loader_data import write_data

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("memory") / "shards", num_rows=200)


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_private_memory_of_all_processes_is_flat_over_epochs(data, worker_type):
    done = subprocess.run(
        [sys.executable, "-m", "tests.workers_memory", str(data), worker_type, "4"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    epochs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [len(epoch) for epoch in epochs] == [2 if worker_type == "process" else 1] * 4
    # the way to a second epoch is gone for the first time then: some 3 MB, once
    assert sum(epochs[3]) <= 1.02 * sum(epochs[1])
    assert sum(epochs[3]) <= 1.05 * sum(epochs[0])


def test_what_a_spawned_worker_is_sent_does_not_grow_with_the_rows(tmp_path):
    sizes = []
    for count in (1_000, 10_000):  # one shard either way
        _write_index(tmp_path / str(count), count)
        settings = LoaderSettings(
            budget=Budget(tokens=4096, tiles=16),
            world=World(),
            seed=0,
            accumulation=1,
            grouping=DEFAULT_GROUPING,
            shuffle=True,
            tail="filler",
            oversize="error",
            window_rows=None,
        )
        shards = open_shards(tmp_path / str(count))
        sent = pickle.dumps(PackDataset(shards, _Blank(), settings=settings))
        again = pickle.loads(sent)
        assert again.rows(0).index.fingerprint == shards.index.fingerprint
        sizes.append(len(sent))
    assert abs(sizes[1] - sizes[0]) < 100
    assert sizes[1] < 10_000


def group(root, path, files):
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def belongs_to(root, text):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_the_tightest_limit_above_a_process_counts(tmp_path):
    belongs_to(tmp_path, "0::/pod/job\n")
    group(tmp_path, "pod/job", {"memory.max": "max\n", "memory.events": "low 0\noom_kill 3\n"})
    group(tmp_path, "pod", {"memory.max": "209715200\n", "memory.current": "104857600\n"})
    group(tmp_path, "", {"memory.max": "419430400\n", "memory.current": "1\n"})
    assert memory_limit(tmp_path) == (200 << 20, 100 << 20)
    assert oom_kills(tmp_path) == 3
    text = memory_text([os.getpid()], kills_before=2, root=tmp_path)
    assert "limit of the container 200 MiB, 100 used, killed for memory since the start: 1" in text
    assert "1 other workers" in text


def test_limits_of_the_first_version_of_control_groups_are_read(tmp_path):
    belongs_to(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/a\n")
    group(
        tmp_path,
        "memory/docker/a",
        {
            "memory.limit_in_bytes": "1048576\n",
            "memory.usage_in_bytes": "5\n",
            "memory.oom_control": "oom_kill_disable 0\noom_kill 1\n",
        },
    )
    group(tmp_path, "memory", {"memory.limit_in_bytes": "9223372036854771712\n"})
    assert memory_limit(tmp_path) == (1 << 20, 5)
    assert oom_kills(tmp_path) == 1


def test_no_limit_is_said_by_what_the_machine_has(tmp_path):
    assert memory_limit(tmp_path) == (0, 0)
    assert oom_kills(tmp_path) == 0
    assert "free on the machine" in memory_text([], root=tmp_path)
