"""Operators of masks and padding: gradients, compilation, the interpreter, builds, guard pages."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload import masks
from omniload.errors import ConfigError
from omniload.kernels import ops, twins
from tests.mask_cases import offsets, spans_of

ROOT = Path(__file__).resolve().parent.parent
ROW = offsets([3, 1, 4])


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 3), st.sampled_from([(), (2, 3)]))
def test_padding_lays_each_document_on_a_line_of_its_own(lengths, spare, shape):
    packed = torch.randn(sum(lengths), *shape)
    length = max(lengths, default=0) + spare
    padded = ops.pad(packed, offsets(lengths), length)
    assert padded.shape == (len(lengths), length, *shape)
    documents = packed.split(lengths) if lengths else []
    for line, document in zip(padded, documents, strict=True):
        assert torch.equal(line[: len(document)], document)
        assert not line[len(document) :].any()
    assert torch.equal(ops.unpad(padded, offsets(lengths), len(packed)), packed)


def test_padding_has_the_right_gradients():
    packed = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    padded = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda given: ops.pad(given, ROW, 5), packed)
    assert torch.autograd.gradcheck(lambda given: ops.unpad(given, ROW, 8), padded)
    assert torch.autograd.gradgradcheck(lambda given: ops.pad(given, ROW, 5) ** 2, packed)
    assert torch.autograd.gradgradcheck(lambda given: ops.unpad(given, ROW, 8) ** 2, padded)


def test_padding_compiles_with_its_gradient_for_any_size():
    def round_trip(packed, cu_seqlens, length):
        return ops.unpad(ops.pad(packed, cu_seqlens, length) * 2, cu_seqlens, packed.shape[0])

    compiled = torch.compile(round_trip, fullgraph=True, backend="aot_eager")
    for lengths in ([3, 1, 4], [2, 2], [5, 6, 7]):
        packed = torch.randn(sum(lengths), 3, requires_grad=True)
        found = compiled(packed, offsets(lengths), 7)
        assert torch.equal(found, 2 * packed)
        found.sum().backward()
        assert torch.equal(packed.grad, torch.full_like(packed, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.pad(torch.zeros(8, 2), ROW, 3), r"longest document: expected 4, got 3"),
        (lambda: ops.pad(torch.zeros(7, 2), ROW, 4), r"number of tokens: expected 7, got 8"),
        (lambda: ops.pad(torch.zeros(8), ROW.long(), 4), r"must be int32 \(n \+ 1,\), got torch.i"),
        (lambda: ops.pad(torch.zeros(8), ROW[:0], 4), r"must be int32 .* \(0,\)"),
        (lambda: ops.pad(torch.tensor(1.0), ROW, 4), r"packed must have at least 1 axes"),
        (lambda: ops.pad(torch.zeros(8, device="meta"), ROW, 4), r"\(cpu\), got \(8,\) on meta"),
        (lambda: ops.unpad(torch.zeros(8), ROW, 8), r"padded must have at least 2 axes"),
        (lambda: ops.unpad(torch.zeros(2, 4), ROW, 8), r"a line for each document: expected 3, g"),
        (lambda: ops.unpad(torch.zeros(3, 3), ROW, 8), r"longest document: expected 4, got 3"),
        (lambda: ops.unpad(torch.zeros(3, 4), ROW, 9), r"number of tokens: expected 9, got 8"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("token_ids", (ROW, 8, 2)),
        ("intervals", (ROW, None, 8, "full", 2)),
        ("intervals", (ROW, spans_of([[0, 2]]), 8, "prefix", 0)),
        ("block_tensors", (*masks.intervals(ROW), 4, 2, [4, 4, 2, 2])),
        ("pad", (torch.randn(8, 2, requires_grad=True), ROW, 5)),
        ("unpad", (torch.randn(3, 5, 2, requires_grad=True), ROW, 8)),
    ],
)
def test_operators_keep_the_rules_of_torch(name, given):
    torch.library.opcheck(getattr(torch.ops.omniload, name).default, given)


def test_importing_the_operators_again_registers_nothing_twice():
    before = torch.ops.omniload.pad
    again = importlib.reload(ops)
    assert torch.ops.omniload.pad is before
    assert again.pad(torch.ones(8), ROW, 4).sum() == 8


def test_a_cpu_needs_no_triton_and_importing_needs_no_numba():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, omniload.masks\n"
        "print('numba' in sys.modules)\n"
        "print(omniload.masks.position_ids(torch.tensor([0, 2], dtype=torch.int32)).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["False", "[0, 1]"], done.stderr


def test_a_gpu_without_triton_is_told_what_to_install():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from omniload.kernels import ops\n"
        "try:\n    ops._lazy('varlen', 'pad')()\n"
        "except ValueError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "pip install 'omniload-vlm[triton]'" in done.stdout, done.stderr


# the interpreter


def interpreted(*arguments):
    pytest.importorskip("triton", reason="triton is not installed")
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )


def test_kernels_equal_their_twins_in_the_interpreter():
    done = interpreted("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_masks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "23 passed" in done.stdout


GUARDED = """
import ctypes, mmap, sys
import torch
from omniload.kernels import block_mask, twins, varlen

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
kept, real, at_end = [], torch.empty, sys.argv[1] == "end"

