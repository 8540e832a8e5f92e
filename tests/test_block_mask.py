"""Block masks: equal to torch's own search, block list by block list, and right in attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from omniload import masks
from omniload.errors import ConfigError
from tests.mask_cases import offsets, rows, spans_of

LISTS = ("kv", "full_kv", "q", "full_q")
BLOCKS = st.sampled_from([(1, 1), (4, 4), (8, 8), (16, 16), (8, 4), (4, 16), (16, 8), (64, 64)])


def found_by_torch(dense, block_size):
    size = len(dense)
    return create_block_mask(
        lambda batch, head, query, key: dense[query, key],
        None, None, size, size, device="cpu", BLOCK_SIZE=block_size,
    )  # fmt: skip


def assert_same_blocks(found, want):
    assert found.BLOCK_SIZE == want.BLOCK_SIZE
    assert found.seq_lengths == want.seq_lengths
    for name in LISTS:
        counts = getattr(want, f"{name}_num_blocks")
        assert torch.equal(getattr(found, f"{name}_num_blocks"), counts), name
        lists = zip(
            getattr(found, f"{name}_indices")[0, 0],
            getattr(want, f"{name}_indices")[0, 0],
            counts[0, 0].tolist(),
            strict=True,
        )
        for mine, torchs, count in lists:
            assert mine[:count].tolist() == torchs[:count].tolist(), name
            assert not mine[count:].any(), f"{name}: the rest is not 0"


@settings(deadline=None, max_examples=150)
@given(rows(), BLOCKS, st.booleans())
def test_all_eight_tensors_equal_create_block_mask(row, block_size, compact):
    cu_seqlens, kind = row
    found = masks.block_mask(cu_seqlens, block_size=block_size, compact=compact, **kind)
    assert_same_blocks(found, found_by_torch(masks.dense(cu_seqlens, **kind), block_size))


@pytest.mark.parametrize("block_size", [64, 128, (256, 128), (128, 64)])
@pytest.mark.parametrize("lengths", [[700, 1, 323], [128, 256, 64, 64, 128], [1000], [129] * 7])
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_blocks_of_real_sizes_equal_create_block_mask(kind, lengths, block_size):
    cu_seqlens = offsets(lengths)
    found = masks.block_mask(cu_seqlens, kind, block_size)
    sizes = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    assert_same_blocks(found, found_by_torch(masks.dense(cu_seqlens, kind), sizes))


@settings(deadline=None, max_examples=100)
@given(rows(), BLOCKS)
def test_the_bound_from_max_seqlen_leaves_room_for_every_list(row, block_size):
    cu_seqlens, kind = row
    longest = int(cu_seqlens.diff().max())
    wide = masks.block_mask(
        cu_seqlens, block_size=block_size, compact=True, max_seqlen=longest, **kind
    )
    exact = masks.block_mask(cu_seqlens, block_size=block_size, compact=True, **kind)
    for name in LISTS:
        width = getattr(exact, f"{name}_indices").shape[-1]
        room = getattr(wide, f"{name}_indices")
        assert torch.equal(room[..., :width], getattr(exact, f"{name}_indices"))
        assert not room[..., width:].any()


def test_compact_lists_grow_with_the_tokens_and_not_with_their_square():
    def num_bytes(documents):
        found = masks.block_mask(offsets([1000] * documents), compact=True)
        return sum(getattr(found, f"{name}_indices").nbytes for name in LISTS)

    assert num_bytes(64) <= 9 * num_bytes(8)


@settings(deadline=None, max_examples=50)
@given(rows(), BLOCKS)
def test_mask_mod_is_the_mask(row, block_size):
    cu_seqlens, kind = row
    found = masks.block_mask(cu_seqlens, block_size=block_size, **kind)
    tokens = torch.arange(int(cu_seqlens[-1]))
    zero = torch.tensor(0)
    dense = found.mask_mod(zero, zero, tokens[:, None], tokens[None])
    assert torch.equal(dense, masks.dense(cu_seqlens, **kind))


@pytest.mark.parametrize("kind", ["causal", "full", "prefix"])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_equals_dense_attention_and_samples_stay_apart(kind, window):
    cu_seqlens = offsets([30, 1, 97, 45, 27])
    spans = spans_of([[2, 20], [40, 110]]) if kind == "prefix" else None
    given = {"kind": kind, "image_spans": spans, "window": window}
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 2, 200, 16, generator=generator) for _ in range(3)]
    mask = masks.block_mask(cu_seqlens, block_size=64, **given)
    before = flex_attention(*inputs, block_mask=mask)
    want = scaled_dot_product_attention(*inputs, attn_mask=masks.dense(cu_seqlens, **given))
    torch.testing.assert_close(before, want, rtol=0, atol=2e-6)
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        changed = [tensor.clone() for tensor in inputs]
        for tensor in changed:
            tensor[:, :, start:end] += 100
        after = flex_attention(*changed, block_mask=mask)
        others = torch.ones(200, dtype=torch.bool)
        others[start:end] = False
        assert torch.equal(after[:, :, others], before[:, :, others])


def test_a_new_batch_of_the_same_size_compiles_nothing():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=count)
    def attend(query, key, value, mask):
        return flex_attention(query, key, value, block_mask=mask)

    inputs = [torch.randn(1, 1, 128, 16) for _ in range(3)]
    for lengths in ([100, 28], [64, 60, 4], [128]):
        attend(*inputs, masks.block_mask(offsets(lengths), block_size=64))
    assert len(graphs) == 1


def test_a_block_mask_is_made_inside_a_compiled_function():
    def make(cu_seqlens, num_tokens, compact):
        mask = masks.block_mask(
            cu_seqlens, "causal", 4, num_tokens=num_tokens, compact=compact, max_seqlen=9
        )
        return [getattr(mask, f"{name}_indices") + 0 for name in LISTS]

    compiled = torch.compile(make, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 5, 4], [6, 2, 9]):
        for compact in (False, True):
            given = (offsets(lengths), sum(lengths), compact)
            for found, want in zip(compiled(*given), make(*given), strict=True):
                assert torch.equal(found, want)


def test_a_mask_may_come_from_intervals_of_ones_own():
    lo = torch.tensor([0, 0, 2, 2, 2], dtype=torch.int32)
    hi = torch.tensor([2, 2, 4, 5, 5], dtype=torch.int32)
    tokens = torch.arange(5)
    dense = (tokens >= lo[:, None]) & (tokens < hi[:, None])
    found = masks.block_mask_from_intervals(lo, hi, 2)
    assert_same_blocks(found, found_by_torch(dense, (2, 2)))


@pytest.mark.parametrize(
    ("lo", "hi", "message"),
    [
        ([0, 0, 0], [1, 1, 3], r"must hold the query, .*got \[0, 1\) for query 1"),
        ([0, 2, 2], [1, 3, 3], r"got \[2, 3\) for query 1"),
        ([0, 1, 0], [1, 2, 3], r"neither begin .*got \[0, 3\) for query 2"),
        ([0, 0, 0], [3, 2, 3], r"nor end before .*got \[0, 2\) for query 1"),
        ([0, 0, 0], [1, 2, 4], r"lie in the 3 tokens, .*got \[0, 4\)"),
        ([-1, 0, 0], [1, 2, 3], r"got \[-1, 1\) for query 0"),
        ([0, 0], [1, 2, 3], r"must be int32 \(num_tokens,\) on one device"),
    ],
)
def test_wrong_intervals_are_refused(lo, hi, message):
    given = [torch.tensor(values, dtype=torch.int32) for values in (lo, hi)]
    with pytest.raises(ConfigError, match=message):
        masks.block_mask_from_intervals(*given)


@pytest.mark.parametrize("block_size", [0, -1, (4,), (4, 0), (4, 4, 4), 1.5, (128, 1.0)])
def test_wrong_block_sizes_are_refused(block_size):
    with pytest.raises(ConfigError, match="block_size must be a number of tokens, or two"):
        masks.block_mask(offsets([3]), block_size=block_size)


def test_a_row_without_tokens_has_no_block_mask():
    with pytest.raises(ConfigError, match="at least 1 token, got 0"):
        masks.block_mask(torch.zeros(1, dtype=torch.int32))


def test_max_seqlen_that_is_too_small_is_refused():
    with pytest.raises(
        ConfigError, match="at least the longest document: expected 300 or more, got 2"
    ):
        masks.block_mask(offsets([300]), block_size=4, compact=True, max_seqlen=2)
