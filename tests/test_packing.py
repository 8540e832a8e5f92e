import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniload import _native
from omniload._rows import ListColumn, TokenRow
from omniload.errors import ConfigError, SampleError
from omniload.packing import pack, pack_list, reserve
from omniload.types import IGNORE_INDEX, Record, Sample
from tests.packing_samples import make_filler, make_sample, samples

ROOT = Path(__file__).resolve().parent.parent
needs_native = pytest.mark.skipif(not _native.available(), reason="the extension is not built")
BACKENDS = ["numpy", pytest.param("native", marks=needs_native)]


def naive(packed):
    """The packed row, spelled out in plain Python."""
    row = {"input_ids": [], "labels": [], "position_ids": [], "cu_seqlens": [0], "image_spans": []}
    for sample in packed:
        start = len(row["input_ids"])
        row["image_spans"] += [[a + start, b + start] for a, b in sample.image_spans.tolist()]
        row["input_ids"] += sample.input_ids.tolist()
        row["labels"] += [IGNORE_INDEX, *sample.labels.tolist()[1:]]
        row["position_ids"] += range(sample.num_tokens)
        row["cu_seqlens"].append(len(row["input_ids"]))
    return row


@pytest.mark.parametrize("backend", BACKENDS)
@given(packed=samples())
def test_a_packed_row_holds_its_samples_end_to_end(backend, packed):
    batch = pack(packed, backend=backend)
    for name, values in naive(packed).items():
        assert batch[name].tolist() == values, name
    for name in ("image_num_tiles", "image_sizes", "image_grids"):
        assert batch[name].tolist() == [v for s in packed for v in getattr(s, name).tolist()]
    pixels = [torch.from_numpy(tile) for sample in packed for tile in sample.tiles]
    assert len(batch.tiles) == len(pixels)
    assert all(map(torch.equal, batch.tiles, pixels))
    assert batch.sample_ids.tolist() == [sample.sample_id for sample in packed]
    assert batch.max_seqlen == max((sample.num_tokens for sample in packed), default=0)
    assert batch.num_loss_tokens == sum(sample.num_loss_tokens for sample in packed)
    assert batch.num_loss_tokens_step == batch.num_loss_tokens


@needs_native
@given(packed=samples())
def test_native_and_numpy_give_the_same_bytes(packed):
    native, numpy = pack(packed, backend="native"), pack(packed, backend="numpy")
    assert native.sizes == numpy.sizes
    assert torch.equal(native.buffer, numpy.buffer)
    assert native.num_loss_tokens == numpy.num_loss_tokens


def in_place(packed, **options):
    """The samples as a transform makes them that writes to the buffer of the batch."""
    fields = ("image_sizes", "image_num_tiles", "image_spans", "input_ids", "labels")
    records = [
        Record(
            row=sample.sample_id, key="", source="", shard="", images=(),
            **{name: getattr(sample, name) for name in fields},
        )
        for sample in packed
    ]  # fmt: skip
    shape = next((sample.tiles.shape[2:] for sample in packed if sample.num_tiles), (0, 0))
    reserved = reserve(records, tile_shape=shape, **options)
    made = []
    for sample, tiles in zip(packed, reserved.tiles, strict=True):
        if sample.num_tiles:
            tiles[:] = sample.tiles
        made.append(dataclasses.replace(sample, tiles=tiles))
    return made, reserved


@pytest.mark.parametrize("backend", BACKENDS)
@given(packed=samples())
def test_tiles_that_lie_in_place_are_not_copied_and_give_the_same_bytes(backend, packed):
    made, reserved = in_place(packed, pad_to=8)
    batch = pack(made, reserved=reserved, pad_to=8, backend=backend)
    assert batch.buffer is reserved.buffer
    copied = pack(packed, pad_to=8, backend=backend)
    assert batch.sizes == copied.sizes
    assert torch.equal(batch.buffer, copied.buffer)


@pytest.mark.parametrize("change", ["own tiles", "another order", "another length"])
def test_a_buffer_made_for_other_samples_is_not_used(change):
    packed = [make_sample(i, text=9 + i, tiles_per_image=(2,)) for i in range(3)]
    made, reserved = in_place(packed)
    if change == "own tiles":
        made[1] = packed[1]
    elif change == "another order":
        made, packed = made[::-1], packed[::-1]
    else:
        made[1] = packed[1] = dataclasses.replace(make_sample(1, text=12), sample_id=1)
    batch = pack(made, reserved=reserved)
    assert batch.buffer is not reserved.buffer
    assert torch.equal(batch.buffer, pack(packed).buffer)