def guarded(tensor):
    # flush against a page that can't be touched: behind its end, or before its beginning
    page, num_bytes = mmap.PAGESIZE, tensor.numel() * tensor.element_size()
    pages = max(-(-num_bytes // page), 1)
    memory = mmap.mmap(-1, (pages + 2) * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = (pages + 1) * page - num_bytes if at_end else page
    copy = whole[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
    copy.copy_(tensor)
    for protected in (address, address + (pages + 1) * page):
        assert libc.mprotect(protected, page, 0) == 0
    kept.append(memory)
    return copy

torch.empty = lambda *args, **options: guarded(real(*args, **options).zero_())

def offsets(*values):
    return guarded(torch.tensor(values, dtype=torch.int32))

def use(cu, num_tokens):
    varlen.token_ids(cu, num_tokens, 1)
    spans = guarded(torch.tensor([[0, 2], [num_tokens - 2, num_tokens], [-5, 3],
                                  [num_tokens - 1, num_tokens + 9]], dtype=torch.int32))
    for kind, images, window in (("full", None, 0), ("full", None, 3), ("prefix", spans, 4)):
        lo, hi = varlen.intervals(cu, images, num_tokens, kind, window)
        for q_block, kv_block in ((16, 16), (32, 8)):
            rows, columns = -(-num_tokens // q_block), -(-num_tokens // kv_block)
            for widths in ([columns, columns, rows, rows], [1, 1, 1, 1]):
                block_mask.block_tensors(lo, hi, q_block, kv_block, widths)
    packed = guarded(torch.ones(num_tokens, 3))
    padded = varlen.pad(packed, cu, 7)
    varlen.unpad(padded, cu, num_tokens)

if sys.argv[2] == "inside":
    use(offsets(0, 7, 7, 18, 19), 19)
    use(offsets(0, 16), 16)
    use(offsets(0, 900, 7, -3, 5), 19)
    use(offsets(-2147483648, 2147483647), 17)
    use(offsets(0, 2, 3, 5), 19)
    use(offsets(0, 16, 900), 19)
else:
    lo, hi = guarded(torch.zeros(16, dtype=torch.int32)), guarded(torch.ones(16, dtype=torch.int32))
    outs = [guarded(torch.zeros(n, dtype=torch.int32)) for n in (1, 2, 1, 2)]
    tokens = 17 if at_end else -20
    block_mask.rows_kernel[(1,)](lo, hi, *outs, tokens, 2, 2, q_block=32, kv_block=32, block=16)
print("no fault")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made as Linux makes them")
@pytest.mark.parametrize("side", ["end", "beginning"])
def test_kernels_touch_nothing_outside_their_tensors_whatever_the_offsets(side):
    done = interpreted("-c", GUARDED, side, "inside")
    assert done.stdout == "no fault\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="guard pages are made as Linux makes them")
@pytest.mark.parametrize("side", ["end", "beginning"])
def test_the_guard_pages_catch_a_kernel_that_does(side):
    done = interpreted("-c", GUARDED, side, "outside")
    assert done.returncode < 0, done.stdout + done.stderr


# builds for GPUs that need not be there

TOKENS = {"num_tokens": "i32", "num_documents": "i32", "num_steps": "i32"}
LISTS = {"num_partial": "*i32", "partial": "*i32", "num_full": "*i32", "full": "*i32"}
WIDTHS = {"partial_width": "i32", "full_width": "i32"}
BITS = {"u8": "*u8", "i16": "*i16", "i32": "*i32", "i64": "*i64"}
BLOCKS = [(64, 64), (128, 128), (256, 256), (256, 128)]
VARIANTS = {
    "ids": ("varlen", "token_ids_kernel", {"block": 1024}),
    "causal": ("varlen", "intervals_kernel", {"is_full": False, "block": 1024}),
    "full": ("varlen", "intervals_kernel", {"is_full": True, "block": 1024}),
    "images": ("varlen", "image_spans_kernel", {"block": 1024}),
    **{
        f"{name} {bits}": ("varlen", f"{name}_kernel", {"packed": bits, "padded": bits, "block": 8})
        for name in ("pad", "unpad")
        for bits in BITS.values()
    },
    **{
        f"{name} {q_block}x{kv_block}": (
            "block_mask",
            f"{name}_kernel",
            {"q_block": q_block, "kv_block": kv_block, "block": 1024},
        )
        for name in ("rows", "columns")
        for q_block, kv_block in BLOCKS
    },
}
POINTERS = {"cu": "*i32", "lo": "*i32", "hi": "*i32", "spans": "*i32", "segments": "*i32"}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_compiles_for(variant, capability):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name, fixed = VARIANTS[variant]
    kernel = getattr(importlib.import_module(f"omniload.kernels.{module}"), name)
    kinds = {**POINTERS, **LISTS, "positions": "*i64", **fixed}
    kinds = {name: kinds.get(name, "i32") for name in kernel.arg_names}
    constants = {key: value for key, value in kinds.items() if not isinstance(value, str)}
    signature = {
        key: value if isinstance(value, str) else "constexpr" for key, value in kinds.items()
    }
    source = ASTSource(kernel, signature, constants)
    options = {"enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert len(built.asm["cubin"]) > 1000


# a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "full", "prefix"])
@pytest.mark.parametrize("window", [None, 300])
def test_a_gpu_gives_what_the_twins_give(kind, window):
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    cu_seqlens = offsets([700, 1, 3000, 128, 267, 4096, 0, 5])
    spans = spans_of([[3, 600], [800, 3000]]) if kind == "prefix" else None
    settings = {"kind": kind, "image_spans": spans, "window": window}
    for compact in (False, True):
        longest = 4096 if compact else None
        here = masks.block_mask(cu_seqlens, compact=compact, max_seqlen=longest, **settings)
        there = masks.block_mask(
            cu_seqlens, compact=compact, max_seqlen=longest, device="cuda", **settings
        )
        for name in ("kv", "full_kv", "q", "full_q"):
            for part in ("num_blocks", "indices"):
                mine = getattr(there, f"{name}_{part}")
                assert torch.equal(mine.cpu(), getattr(here, f"{name}_{part}"))
    packed = torch.randn(8197, 96, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    on_device = cu_seqlens.cuda()
    padded = ops.pad(packed, on_device, 4096)
    assert torch.equal(padded.cpu(), twins.pad(packed.detach().cpu(), cu_seqlens, 4096))
    ops.unpad(padded, on_device, 8197).sum().backward()
    assert (packed.grad == 1).all()
