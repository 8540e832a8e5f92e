"""Each backend gets what it asks for, and where it runs here its attention is that of a loop."""

import importlib
import inspect
import types
import warnings
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from omniload.attention import BACKENDS
from omniload.errors import ConfigError
from omniload.packing import pack
from omniload.padding import Padding
from tests.packing_samples import make_sample

SAMPLES = [
    make_sample(0, text=9, tiles_per_image=(2, 1)),
    make_sample(1, text=1),
    make_sample(2, text=24),
    make_sample(3, text=5, tiles_per_image=(1,)),
]
KINDS = [("causal", None), ("full", None), ("prefix", None), ("causal", 4), ("full", 3)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def heads(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 1, 2, num_tokens, 16, generator=generator, dtype=torch.float64)


def seen_pairs(batch, kind, window):
    """Which query sees which key, one pair at a time, from the definition."""
    document = [0] * batch.num_tokens
    for number, (start, end) in enumerate(pairwise(batch.cu_seqlens.tolist())):
        document[start:end] = [number] * (end - start)
    spans = batch.image_spans.tolist()
    seen = torch.zeros(batch.num_tokens, batch.num_tokens, dtype=torch.bool)
    for query in range(batch.num_tokens):
        for key in range(batch.num_tokens):
            near = window is None or abs(query - key) < window
            backward = key <= query and near
            image = any(start <= query < end and start <= key < end for start, end in spans)
            sees = {"causal": backward, "full": near, "prefix": backward or image}[kind]
            seen[query, key] = sees and document[query] == document[key]
    return seen


def by_hand(batch, qkv, kind, window=None):
    """Attention from the definition, in float64."""
    q, k, v = qkv
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~seen_pairs(batch, kind, window), float("-inf"))
    return scores.softmax(-1) @ v


# -- backends that run on a CPU -------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "window"), KINDS)
@pytest.mark.parametrize("pad_to", [None, 16], ids=["plain", "padded"])
def test_sdpa_is_the_attention_of_a_loop(kind, window, pad_to):
    batch = pack(SAMPLES, pad_to=pad_to)
    qkv = heads(batch.num_tokens)
    expected = by_hand(batch, qkv, kind, window)
    for dtype in (None, torch.float64):
        given = batch.attention("sdpa", kind=kind, window=window, dtype=dtype)
        assert given["attn_mask"].dtype == (dtype or torch.bool)
        found = scaled_dot_product_attention(*qkv, **given)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_flex_is_the_attention_of_a_loop(kind, window):
    batch = pack(SAMPLES, pad_to=16)
    qkv = heads(batch.num_tokens)
    given = batch.attention("flex", kind=kind, window=window, block_size=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that eager flex_attention is slow
        found = flex_attention(*qkv, **given)
    torch.testing.assert_close(found, by_hand(batch, qkv, kind, window), rtol=0, atol=1e-12)


def varlen_by_loop(qkv, cu_q, cu_k, window_size):
    """What a varlen kernel is documented to do: documents by offsets, `window_size` inside."""
    assert torch.equal(cu_q, cu_k)
    left, right = window_size
    parts = []
    for start, end in pairwise(cu_q.tolist()):
        q, k, v = (t[..., start:end, :] for t in qkv)
        distance = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = ((distance <= left) | (left < 0)) & ((-distance <= right) | (right < 0))
        parts.append(scaled_dot_product_attention(q, k, v, attn_mask=seen))
    return torch.cat(parts, dim=-2)


@pytest.mark.parametrize(("kind", "window"), [case for case in KINDS if case[0] != "prefix"])
def test_varlen_arguments_describe_the_attention_of_a_loop(kind, window):
    batch = pack(SAMPLES, pad_to=16)
    qkv = heads(batch.num_tokens)
    expected = by_hand(batch, qkv, kind, window)
    flash = batch.attention("flash", kind=kind, window=window)
    size = flash.get("window_size", (-1, -1))
    size = (size[0], 0) if flash["causal"] else size
    found = varlen_by_loop(qkv, flash["cu_seqlens_q"], flash["cu_seqlens_k"], size)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torchs = batch.attention("torch_varlen", kind=kind, window=window)
    found = varlen_by_loop(qkv, torchs["cu_seq_q"], torchs["cu_seq_k"], torchs["window_size"])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "window"), KINDS)
