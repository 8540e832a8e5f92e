import json
import subprocess
import sys
from pathlib import Path


def test_the_benchmark_of_reading_compares_ways_to_store_the_same_samples():
    # a process of its own: webdataset leaves its files to the garbage collection
    arguments = ["bench", "read", "--samples", "200", "--kb", "2", "--repeats", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "omniload", *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parent.parent,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ways = {row["way"]: row for row in found["rows"]}
    assert {"omniload, any order", "two files a sample, any order"} <= set(ways)
    assert ways["omniload, any order"]["times ours"] == 1
    assert all(row["us a sample"] > 0 for row in ways.values())