@needs_native
def test_native_and_numpy_give_the_same_bytes_on_long_rows():
    # lengths around the width of vector registers, and rows longer than the caches
    packed = [make_sample(i, text=length) for i, length in enumerate([1, 2, *range(7, 40), 9001])]
    packed += [make_sample(99, text=64, tiles_per_image=(13, 1, 5))]
    native, numpy = pack(packed, backend="native"), pack(packed, backend="numpy")
    assert torch.equal(native.buffer, numpy.buffer)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_that_are_not_contiguous_or_not_aligned_are_packed_all_the_same(backend):
    plain = make_sample(3, text=9, tiles_per_image=(2,))
    raw = np.zeros(4 * plain.num_tokens + 1, np.uint8)
    odd = raw[1:].view(np.int32)
    odd[:] = plain.labels
    assert not odd.flags.aligned
    strided = Sample(
        sample_id=3,
        input_ids=np.repeat(plain.input_ids, 2)[::2],
        labels=odd,
        tiles=np.ascontiguousarray(plain.tiles.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
        image_num_tiles=plain.image_num_tiles,
        image_sizes=plain.image_sizes,
        image_grids=plain.image_grids,
        image_spans=plain.image_spans,
    )
    assert torch.equal(
        pack([strided], backend=backend).buffer, pack([plain], backend="numpy").buffer
    )


def test_the_arrays_of_a_sample_may_be_read_only():
    sample = make_sample(3, text=9, tiles_per_image=(1,))
    for array in (sample.input_ids, sample.labels, sample.tiles):
        array.flags.writeable = False
    assert pack([sample]).num_tokens == sample.num_tokens


def test_a_filler_holds_no_sample_of_the_data():
    batch = pack([make_filler()], is_filler=True, num_loss_tokens_step=9, dp_world_size=2)
    assert batch.is_filler
    assert batch.sample_ids.shape == (0,)
    assert (batch.num_samples, batch.num_loss_tokens, batch.num_tiles) == (1, 0, 1)
    assert batch.loss_scale("mean") == batch.loss_scale("sum") == batch.loss_scale("step") == 0.0


def test_an_empty_row_is_a_batch():
    batch = pack([], num_loss_tokens_step=5)
    assert batch.cu_seqlens.tolist() == [0]
    assert batch.tiles.shape == (0, 3, 0, 0)
    assert (batch.num_tokens, batch.max_seqlen) == (0, 0)


@pytest.mark.parametrize(
    ("packed", "settings", "message"),
    [
        ([make_sample(1, text=5)], {"is_filler": True}, r"must have sample_id=-1.*sample_id=1"),
        ([make_filler()], {}, r"sample_id=-1 with is_filler=False"),
        ([make_sample(1, text=5)], {"dp_world_size": 2}, r"num_loss_tokens_step must be given"),
        ([make_sample(1, text=5)], {"accumulation": 3}, r"accumulation=3"),
        ([], {"dp_world_size": 0, "num_loss_tokens_step": 0}, r"must be at least 1, got 0"),
        (
            [make_sample(1, text=8)],
            {"num_loss_tokens_step": 3},
            r"expected at least 4 \(this batch\), got 3 .*sample_ids=\[1\]",
        ),
        ([], {"backend": "cuda"}, r"one of 'auto', 'native', 'numpy', got 'cuda'"),
    ],
)
def test_settings_that_contradict_the_samples_are_refused(packed, settings, message):
    with pytest.raises(ConfigError, match=message):
        pack(packed, **settings)


def test_a_filler_with_loss_is_refused():
    with pytest.raises(ConfigError, match="a filler must give no loss, got 2"):
        pack([make_sample(-1, text=4, seed=1)], is_filler=True)


def test_tiles_of_two_sizes_are_refused_with_the_sample():
    packed = [
        make_sample(i, text=4, tiles_per_image=(1,), size=size) for i, size in ((4, 8), (9, 6))
    ]
    with pytest.raises(SampleError, match=r"\(8, 8\), got \(6, 6\) \(sample_id=9\)"):
        pack(packed)


# -- Arrow columns --------------------------------------------------------------------------------


def columns(packed, arrow_type=None):
    kind = arrow_type or pa.list_(pa.int32())
    lists = ([s.input_ids.tolist() for s in packed], [s.labels.tolist() for s in packed])
    return [ListColumn.from_arrow(pa.array(values, kind)) for values in lists]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int32())])
