"""Every option of packed rows, given what it can't be: our error, which says what it got."""

import inspect

import numpy as np
import pytest
import torch
from torch import nn

from omniload import masks
from omniload.attention import BACKENDS, AttentionOptions
from omniload.batch import PackedBatch
from omniload.errors import ConfigError
from omniload.isolation import check_isolation
from omniload.kernels import ops
from omniload.kernels.reference import normalize_table
from omniload.model_check import pack_for
from omniload.mrope import mrope_position_ids
from omniload.packing import pack
from omniload.padding import Padding
from tests.mask_cases import offsets, spans_of
from tests.packing_samples import make_sample

ROW = offsets([3, 5, 4])
LO, HI = masks.intervals(ROW)
GRIDS = torch.tensor([[1, 2, 2]])
BATCH = pack([make_sample(0, text=5, tiles_per_image=(1,)), make_sample(1, text=7)])

# what a setting of each sort can't be
COUNT = (True, np.bool_(True), 2.5, "4", [4], float("nan"), 2**31, -1, torch.tensor(4))
OPTIONAL = COUNT
NEEDED = (*COUNT, None)
ABOVE_ZERO = (*COUNT, 0)
FLAG = ("yes", 1, None, [True])
NAME = ("nope", "", 3, None, ["causal"], {"a": 1}, torch.tensor(1))
TENSOR = (None, 3, "x", [0, 12], np.array([0, 12], np.int32))
INT32 = (
    *TENSOR, ROW.long(), ROW.double(), ROW.bool(), ROW.to("meta"), ROW.to_sparse(), ROW[None, None],
)  # fmt: skip
SPANS = (*INT32[1:], ROW, torch.zeros(2, 3, dtype=torch.int32), spans_of([[2, 4]]))
INTEGERS = (*TENSOR, ROW.double(), ROW.bool(), ROW.to("meta"), ROW[None, None])
DEVICE = ("nope", "", "cuda:99", -5, True, 1.5, [0], "cpu:x")
DTYPE = ("float32", np.float32, torch.int64, 3, float)
BLOCK = (0, -1, True, 1.5, "128", (4,), (4, 0), (4, True), (4, 4, 4), None, 2**31)
COLOURS = (0.5, None, (1, 2), "abc", (1, 2, "x"), (1, 2, float("nan")), (1, 2, float("inf")))

MASK = {
    "cu_seqlens": INT32,
    "kind": NAME,
    "image_spans": SPANS,
    "window": (*OPTIONAL, 0),
    "num_tokens": OPTIONAL,
}
PREFIX = {"cu_seqlens": ROW, "kind": "prefix", "image_spans": spans_of([[1, 3]])}
MROPE = {"cu_seqlens": ROW, "image_spans": spans_of([[4, 5]]), "image_grid_thw": GRIDS, "merge": 2}

