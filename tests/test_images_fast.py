"""Every way to decode, turn, resize and cut gives the same pixels, whoever asks, wherever."""

import io
import multiprocessing
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from omniload import _native
from omniload.errors import ConfigError
from omniload.images import (
    AnyResTiles,
    InternVLTiles,
    NaViTPatches,
    cut_tiles,
    decode,
    image_size,
    pil_info,
    resize,
    resize_backend,
    tiles,
)
from omniload.images.cells import write_cells
from omniload.images.decode import _upright
from omniload.images.resize import write_resized
from tests.images_corpus import encode, exif, noise, photo

ROOT = Path(__file__).resolve().parent.parent
native = pytest.mark.skipif(not _native.available(), reason="the extension is not built")
NATIVE = pytest.param("native", marks=native)
BACKENDS = [NATIVE, "numpy"]
SMALL = InternVLTiles(size=28, max_tiles=6)
sides = st.one_of(st.just(1), st.integers(2, 40), st.sampled_from([31, 32, 33, 64, 97]))
long_sides = st.one_of(sides, st.integers(41, 700))


@pytest.fixture
def fresh_choice(monkeypatch):
    """Forget the choice of a backend before and after a test that changes what it hangs on."""
    module = sys.modules["omniload.images.resize"]
    for cached in (module.resize_backend, module._checked):
        cached.cache_clear()
    yield monkeypatch
    for cached in (module.resize_backend, module._checked):
        cached.cache_clear()


# turning


@pytest.mark.parametrize("backend", BACKENDS)
@given(width=sides, height=sides, orientation=st.integers(1, 8))
def test_turns_are_those_of_exif(backend, width, height, orientation):
    image = noise(width, height, seed=width)
    tagged = Image.fromarray(image)
    tagged.getexif()[274] = orientation
    expected = np.asarray(ImageOps.exif_transpose(tagged))
    turned = _upright(image, orientation, backend)
    assert turned.flags.c_contiguous
    assert np.array_equal(turned, expected)


# cells


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    columns=st.integers(1, 4), rows=st.integers(1, 4), width=st.integers(1, 40),
    height=st.integers(1, 9),
)  # fmt: skip
def test_cells_are_those_of_the_grid(backend, columns, rows, width, height):
    image = noise(columns * width, rows * height)
    out = np.zeros((rows * columns, 3, height, width), np.uint8)
    write_cells(image, columns, rows, out=out, backend=backend)
    for row in range(rows):
        for column in range(columns):
            cell = image[row * height :, column * width :][:height, :width]
            assert np.array_equal(out[row * columns + column], cell.transpose(2, 0, 1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_need_not_be_contiguous(backend):
    image = noise(12, 8)
    expected = np.zeros((6, 3, 4, 4), np.uint8)
    write_cells(image, 3, 2, out=expected, backend=backend)
    turned = np.ascontiguousarray(image[::-1, ::-1])[::-1, ::-1]
    wide = np.zeros((6, 3, 4, 9), np.uint8)
    write_cells(turned, 3, 2, out=wide[..., 2:6], backend=backend)
    assert np.array_equal(wide[..., 2:6], expected)
    assert not wide[..., :2].any()
    assert not wide[..., 6:].any()


@pytest.mark.parametrize(
    ("columns", "rows", "shape", "message"),
    [
        (5, 2, (10, 3, 4, 4), r"divide into the cells .* \(8, 12, 3\) for 5 columns and 2 rows"),
        (3, 0, (0, 3, 4, 4), r"3 columns and 0 rows"),
        (3, 2, (6, 3, 4, 5), r"shape \(6, 3, 4, 4\), got \(6, 3, 4, 5\)"),
    ],
)
def test_grids_that_do_not_fit_are_refused(columns, rows, shape, message):
    with pytest.raises(ConfigError, match=message):
        write_cells(noise(12, 8), columns, rows, out=np.zeros(shape, np.uint8))


# resizing

SHAPES = [(1, 1), (1, 90), (90, 1), (7, 5), (64, 48), (333, 2), (2, 333), (130, 77)]


def by_pillow(image, size):
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC)).astype(int)