@given(packed=samples(), data=st.data())
def test_packing_from_arrow_buffers_equals_packing_samples(backend, kind, packed, data):
    rows = data.draw(st.lists(st.sampled_from(range(len(packed))))) if packed else []
    row, num_loss_tokens = pack_list(*columns(packed, kind), rows, backend=backend)
    batch = pack([packed[i] for i in rows], backend="numpy")
    for name in ("input_ids", "labels", "position_ids", "cu_seqlens"):
        assert getattr(row, name).tolist() == batch[name].tolist()
    assert num_loss_tokens == batch.num_loss_tokens


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_slice_of_an_arrow_column_is_read_in_place(backend):
    array = pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32()))
    column = ListColumn.from_arrow(array.slice(1))
    assert column.values.ctypes.data == array.values.buffers()[1].address
    row, _ = pack_list(column, column, [1, 0], backend=backend)
    assert row.input_ids.tolist() == [4, 5, 6, 3]


def test_nulls_in_a_column_are_refused():
    for values in ([[1], None], [[1, None]]):
        with pytest.raises(ConfigError, match="must not hold nulls"):
            ListColumn.from_arrow(pa.array(values, pa.list_(pa.int32())))


VALUES = np.arange(6, dtype=np.int32)


def column(offsets, values=VALUES, dtype=np.int64):
    return ListColumn(values=values, offsets=np.array(offsets, dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("offsets", "label_offsets", "rows", "message"),
    [
        ([0, 3, 6], [0, 3, 6], [0, 2], r"column of 2 lists, got 2"),
        ([0, 3, 6], [0, 3, 6], [-1], r"got -1"),
        ([0, 3, 6], [0, 3, 6], [2**62], r"got 4611686018427387904"),
        ([0], [0], [0], r"column of 0 lists"),
        ([0, 3, 7], [0, 3, 6], [1], r"lie in the 6 values .* got \[3, 7\) \(row 1\)"),
        ([0, 3, 6], [0, 3, 7], [1], r"got \[3, 7\) \(row 1\)"),
        ([0, 4, 3], [0, 4, 3], [0, 1], r"got \[4, 3\) \(row 1\)"),
        ([-1, 3, 6], [0, 3, 6], [0], r"got \[-1, 3\) \(row 0\)"),
        ([0, 3, 3], [0, 3, 3], [1], r"not be empty, got \[3, 3\) \(row 1\)"),
        ([0, 3, 6], [0, 2, 6], [0, 1], r"expected 3, got 2 \(row 0\)"),
    ],
)
def test_damaged_offsets_and_rows_are_refused(
    backend, dtype, offsets, label_offsets, rows, message
):
    ids, labels = column(offsets, dtype=dtype), column(label_offsets, dtype=dtype)
    with pytest.raises(ConfigError, match=message):
        pack_list(ids, labels, rows, backend=backend, out=TokenRow.empty(6, len(rows)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("room", [(5, 2), (7, 2), (6, 1), (6, 3)])
def test_an_output_of_another_size_is_refused(backend, room):
    ids = column([0, 3, 6])
    with pytest.raises(ConfigError, match=r"expected 6 tokens of 2 samples"):
        pack_list(ids, ids, [0, 1], backend=backend, out=TokenRow.empty(*room))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": VALUES.astype(np.int64)}, r"values must be int32 \(n,\), got int64"),
        ({"values": VALUES[None]}, r"got int32 \(1, 6\)"),
        ({"offsets": np.zeros(2)}, r"offsets must be int32 or int64 \(n \+ 1,\), got float64"),
        ({"offsets": np.zeros(0, np.int32)}, r"got int32 \(0,\)"),
    ],
)
def test_a_column_of_other_types_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        ListColumn(**({"values": VALUES, "offsets": np.array([0, 6])} | fields))


def test_a_row_beyond_int32_offsets_is_refused_before_it_is_allocated():
    values = np.zeros(1, np.int32)
    giant = ListColumn(values=values, offsets=np.array([0, 2**31 - 1, 2**31], np.int64))
    with pytest.raises(ConfigError, match="at most 2147483647 tokens, got 2147483648"):
        pack_list(giant, giant, [0, 1], backend="numpy")


# -- without the extension ------------------------------------------------------------------------


def test_without_the_extension_everything_works_and_native_says_what_to_do():
    code = """
import sys
sys.modules["omniload._C"] = None  # any import of it fails
from omniload import _native
from omniload.errors import NativeUnavailableError
from omniload.packing import pack
from tests.packing_samples import make_sample
assert not _native.available()
print(pack([make_sample(1, text=6)]))
try:
    pack([], backend="native")
except NativeUnavailableError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert "PackedBatch(step=0, micro_step=0, samples=1, tokens=6" in done.stdout
    assert "must be built for backend='native'" in done.stdout
    assert "use backend='auto' or 'numpy'" in done.stdout
