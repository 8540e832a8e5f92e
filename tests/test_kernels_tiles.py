"""Tiles on the device: the interpreter, builds for three GPUs, guard pages, and a GPU if there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.kernels import reference

triton = pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).resolve().parent.parent
TYPES = {"u8": torch.uint8, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def interpreted(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )


# the truth itself


def by_hand(pixels, grids, size, merge):
    """Cells of images end to end, pixel by pixel as the text says; (n, 3, size, size)."""
    cells, start = [], 0
    for columns, rows in grids:
        stop = start + columns * rows * size * size * 3
        image = pixels[start:stop].reshape(rows * size, columns * size, 3)
        start = stop
        for top in range(0, rows, merge):
            for left in range(0, columns, merge):
                for row in range(top, top + merge):
                    for column in range(left, left + merge):
                        cell = image[row * size :, column * size :][:size, :size]
                        cells.append(cell.transpose(2, 0, 1))
    return np.array(cells).reshape(-1, 3, size, size)


@given(
    grids=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
    size=st.integers(1, 5),
    merge=st.integers(1, 3),
    frames=st.integers(1, 3),
)
def test_the_reference_cuts_as_the_text_says(grids, size, merge, frames):
    grids = [(columns * merge, rows * merge) for columns, rows in grids]
    count = sum(columns * rows for columns, rows in grids) * size * size * 3
    pixels = np.random.default_rng(count).integers(0, 256, count, dtype=np.uint8)
    given_grids = torch.tensor(grids, dtype=torch.int32).view(-1, 2)
    result = reference.patchify(
        torch.from_numpy(pixels), given_grids, patch=size, merge=merge, frames=frames
    )
    expected = np.repeat(by_hand(pixels, grids, size, merge)[:, :, None], frames, axis=2)
    assert np.array_equal(result.numpy(), expected.reshape(result.shape))
    if merge == 1:
        tiles = reference.images_to_tiles(torch.from_numpy(pixels), given_grids, size)
        assert np.array_equal(tiles.numpy(), by_hand(pixels, grids, size, 1))


@pytest.mark.parametrize(
    ("grids", "merge", "message"),
    [
        ([(2, 1)], 1, r"got 192 bytes for the grids \[\[2, 1\]\]"),
        ([(3, 2)], 1, r"got 192 bytes"),
        ([(4, 1)], 2, r"multiples of merge=2, got \[4, 1\]"),
        ([(-2, -2)], 1, r"multiples of merge=1, got \[-2, -2\]"),
        ([], 1, r"in 0 images"),
    ],
)
def test_the_reference_refuses_grids_of_other_pixels(grids, merge, message):
    pixels = torch.zeros(4 * 48, dtype=torch.uint8)
    given_grids = torch.tensor(grids, dtype=torch.int32).view(-1, 2)
    with pytest.raises(ConfigError, match=message):
        reference.patchify(pixels, given_grids, patch=4, merge=merge)


# the interpreter


def test_kernels_equal_the_reference_in_the_interpreter():
    done = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_tiles.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "13 passed" in done.stdout


GUARDED = """
import ctypes, mmap, sys
import torch
from omniload.kernels import reference, tiles

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def guarded(tensor):
    # the page after it can't be touched, nor the one before the page in which it begins
    num_bytes = tensor.numel() * tensor.element_size()
    page = mmap.PAGESIZE
    pages = -(-num_bytes // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    raw = whole[(pages + 1) * page - num_bytes : (pages + 1) * page]
    copy = raw.view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    for protected in (address, address + (pages + 1) * page):
        assert libc.mprotect(protected, page, 0) == 0
    kept.append(memory)
    return copy

kept = []
real = torch.empty
case = sys.argv[1]
# outputs lie before a guard page too
torch.empty = lambda *args, **options: guarded(real(*args, **options).zero_())
table = guarded(reference.normalize_table())
pixels = guarded(torch.full((6 * 75,), 255, dtype=torch.uint8))
if case == "as they are":
    tiles.normalize_tiles(pixels.view(6, 3, 5, 5), table)
    for grids in ([(2, 2), (2, 1)], [(6, 1)], [(1, 1)] * 6, [(9, 9)], [(2**31 - 1,) * 2] * 3,
                  [(1, 1), (-7, 3)]):
        grids = guarded(torch.tensor(grids, dtype=torch.int32))
        tiles.images_to_tiles(pixels, grids, 5, table)
        tiles.patchify(pixels, grids, patch=5, merge=2, frames=2)
elif case == "plane too long":
    out = guarded(real(6 * 75))
    tiles.normalize_kernel[(18, 1)](pixels, table, out, 26, block=32)
print("no fault")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made as Linux makes them")
def test_kernels_touch_nothing_outside_their_tensors():
    done = interpreted("-c", GUARDED, "as they are")
    assert done.stdout == "no fault\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made as Linux makes them")
def test_the_guard_pages_catch_a_kernel_that_does():
    done = interpreted("-c", GUARDED, "plane too long")
    assert done.returncode < 0
    assert done.stdout == ""


# builds for GPUs that need not be there

