"""The examples run as their own documentation says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(*words, cwd):
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    run(EXAMPLES / "render_documents.py", "raw", "--samples", "24", cwd=folder)
    settings = ["--tile-size", "56", "--tokens-per-tile", "4", "--max-tokens", "768", "--json"]
    command = ["-m", "omniload", "preprocess", "raw/annotations.json", "shards"]
    summary = json.loads(run(*command, *settings, "--workers", "1", cwd=folder))
    assert summary["written"] >= 22
    return folder / "shards"


def test_training_stops_and_goes_on_with_the_next_batch(shards, tmp_path):
    common = [EXAMPLES / "train.py", shards, "--tokens", "1024", "--save-every", "1"]
    first = run(*common, "--epochs", "1", "--workers", "0", cwd=tmp_path).splitlines()
    assert len(first) >= 3
    more = run(*common, "--epochs", "2", "--workers", "1", "--resume", cwd=tmp_path).splitlines()
    # the state was saved after the last step of the first epoch
    assert more[0].startswith("epoch 1 step 0 ")


def test_comparison_feeds_both_loaders_alike(shards, tmp_path):
    results = {}
    for loader in ("torch", "omniload"):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        options = ["--loader", loader, "--out", f"{loader}.json", "--epochs", "1"]
        run(*torchrun, EXAMPLES / "compare.py", shards, *options, "--tokens", "1024", cwd=tmp_path)
        results[loader] = json.loads((tmp_path / f"{loader}.json").read_text(encoding="utf-8"))
    torch, omniload = results["torch"], results["omniload"]
    assert omniload["pad_ratio"] == 0 < torch["pad_ratio"]
    # DistributedSampler repeats samples until the ranks have equally many; omniload doesn't
    assert 0 <= torch["samples"] - omniload["samples"] <= 1
    assert abs(torch["final_loss"] - omniload["final_loss"]) < 1.0
