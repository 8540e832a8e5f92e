"""`omniload index`: in parallel, resumable, with nothing hidden; in real processes."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError, ShardError
from omniload.shards import open_shards
from omniload.tars import open_tars
from omniload.tars.manifest import REJECTED_NAME, SET_NAME
from omniload.tools import index_cmd
from omniload.tools.cli import app
from omniload.tools.index_run import index_tars
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe, RunOptions
from omniload.tools.tilings import TILINGS
from tests.data_makers import image_bytes, turns, write_tar
from tests.tar_makers import (
    RECIPE,
    header_of,
    indexed,
    lengths_of,
    overwrite,
    tar_folder,
    tar_members,
)

ROOT = Path(__file__).resolve().parent.parent
TILES = ("--tile-size", "28", "--max-tiles", "4", "--tokens-per-tile", "4")


def command(*more):
    return [sys.executable, "-m", "omniload", "index", *map(str, more), *TILES]


def run_command(*more):
    return subprocess.run(command(*more), capture_output=True, text=True, cwd=ROOT)


@contextmanager
def started(*more):
    """A running command, in a process group of its own; nothing of it is left at the end."""
    process = subprocess.Popen(
        command(*more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def sides(folder):
    return {p.name: p.stat().st_mtime_ns for p in folder.rglob("*.omniload-index")}


def rejected(folder):
    return [json.loads(line) for line in (folder / REJECTED_NAME).read_text().splitlines()]


def test_finished_side_files_are_kept_and_a_changed_tar_is_indexed_again(tmp_path):
    folder = indexed(tmp_path)
    before = sides(folder)
    assert index_tars([folder], recipe=RECIPE).tars == {"indexed": 0, "measured": 0, "kept": 2}
    assert sides(folder) == before
    write_tar(folder / "00001.tar", tar_members(8, first=50))
    summary = index_tars([folder], recipe=RECIPE)
    assert summary.tars == {"indexed": 1, "measured": 0, "kept": 1}
    assert summary.manifest.num_rows == 28
    assert open_tars(folder).read(20).key == "0050"


def test_other_settings_measure_lengths_again_with_the_same_offsets(tmp_path):
    folder = indexed(tmp_path / "a")
    other = Recipe(tile_size=28, max_tiles=2, tokens_per_tile=4, template="vicuna")
    summary = index_tars([folder], recipe=other)
    assert summary.tars == {"indexed": 0, "measured": 2, "kept": 0}
    index_tars([tar_folder(tmp_path / "b")], recipe=other)
    assert lengths_of(open_tars(folder)) == lengths_of(open_tars(tmp_path / "b"))
    for name in ("bytes_skipped", "damaged", "members", "samples", "tokens"):
        fresh = open_tars(tmp_path / "b").manifest.counts
        assert open_tars(folder).manifest.counts[name] == fresh[name]


def test_damage_stays_known_when_lengths_are_measured_again(tmp_path):
    folder = tar_folder(tmp_path)
    overwrite(folder / "00000.tar", header_of(folder / "00000.tar", "0008.jpg"), b"\xff" * 99)
    first = index_tars([folder], recipe=RECIPE)
    lines = rejected(folder)
    again = index_tars([folder], recipe=Recipe(tile_size=28, max_tiles=2, tokens_per_tile=4))
    assert again.tars["measured"] == 2
    assert again.reasons == first.reasons
    assert rejected(folder) == lines


def test_a_damaged_side_file_is_made_anew(tmp_path):
    folder = indexed(tmp_path)
    side = folder / "00000.tar.omniload-index"
    overwrite(side, side.stat().st_size // 2, b"\xff\xff")
    with pytest.raises(ShardError, match=r"damaged.*omniload index"):
        open_tars(folder).read(0)
    assert index_tars([folder], recipe=RECIPE).tars == {"indexed": 1, "measured": 0, "kept": 1}
    assert open_tars(folder).read(0).key == "0000"


def test_what_is_lost_is_counted_and_listed_with_its_place(tmp_path):
    folder = tar_folder(tmp_path, (40,))
    path = folder / "00000.tar"
    at, at_last = header_of(path, "0008.jpg"), header_of(path, "0039.jpg")
    overwrite(path, at, b"\xff" * 100)
    path.write_bytes(path.read_bytes()[: at_last + 600])
    done = CliRunner().invoke(app, ["index", str(folder), *TILES, "--json"])
    facts = json.loads(done.stdout)
    assert facts["rows"] == 38
    assert facts["damaged"] == 2
    assert facts["reasons"] == {"damaged tar": 2, "marks and images": 1}
    lines = rejected(folder)
    assert [line["where"].partition(" to ")[0] for line in lines] == [
        f"00000.tar bytes {at}",
        f"00000.tar bytes {at_last}",
        f"00000.tar sample at byte {header_of_json(path)}",
    ]
    assert facts["bytes_skipped"] == sum(
        int(end) - int(start)
        for start, end in (
            line["where"].removeprefix("00000.tar bytes ").split(" to ") for line in lines[:2]
        )
    )


def header_of_json(path):
    from omniload.tars.archive import Archive

    with Archive(path) as archive:
        return next(m.header for m in archive.members() if m[0] == "0008.json")


def test_images_outside_the_tar_are_refused_and_data_uris_are_not(tmp_path):
    from tests.data_makers import data_uri

    (tmp_path / "x.jpg").write_bytes(image_bytes())
    talk = turns("<image>What?", "That.")
    write_tar(
        tmp_path / "a.tar",
        [
            ("1.json", {"image": "x.jpg", "conversations": talk}),
            ("2.json", {"image": data_uri(image_bytes()), "conversations": talk}),
            ("3.json", {"image": "http://example.com/a.jpg", "conversations": talk}),
        ],
    )
    summary = index_tars([tmp_path], recipe=RECIPE)
    assert summary.manifest.num_rows == 1
    assert summary.reasons == {"image outside the tar": 2}
    assert open_tars(tmp_path).read(0).images == (image_bytes(),)


def test_members_of_a_key_that_are_not_neighbours_follow_the_rule_of_preprocess(tmp_path):
    members = [("a.jpg", image_bytes()), ("b.jpg", image_bytes()), ("b.txt", b"B"), ("a.txt", b"A")]
    (tmp_path / "t").mkdir()
    write_tar(tmp_path / "t" / "a.tar", members)
    summary = index_tars([tmp_path / "t"], recipe=RECIPE)
    preprocess_data(tmp_path / "t" / "a.tar", tmp_path / "out", recipe=RECIPE)
    assert summary.manifest.num_rows == 1
    lines = (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()
    reasons = [json.loads(line)["reason"] for line in lines]
    assert [line["reason"] for line in rejected(tmp_path / "t")] == reasons
    assert len(reasons) == 2


def test_an_indexed_folder_is_still_read_by_preprocess(tmp_path):
    folder = indexed(tmp_path / "t", (12,))
    summary = preprocess_data(folder, tmp_path / "out", recipe=RECIPE)
    assert summary.manifest.num_rows == 12


@pytest.mark.parametrize("as_glob", [False, True])
def test_several_tars_of_a_folder_are_one_source_in_order(tmp_path, as_glob):
    folder = tar_folder(tmp_path / "mine", (3, 3, 3))
    srcs = [folder / "*.tar"] if as_glob else sorted(folder.glob("*.tar"))
    summary = index_tars(srcs, recipe=RECIPE)
    assert summary.manifest.sources == {"mine": 9}
    assert [tar.name for tar in summary.manifest.tars] == ["00000.tar", "00001.tar", "00002.tar"]
    one = index_tars([folder / "00001.tar"], recipe=RECIPE, out=tmp_path / "one")
    assert one.manifest.sources == {"00001": 3}


def test_folders_of_tars_side_by_side_are_sources_of_one_set(tmp_path):
    for name in ("a", "b"):
        tar_folder(tmp_path / name, (3, 2))
    summary = index_tars([tmp_path / "a", tmp_path / "b"], recipe=RECIPE, out=tmp_path / "out")
    assert summary.manifest.sources == {"a": 5, "b": 5}
    assert [tar.name for tar in summary.manifest.tars][:2] == ["a/00000.tar", "a/00001.tar"]
    assert open_tars(tmp_path / "out").read(7).source == "b"


def test_a_folder_that_can_not_be_written_needs_another_one(tmp_path):
    (tmp_path / "file").write_text("x")
    folder = tar_folder(tmp_path / "t", (4,))
    with pytest.raises(ConfigError, match="--out must be a folder"):
        index_tars([folder], recipe=RECIPE, out=tmp_path / "file")
    with pytest.raises(ConfigError, match="no tar found"):
        index_tars([tmp_path / "none*.tar"], recipe=RECIPE)
    with pytest.raises(ConfigError, match="--workers must be at least 1"):
        index_tars([folder], recipe=RECIPE, workers=0)
    (folder / "x.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(ConfigError, match=r"x.tar is not a tar"):
        index_tars([folder], recipe=RECIPE)
    write_tar(tmp_path / "empty.tar", [("a.jpg", image_bytes())])
    with pytest.raises(ConfigError, match=r"no sample can be used of 1.*The first: "):
        index_tars([tmp_path / "empty.tar"], recipe=RECIPE, out=tmp_path / "e")


def test_any_number_of_processes_gives_the_same_index(tmp_path):
    folder = tar_folder(tmp_path / "t", (20, 12, 8, 4))
    index_tars([folder], recipe=RECIPE, out=tmp_path / "one")
    index_tars([folder], recipe=RECIPE, out=tmp_path / "two", workers=3)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_run_that_is_killed_goes_on_with_the_tars_that_are_left(tmp_path):
    folder = tar_folder(tmp_path, (300, 300, 300, 300))
    with started(folder, "--workers", 2) as process:
        end = time.monotonic() + 60
        while not sides(folder):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert not (folder / SET_NAME).exists()
    done = len(sides(folder))
    assert 1 <= done <= 4
    facts = json.loads(run_command(folder, "--json").stdout)
    assert facts["tars_kept"] >= done
    assert facts["rows"] == 1200
    assert not list(folder.glob("*.partial"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks for the processes in /proc")
def test_ctrl_c_ends_at_once_and_says_how_to_go_on(tmp_path):
    folder = tar_folder(tmp_path, (1500, 1500))
    with started(folder, "--workers", 2) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + 60
        while not children.read_text():  # else it is still importing
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=30)
    if process.returncode:
        assert "run the same command again" in said


def test_what_should_be_known_is_said_before_the_work(tmp_path):
    said = []
    folder = tar_folder(tmp_path, (4,))
    recipe = Recipe(tiling="qwen", min_pixels=784, max_pixels=3136)
    index_tars([folder], recipe=recipe, note=said.append)
    assert "its template is qwen-vl" in said[0]
    assert "added to the tokenizer" in said[1]


def test_the_summary_is_for_people_or_one_json_object(tmp_path):
    folder = tar_folder(tmp_path, (12, 8))
    done = run_command(folder)
    assert done.returncode == 0, done.stderr
    for text in ("2 tars", "2 indexed", "20 of 20 samples", "tokens", "tiles", "vocabulary"):
        assert text in done.stdout
    again = CliRunner().invoke(app, ["index", str(folder), *TILES, "--workers", "1"])
    assert "2 kept" in again.stdout
    facts = CliRunner().invoke(app, ["index", str(folder), *TILES, "--json"])
    assert json.loads(facts.stdout)["tars_kept"] == 2
    missing = CliRunner().invoke(app, ["index", str(folder / "none.tar")])
    assert "no tar found" in str(missing.exception)


def test_index_has_every_option_of_every_tiling():
    wanted = {option for options in TILINGS.values() for option in options}
    assert wanted <= set(inspect.signature(index_cmd.index).parameters)


def test_pixtral_breaks_between_rows_are_counted_as_preprocess_counts_them(tmp_path):
    folder = tar_folder(tmp_path / "tars", (6,))
    options = ["--tiling", "navit", "--max-side", "64", "--row-breaks", "--template", "pixtral"]
    done = CliRunner().invoke(app, ["index", str(folder), *options, "--workers", "1"])
    assert done.exit_code == 0, done.output
    recipe = Recipe(tiling="navit", max_side=64, row_breaks=True, template="pixtral")
    preprocess_data(folder, tmp_path / "shards", recipe=recipe, options=RunOptions(keep_order=True))
    assert lengths_of(open_tars(folder)) == lengths_of(open_shards(tmp_path / "shards"))
