"""The masks of the C++ extension: equal to Numba's, and wrong arguments never reach memory."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import _native, masks
from omniload._mask_native import fused_block_mask
from omniload._mask_tensors import block_mask_of
from omniload.errors import ConfigError
from omniload.kernels import twins
from tests.mask_cases import LENGTHS, offsets, rows, spans_of

pytestmark = pytest.mark.skipif(not _native.available(), reason="the extension is not built")

TENSORS = [
    f"{name}_{part}"
    for name in ("kv", "full_kv", "q", "full_q")
    for part in ("num_blocks", "indices")
]
SIZES = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 64, 1000])


def fused(cu_seqlens, block_size=4, *, compact=False, reach=None, **changes):
    fields = {"kind": "causal", "image_spans": None, "window": None, "num_tokens": None}
    fields |= changes
    return fused_block_mask(
        cu_seqlens, fields.pop("kind"), block_size, compact=compact, reach=reach, **fields
    )


def assert_equal(found, lo, hi, want):
    assert found.BLOCK_SIZE == want.BLOCK_SIZE
    assert found.seq_lengths == want.seq_lengths
    for name in TENSORS:
        mine, other = getattr(found, name), getattr(want, name)
        assert mine.dtype == other.dtype, name
        assert torch.equal(mine, other), name
    bounds = [cell.cell_contents for cell in found.mask_mod.__closure__]
    assert torch.equal(bounds[1], lo)
    assert torch.equal(bounds[0], hi)


@settings(deadline=None, max_examples=600)
@given(
    rows(st.one_of(st.just(0), LENGTHS), 8).filter(lambda row: row[0][-1] > 0),
    st.tuples(SIZES, SIZES),
    st.sampled_from(["full width", "narrowest", "bound"]),
)
def test_masks_equal_those_of_numba(row, block_size, width):
    cu_seqlens, kind = row
    num_tokens = int(cu_seqlens[-1])
    lo, hi = twins.intervals(
        cu_seqlens, kind["image_spans"], num_tokens, kind["kind"], kind["window"] or 0
    )
    wide = {
        "compact": width != "full width",
        "reach": int(cu_seqlens.diff().max()) if width == "bound" else None,
    }
    found = fused(cu_seqlens, block_size, **kind, **wide)
    assert found is not None
    assert_equal(found, lo, hi, block_mask_of(lo, hi, block_size, **wide))


@pytest.mark.parametrize("kind", ["causal", "full"])
@pytest.mark.parametrize("window", [None, 300])
def test_long_rows_equal_those_of_numba(kind, window):
    lengths = np.random.default_rng(0).integers(1, 4000, 20).tolist()
    cu_seqlens = offsets(lengths)
    lo, hi = twins.intervals(cu_seqlens, None, sum(lengths), kind, window or 0)
    found = fused(cu_seqlens, 128, kind=kind, window=window)
    assert_equal(found, lo, hi, block_mask_of(lo, hi, 128, compact=False, reach=None))


def test_a_mask_from_the_door_is_that_of_the_extension():
    cu_seqlens = offsets([3, 9])
    found = masks.block_mask(cu_seqlens, block_size=4, device="cpu")
    begin = found.kv_num_blocks.data_ptr()
    # all in one piece of memory, as only the extension lays it out
    assert [getattr(found, name).data_ptr() - begin for name in TENSORS] == [
        *(0, 12, 48, 60, 96, 108, 144, 156)
    ]


# each is refused or left to the operators, which say what is wrong with it
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens": [1, 5]}, "must start at 0, got 1"),
        ({"cu_seqlens": [0, 5, 3, 8]}, r"must not fall: got 5, then 3 \(at 2\)"),
        ({"cu_seqlens": [0, 2**31 - 1, 4]}, "must not fall"),
        ({"cu_seqlens": [0, -4]}, "num_tokens must be an integer"),
        ({"cu_seqlens": []}, r"must be int32 \(n \+ 1,\)"),
        ({"cu_seqlens": [0]}, "at least 1 token"),
        ({"num_tokens": 9}, "expected 9, got 8"),
        ({"num_tokens": -1}, "num_tokens must be an integer"),
        ({"kind": "causa"}, "kind must be one of"),
        ({"window": 0}, "window must be an integer"),
        ({"window": True}, "window must be an integer"),
        ({"window": 2**31}, "window must be an integer"),
        ({"kind": "prefix"}, "image_spans must be given for kind='prefix'"),
        ({"image_spans": [[0, 2]]}, "image_spans must be given for kind='prefix'"),
        ({"kind": "prefix", "image_spans": [[1, 4]]}, r"got \[1, 4\] \(image 0\)"),
        ({"kind": "prefix", "image_spans": [[4, 6], [5, 7]]}, r"got \[5, 7\] \(image 1\)"),
        ({"kind": "prefix", "image_spans": [[7, 9]]}, r"got \[7, 9\] \(image 0\)"),
        ({"kind": "prefix", "image_spans": [[8, 9]]}, r"got \[8, 9\] \(image 0\)"),
        ({"kind": "prefix", "image_spans": [[-2, 1]]}, r"got \[-2, 1\] \(image 0\)"),
        ({"kind": "prefix", "image_spans": [[2, 1]]}, r"got \[2, 1\] \(image 0\)"),
        ({"block_size": (4, 0)}, "block_size must be a number of tokens"),
        (
            {"compact": True, "max_seqlen": 1, "cu_seqlens": [0, 80]},
            "max_seqlen must be at least the longest document: expected 80",
        ),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    given = {"cu_seqlens": [0, 3, 8], "block_size": 4} | changes
    cu_seqlens = torch.tensor(given.pop("cu_seqlens"), dtype=torch.int32)
    if "image_spans" in given:
        given["image_spans"] = spans_of(given["image_spans"])
    with pytest.raises(ConfigError, match=message):
        masks.block_mask(cu_seqlens, **given)


def test_tensors_that_are_not_plain_go_the_way_of_the_operators():
    every_other = torch.tensor([0, 7, 3, 7, 8, 7], dtype=torch.int32)[::2]
    assert fused(every_other) is None
    assert masks.block_mask(every_other, block_size=4).seq_lengths == (8, 8)
    assert fused(offsets([8]).long()) is None
    assert fused(offsets([8])[None]) is None
    assert fused(offsets([8]).to("meta")) is None
    assert fused(torch.nn.Parameter(offsets([8]), requires_grad=False)) is None


OFFSETS = np.array([0, 3, 8], np.int32)
SPANS = np.array([[1, 3], [4, 4], [5, 8]], np.int32)


def call(**changes):
    fields = {
        "cu_seqlens": OFFSETS,
        "image_spans": None,
        "kind": 0,
        "window": 0,
        "num_tokens": 8,
        "q_block": 4,
        "kv_block": 4,
        "row_width": 0,
        "column_width": 0,
    }
    assert changes.keys() <= fields.keys()
    return _native.require().block_mask(*(fields | changes).values())


def test_the_memory_holds_bounds_and_lists_end_to_end():
    bounds, lists, *widths = call()
    bounds, lists = np.frombuffer(bounds, np.int32), np.frombuffer(lists, np.int32)
    assert bounds.reshape(2, -1).tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert widths == [2, 0, 2, 0]
    # rows: counts and lists of partial blocks, counts of full ones; then columns
    rows, columns = lists.reshape(2, -1).tolist()
    assert rows == [1, 2, 0, 0, 0, 1, 0, 0]
    assert columns == [2, 1, 0, 1, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"cu_seqlens": OFFSETS.astype(np.int64)}, ValueError, "cu_seqlens must be int32"),
        ({"cu_seqlens": OFFSETS[::2]}, ValueError, "not C-contiguous"),
        ({"cu_seqlens": OFFSETS[:0]}, ValueError, "cu_seqlens must not be empty"),
        ({"cu_seqlens": OFFSETS[1:]}, ValueError, "must start with 0 and never fall"),
        ({"cu_seqlens": OFFSETS[::-1].copy()}, ValueError, "must start with 0 and never fall"),
        ({"cu_seqlens": None}, TypeError, "bytes-like object"),
        ({"num_tokens": 7}, ValueError, "expected 7, got 8"),
        ({"num_tokens": 0}, ValueError, "num_tokens must be from 1 to 2147483647, got 0"),
        ({"num_tokens": 2**31}, ValueError, "num_tokens must be from 1"),
        ({"num_tokens": 2**64}, OverflowError, "too"),
        ({"kind": 3}, ValueError, "kind must be 0, 1 or 2"),
        ({"kind": -1}, ValueError, "kind must be from 0"),
        ({"kind": 2}, ValueError, "image_spans be given for 2 only"),
        ({"image_spans": SPANS}, ValueError, "image_spans be given for 2 only"),
        ({"kind": 2, "image_spans": SPANS.ravel()[:3]}, ValueError, "must be pairs"),
        ({"kind": 2, "image_spans": SPANS.astype(np.int16)}, ValueError, "must be int32"),
        ({"kind": 2, "image_spans": SPANS[::-1].copy()}, ValueError, r"got \[4, 4\) \(image 1\)"),
        ({"kind": 2, "image_spans": SPANS + 1}, ValueError, r"got \[2, 4\) \(image 0\)"),
        ({"window": -1}, ValueError, "window must be from 0"),
        ({"q_block": 0}, ValueError, "q_block must be from 1"),
        ({"kv_block": 2**31}, ValueError, "kv_block must be from 1"),
        ({"row_width": 1}, ValueError, "row_width must be at least 2, got 1"),
        ({"column_width": 1}, ValueError, "column_width must be at least 2, got 1"),
        ({"q_block": 2.0}, TypeError, "float"),
    ],
)
def test_wrong_arguments_never_reach_memory(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_blocks_and_windows_of_any_size_are_fine():
    most = 2**31 - 1
    for size in ({"q_block": most}, {"kv_block": most}, {"window": most}):
        assert len(call(**size)) == 6
    assert call(q_block=most, kv_block=most)[2:] == (1, 0, 1, 0)
    assert len(call(row_width=5, column_width=9)[1]) == 4 * 2 * (2 + 2 * 5 + 2 + 2 * 9)


def test_spans_may_be_read_only_and_empty():
    spans = SPANS.copy()
    spans.flags.writeable = False
    bounds = np.frombuffer(call(kind=2, image_spans=spans)[0], np.int32).reshape(2, -1)
    assert bounds.tolist() == [[0, 0, 0, 3, 3, 3, 3, 3], [1, 3, 3, 4, 5, 8, 8, 8]]
    assert call(kind=2, image_spans=SPANS[:0])[1:] == call()[1:]