@pytest.mark.parametrize("size", SHAPES)
def test_pillow_differs_from_torch_by_two_levels_at_most_and_pillow_simd_not_at_all(size):
    most = 0 if pil_info().simd else 2
    width, height = size
    for image in (noise(*size), photo(*size)):
        # one axis at a time: Pillow 13 may take the axes in another order, which shows at edges
        for target in ((56, height), (width, 28), (3, height), (width, 1), size):
            ours = resize(image, *target, backend="torch").astype(int)
            assert np.abs(ours - by_pillow(image, target)).max() <= most
    ours = resize(photo(*size), 56, 28, backend="torch").astype(int)
    assert np.abs(ours - by_pillow(photo(*size), (56, 28))).max() <= most


@native
@settings(deadline=None, max_examples=300)
@given(
    source=st.tuples(long_sides, long_sides),
    target=st.tuples(long_sides, long_sides),
    kind=st.sampled_from(["noise", "photo", "edges"]),
    use_vectors=st.booleans(),
)
@example(source=(333, 2), target=(333, 7), kind="noise", use_vectors=True)
@example(source=(5, 400), target=(700, 400), kind="edges", use_vectors=True)
@example(source=(1, 700), target=(64, 1), kind="edges", use_vectors=True)
def test_our_own_resize_gives_torchs_bits(source, target, kind, use_vectors):
    image = photo(*source) if kind == "photo" else noise(*source)
    if kind == "edges":
        image = (image // 128) * np.uint8(255)
    out = np.full((target[1], target[0], 3), 7, np.uint8)
    _native.require().resize(image, 1, 1, out, use_vectors)
    assert np.array_equal(out, resize(image, *target, backend="torch"))


@native
@pytest.mark.parametrize("use_vectors", [True, False])
@pytest.mark.parametrize("size", [(640, 480), (1654, 2339), (1003, 700)])
def test_our_own_resize_gives_torchs_bits_for_whole_pictures(size, use_vectors):
    image = photo(*size)
    for columns, rows in ((1, 1), (2, 3), (4, 2)):
        tiles = np.full((columns * rows, 3, 448, 448), 7, np.uint8)
        _native.require().resize(image, columns, rows, tiles, use_vectors)
        expected = np.zeros_like(tiles)
        write_resized(image, columns, rows, out=expected, backend="torch")
        assert np.array_equal(tiles, expected)


@pytest.mark.parametrize("backend", [NATIVE, "torch"])
@pytest.mark.parametrize("size", [(1, 5), (5, 1), (1, 1)])
def test_a_mirrored_image_with_a_side_of_1_pixel_is_resized(size, backend):
    image = noise(*size)[::-1, ::-1]
    expected = resize(image.copy(), 7, 6, backend=backend)
    np.testing.assert_array_equal(resize(image, 7, 6, backend=backend), expected)


@pytest.mark.parametrize("backend", [NATIVE, "torch"])
@pytest.mark.parametrize(
    ("columns", "rows", "shape", "dtype"),
    [
        (0, 1, (0, 3, 4, 4), np.uint8),
        (2, -1, (2, 3, 4, 4), np.uint8),
        (2, 1, (3, 3, 4, 4), np.uint8),
        (1, 1, (1, 3, 4, 4), np.float32),
    ],
)
def test_resizing_into_another_grid_or_type_is_refused(columns, rows, shape, dtype, backend):
    image, out = noise(8, 8), np.zeros(shape, dtype=dtype)
    with pytest.raises(ConfigError, match="out must be uint8"):
        write_resized(image, columns, rows, out=out, backend=backend)


@native
@settings(deadline=None)
@given(
    source=st.tuples(long_sides, long_sides),
    cell=st.tuples(sides, sides),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_resized_cells_are_the_cells_of_the_resized(source, cell, grid):
    image = noise(*source)
    out = np.full((grid[0] * grid[1], 3, cell[1], cell[0]), 7, np.uint8)
    write_resized(image, *grid, out=out, backend="native")
    expected = np.zeros_like(out)
    whole = resize(image, grid[0] * cell[0], grid[1] * cell[1], backend="torch")
    write_cells(whole, *grid, out=expected)
    assert np.array_equal(out, expected)
    strided = np.zeros((*out.shape[:3], 2 * cell[0]), np.uint8)[..., ::2]
    write_resized(np.asfortranarray(image), *grid, out=strided, backend="native")
    assert np.array_equal(strided, expected)


@native
@pytest.mark.parametrize(
    ("image", "columns", "rows", "shape"),
    [
        ((4, 4, 3), 1, 1, (4, 4, 4)),
        ((4, 4, 3), 2, 1, (4, 4, 3)),
        ((4, 4, 3), 2, 2, (3, 3, 4, 4)),
        ((4, 4, 3), 1, 1, (1, 3, 0, 4)),
        ((0, 4, 3), 1, 1, (4, 4, 3)),
        ((4, 4), 1, 1, (4, 4, 3)),
        ((4, 4, 3), 1 << 62, 4, (0, 3, 4, 4)),
    ],
)
def test_memory_of_another_shape_is_refused_before_it_is_touched(image, columns, rows, shape):
    with pytest.raises(ValueError, match="must have the shape"):
        _native.require().resize(
            np.zeros(image, np.uint8), columns, rows, np.zeros(shape, np.uint8), True
        )


@native
@pytest.mark.parametrize("policy", [InternVLTiles(), AnyResTiles(), NaViTPatches()])
def test_a_very_long_image_takes_little_memory_beside_itself(policy):
    if resize_backend() != "native":
        pytest.skip("our own resize is not used here")
    done = subprocess.run(
        [sys.executable, "-c", LONG_IMAGE.format(policy=policy)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 40 << 20


LONG_IMAGE = """
import resource
import numpy as np
from omniload.images import *
image = np.zeros((100_000, 30, 3), np.uint8)
policy = {policy!r}
out = np.zeros((policy.num_tiles(30, 100_000), 3, policy.size, policy.size), np.uint8)
cut_tiles(np.ones((9, 9, 3), np.uint8), policy, out=np.zeros_like(out)[: policy.num_tiles(9, 9)])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cut_tiles(image, policy, out=out)
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def without_our_own(fresh_choice):
    module = sys.modules["omniload.images.resize"]
    fresh_choice.delenv("OMNILOAD_RESIZE", raising=False)
    fresh_choice.setattr(module._native, "choose", lambda backend: None)
    return module


def test_our_own_is_chosen_where_it_has_vector_code(fresh_choice):
    fresh_choice.delenv("OMNILOAD_RESIZE", raising=False)
    extension = _native.choose("auto")
    is_quick = extension is not None and extension.resize_is_quick()
    assert (resize_backend() == "native") == is_quick


def test_else_torch_is_chosen_where_it_has_vector_code(fresh_choice):
    without_our_own(fresh_choice)
    capability = torch.backends.cpu.get_cpu_capability()
    if capability.startswith("AVX") or not pil_info().simd:
        assert resize_backend() == "torch"
    else:
        assert resize_backend() == "pillow-simd"


def test_without_vector_code_pillow_simd_is_chosen_and_plain_pillow_never(fresh_choice):
    module = without_our_own(fresh_choice)
    fresh_choice.setattr(module.platform, "machine", lambda: "x86_64")
    fresh_choice.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert resize_backend() == ("pillow-simd" if pil_info().simd else "torch")
    for simd, expected in ((True, "pillow-simd"), (False, "torch")):
        resize_backend.cache_clear()
        fresh_choice.setattr(PIL_INFO, "simd", simd)
        fresh_choice.setattr(module, "pil_info", lambda: PIL_INFO)
        assert resize_backend() == expected


class PIL_INFO:  # noqa: N801  stands for what pil_info returns
    version = "12.0.0"
    simd = False


def test_plain_pillow_warns_once_that_pixels_differ(fresh_choice):
    fresh_choice.setenv("OMNILOAD_RESIZE", "pillow")
    image = photo(50, 40)
    if pil_info().simd:
        pytest.skip("PIL is Pillow-SIMD")
    with pytest.warns(UserWarning, match=r"plain Pillow \S+: pixels differ by 1 or 2 levels"):
        assert resize_backend() == "pillow"
    expected = Image.fromarray(image).resize((9, 8), Image.Resampling.BICUBIC)
    assert np.array_equal(resize(image, 9, 8), np.asarray(expected))  # no second warning


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("opencv", r"'auto' or one of \('native', 'torch', .*'pillow'\), got 'opencv'"),
        ("pillow-simd", r"needs Pillow-SIMD, but PIL is plain Pillow"),
    ],
)
def test_a_backend_that_is_not_there_is_refused(fresh_choice, name, message):
    if name == "pillow-simd" and pil_info().simd:
        pytest.skip("PIL is Pillow-SIMD")
    with pytest.raises(ConfigError, match=message):
        resize(photo(9, 9), 3, 3, backend=name)
    fresh_choice.setenv("OMNILOAD_RESIZE", name)
    with pytest.raises(ConfigError, match=message):
        resize(photo(9, 9), 3, 3)


# whole images


def corpus():
    """Encoded images of every mode, odd sizes, sides of one pixel, extreme shapes, all turns."""
    made = [encode(photo(61, 43), "JPEG", exif=exif(turn).tobytes()) for turn in range(1, 9)]
    for size in ((1, 1), (1, 37), (37, 1), (17, 3), (300, 5), (5, 300), (129, 127)):
        made += [encode(photo(*size), "JPEG"), encode(noise(*size), "PNG")]
    colour = Image.fromarray(photo(45, 31))
    modes = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16", "CMYK")
    for mode in modes:
        image = colour.convert("L").convert(mode) if mode == "I;16" else colour.convert(mode)
        made.append(encode(image, "TIFF" if mode == "CMYK" else "PNG"))
    made.append(encode(colour.convert("CMYK"), "JPEG"))
    made.append(encode(colour.convert("L"), "JPEG", progressive=True))
    made += [encode(colour, kind) for kind in ("GIF", "BMP", "TIFF", "PPM")]
    return made


CORPUS = corpus()


def plainly(data):
    """Tiles as the text says, with PIL's or NumPy's slow ways and torch's resize."""
    image = decode(data)
    columns, rows = SMALL.grid(*image_size(data))
    resized = resize(image, columns * 28, rows * 28, backend="torch")
    cut = [
        resized[28 * row :, 28 * column :][:28, :28].transpose(2, 0, 1)
        for row in range(rows)
        for column in range(columns)
    ]
    if len(cut) > 1:
        cut.append(resize(image, 28, 28, backend="torch").transpose(2, 0, 1))
    return np.array(cut)


def checksum(data):
    return zlib.crc32(tiles(data, SMALL).tobytes())


EXPECTED = [zlib.crc32(plainly(data).tobytes()) for data in CORPUS]


@pytest.mark.parametrize("index", range(len(CORPUS)))
def test_tiles_of_every_image_are_those_of_the_slow_way(index):
    assert np.array_equal(tiles(CORPUS[index], SMALL), plainly(CORPUS[index]))


def test_jpegs_are_upright_as_pil_makes_them():
    for data in CORPUS[:8]:
        pils = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert np.array_equal(decode(data), np.asarray(pils))


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_worker_processes_give_the_same_tiles(method):
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.map(checksum, CORPUS) == EXPECTED


def test_threads_give_the_same_tiles():
    found = [[] for _ in range(4)]

    def work(mine):
        mine += [checksum(data) for data in CORPUS]

    threads = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [EXPECTED] * 4


def test_tiles_are_written_where_they_belong_and_nowhere_else():
    image = photo(100, 50)
    count = SMALL.num_tiles(100, 50)
    room = np.full((count + 2, 3, 28, 28), 9, np.uint8)
    cut_tiles(image, SMALL, out=room[1:-1])
    assert np.array_equal(room[1:-1], tiles(encode(image, "PNG"), SMALL))
    assert (room[0] == 9).all()
    assert (room[-1] == 9).all()


def test_without_extension_and_vector_code_the_pixels_are_the_same():
    code = (
        "import sys\n"
        "sys.modules['omniload._C'] = None\n"
        "import torch\n"
        "from omniload import _native\n"
        "assert not _native.available()\n"
        "assert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'\n"
        "from tests import test_images_fast as module\n"
        "assert [module.checksum(data) for data in module.CORPUS] == module.EXPECTED\n"
        "print(*module.EXPECTED)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
    )
    assert done.returncode == 0, done.stderr
    assert [int(value) for value in done.stdout.split()] == EXPECTED
