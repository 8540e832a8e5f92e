import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

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
