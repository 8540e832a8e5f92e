"""Compiled code is cached only where nobody else can write, and compiling says so."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from omniload._jit import cache_folder

ROOT = Path(__file__).resolve().parent.parent
MODULE = """
from omniload._jit import jit

@jit
def callee(x):
    return x + 1

@jit
def double(x):
    return callee(x) * 2
"""
PROGRAM = (
    "import logging, sys; logging.basicConfig(stream=sys.stdout); sys.path.insert(0, '.');"
    "import numba; before = numba.config.CACHE_DIR; import omniload.hot;"
    "print('result', omniload.hot.double(4), before == numba.config.CACHE_DIR)"
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    # /tmp has the sticky bit and the folders of pytest are private: nobody else can write here
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(tmp_path, **environment):
    package = tmp_path / "hot_package"
    package.mkdir(exist_ok=True)
    (package / "hot.py").write_text(MODULE)
    program = f"import omniload; omniload.__path__.append({str(package)!r}); " + PROGRAM
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_cold_compile_logs_one_line_and_the_next_process_reads_the_cache(tmp_path, home):
    cold, warm = run(tmp_path), run(tmp_path)
    assert "result 10 True" in cold
    assert cold.count("compiling omniload.hot.double") == 1
    assert f"kept in {home / 'omniload'}" in cold
    assert "callee" not in cold
    assert warm.strip() == "result 10 True"
    assert list((home / "omniload").rglob("*.nbc"))
    assert not list((tmp_path / "hot_package").rglob("*.nbc"))


def test_without_a_safe_folder_nothing_is_cached(tmp_path, home):
    (home / "omniload").mkdir(parents=True)
    (home / "omniload").chmod(0o777)
    text = run(tmp_path)
    assert "in every process: others can write to" in text
    assert "result 10" in text
    assert not list(tmp_path.rglob("*.nbc"))


def test_disabled_jit_leaves_plain_functions(tmp_path, home):
    assert run(tmp_path, NUMBA_DISABLE_JIT="1").strip() == "result 10 True"


def test_folder_is_private(home):
    folder, reason = cache_folder()
    assert folder == home / "omniload"
    assert reason == ""
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_above_that_others_can_write_is_refused(home):
    home.mkdir()
    home.chmod(0o775)
    assert cache_folder() == (None, f"others can write to {home}")
    home.chmod(0o1777)  # sticky: others can add to it, not replace what is ours
    assert cache_folder()[0] == home / "omniload"


def test_a_folder_that_cannot_be_made_gives_the_reason(home, monkeypatch):
    home.write_text("a file, not a folder")
    folder, reason = cache_folder()
    assert folder is None
    assert "no folder for it" in reason


def test_cache_lies_in_the_cache_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder()[0] == tmp_path / "xdg" / "omniload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder()[0] == tmp_path / ".cache" / "omniload"


def test_folders_made_on_the_way_are_private_whatever_the_umask(home, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(home / "a" / "b"))
    before = os.umask(0o002)
    try:
        assert cache_folder()[0] == home / "a" / "b" / "omniload"
    finally:
        os.umask(before)


def test_planning_leaves_the_interpreter_to_other_threads():
    from omniload.grouping.fit import fit_groups

    if hasattr(fit_groups, "targetoptions"):  # else NUMBA_DISABLE_JIT is set
        assert fit_groups.targetoptions["nogil"]
