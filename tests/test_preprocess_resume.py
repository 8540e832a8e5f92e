"""A run that is killed, in real processes, and run again."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from omniload.errors import ConfigError
from omniload.shards import open_shards
from omniload.tools import preprocess_run
from omniload.tools.preprocess_run import preprocess_data
from omniload.tools.recipe import Recipe, RunOptions
from tests.data_makers import image_bytes, turns, write_jsonl

ROOT = Path(__file__).resolve().parent.parent
TILES = ("--tile-size", "28", "--max-tiles", "4", "--tokens-per-tile", "4")
SMALL = Recipe(tile_size=28, max_tiles=4, tokens_per_tile=4)


def command(src, out, *more):
    head = [sys.executable, "-m", "omniload", "preprocess", str(src), str(out)]
    return [*head, *TILES, "--json", *map(str, more)]


def run_command(src, out, *more):
    return subprocess.run(command(src, out, *more), capture_output=True, text=True, cwd=ROOT)


def heed_interrupts():
    # a shell starts background jobs with SIGINT ignored, and children inherit that
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def started(src, out, *more):
    """A running command, in a process group of its own; nothing of it is left at the end."""
    process = subprocess.Popen(
        command(src, out, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=heed_interrupts,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_until(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)


def receipts(out):
    return len(list((out / ".preprocess").glob("[0-9]*.json")))


def wait_for_end_of(group, seconds=30):
    end = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(group, 0)
            time.sleep(0.02)
        raise AssertionError("processes are left")


def content(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raw")
    (folder / "a.jpg").write_bytes(image_bytes(0, (320, 240)))
    records = [
        {"id": i, "image": "a.jpg", "conversations": turns("<image>q", f"{i} " * (1 + i % 50))}
        for i in range(1100)
    ]
    records[700] = {"id": "bad", "image": "none.jpg", "caption": "x"}
    return write_jsonl(folder / "a.jsonl", records)


@pytest.fixture(scope="module")
def unbroken(raw, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    done = run_command(raw, out, "--workers", 1)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["read"], facts["written"], facts["rejected"]) == (1100, 1099, 1)
    return content(out)


def test_a_run_killed_again_and_again_gives_the_bytes_of_an_unbroken_one(raw, unbroken, tmp_path):
    out = tmp_path / "out"
    done_before = 0
    for workers, more in ((2, 1), (1, 2)):
        with started(raw, out, "--workers", workers) as process:
            target = done_before + more
            wait_until(lambda target=target: receipts(out) >= target, process)
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            wait_for_end_of(process.pid)  # workers end by themselves
        done_before = receipts(out)
        assert not (out / "manifest.json").exists()
    done = run_command(raw, out, "--workers", 2)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["resumed_pieces"] == done_before >= 3
    assert (facts["read"], facts["rejected"]) == (1100, 1)
    assert content(out) == unbroken


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="finds workers in /proc")
def test_a_killed_worker_ends_the_run_with_the_pieces_named(raw, unbroken, tmp_path):
    out = tmp_path / "out"
    with started(raw, out, "--workers", 2) as process:
        wait_until(lambda: receipts(out) >= 2, process)
        os.kill(worker_of(process.pid), signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
    text = " ".join(stderr.split())
    assert "a worker process was killed while it did one of the pieces" in text
    assert "run the same command again" in text
    assert "Traceback" not in text
    assert run_command(raw, out, "--workers", 1).returncode == 0
    assert content(out) == unbroken


def worker_of(pid):
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    raise AssertionError("no worker found")


def test_an_interrupted_run_ends_soon_and_leaves_no_process(raw, unbroken, tmp_path):
    out = tmp_path / "out"
    with started(raw, out, "--workers", 2) as process:
        wait_until(lambda: receipts(out) >= 1, process)
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert process.returncode == 130
        assert "run the same command again to go on" in stderr
        assert "Traceback" not in stderr
        wait_for_end_of(process.pid)
    assert run_command(raw, out, "--workers", 2).returncode == 0
    assert content(out) == unbroken


# --- the same in this process ----------------------------------------------------------------


def run(src, out, *, recipe=SMALL, **settings):
    options = RunOptions(seed=settings.pop("seed", 0))
    return preprocess_data(src, out, recipe=recipe, options=options, **settings)


class Crash(BaseException):
    pass


def crash_after(monkeypatch, calls):
    """End the run, as a kill would, after some pieces."""
    real = preprocess_run.run_pieces

    def crashing(*args, **options):
        for number, receipt in enumerate(real(*args, **options)):
            yield receipt
            if number + 1 == calls:
                raise Crash

    monkeypatch.setattr(preprocess_run, "run_pieces", crashing)


@pytest.fixture
def killed(raw, tmp_path):
    """A folder with an unfinished run: two pieces are done."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        crash_after(monkeypatch, 2)
        with pytest.raises(Crash):
            run(raw, tmp_path / "out")
    assert receipts(tmp_path / "out") == 2
    return tmp_path / "out"


