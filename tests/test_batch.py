import copy
import io
import itertools
import pickle
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload._layout import BatchSizes, TensorBuffer, allocate_buffer
from omniload.batch import PackedBatch
from omniload.errors import ConfigError
from omniload.kernels.reference import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    normalize_table,
    normalize_tiles,
)
from omniload.packing import pack
from omniload.types import IGNORE_INDEX
from tests.packing_samples import make_filler, make_sample

TENSORS = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "cu_seqlens": torch.int32,
    "sample_ids": torch.int64,
    "image_num_tiles": torch.int32,
    "image_sizes": torch.int32,
    "image_grids": torch.int32,
    "image_spans": torch.int32,
    "tiles": torch.uint8,
}


def make_batch(**settings):
    packed = [
        make_sample(3, text=9, tiles_per_image=(2, 1)),
        make_sample(8, text=5),
        make_sample(1, text=12, tiles_per_image=(1,)),
    ]
    return pack(packed, **settings)


def filler(**settings):
    return pack([make_filler()], is_filler=True, num_loss_tokens_step=40, **settings)


# -- the container --------------------------------------------------------------------------------


def test_a_batch_is_a_mapping_of_its_tensors():
    batch = make_batch()
    assert {name: tensor.dtype for name, tensor in batch.items()} == TENSORS
    assert len(batch) == len(TENSORS)
    for name in TENSORS:
        assert batch[name] is getattr(batch, name)
    assert "step" not in batch
    assert batch == batch
    assert batch != make_batch()
    assert len({batch, batch}) == 1


@given(st.lists(st.integers(0, 70), min_size=7, max_size=7))
def test_every_tensor_lies_in_the_one_buffer_at_a_cache_line_of_its_own(numbers):
    buffer, arrays = allocate_buffer(BatchSizes(*numbers))
    batch = TensorBuffer(buffer=buffer, sizes=BatchSizes(*numbers))
    end = 0
    for name, tensor in batch.items():
        assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        start = tensor.storage_offset() * tensor.element_size()
        assert start % 64 == 0
        assert not buffer[end:start].any()  # the gap
        end = start + tensor.nbytes
        arrays[name][...] = 1
        assert (tensor == 1).all()
        assert tensor.shape == arrays[name].shape
    assert end <= len(buffer)


def test_equal_samples_give_equal_bytes_gaps_included():
    first = make_batch()
    torch.full((4096,), 255, dtype=torch.uint8)  # dirties memory that the next batch may get
    assert torch.equal(first.buffer, make_batch().buffer)


def test_repr_is_short_and_says_what_is_in_it():
    assert repr(make_batch(step=4, micro_step=1, num_loss_tokens_step=99)) == (
        "PackedBatch(step=4, micro_step=1, samples=3, tokens=42, tiles=4, "
        "loss_tokens=12/99, device='cpu')"
    )
    assert "filler, samples=1" in repr(filler())


def test_a_batch_carries_its_place_in_the_step():
    batch = make_batch(
        step=4,
        micro_step=1,
        is_last_micro_step=False,
        num_loss_tokens_step=50,
        dp_world_size=2,
        accumulation=3,
    )
    assert (batch.step, batch.micro_step, batch.is_last_micro_step) == (4, 1, False)
    assert (batch.num_loss_tokens, batch.num_loss_tokens_step) == (12, 50)
    assert (batch.dp_world_size, batch.accumulation) == (2, 3)
    assert (batch.num_samples, batch.num_images, batch.num_tiles) == (3, 3, 4)


# -- moving ---------------------------------------------------------------------------------------


def test_moving_to_where_it_is_gives_the_same_batch():
    batch = make_batch()
    assert batch.to("cpu") is batch
    assert batch.to(torch.device("cpu"), non_blocking=True) is batch


def test_moving_makes_one_new_buffer_and_keeps_all_else():
    batch = make_batch(step=4, num_loss_tokens_step=50)
    moved = batch.to("meta")  # a device that every machine has
    assert moved.device.type == "meta"
    for name, tensor in moved.items():
        assert tensor.device.type == "meta"
        assert (tensor.dtype, tensor.shape) == (batch[name].dtype, batch[name].shape)
    assert repr(moved) == repr(batch).replace("'cpu'", "'meta'")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinning_and_moving_to_a_gpu_keep_the_values():
    batch = make_batch(step=4)
    pinned = batch.pin_memory()
    assert pinned.is_pinned()
    assert isinstance(pinned, PackedBatch)
    moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(moved.buffer.cpu(), batch.buffer)
    assert moved.max_seqlen == batch.max_seqlen
    inputs, expected = moved.model_inputs(), batch.model_inputs()
    assert torch.equal(inputs["pixel_values"].cpu(), expected["pixel_values"])


