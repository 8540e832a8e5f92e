import json

import typer
from typer.testing import CliRunner

from omniload.errors import ConfigError
from omniload.tools import bench_workers


def run(*arguments):
    app = typer.Typer()
    app.command()(bench_workers.workers)
    return CliRunner().invoke(app, arguments)


def test_bench_workers_measures_processes_and_threads_side_by_side():
    done = run("--data", "text", "--num-workers", "1", "--scale", "0.02", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert [row["workers"] for row in found["rows"]] == ["none", "1 processes", "1 threads"]
    for row in found["rows"]:
        for name in ("samples/s", "looping samples/s", "step ms", "MiB", "start ms"):
            assert row[name] > 0, name
        assert row["CPU ms"] >= 0  # the kernel counts in ticks of 10 ms: so little work may be none


def test_bench_workers_names_the_data_it_knows():
    done = run("--data", "video")
    assert isinstance(done.exception, ConfigError)
    assert "must be one of text, photo:640x480" in str(done.exception)
