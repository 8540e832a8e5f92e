"""Output that is there already: checked, kept until it can be replaced, and not made twice."""

import json
import os

import pytest
from typer.testing import CliRunner

from omniload.errors import ConfigError, SampleError, ShardError
from omniload.shards import open_shards, verify_shards
from omniload.tools import preprocess_run, replace
from omniload.tools.cli import app
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe, RunOptions
from tests.data_makers import llava_set, turns, write_jsonl

SMALL = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)


class Crash(BaseException):
    pass


def run(src, out, *, seed=0, strict=False, **settings):
    options = RunOptions(seed=seed, strict=strict)
    return preprocess_data(src, out, recipe=SMALL, options=options, **settings)


def crash_after(monkeypatch, calls):
    real = preprocess_run.run_pieces

    def crashing(*args, **options):
        for number, receipt in enumerate(real(*args, **options)):
            yield receipt
            if number + 1 == calls:
                raise Crash

    monkeypatch.setattr(preprocess_run, "run_pieces", crashing)


def killed_run(src, out, pieces=2, **settings):
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash_after(monkeypatch, pieces)
        with pytest.raises(Crash):
            run(src, out, **settings)


@pytest.fixture
def raw(tmp_path):
    records = [{"id": i, "conversations": turns("q", f"{i}")} for i in range(600)]
    for i in range(0, 600, 5):
        records[i] = {"id": i, "conversations": []}
    return write_jsonl(tmp_path / "a.jsonl", records)


def content(folder):
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def flip(path, at=-100):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


# --- going on --------------------------------------------------------------------------------


def test_strict_fails_on_what_an_earlier_run_rejected(raw, tmp_path):
    killed_run(raw, tmp_path / "out")
    with pytest.raises(SampleError, match=r"is rejected: .* at least one turn.*--strict"):
        run(raw, tmp_path / "out", strict=True)
    run(raw, tmp_path / "out")
    with pytest.raises(SampleError, match="--strict"):
        run(raw, tmp_path / "out", strict=True)


def test_a_piece_with_a_flipped_byte_is_made_again(raw, tmp_path):
    run(raw, tmp_path / "whole")
    killed_run(raw, tmp_path / "out")
    flip(min((tmp_path / "out").glob("shard-*.arrow")))
    assert run(raw, tmp_path / "out").resumed_pieces == 1
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_finished_run_is_not_done_again(raw, tmp_path):
    first = run(raw, tmp_path / "out")
    before = content(tmp_path / "out")
    again = run(raw, tmp_path / "out")
    assert again.already_complete
    assert again.reasons == first.reasons == {"no turn": 120}
    assert content(tmp_path / "out") == before
    args = ["preprocess", str(raw), str(tmp_path / "cli"), "--workers", "1"]
    assert "already complete" not in CliRunner().invoke(app, args).stdout
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0
    assert "already complete" in done.stdout
    with pytest.raises(ConfigError, match="complete set"):
        run(raw, tmp_path / "out", seed=1)


# --- replacing -------------------------------------------------------------------------------


def test_overwrite_leaves_the_old_set_whole_until_the_new_one_is(raw, tmp_path):
    out = tmp_path / "out"
    run(llava_set(tmp_path / "old", 30), out)
    old = content(out)
    killed_run(raw, out, overwrite=True)
    assert content(out) == old
    assert len(open_shards(out)) == 30
    assert run(raw, out, overwrite=True).resumed_pieces == 2
    assert len(open_shards(out)) == 480
    run(raw, tmp_path / "new")
    assert content(out) == content(tmp_path / "new")
    assert not (out / ".overwrite").exists()


def test_an_overwrite_with_other_settings_does_not_go_on_with_the_killed_one(raw, tmp_path):
    out = tmp_path / "out"
    run(raw, out)
    killed_run(raw, out, overwrite=True, seed=1)
    assert run(raw, out, overwrite=True, seed=2).resumed_pieces == 0
    run(raw, tmp_path / "new", seed=2)
    assert content(out) == content(tmp_path / "new")


@pytest.mark.parametrize("moves", [0, 2, 6])
def test_a_kill_while_a_set_is_replaced_costs_nothing(raw, tmp_path, monkeypatch, moves):
    out = tmp_path / "out"
    run(llava_set(tmp_path / "old", 30), out)
    killed_run(raw, out, overwrite=True)
    left = iter(range(moves))
    real = os.replace

    def failing(self, target):
        if ".overwrite" in str(self.parent) and ".partial" not in self.name:
            if next(left, None) is None:
                raise Crash
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(replace.Path, "replace", failing)
        with pytest.raises(Crash):
            run(raw, out, overwrite=True)
    with pytest.raises(ShardError, match=r"did not end|no manifest"):
        open_shards(out)
    with pytest.raises(ConfigError, match="complete set"):
        run(raw, out, seed=3)
    assert run(raw, out).already_complete
    run(raw, tmp_path / "new")
    assert content(out) == content(tmp_path / "new")


@pytest.mark.parametrize("below", ["file.txt/out", "file.txt/a/out"])
def test_an_out_that_can_not_be_made_is_an_error_of_ours(raw, tmp_path, below):
    (tmp_path / "file.txt").touch()
    with pytest.raises(
        ConfigError, match=r"OUT must be a folder that can be written.*[Nn]ot a dir"
    ):
        run(raw, tmp_path / below)


# --- verify -----------------------------------------------------------------------------------


def test_verify_names_each_damaged_file_and_ends_with_1(raw, tmp_path):
    out = tmp_path / "out"
    run(raw, out)
    done = CliRunner().invoke(app, ["verify", str(out)])
    assert done.exit_code == 0
    assert "all as it was written" in done.stdout
    first, second, third, *_ = sorted(out.glob("shard-*.arrow"))
    flip(first)
    second.unlink()
    third.write_bytes(third.read_bytes()[:-1])
    flip(out / "index.arrow")
    assert set(verify_shards(out)) == {first.name, second.name, third.name, "index.arrow"}
    done = CliRunner().invoke(app, ["verify", str(out)])
    assert done.exit_code == 1
    for path in (first, second, third):
        assert f"damaged: {path}" in done.output
    done = CliRunner().invoke(app, ["verify", str(out), "--json"])
    assert done.exit_code == 1
    assert "xxh3_128 must be" in json.loads(done.stdout)["damaged"][str(first)]


def test_verify_says_how_far_it_is(raw, tmp_path):
    run(raw, tmp_path / "out")
    seen = []
    assert verify_shards(tmp_path / "out", tick=lambda *done: seen.append(done)) == {}
    assert seen == sorted(seen)
    assert (
        seen[-1][0]
        == seen[-1][1]
        == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.arrow"))
    )