class CountingPickler(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file)
        self.tensors = []

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
        return NotImplemented


def test_pickling_sends_one_tensor_and_a_few_numbers():
    batch = make_batch(step=4, num_loss_tokens_step=50)
    file = io.BytesIO()
    pickler = CountingPickler(file)
    pickler.dump(batch)
    assert [tensor is batch.buffer for tensor in pickler.tensors] == [True]
    found = pickle.loads(file.getvalue())
    assert repr(found) == repr(batch)
    assert torch.equal(found.buffer, batch.buffer)
    assert copy.deepcopy(batch).max_seqlen == batch.max_seqlen


def test_pickling_to_another_process_is_small_however_large_the_batch():
    large = pack([make_sample(1, text=50, tiles_per_image=(12,), size=64)])
    assert len(ForkingPickler.dumps(large)) < 1000
    assert large.buffer.is_shared()


class OneBatch(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, step):
        batch = make_batch(step=step, num_loss_tokens_step=50)
        return replace(batch, micro_step=int(batch.buffer.is_shared()))


def unchanged(batch):
    return batch


def test_a_worker_packs_into_shared_memory_and_the_batch_arrives_whole():
    loader = torch.utils.data.DataLoader(
        OneBatch(), batch_size=None, num_workers=1, collate_fn=unchanged
    )
    for step, batch in enumerate(loader):
        assert isinstance(batch, PackedBatch)
        assert batch.micro_step == 1, "the buffer was not in shared memory when it was made"
        assert torch.equal(batch.buffer, make_batch().buffer)
        assert (batch.step, batch.num_loss_tokens_step, batch.max_seqlen) == (step, 50, 21)
    assert not make_batch().buffer.is_shared()


# -- model inputs ---------------------------------------------------------------------------------


def test_model_inputs_are_what_a_hugging_face_model_takes():
    batch = make_batch(num_loss_tokens_step=50)
    inputs = batch.model_inputs()
    assert set(inputs) == {
        "input_ids",
        "labels",
        "position_ids",
        "pixel_values",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "use_cache",
        "num_items_in_batch",
    }
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(inputs[name], batch[name][None])
    assert torch.equal(inputs["cu_seq_lens_q"], batch.cu_seqlens)
    assert torch.equal(inputs["cu_seq_lens_k"], batch.cu_seqlens)
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (21, 21)
    assert type(inputs["max_length_q"]) is int
    assert inputs["num_items_in_batch"] == 50


def test_labels_that_hugging_face_counts_are_the_loss_tokens():
    batch = make_batch()
    assert int((batch.labels != IGNORE_INDEX).sum()) == batch.num_loss_tokens
    assert int((batch.labels[1:] != IGNORE_INDEX).sum()) == batch.num_loss_tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_pixels_are_the_float_path_bit_for_bit(dtype):
    every_value = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    sample = make_sample(1, text=4, tiles_per_image=(2,), size=16)
    sample.tiles[:] = np.stack([every_value, every_value[:, ::-1]]).repeat(3, axis=1)
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    pixels = torch.from_numpy(sample.tiles).float()
    expected = (pixels / 255 - mean[:, None, None]) / std[:, None, None]
    found = pack([sample]).model_inputs(dtype=dtype)["pixel_values"]
    assert found.dtype == dtype
    assert torch.equal(found, expected.to(dtype))


def test_mean_and_std_may_be_another_models():
    batch = make_batch()
    pixels = batch.model_inputs(mean=(0.5,) * 3, std=(0.5, 0.25, 1.0))["pixel_values"]
    expected = (batch.tiles.float() / 255 - 0.5) / torch.tensor([0.5, 0.25, 1.0])[:, None, None]
    assert torch.equal(pixels, expected)


def test_a_text_row_has_no_pixels():
    assert pack([make_sample(1, text=5)]).model_inputs()["pixel_values"] is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: normalize_table(mean=(0.5,)), r"3 numbers each"),
        (lambda: normalize_table(std=(1, 0, 1)), r"std without 0"),
        (lambda: normalize_table(dtype=torch.uint8), r"floating dtype, got torch.uint8"),
        (lambda: normalize_tiles(torch.zeros(1, 3, 2, 2), normalize_table()), r"must be uint8"),
        (lambda: make_batch().model_inputs(loss="Mean"), r"'sum', 'mean', 'step', got 'Mean'"),
        (lambda: make_batch().loss_scale(loss="max"), r"'sum', 'mean', 'step', got 'max'"),
        (lambda: make_batch().loss_scale(ranks="avg"), r"ranks must be one of 'mean', 'sum'"),
        (lambda: make_batch().model_inputs(dtype=torch.int64), r"floating type .* got torch.int64"),
        (lambda: make_batch().model_inputs(dtype="bf16"), r"floating type .* got 'bf16'"),
        (lambda: make_batch().loss_weights(dtype=np.float32), r"floating type of torch, got"),
        (lambda: make_batch().attention("sdpa", dtype=float), r"floating type .* got <class"),
        (
            lambda: make_batch().padded(pad_token_id=1.5),
            r"pad_token_id must be .* got 1.5",
        ),
        (lambda: make_batch().to(torch.bfloat16), r"not to a dtype.*model_inputs\(dtype=\)"),
        (lambda: make_batch().to("cpu", torch.float16), r"not to a dtype.*model_inputs\(dtype=\)"),
    ],
)
def test_unknown_options_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


