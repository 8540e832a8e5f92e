import json

from typer.testing import CliRunner

from omniload.tools.cli import app


def test_bench_start_times_the_first_batch_and_a_restored_one():
    done = CliRunner().invoke(
        app, ["bench", "start", "--rows", "30000", "--rows", "40001", "--ranks", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output.splitlines()[-1])["rows"]
    assert [row["rows"] for row in rows] == [30000, 40001]
    for row in rows:
        for name in ("open", "loader", "first batch", "restored", "restored, batch"):
            assert row[name] > 0
        assert row["bytes of state"] < 1000
