import json

from typer.testing import CliRunner

from omniload.tools.cli import app


def test_the_parts_of_indexing_are_measured_beside_each_other():
    args = ["bench", "index", "--samples", "40", "--image-bytes", "2000", "--repeats", "1"]
    done = CliRunner().invoke(app, [*args, "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["way"]: row for row in json.loads(done.stdout)["rows"]}
    assert list(rows) == [
        "tarfile, headers", "headers", "places and checksums", "checksums alone",
        "all, with lengths", "places: the difference",
    ]  # fmt: skip
    assert all(row["us a member"] > 0 for name, row in rows.items() if "difference" not in name)
    table = CliRunner().invoke(app, args).stdout
    assert "us a member" in table
    assert "80 members" in table
