import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import _native
from omniload.errors import ConfigError, NativeUnavailableError
from omniload.mrope import mrope_position_ids

BACKENDS = ["numpy", *(["native"] if _native.available() else [])]


def naive(samples, merge):
    """Positions token by token; a sample is a list of text lengths and (t, h, w) in patches."""
    rows = []
    for sample in samples:
        highest = -1
        for part in sample:
            start = highest + 1
            if isinstance(part, int):
                new = [(start + i,) * 3 for i in range(part)]
            else:
                time, high, wide = part[0], part[1] // merge, part[2] // merge
                new = [
                    (start + t, start + y, start + x)
                    for t, y, x in itertools.product(range(time), range(high), range(wide))
                ]
            rows += new
            highest = max([highest, *(max(position) for position in new)])
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


def packed(samples, merge):
    starts, spans, grids, at = [0], [], [], 0
    for sample in samples:
        for part in sample:
            length = part if isinstance(part, int) else part[0] * part[1] * part[2] // merge**2
            if not isinstance(part, int):
                spans.append((at, at + length))
                grids.append(part)
            at += length
        starts.append(at)
    return (
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(spans, dtype=torch.int32).reshape(-1, 2),
        torch.tensor(grids, dtype=torch.int64).reshape(-1, 3),
    )


@st.composite
def rows(draw):
    merge = draw(st.integers(1, 3))
    side = st.integers(1, 4).map(lambda n: n * merge)
    image = st.tuples(st.integers(1, 3), side, side)
    sample = st.lists(st.one_of(st.integers(0, 6), image), max_size=6)
    return draw(st.lists(sample, max_size=5)), merge


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None)
@given(rows())
def test_positions_equal_those_counted_token_by_token(backend, row):
    samples, merge = row
    got = mrope_position_ids(*packed(samples, merge), merge, backend=backend)
    assert got.dtype == torch.int64
    assert np.array_equal(got.numpy(), naive(samples, merge))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_example_of_the_module(backend):
    # two of text, an image of 2 x 3, two of text; and a second sample that starts anew
    got = mrope_position_ids(*packed([[2, (1, 4, 6), 2], [1]], 2), 2, backend=backend)
    assert got.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 0],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 0],
    ]


def test_other_layouts_and_types_of_the_arguments_are_taken():
    starts, spans, grids = packed([[2, (1, 4, 6), 2]], 2)
    expected = mrope_position_ids(starts, spans, grids, 2)
    turned = spans.flip(1).flip(1), grids.int().t().contiguous().t()
    for backend in BACKENDS:
        got = mrope_position_ids(starts.long(), *turned, 2, backend=backend, num_tokens=10)
        assert torch.equal(got, expected)


WRONG = [
    ({"starts": [1, 10]}, "cu_seqlens must start with 0 and never fall"),
    ({"starts": [0, 12, 10]}, "cu_seqlens must start with 0 and never fall"),
    ({"num_tokens": 9}, "cu_seqlens must end with the number of tokens: expected 9, got 10"),
    ({"starts": [0, 4, 10]}, r"image 0 of the row: its span must lie in one sample, got \[2, 8\)"),
    ({"starts": [0, 2]}, r"its span must lie in one sample, got \[2, 8\)"),
    ({"spans": [[2, 7]]}, r"must follow the one before and have 6 tokens, got \[2, 7\)"),
    ({"spans": [[-1, 5]]}, r"must follow the one before and have 6 tokens, got \[-1, 5\)"),
    ({"grids": [[1, 4, 5]]}, r"its grid must divide by merge=2, got \(1, 4, 5\)"),
    ({"grids": [[0, 4, 6]]}, r"its grid must divide by merge=2, got \(0, 4, 6\)"),
    ({"grids": [[1, 4, 6], [1, 2, 2]]}, "one grid of 3 for each span of 2: got 6 and 2 numbers"),
    ({"spans": [[2, 8], [7, 8]], "grids": [[1, 4, 6], [1, 2, 2]]}, "image 1 of the row: its span"),
    ({"merge": 0}, "merge must be an integer of at least 1 patch, got 0"),
    ({"merge": True}, "merge must be an integer of at least 1 patch, got True"),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_rows_that_do_not_fit_together_are_refused(backend, changes, message):
    values = {"starts": [0, 10], "spans": [[2, 8]], "grids": [[1, 4, 6]], "merge": 2, **changes}
    with pytest.raises(ConfigError, match=message):
        mrope_position_ids(
            torch.tensor(values["starts"], dtype=torch.int32),
            torch.tensor(values["spans"], dtype=torch.int32),
            torch.tensor(values["grids"]),
            values["merge"],
            num_tokens=values.get("num_tokens"),
            backend=backend,
        )


def test_without_the_extension_the_portable_code_runs(monkeypatch):
    arguments = packed([[2, (1, 4, 6), 2]], 2)
    expected = mrope_position_ids(*arguments, 2)
    monkeypatch.setattr(_native, "_load", lambda: None)
    assert torch.equal(mrope_position_ids(*arguments, 2), expected)
    with pytest.raises(NativeUnavailableError, match="must be built for backend='native'"):
        mrope_position_ids(*arguments, 2, backend="native")


@pytest.mark.skipif("native" not in BACKENDS, reason="the extension is not built")
def test_the_extension_refuses_buffers_of_other_sizes():
    module = _native.require()
    starts, spans = np.array([0, 2], np.int32), np.zeros((0, 2), np.int32)
    grids = np.zeros((0, 3), np.int64)
    with pytest.raises(ValueError, match="out must have 3 rows"):
        module.mrope_position_ids(starts, spans, grids, 2, np.empty(4, np.int64))
    with pytest.raises(ValueError, match="cu_seqlens must not be empty"):
        module.mrope_position_ids(starts[:0], spans, grids, 2, np.empty((3, 2), np.int64))
    with pytest.raises(ValueError, match="merge must be at least 1, got 0"):
        module.mrope_position_ids(starts, spans, grids, 0, np.empty((3, 2), np.int64))
    with pytest.raises(ValueError, match="image_grid_thw must be int64"):
        module.mrope_position_ids(starts, spans, grids.astype(np.int32), 2, np.empty(6, np.int64))
    huge = np.array([[1 << 40, 1 << 40, 1 << 40]], np.int64)
    with pytest.raises(ValueError, match="its grid must divide"):
        module.mrope_position_ids(
            starts, np.array([[0, 2]], np.int32), huge, 1, np.empty((3, 2), np.int64)
        )


@pytest.mark.gpu
def test_positions_on_a_gpu_equal_those_of_the_cpu_and_wait_for_nothing():
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    arguments = packed([[3, (1, 8, 4), 5], [], [(2, 2, 2), (1, 4, 4)], [7]], 2)
    expected = mrope_position_ids(*arguments, 2)
    on_gpu = [argument.cuda() for argument in arguments]
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = mrope_position_ids(*on_gpu, 2, num_tokens=expected.shape[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.cpu(), expected)
