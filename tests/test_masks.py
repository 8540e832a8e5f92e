"""Masks: each token sees what the definition says, and no sample leaks into another."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn.functional import scaled_dot_product_attention

from omniload import masks
from omniload.errors import ConfigError
from tests.mask_cases import naive_dense, offsets, rows, spans_of

ROW = offsets([3, 5, 4])
IMAGES = spans_of([[1, 3], [4, 6]])


@settings(deadline=None, max_examples=200)
@given(rows())
def test_the_mask_is_what_the_definition_says(row):
    cu_seqlens, kind = row
    assert torch.equal(masks.dense(cu_seqlens, **kind), naive_dense(cu_seqlens, **kind))


@settings(deadline=None, max_examples=100)
@given(rows())
def test_intervals_hold_their_query_and_never_fall(row):
    cu_seqlens, kind = row
    lo, hi = masks.intervals(cu_seqlens, **kind)
    query = torch.arange(len(lo))
    assert lo.dtype == hi.dtype == torch.int32
    assert ((lo <= query) & (query < hi)).all()
    assert (lo.diff() >= 0).all()
    assert (hi.diff() >= 0).all()


@settings(deadline=None, max_examples=100)
@given(rows())
def test_rows_of_flashmask_hide_what_the_mask_hides(row):
    cu_seqlens, kind = row
    bounds, causal = masks.flashmask_rows(cu_seqlens, **kind)
    num_tokens = int(cu_seqlens[-1])
    assert bounds.shape == (1, 1, num_tokens, 1 if kind["kind"] == "causal" else 2)
    assert bounds.dtype == torch.int32
    query = torch.arange(num_tokens)[:, None]
    seen = query < bounds[0, 0, :, 0]
    # causal hides the keys after a query by itself
    seen &= query >= torch.arange(num_tokens) if causal else query >= bounds[0, 0, :, 1]
    assert torch.equal(seen, naive_dense(cu_seqlens, **kind))


def test_segments_count_from_one_and_padding_is_zero():
    assert masks.segment_ids(ROW).tolist() == [1] * 3 + [2] * 5 + [3] * 4
    assert masks.segment_ids(ROW, num_documents=2).tolist() == [1] * 3 + [2] * 5 + [0] * 4
    assert masks.segment_ids(ROW).dtype == torch.int32


def test_positions_restart_with_each_document():
    positions = masks.position_ids(ROW)
    assert positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert positions.dtype == torch.int64


def test_offsets_that_repeat_are_documents_without_tokens():
    padded = torch.tensor([0, 3, 3, 8, 12, 12, 12], dtype=torch.int32)
    for kind in ("causal", "full"):
        for found, want in zip(
            masks.intervals(padded, kind), masks.intervals(ROW, kind), strict=True
        ):
            assert torch.equal(found, want)
    assert masks.segment_ids(padded).tolist() == [1] * 3 + [3] * 5 + [4] * 4


def test_a_row_without_tokens_has_no_intervals():
    lo, hi = masks.intervals(torch.zeros(1, dtype=torch.int32))
    assert len(lo) == len(hi) == 0
    assert masks.dense(torch.zeros(3, dtype=torch.int32)).shape == (0, 0)


def test_an_image_longer_than_the_window_stays_whole():
    lo, hi = masks.intervals(offsets([10]), "prefix", image_spans=spans_of([[2, 8]]), window=2)
    assert lo.tolist() == [0, 0, 1, 2, 2, 2, 2, 2, 7, 8]
    assert hi.tolist() == [1, 2, 8, 8, 8, 8, 8, 8, 9, 10]


def test_offsets_may_be_a_strided_view():
    wide = torch.stack([ROW, ROW], dim=1)
    assert torch.equal(masks.position_ids(wide[:, 0]), masks.position_ids(ROW))
    spans = torch.stack([IMAGES, IMAGES], dim=2)[:, :, 0]
    assert not spans.is_contiguous()
    found = masks.intervals(wide[:, 0], "prefix", image_spans=spans)
    for mine, want in zip(found, masks.intervals(ROW, "prefix", image_spans=IMAGES), strict=True):
        assert torch.equal(mine, want)


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        ([1, 3], {}, r"must start at 0, got 1"),
        ([0, 5, 3], {}, r"must not fall: got 5, then 3 \(at 2\)"),
        ([0, 5, -2147483648], {"num_tokens": 5}, r"Offsets past 2147483647 don't fit"),
        ([0, 5], {"num_tokens": 6}, r"must be the number of tokens: expected 6, got 5"),
        ([0, 5], {"num_tokens": 4}, r"expected 4, got 5"),
        ([0, -5], {}, r"num_tokens must be an integer of at least 0 tokens, or None, got -5"),
        ([0, 5], {"num_tokens": 2**31}, r"at most 2147483647 tokens, or None, got 2147483648"),
        ([], {}, r"cu_seqlens must be int32 \(n \+ 1,\), got the shape \(0,\)"),
        ([[0, 5]], {}, r"got the shape \(1, 2\)"),
        ([0, 5], {"kind": "banded"}, r"kind must be one of 'causal', 'full', 'prefix', got 'band"),
        ([0, 5], {"window": 0}, r"window must be an integer of at least 1 token, or None, got 0"),
        ([0, 5], {"window": 2.0}, r"window must be an integer .*, got 2\.0"),
        ([0, 5], {"window": True}, r"window must be an integer .*, got True"),
        ([0, 5], {"kind": "prefix"}, r"image_spans must be given for kind='prefix'"),
        ([0, 5], {"image_spans": [[0, 1]]}, r"for no other: got them with kind='causal'"),
        ([0, 5], {"kind": "prefix", "image_spans": [0, 1]}, r"image_spans must be int32 \(m, 2\)"),
        ([0, 3, 5], {"kind": "prefix", "image_spans": [[2, 4]]}, r"inside one document .*\[2, 4\]"),
        ([0, 5], {"kind": "prefix", "image_spans": [[3, 6]]}, r"got \[3, 6\] \(image 0\)"),
        ([0, 5], {"kind": "prefix", "image_spans": [[-1, 2]]}, r"got \[-1, 2\]"),
        ([0, 5], {"kind": "prefix", "image_spans": [[2, 1]]}, r"got \[2, 1\]"),
        ([0, 5], {"kind": "prefix", "image_spans": [[0, 3], [2, 5]]}, r"\(image 1\), after \[0, 3"),
        ([0, 5], {"kind": "prefix", "image_spans": [[3, 4], [0, 1]]}, r"order of the tokens"),
    ],
)
def test_wrong_arguments_are_refused(given, settings, message):
    settings = dict(settings)
    if "image_spans" in settings:
        settings["image_spans"] = torch.tensor(settings["image_spans"], dtype=torch.int32)
    with pytest.raises(ConfigError, match=message):
        masks.intervals(torch.tensor(given, dtype=torch.int32), **settings)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.tensor([0, 5]), r"cu_seqlens must be int32, .*got torch.int64"),
        (torch.tensor([0.0, 5.0]), r"must be int32, .*got torch.float32"),
        ([0, 5], r"must be a torch tensor, got list"),
        (np.array([0, 5], np.int32), r"must be a torch tensor, got ndarray"),
        (
            torch.tensor([0, 5], dtype=torch.int32, device="meta"),
            r"CPU or a CUDA device .*got meta",
        ),
    ],
)
def test_wrong_tensors_are_refused(tensor, message):
    for function in (masks.intervals, masks.segment_ids, masks.position_ids, masks.dense):
        with pytest.raises(ConfigError, match=message):
            function(tensor)


def test_offsets_are_checked_by_every_function():
    bad = torch.tensor([0, 5, 3], dtype=torch.int32)
    for function in (masks.segment_ids, masks.position_ids, masks.dense, masks.block_mask):
        with pytest.raises(ConfigError, match="must not fall"):
            function(bad)


def attention_inputs(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, num_tokens, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("kind", ["causal", "full", "prefix"])
@pytest.mark.parametrize("window", [None, 3])
def test_a_changed_sample_leaves_all_others_bit_identical(kind, window):
    cu_seqlens = offsets([3, 17, 1, 30, 13])
    spans = spans_of([[1, 2], [5, 12], [25, 40]]) if kind == "prefix" else None
    mask = masks.dense(cu_seqlens, kind, image_spans=spans, window=window)
    inputs = attention_inputs(64)
    before = scaled_dot_product_attention(*inputs, attn_mask=mask)
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed:
            tensor[:, :, start:end] += 100
        after = scaled_dot_product_attention(*changed, attn_mask=mask)
        others = torch.ones(64, dtype=torch.bool)
        others[start:end] = False
        assert torch.equal(after[:, :, others], before[:, :, others])
        assert not torch.equal(after[:, :, ~others], before[:, :, ~others])


def test_masks_compile_without_a_graph_break():
    def everything(cu_seqlens, spans, num_tokens):
        lo, hi = masks.intervals(
            cu_seqlens, "prefix", image_spans=spans, window=3, num_tokens=num_tokens
        )
        return (
            lo,
            hi,
            masks.segment_ids(cu_seqlens, num_tokens=num_tokens),
            masks.position_ids(cu_seqlens, num_tokens=num_tokens),
            masks.dense(cu_seqlens, "full", num_tokens=num_tokens),
            masks.flashmask_rows(cu_seqlens, "full", num_tokens=num_tokens)[0],
        )

    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 5, 4], [6, 2, 9], [1, 1, 1]):
        cu_seqlens, spans = offsets(lengths), spans_of([[0, 1]])
        given = (cu_seqlens, spans, sum(lengths))
        for found, want in zip(compiled(*given), everything(*given), strict=True):
            assert torch.equal(found, want)


@pytest.mark.filterwarnings("ignore")  # torch explains every break of a graph
def test_offsets_without_their_number_end_the_graph_and_say_so():
    def first(cu_seqlens):
        return masks.intervals(cu_seqlens)[0] + 1

    compiled = torch.compile(first, backend="eager")
    assert torch.equal(compiled(ROW), first(ROW))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Give num_tokens=, the last offset"):
        torch.compile(first, backend="eager", fullgraph=True)(ROW)
