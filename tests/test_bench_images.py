import json
import warnings

import pytest
import torch
import typer
from typer.testing import CliRunner

from omniload.errors import ConfigError
from omniload.images import image_size, pil_info
from omniload.tools import bench_images, doctor


def run(command, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments)


def test_bench_images_compares_both_ways_and_says_where_the_time_goes():
    threads = torch.get_num_threads()
    done = run(
        bench_images.images, "--image", "photo:1000x500", "--image", "page:100x100",
        "--batch", "2", "--max-tiles", "2", "--repeats", "1", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    parts = ["- decode", "- grid", "- thumb", "- rest"]
    assert [(row["image"], row["way"]) for row in found["rows"]] == [
        ("photo:1000x500", way) for way in ("float32", "uint8", "stored", *parts)
    ] + [("page:100x100", way) for way in ("float32", "uint8", *parts) if way != "- thumb"]
    for row in found["rows"]:
        if row["way"] == "float32":
            assert row["KB/tile"] == 4 * 588
            assert row["differ %"] < 5
            assert row["levels"] <= (0 if pil_info().simd else 30)
        if row["way"] == "uint8":
            assert row["KB/tile"] == 588
            assert row["times"] == 1
    assert torch.get_num_threads() == threads


def test_ways_that_give_other_images_are_not_timed(monkeypatch):
    monkeypatch.setattr(bench_images, "_normalized", lambda tile: torch.zeros(3, 448, 448))
    with pytest.raises(RuntimeError, match="give different images"):
        raise run(bench_images.images, "--image", "photo:64x64", "--repeats", "1").exception


@pytest.mark.parametrize("name", ["photo:640x480", "page:123x145"])
def test_rendered_images_have_the_size_asked_for(name):
    data = bench_images._encoded(name, 0)
    assert "{}x{}".format(*image_size(data)) == name.partition(":")[2]
    assert data == bench_images._encoded(name, 0)
    assert data != bench_images._encoded(name, 1)


@pytest.mark.parametrize("name", ["640x480", "photo:640", "scan:6x6", "photo:0x5", "photo:6x-1"])
def test_other_images_are_refused(name):
    with pytest.raises(ConfigError, match="--image must"):
        raise run(bench_images.images, "--image", name).exception


@pytest.fixture
def fresh_choice(monkeypatch):
    from omniload.images.resize import _checked, resize_backend

    resize_backend.cache_clear()
    _checked.cache_clear()
    yield monkeypatch
    resize_backend.cache_clear()
    _checked.cache_clear()


@pytest.mark.parametrize(
    ("name", "state", "text"),
    [
        ("", "ok", "; vector code of this processor: "),
        ("torch", "ok", "torch; vector code of this processor: "),
        ("pillow", "note", "pixels differ slightly"),
        ("opencv", "problem", "got 'opencv'"),
    ],
)
def test_doctor_says_what_resizes(fresh_choice, name, state, text):
    fresh_choice.setenv("OMNILOAD_RESIZE", name)
    if name == "pillow" and pil_info().simd:
        pytest.skip("PIL is Pillow-SIMD")
    if name in ("", "torch") and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("this processor has no AVX2")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        done = run(doctor.doctor, "--json")
    (finding,) = (item for item in json.loads(done.output) if item["part"] == "resize")
    assert finding["state"] == state
    assert text in finding["found"]
    assert bool(finding["remedy"]) == (state != "ok")