#: name -> function, arguments that are right, and for each of its parameters values that are not.
TABLE = {
    "segment_ids": (
        masks.segment_ids,
        {"cu_seqlens": ROW},
        {"cu_seqlens": INT32, "num_tokens": OPTIONAL, "num_documents": (*OPTIONAL, 4)},
    ),
    "position_ids": (
        masks.position_ids,
        {"cu_seqlens": ROW},
        {"cu_seqlens": INT32, "num_tokens": OPTIONAL},
    ),
    "intervals": (masks.intervals, PREFIX, MASK),
    "dense": (masks.dense, PREFIX, MASK),
    "flashmask_rows": (masks.flashmask_rows, PREFIX, MASK),
    "block_mask": (
        masks.block_mask,
        PREFIX,
        {
            **MASK,
            "block_size": BLOCK,
            "device": (*DEVICE, "meta"),
            "compact": FLAG,
            "max_seqlen": (*OPTIONAL, 0),
        },
    ),
    "block_mask_from_intervals": (
        masks.block_mask_from_intervals,
        {"lo": LO, "hi": HI},
        {
            "lo": INT32,
            "hi": INT32,
            "block_size": BLOCK,
            "compact": FLAG,
            "max_seqlen": (*OPTIONAL, 0),
        },
    ),
    "mrope_position_ids": (
        mrope_position_ids,
        MROPE,
        {
            "cu_seqlens": (*INTEGERS, torch.tensor([0, 2**32 + 12])),
            "image_spans": (*INTEGERS, torch.tensor([[4, 2**32 + 5]])),
            "image_grid_thw": INTEGERS,
            "merge": (*ABOVE_ZERO, None),
            "num_tokens": (*OPTIONAL, 11),
            "backend": NAME,
        },
    ),
    "pad": (
        ops.pad,
        {"packed": torch.zeros(12, 2), "cu_seqlens": ROW, "length": 5},
        {"packed": TENSOR, "cu_seqlens": INT32[:-1], "length": (*NEEDED, 4)},
    ),
    "unpad": (
        ops.unpad,
        {"padded": torch.zeros(3, 5), "cu_seqlens": ROW, "num_tokens": 12},
        {"padded": TENSOR, "cu_seqlens": INT32[:-1], "num_tokens": (*NEEDED, 11)},
    ),
    "Padding": (
        Padding,
        {},
        {
            "multiple": (*ABOVE_ZERO, None),
            "num_tokens": ABOVE_ZERO,
            "document_multiple": (*ABOVE_ZERO, None),
            "num_documents": ABOVE_ZERO,
            "token_id": OPTIONAL,
        },
    ),
    "padded": (
        BATCH.padded,
        {},
        {"pad_token_id": (*NEEDED, -100), "side": NAME, "multiple": (*ABOVE_ZERO, None)},
    ),
    "split": (BATCH.split, {}, {"values": (*TENSOR, torch.tensor(1), torch.zeros(1, 12))}),
    "to": (
        BATCH.to,
        {"device": "cpu"},
        {
            "device": (*DEVICE, torch.float16, None),
            "non_blocking": (*FLAG, torch.float16),
            "dtype": (torch.float16,),
        },
    ),
    "model_inputs": (
        BATCH.model_inputs,
        {},
        {"dtype": DTYPE, "mean": COLOURS, "std": (*COLOURS, (1, 0, 1)), "loss": NAME},
    ),
    "normalize_table": (
        normalize_table,
        {},
        {"mean": COLOURS, "std": (*COLOURS, (1, 0, 1)), "dtype": DTYPE, "device": DEVICE},
    ),
    "pack_for": (pack_for, {}, {"model": (None, "llama", nn.Linear)}),
    "check_isolation": (
        check_isolation,
        {"model": nn.Identity(), "batch": BATCH, "forward": lambda batch: batch.input_ids},
        {
            "model": (None, "llama", nn.Linear),
            "batch": (None, {}, pack([make_sample(0, text=4)])),
            "forward": ("x", lambda batch: None, lambda batch: batch.input_ids[1:]),
            "tolerance": (-1, "x", True, float("nan"), float("inf")),
            "max_samples": (*ABOVE_ZERO, None),
        },
    ),
}
ATTENTION = {
    "kind": NAME,
    "window": (*OPTIONAL, 0),
    "max_seqlen": (*OPTIONAL, BATCH.max_seqlen - 1),
    "block_size": BLOCK,
    "compact": FLAG,
    "dtype": DTYPE,
    "max_tokens": (*ABOVE_ZERO, None),
    "mrope_position_ids": ([1], "x", 3, torch.zeros(3, 12), torch.zeros(3, 12, dtype=torch.bool),
                           torch.zeros(2, 12, dtype=torch.int64)),
    "seq_idx": FLAG,
    "context_parallel": (*ABOVE_ZERO, None, -2),
}  # fmt: skip
CASES = [
    (name, option, index)
    for name, (_, _, wrong) in TABLE.items()
    for option, values in wrong.items()
    for index in range(len(values))
]


@pytest.mark.parametrize(("name", "option", "index"), CASES)
def test_a_wrong_value_is_named(name, option, index):
    function, right, wrong = TABLE[name]
    with pytest.raises(ConfigError, match=r"must|needs|can't|can go") as caught:
        function(**{**right, option: wrong[option][index]})
    assert "got" in str(caught.value)


@pytest.mark.parametrize("name", TABLE)
def test_the_table_has_every_option(name):
    function, right, wrong = TABLE[name]
    assert set(inspect.signature(function).parameters) == set(wrong)
    if name not in ("split", "pack_for"):
        function(**right)


@pytest.mark.parametrize("option", ATTENTION)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_option_of_attention_is_named(backend, option):
    for value in ATTENTION[option]:
        with pytest.raises(ConfigError, match="got") as caught:
            BATCH.attention(backend, **{option: value})
        assert option in str(caught.value)


def test_the_table_has_every_option_of_attention():
    parameters = inspect.signature(PackedBatch.attention).parameters
    assert list(parameters) == ["self", "backend", *ATTENTION]
    assert list(ATTENTION) == list(AttentionOptions.__dataclass_fields__)
    for backend in NAME:
        with pytest.raises(ConfigError, match="backend must be one of 'flash'"):
            BATCH.attention(backend)


def test_numbers_of_numpy_are_numbers():
    four = np.int64(4)
    assert masks.block_mask(ROW, window=four, block_size=four).BLOCK_SIZE == (4, 4)
    assert type(BATCH.attention("flash", max_seqlen=np.int32(4096))["max_seqlen_q"]) is int
    assert BATCH.padded(pad_token_id=four, multiple=four)["input_ids"].shape[1] % 4 == 0