def test_an_unfinished_run_with_other_settings_is_refused_and_they_are_named(raw, killed):
    with pytest.raises(ConfigError, match=r"unfinished run.* seed was 0, is 1\. Run with the same"):
        run(raw, killed, seed=1)
    other = Recipe(tile_size=28, max_tiles=6, tokens_per_tile=4)
    with pytest.raises(ConfigError, match=r"tiling\.max_tiles was 4, is 6"):
        run(raw, killed, recipe=other)
    assert run(raw, killed, seed=1, overwrite=True).resumed_pieces == 0
    assert len(open_shards(killed)) == 1099


def test_a_run_that_got_nowhere_stands_in_nobodys_way(raw, unbroken, tmp_path):
    out = tmp_path / "out"
    (out / ".preprocess").mkdir(parents=True)
    (out / ".preprocess" / "run.json").write_text("{}")
    for name in ("shard-00000-007.arrow", "shard-00001-000.arrow.17.partial"):
        (out / name).write_bytes(b"of another run")
    run(raw, out)
    assert content(out) == unbroken


def test_a_changed_input_is_noticed(raw, killed):
    text = raw.read_text()
    facts = raw.stat()
    try:
        os.utime(raw, ns=(0, 0))
        with pytest.raises(ConfigError, match=r"input files have changed \(a\.jsonl\)"):
            run(raw, killed)
    finally:
        raw.write_text(text)
        os.utime(raw, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert run(raw, killed).resumed_pieces == 2


def test_shards_that_vanished_or_were_cut_are_made_again(raw, unbroken, killed):
    first, second = sorted(killed.glob("shard-*.arrow"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    assert run(raw, killed).resumed_pieces == 0
    assert content(killed) == unbroken


def test_a_run_killed_after_its_manifest_only_tidies_up(raw, unbroken, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def crash(*args, **options):
        raise Crash

    with monkeypatch.context() as patch:
        fake = SimpleNamespace(rmtree=crash, copyfileobj=shutil.copyfileobj)
        patch.setattr(preprocess_run, "shutil", fake)
        with pytest.raises(Crash):
            run(raw, out)
    assert (out / "manifest.json").exists()
    done = run(raw, out)
    assert done.resumed_pieces == done.pieces
    assert content(out) == unbroken


def test_two_runs_do_not_write_to_one_folder(raw, killed):
    lock = os.open(killed, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `omniload preprocess` is writing"):
            run(raw, killed)
    finally:
        os.close(lock)
    assert run(raw, killed).resumed_pieces == 2


# --- exit codes ------------------------------------------------------------------------------


def test_exit_codes_and_messages_are_for_people(raw, tmp_path):
    done = run_command(raw, tmp_path / "out", "--strict", "--workers", 1)
    assert done.returncode == 1
    assert "sample 'bad' (a.jsonl line 701) is rejected" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    done = run_command(tmp_path / "none", tmp_path / "out2")
    assert done.returncode == 1
    assert "no data found" in done.stderr
    assert run_command(raw, tmp_path / "out2", "--oversize", "maybe").returncode == 2


def test_a_file_that_can_not_grow_ends_the_run_with_words_and_it_goes_on_later(
    raw, unbroken, tmp_path
):
    out = tmp_path / "out"
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    code = f"{limited}; sys.argv[:] = {command(raw, out, '--workers', 1)[2:]!r}"
    code += "; from omniload.tools.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stderr.split())
    assert "piece 0 failed" in text
    assert "run the same command again" in text
    assert "Traceback" not in text
    assert run_command(raw, out, "--workers", 1).returncode == 0
    assert content(out) == unbroken
