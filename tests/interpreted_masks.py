"""The kernels of omniload.kernels.varlen and block_mask in Triton's interpreter.

Run by test_kernels_varlen.py in a process of its own, because the interpreter is chosen when a
kernel's module is imported. A program takes some milliseconds here, so sizes are small.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.kernels import block_mask, twins, varlen
from tests.mask_cases import offsets, rows

few = settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 4, 7, 20]), min_size=1, max_size=5)


def assert_equal(found, want):
    for mine, other in zip(found, want, strict=True):
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


@few
@given(LENGTHS, st.integers(0, 5))
def test_ids_equal_their_twin(lengths, num_documents):
    given = (offsets(lengths), sum(lengths), num_documents)
    assert_equal(varlen.token_ids(*given), twins.token_ids(*given))


@few
@given(rows())
def test_intervals_and_block_lists_equal_their_twins(row):
    cu_seqlens, kind = row
    given = (
        cu_seqlens,
        kind["image_spans"],
        int(cu_seqlens[-1]),
        kind["kind"],
        kind["window"] or 0,
    )
    lo, hi = twins.intervals(*given)
    assert_equal(varlen.intervals(*given), (lo, hi))
    for q_block, kv_block in ((16, 16), (32, 8)):
        num_rows, num_columns = -(-len(lo) // q_block), -(-len(lo) // kv_block)
        full = [num_columns, num_columns, num_rows, num_rows]
        for widths in (full, twins.block_widths(lo, hi, q_block, kv_block)):
            sizes = (lo, hi, q_block, kv_block, widths)
            assert_equal(block_mask.block_tensors(*sizes), twins.block_tensors(*sizes))


def test_tokens_of_several_programs_equal_their_twin():
    cu_seqlens = offsets([1000, 24, 1, 1500, 1023])
    spans = torch.tensor([[100, 1], [1030, 2500]], dtype=torch.int32)
    spans[0] = torch.tensor([3, 900])
    given = (cu_seqlens, spans, 3548, "prefix", 700)
    assert_equal(varlen.intervals(*given), twins.intervals(*given))
    assert_equal(varlen.token_ids(cu_seqlens, 3548, 4), twins.token_ids(cu_seqlens, 3548, 4))
    lo, hi = twins.intervals(*given)
    sizes = (lo, hi, 64, 128, [28, 28, 56, 56])
    assert_equal(block_mask.block_tensors(*sizes), twins.block_tensors(*sizes))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
def test_pad_and_unpad_equal_their_twins(dtype, shape):
    cu_seqlens = offsets([3, 0, 1, 4])
    packed = torch.randint(0, 100, (8, *shape)).to(dtype)
    padded = varlen.pad(packed, cu_seqlens, 5)
    assert_equal([padded], [twins.pad(packed, cu_seqlens, 5)])
    assert_equal([varlen.unpad(padded, cu_seqlens, 8)], [packed])


def test_rows_of_more_than_one_program_are_padded_whole():
    packed = torch.randn(3, 1500)
    padded = varlen.pad(packed, offsets([1, 2]), 2)
    assert_equal([padded], [twins.pad(packed, offsets([1, 2]), 2)])
    assert_equal([varlen.unpad(padded, offsets([1, 2]), 3)], [packed])


def test_strided_inputs_are_read_right():
    packed = torch.randn(6, 8)[::2, 1::2]
    cu_seqlens = torch.stack([offsets([1, 2])] * 2, dim=1)[:, 1]
    padded = varlen.pad(packed, cu_seqlens, 2)
    assert_equal([padded], [twins.pad(packed, cu_seqlens, 2)])
    assert_equal([varlen.unpad(padded[:, ::1], cu_seqlens, 3)], [packed])


def test_a_document_longer_than_a_line_is_cut_and_gives_zeros():
    packed = torch.arange(1, 7, dtype=torch.float32)[:, None]
    padded = varlen.pad(packed, offsets([4, 2]), 3)
    assert padded[..., 0].tolist() == [[1, 2, 3], [5, 6, 0]]
    assert varlen.unpad(padded, offsets([4, 2]), 6)[:, 0].tolist() == [1, 2, 3, 0, 5, 6]


def test_nothing_is_launched_for_nothing():
    none = torch.zeros(1, dtype=torch.int32)
    assert len(varlen.token_ids(none, 0, 0)[0]) == 0
    assert len(varlen.intervals(none, None, 0, "causal", 0)[0]) == 0
    assert varlen.pad(torch.zeros(0, 4), none, 3).shape == (0, 3, 4)
    assert varlen.unpad(torch.zeros(0, 3, 4), none, 0).shape == (0, 4)
    with pytest.raises(ConfigError, match="at least one document, got none"):
        varlen.token_ids(none, 3, 0)


def test_types_of_16_bytes_are_refused():
    with pytest.raises(ConfigError, match=r"types of 1, 2, 4 or 8 bytes, got torch\.complex128"):
        varlen.pad(torch.zeros(3, dtype=torch.complex128), offsets([3]), 3)