def test_flashmask_rows_describe_the_same_mask(kind, window):
    batch = pack(SAMPLES, pad_to=16)
    given = batch.attention("flashmask", kind=kind, window=window)
    rows = given["startend_row_indices"][0, 0]
    assert rows.dtype == torch.int32
    queries = torch.arange(batch.num_tokens)[:, None]
    # by FlashMask's contract, column k: from row 0 of its entry on hidden, before row 1 hidden
    seen = queries < rows[:, 0]
    if given["causal"]:
        assert rows.shape[1] == 1
        seen &= queries >= torch.arange(batch.num_tokens)
    else:
        seen &= queries >= rows[:, 1]
    assert torch.equal(seen, seen_pairs(batch, kind, window))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 8))
def test_every_backend_tells_the_same_documents(lengths, multiple):
    samples = [make_sample(i, text=length) for i, length in enumerate(lengths)]
    batch = pack(samples, pad_to=multiple)
    bounds = batch.cu_seqlens.tolist()
    ends = torch.tensor(batch.attention("xformers")["q_seqlen"]).cumsum(0).tolist()
    assert [0, *ends] == bounds
    for backend in ("flash", "torch_varlen", "transformers", "megatron"):
        given = batch.attention(backend)
        offsets = [v for v in given.values() if isinstance(v, torch.Tensor) and v.ndim == 1]
        assert offsets
        assert all(o.tolist() == bounds and o.dtype == torch.int32 for o in offsets)
        longest = [v for name, v in given.items() if name.startswith("max")]
        assert len(longest) == 2
        assert all(type(value) is int and value == batch.max_seqlen for value in longest)
    seen = batch.attention("sdpa")["attn_mask"][0, 0]
    assert torch.equal(seen, seen_pairs(batch, "causal", None))


@pytest.mark.parametrize("backend", ["sdpa", "flex"])
def test_changing_one_sample_leaves_the_others_bit_for_bit(backend):
    batch = pack(SAMPLES, pad_to=16)
    given = batch.attention(backend)
    run = scaled_dot_product_attention if backend == "sdpa" else flex_attention
    qkv = heads(batch.num_tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = run(*qkv, **given)
        for start, end in pairwise(batch.cu_seqlens.tolist()):
            changed = qkv.clone()
            changed[..., start:end, :] += 1 + changed[..., start:end, :].abs()
            after = run(*changed, **given)
            assert torch.equal(after[..., :start, :], before[..., :start, :])
            assert torch.equal(after[..., end:, :], before[..., end:, :])
            assert not torch.equal(after[..., start:end, :], before[..., start:end, :])


# -- documented contracts -------------------------------------------------------------------------


def test_torch_varlen_takes_exactly_these_arguments():
    signature = inspect.signature(varlen.varlen_attn)
    query = torch.zeros(3, 2, 16)
    signature.bind(query, query, query, **pack(SAMPLES).attention("torch_varlen"))


def test_torch_varlen_of_an_older_torch_is_told_is_causal(monkeypatch):
    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False): ...

    monkeypatch.setattr(varlen, "varlen_attn", older)
    batch = pack(SAMPLES)
    assert batch.attention("torch_varlen")["is_causal"] is True
    given = batch.attention("torch_varlen", kind="full")
    assert given["is_causal"] is False
    assert "window_size" not in given
    with pytest.raises(ConfigError, match="no sliding window"):
        batch.attention("torch_varlen", window=4)


def test_a_torch_without_varlen_is_named(monkeypatch):
    monkeypatch.delattr(varlen, "varlen_attn")
    assert importlib.import_module("torch.nn.attention.varlen") is varlen
    with pytest.raises(ConfigError, match=r"torch 2\.10 or newer"):
        pack(SAMPLES).attention("torch_varlen")


def test_flash_gets_a_window_only_where_there_is_one():
    batch = pack(SAMPLES)
    assert set(batch.attention("flash")) == {
        "cu_seqlens_q",
        "cu_seqlens_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "causal",
    }
    assert batch.attention("flash", window=4)["window_size"] == (3, 0)


def test_max_seqlen_can_be_held_constant():
    batch = pack(SAMPLES)
    assert batch.attention("flash", max_seqlen=4096)["max_seqlen_k"] == 4096
    for wrong in (batch.max_seqlen - 1, 4096.0, torch.tensor(4096)):
        with pytest.raises(
            ConfigError, match=rf"max_seqlen must be an integer of at least {batch.max_seqlen}"
        ):
            batch.attention("flash", max_seqlen=wrong)