NORMALIZE = {"tiles": "*u8", "table": "*{t}", "out": "*{t}", "plane": "i32", "block": 4096}
CELLS = {
    "pixels": "*u8",
    "grids": "*i32",
    "first_cells": "*i64",
    "table": "*{t}",
    "out": "*{t}",
    "num_images": "i32",
    "num_bytes": "i64",
    "num_steps": "i32",
}
TILE = {"size": 448, "merge": 1, "frames": 1, "block": 4096}
QWEN = {"size": 14, "merge": 2, "frames": 2, "block": 256}
VARIANTS = {
    **{f"normalize to {t}": ("normalize_kernel", NORMALIZE, t) for t in ("fp32", "bf16", "fp16")},
    **{
        f"{name} to {t}": (
            "cells_kernel",
            {**CELLS, **shape, "has_table": t != "u8"},
            t,
        )
        for name, shape in (("tiles", TILE), ("qwen patches", QWEN))
        for t in ("u8", "fp32", "bf16", "fp16")
    },
    # a value of 1 is compiled in
    "one image": ("cells_kernel", {**CELLS, **QWEN, "has_table": True, "num_images": 1,
                                   "num_steps": 1, "num_bytes": "i32"}, "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles_for(variant, capability):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from omniload.kernels import tiles

    name, arguments, letters = VARIANTS[variant]
    constants = {key: value for key, value in arguments.items() if not isinstance(value, str)}
    signature = {
        key: value.format(t=letters) if isinstance(value, str) else "constexpr"
        for key, value in arguments.items()
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(getattr(tiles, name), signature, constants, aligned)
    # as the kernels are launched; left open, Triton 3.9 warns that its default will change
    options = {"enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(built.asm["cubin"]) > 1000


# a GPU


@pytest.fixture
def device():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("letters", ["fp32", "bf16", "fp16"])
def test_a_gpu_gives_the_bits_of_the_reference(device, letters):
    from omniload.kernels import tiles

    table = reference.normalize_table(dtype=TYPES[letters])
    rng = np.random.default_rng(0)
    for shape in ((13, 3, 448, 448), (1, 3, 1, 1), (5, 3, 17, 33), (16384, 3, 14, 14)):
        given_tiles = torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8))
        result = tiles.normalize_tiles(given_tiles.to(device), table.to(device))
        assert torch.equal(result.cpu(), reference.normalize_tiles(given_tiles, table))
    for grids, options in (
        ([(4, 3), (1, 1), (2, 6)], {"patch": 448}),
        ([(64, 48), (2, 2), (28, 36)] * 5, {"patch": 14, "merge": 2, "frames": 2}),
        ([(31, 7)], {"patch": 16}),
    ):
        cells = sum(columns * rows for columns, rows in grids)
        pixels = rng.integers(0, 256, 3 * cells * options["patch"] ** 2, dtype=np.uint8)
        pixels, given_grids = torch.from_numpy(pixels), torch.tensor(grids, dtype=torch.int32)
        on_device = (pixels.to(device), given_grids.to(device))
        result = tiles.patchify(*on_device, **options, table=table.to(device))
        assert torch.equal(
            result.cpu(), reference.patchify(pixels, given_grids, **options, table=table)
        )


@pytest.mark.gpu
def test_more_values_than_an_int32_counts(device):
    from omniload.kernels import tiles

    table = reference.normalize_table(dtype=torch.bfloat16, device=device)
    given_tiles = torch.zeros((1190, 3, 1024, 600), dtype=torch.uint8, device=device)
    given_tiles[-1] = 7
    result = tiles.normalize_tiles(given_tiles, table)
    assert result.numel() > 2**31
    assert torch.equal(result[-1, :, 0, 0], table[:, 7])
    assert torch.equal(result[-2, :, -1, -1], table[:, 0])


def bench_tiles(*arguments):
    import typer
    from typer.testing import CliRunner

    from omniload.tools.bench_tiles import tiles

    app = typer.Typer()
    app.command()(tiles)
    return CliRunner().invoke(app, arguments)


def test_the_benchmark_says_that_it_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"needs a GPU .* `omniload bench images`"):
        raise bench_tiles().exception


def test_the_benchmark_times_nothing_that_differs_from_the_reference():
    done = interpreted("-c", BENCH)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "images to tiles, bfloat16 does not give what the reference gives" in done.stdout


BENCH = """
import torch
from omniload.tools import bench_tiles
cases = bench_tiles._cases(1, torch.device("cpu"))
by_name = {case.name: case for case in cases}
sizes = {name: case.num_bytes // (3 * 448 * 448) for name, case in by_name.items()}
assert sizes == {
    "normalize, bfloat16": 3, "normalize, torch, bfloat16": 3, "images to tiles, bfloat16": 3,
    "qwen patches, bfloat16": 5, "normalize, float32": 5, "normalize, torch, float32": 5,
    "images to tiles, float32": 5, "qwen patches, float32": 9, "copy": 8,
}, sizes
for name in ("normalize, bfloat16", "normalize, torch, bfloat16", "normalize, float32",
             "images to tiles, float32", "copy"):
    bench_tiles._check(by_name[name])
case = by_name["images to tiles, bfloat16"]
call = case.call
wrong = bench_tiles._Case(
    name=case.name, call=lambda: call() + 1, expected=case.expected, num_bytes=1
)
try:
    bench_tiles._check(wrong)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.gpu
def test_the_benchmark_reports_shares_of_the_peak(device):
    done = bench_tiles("--num-tiles", "16", "--repeats", "3", "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.output)["rows"]
    assert len(rows) == 9
    assert all(row["us"] > 0 for row in rows)
