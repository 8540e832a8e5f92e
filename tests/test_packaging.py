"""Build, install and use the package as a stranger would: in a fresh environment, elsewhere."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache", "demo-out"
)

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]


def run(*command, cwd, **env):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def fresh_venv(folder):
    """Make an environment that sees our dependencies, but not our own editable install."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd="/").strip())
    # a path in a .pth file is added to sys.path without reading the .pth files that lie there
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python, site


def install(python, *what, cwd, **env):
    site = run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd="/").strip()
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run(*pip, "--no-build-isolation", "--no-index", *what, cwd=cwd, **env)
    return Path(site)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    copy = tmp_path_factory.mktemp("source") / "checkout"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    return copy


@pytest.fixture(scope="module")
def built(source, tmp_path_factory):
    """Return the sdist and the wheel that is built from the sdist, not from the checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


IMPORT_ALL = """
import importlib, json, pkgutil, sys
import omniload
names = ["omniload"]
# in a checkout the last two lie beside the package, so a walk over its folder misses them
for top in ("omniload", "omniload.kernels", "omniload.tools"):
    folders = importlib.import_module(top).__path__
    names += [found.name for found in pkgutil.walk_packages(folders, top + ".")]
optional = {"triton", "deepspeed", "webdataset", "ray", "s3fs", "transformers", "accelerate",
            "lightning", "megatron"}
for name in names:
    if name == "omniload.__main__":
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] not in optional:
            raise
print(json.dumps({"names": names, "file": omniload.__file__}))
"""


def check_use(python, folder):
    printed = run(python, "-W", "error", "-c", IMPORT_ALL, cwd=folder)
    found = json.loads(printed.splitlines()[-1])  # deepspeed logs to stdout when it is imported
    wanted = {"omniload.tools.cli", "omniload.kernels.reference", "omniload.loader"}
    assert wanted <= set(found["names"])
    assert "Usage" in run(python.parent / "omniload", "--help", cwd=folder)
    assert "Usage" in run(python, "-m", "omniload", "--help", cwd=folder)
    return found


def test_wheel_is_one_for_all_pythons_and_holds_omniload_alone(built):
    sdist, wheel = built
    assert wheel.name.startswith("omniload_vlm-")
    assert "-cp311-abi3-" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"omniload"}
    for folder in ("kernels", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert f"omniload/{path.relative_to(ROOT).as_posix()}" in names
    for path in (ROOT / "omniload").rglob("*"):
        if path.is_file() and path.suffix in {".py", ".pyi", ".json", ".typed"}:
            assert path.relative_to(ROOT).as_posix() in names
    assert any(name.startswith("omniload/_C.abi3") for name in names)
    with tarfile.open(sdist) as archive:
        shipped = {name.split("/", 1)[-1] for name in archive.getnames()}
    assert {"csrc/binding.cpp", "csrc/pack.h", "kernels/__init__.py", "LICENSE"} <= shipped


def test_wheel_works_in_a_fresh_environment(built, tmp_path):
    python, site = fresh_venv(tmp_path / "venv")
    install(python, built[1], cwd=tmp_path)
    landed = {path.name for path in site.iterdir() if path.name != "dependencies.pth"}
    assert {name for name in landed if not name.endswith(".dist-info")} <= {
        "omniload",
        "__pycache__",
    }
    found = check_use(python, tmp_path)
    assert Path(found["file"]).is_relative_to(site)
    assert "True" in run(
        python, "-c", "from omniload import _native; print(_native.available())", cwd=tmp_path
    )


@pytest.mark.parametrize("editable", [False, True])
def test_plain_and_editable_installs_work_from_any_folder(source, tmp_path, editable):
    python, _ = fresh_venv(tmp_path / "venv")
    what = ["-e", source] if editable else [source]
    install(python, *what, cwd=tmp_path)
    check_use(python, tmp_path)
    check_use(python, source)


def test_without_a_compiler_the_install_works_and_numpy_steps_in(source, tmp_path):
    python, _ = fresh_venv(tmp_path / "venv")
    shutil.rmtree(source / "build", ignore_errors=True)
    install(python, source, cwd=tmp_path, CC="/bin/false", CXX="/bin/false")
    code = (
        "from omniload import _native, errors\n"
        "assert not _native.available()\n"
        "try:\n    _native.require()\n"
        "except errors.NativeUnavailableError as error:\n    print(error)\n"
    )
    assert "compiler" in run(python, "-c", code, cwd=tmp_path)


def test_a_bare_checkout_runs_without_an_install(source, tmp_path):
    python, _ = fresh_venv(tmp_path / "venv")
    assert "Usage" in run(python, "-m", "omniload", "--help", cwd=source)