@pytest.mark.parametrize("loss", ["sum", "step"])
def test_a_filler_leaves_its_labels_alone_where_the_model_sums(loss):
    assert (filler().model_inputs(loss=loss)["labels"] == IGNORE_INDEX).all()


def test_a_mean_of_no_tokens_is_never_asked_for():
    batch = filler()
    inputs = batch.model_inputs(loss="mean")
    assert inputs["labels"][0, :-1].tolist() == [IGNORE_INDEX] * (batch.num_tokens - 1)
    assert inputs["labels"][0, -1] == batch.input_ids[-1]
    assert (batch.labels == IGNORE_INDEX).all()  # the batch itself is as it was
    assert "num_items_in_batch" not in inputs
    unlabelled = pack([make_sample(1, text=6, labelled=0)], num_loss_tokens_step=9)
    assert (unlabelled.model_inputs(loss="mean")["labels"] != IGNORE_INDEX).sum() == 1
    assert unlabelled.loss_scale("mean") == 0.0


def test_a_batch_with_loss_keeps_its_labels_for_a_mean():
    batch = make_batch()
    assert torch.equal(batch.model_inputs(loss="mean")["labels"][0], batch.labels)


def test_a_row_of_one_token_has_no_mean():
    batch = pack([make_sample(1, text=1, labelled=0)], num_loss_tokens_step=7, step=3)
    assert batch.num_tokens == 1
    with pytest.raises(ConfigError, match=r"at least 2 tokens.* got 1 \(step=3, micro_step=0\)"):
        batch.model_inputs(loss="mean")


# -- loss scale -----------------------------------------------------------------------------------

ENGINES = list(itertools.product(["sum", "mean", "step"], ["mean", "sum"], [False, True]))


@pytest.mark.parametrize(("loss", "ranks", "divides"), ENGINES)
@settings(max_examples=25)
@given(
    world=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    data=st.data(),
)
def test_the_step_is_the_mean_over_its_loss_tokens(loss, ranks, divides, world, accumulation, data):
    """Plays the engine over made-up token losses: whole numbers, so that sums are exact."""
    slots = [
        data.draw(st.lists(st.integers(0, 99), max_size=6)) for _ in range(world * accumulation)
    ]
    total = sum(map(len, slots))
    result = 0.0
    for token_losses in slots:
        sample = make_sample(0, text=max(len(token_losses), 1) * 2, labelled=0)
        sample.labels[len(sample.labels) - len(token_losses) :] = 1
        batch = pack(
            [sample],
            num_loss_tokens_step=total,
            dp_world_size=world,
            accumulation=accumulation,
        )
        assert batch.num_loss_tokens == len(token_losses)
        model_loss = {
            "sum": sum(token_losses),
            "mean": sum(token_losses) / max(len(token_losses), 1),
            "step": sum(token_losses) / max(total, 1),
        }[loss]
        scaled = model_loss * batch.loss_scale(loss, ranks, engine_divides_accumulation=divides)
        result += scaled / (accumulation if divides else 1) / (world if ranks == "mean" else 1)
    expected = sum(map(sum, slots)) / total if total else 0.0
    assert result == pytest.approx(expected, rel=1e-12)


def test_loss_scale_of_a_plain_loop_and_of_two_ranks():
    assert make_batch().loss_scale() == 1 / 12
    two = make_batch(dp_world_size=2, accumulation=3, num_loss_tokens_step=48)
    assert two.loss_scale("sum") == 2 / 48
    assert two.loss_scale("mean") == 0.5
    assert two.loss_scale("step") == 2.0
    assert two.loss_scale("mean", "sum") == 0.25
    assert two.loss_scale("mean", engine_divides_accumulation=True) == 1.5


def test_hugging_face_divides_by_at_least_one():
    nothing = pack([make_sample(1, text=6, labelled=0)])
    assert nothing.num_loss_tokens_step == 0
    assert nothing.model_inputs()["num_items_in_batch"] == 1
    assert nothing.loss_scale("step") == 0.0
