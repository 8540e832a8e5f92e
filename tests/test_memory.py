import mmap
import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from omniload._memory import populate

ROOT = Path(__file__).resolve().parent.parent
CODE = """
import resource, sys
import numpy as np
from omniload._memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        arrays = [np.empty(3 << 20, np.uint8) for _ in range(8)]
        for array in arrays:
            array.fill(1)
        del arrays, array
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

left_alone = faults()
done = keep_freed_memory()
faults()
print(left_alone, done, faults())
"""


def run(**environment):
    clean = {name: value for name, value in os.environ.items()
             if not name.startswith(("MALLOC_", "GLIBC_"))}  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    before, kept, after = done.stdout.split()
    return int(before), kept == "True", int(after)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is not glibc's")
def test_freed_memory_is_used_again_without_asking_the_system():
    before, kept, after = run()
    assert kept
    assert before > 1000  # pages of 4 KiB; else this system has no such problem
    assert after < before / 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "1000000"),
        ("MALLOC_MMAP_THRESHOLD_", "1000000"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000000"),
    ],
)
def test_settings_of_the_user_stand(name, value):
    assert not run(**{name: value})[1]


def knows_the_call():
    version = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
    return sys.platform == "linux" and version >= (5, 14)


@pytest.mark.skipif(not knows_the_call(), reason="Linux before 5.14")
def test_pages_of_a_batch_are_there_before_they_are_written():
    storage = torch.UntypedStorage._new_shared(8 << 20)
    pixels = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert populate(pixels.data_ptr(), len(pixels))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    pixels.fill_(1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 200  # of 2048
    assert populate(pixels.data_ptr() + 100, 5000)
    assert populate(0, 0)


@pytest.mark.skipif(not knows_the_call(), reason="Linux before 5.14")
def test_memory_that_is_not_there_is_told_and_does_not_end_the_process(tmp_path):
    page = mmap.PAGESIZE
    path = tmp_path / "short"
    path.write_bytes(bytes(2 * page))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 2 * page) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        os.truncate(path, page)  # the second page has nothing behind it any more
        assert populate(array.ctypes.data, page)
        assert not populate(array.ctypes.data, 2 * page)
        del array
