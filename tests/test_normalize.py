"""Every way to make floats of pixels gives the bits of the float path."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniload import _native
from omniload._normalize import normalize_tiles
from omniload.errors import ConfigError
from omniload.kernels import reference
from omniload.packing import pack
from tests.packing_samples import make_sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BACKENDS = [
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not _native.available(), reason="the extension is not built"),
    ),
    "numpy",
]


def random_tiles(*shape):
    values = np.random.default_rng(shape[-1]).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(values)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    num_tiles=st.integers(0, 3),
    height=st.integers(1, 9),
    width=st.integers(1, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_both_backends_equal_the_float_path_bit_for_bit(backend, num_tiles, height, width, dtype):
    tiles = random_tiles(num_tiles, 3, height, width)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.2, 0.3, 1)))
    table = reference.normalize_table(mean.flatten(), std.flatten(), dtype=dtype)
    result = normalize_tiles(tiles, table, backend=backend)
    assert result.dtype == dtype
    assert torch.equal(result, ((tiles.float() / 255 - mean) / std).to(dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiles_and_table_need_not_be_contiguous(backend):
    table = reference.normalize_table().t().contiguous().t()
    for tiles in (random_tiles(2, 5, 6, 3).permute(0, 3, 1, 2), random_tiles(4, 3, 5, 9)[::2]):
        expected = reference.normalize_tiles(tiles.contiguous(), table.contiguous())
        assert torch.equal(normalize_tiles(tiles, table, backend=backend), expected)


def test_a_type_without_an_integer_of_its_size_takes_the_reference():
    tiles = random_tiles(1, 3, 4, 5)
    table = reference.normalize_table().to(torch.float8_e5m2)
    with pytest.raises(ConfigError, match="table must be"):
        normalize_tiles(tiles, table[:2])
    complex_table = reference.normalize_table().to(torch.complex128)
    assert torch.equal(
        normalize_tiles(tiles, complex_table), reference.normalize_tiles(tiles, complex_table)
    )


@pytest.mark.parametrize(
    ("tiles", "table", "message"),
    [
        (torch.zeros(2, 3, 4), torch.zeros(3, 256), r"tiles must be uint8 \(num_tiles, 3,"),
        (torch.zeros(2, 4, 4, 4, dtype=torch.uint8), torch.zeros(3, 256), r"\(2, 4, 4, 4\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3, 255), r"got \(3, 255\) on cpu"),
        (
            torch.zeros(2, 3, 4, 4, dtype=torch.uint8, device="meta"),
            torch.zeros(3, 256),
            r"on meta, got \(3, 256\) on cpu",
        ),
    ],
)
def test_wrong_tiles_and_tables_are_refused(tiles, table, message):
    with pytest.raises(ConfigError, match=message):
        normalize_tiles(tiles, table)


def test_a_batch_takes_the_quick_way(monkeypatch):
    batch = pack([make_sample(0, text=9, tiles_per_image=(2, 1))])
    for dtype in (torch.float32, torch.bfloat16):
        table = reference.normalize_table(dtype=dtype)
        expected = reference.normalize_tiles(batch.tiles, table)
        with monkeypatch.context() as patch:
            if _native.available():
                patch.setattr(reference, "normalize_tiles", None)  # not called
            assert torch.equal(batch.model_inputs(dtype=dtype)["pixel_values"], expected)


def test_without_triton_and_extension_plain_torch_does_it():
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "sys.modules['omniload._C'] = None\n"
        "import torch\n"
        "from omniload import _native, _normalize\n"
        "from omniload.kernels import reference\n"
        "assert not _native.available() and _normalize._triton() is None\n"
        "tiles = torch.arange(2 * 3 * 16, dtype=torch.uint8).view(2, 3, 4, 4)\n"
        "table = reference.normalize_table(dtype=torch.bfloat16)\n"
        "expected = reference.normalize_tiles(tiles, table)\n"
        "assert torch.equal(_normalize.normalize_tiles(tiles, table), expected)\n"
    )
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)