def test_transformers_gets_positions_offsets_and_no_cache():
    batch = pack(SAMPLES)
    given = batch.attention("transformers")
    assert given["attention_mask"] is None
    assert given["use_cache"] is False
    assert torch.equal(given["position_ids"], batch.position_ids[None])
    assert "seq_idx" not in given
    seq_idx = batch.attention("transformers", seq_idx=True)["seq_idx"]
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape == (1, batch.num_tokens)
    starts, ends = batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist()
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert (seq_idx[0, start:end] == number).all()


@pytest.mark.parametrize("shape", [(3, -1), (3, 1, -1)])
def test_mrope_positions_get_the_text_row_before_them(shape):
    batch = pack(SAMPLES)
    mrope = torch.arange(3 * batch.num_tokens, dtype=torch.int32)
    found = batch.attention("transformers", mrope_position_ids=mrope.reshape(shape))["position_ids"]
    assert found.shape == (4, 1, batch.num_tokens)
    assert found.dtype == torch.int64
    assert torch.equal(found[0, 0], batch.position_ids)
    assert torch.equal(found[1:].flatten(), mrope.long())
    with pytest.raises(ConfigError, match="mrope_position_ids must be a tensor of integers"):
        batch.attention("transformers", mrope_position_ids=mrope.reshape(-1, 3))


@dataclass
class PackedSeqParams:
    """The fields of Megatron Core's class of this name, as documented."""

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None


def test_megatron_gets_real_and_padded_offsets():
    batch = pack(SAMPLES, pad_to=Padding(document_multiple=4, multiple=16, num_documents=7))
    params = PackedSeqParams(**batch.attention("megatron", context_parallel=2))
    assert params.qkv_format == "thd"
    lengths = [sample.num_tokens for sample in SAMPLES]
    tail = batch.num_tokens - sum(-(-length // 4) * 4 for length in lengths)
    assert params.cu_seqlens_q.diff().tolist() == [*lengths, *([tail] if tail else []), *[0] * (
        7 - len(lengths) - bool(tail)
    )]  # fmt: skip
    assert params.cu_seqlens_q.dtype == params.cu_seqlens_q_padded.dtype == torch.int32
    assert (params.cu_seqlens_q_padded % 4 == 0).all()
    assert int(params.cu_seqlens_q_padded[-1]) == batch.num_tokens
    assert params.max_seqlen_q == int(params.cu_seqlens_q_padded.diff().max())
    with pytest.raises(ConfigError, match=r"document_multiple=8"):
        batch.attention("megatron", context_parallel=4)


# -- refusals -------------------------------------------------------------------------------------


def test_a_dense_mask_of_a_long_row_is_refused_with_a_remedy():
    batch = pack(SAMPLES)
    with pytest.raises(ConfigError, match=r"at most 16 tokens.*Use 'flex'"):
        batch.attention("sdpa", max_tokens=16)


@pytest.mark.parametrize("backend", ["flash", "torch_varlen", "megatron", "xformers"])
def test_kernels_without_masks_refuse_images_that_see_themselves(backend):
    with pytest.raises(ConfigError, match="'flex', 'sdpa' and 'flashmask' can do every kind"):
        pack(SAMPLES).attention(backend, kind="prefix")


def test_tokens_that_see_ahead_must_not_see_padding():
    batch = pack(SAMPLES, pad_to=Padding(document_multiple=8))
    with pytest.raises(ConfigError, match="documents must not hold padding"):
        batch.attention("flash", kind="full")
    assert batch.attention("megatron", kind="full")


@pytest.mark.parametrize(
    ("backend", "options", "message"),
    [
        ("flsh", {}, "backend must be one of 'flash', 'torch_varlen', 'flex'"),
        ("flash", {"kind": "cuasal"}, "kind must be one of 'causal', 'full'"),
        ("flash", {"window": 0}, "window must be an integer of at least 1"),
        ("flash", {"block_size": 64}, "got block_size=64"),
        ("flex", {"max_seqlen": 64}, "got max_seqlen=64"),
        ("transformers", {"window": 64}, "The model's config has the window"),
        ("xformers", {"window": 64}, r"make_local_attention\(window\)"),
    ],
)
def test_wrong_arguments_are_named(backend, options, message):
    with pytest.raises(ConfigError, match=message):
        pack(SAMPLES).attention(backend, **options)


def test_every_backend_runs_with_padding_and_empty_documents():
    samples = [make_sample(0, text=5)]
    batch = pack(samples, pad_to=Padding(multiple=8, num_documents=5))
    for backend in BACKENDS:
        given = batch.attention(backend)
        assert given
        assert isinstance(given, dict)
    assert isinstance(batch.attention("flex")["block_mask"].mask_mod, types.FunctionType)
