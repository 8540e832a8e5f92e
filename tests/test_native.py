"""The C++ extension at its own border: wrong arguments never reach memory."""

import ast
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload import _native
from omniload.errors import ConfigError

pytestmark = pytest.mark.skipif(not _native.available(), reason="the extension is not built")

IDS = np.arange(4, dtype=np.int32)


def arguments(**changes):
    """Arguments of `pack` for one sample of 4 tokens and one tile of 12 bytes."""
    fields = {
        "input_ids": [IDS],
        "labels": [IDS],
        "tiles": [np.zeros((1, 3, 2, 2), np.uint8)],
        "out_input_ids": np.zeros(4, np.int64),
        "out_labels": np.zeros(4, np.int64),
        "out_position_ids": np.zeros(4, np.int64),
        "out_cu_seqlens": np.zeros(2, np.int32),
        "out_tiles": np.zeros(12, np.uint8),
    }
    assert changes.keys() <= fields.keys()
    return list((fields | changes).values())


def list_arguments(**changes):
    fields = {
        "values": IDS,
        "offsets": np.array([0, 4], np.int32),
        "label_values": IDS,
        "label_offsets": np.array([0, 4], np.int64),
        "rows": np.zeros(1, np.int64),
        "out_input_ids": np.zeros(4, np.int64),
        "out_labels": np.zeros(4, np.int64),
        "out_position_ids": np.zeros(4, np.int64),
        "out_cu_seqlens": np.zeros(2, np.int32),
    }
    assert changes.keys() <= fields.keys()
    return list((fields | changes).values())


def read_only(array):
    array.flags.writeable = False
    return array


def odd_address(size, dtype):
    raw = np.zeros(size * np.dtype(dtype).itemsize + 1, np.uint8)
    return raw[1:].view(dtype)


def test_the_extension_offers_what_its_types_say():
    stub = Path(_native.__file__).with_name("_C.pyi").read_text(encoding="utf-8")
    functions = {node.name for node in ast.parse(stub).body if isinstance(node, ast.FunctionDef)}
    native = _native.require()
    assert functions == {name for name in dir(native) if not name.startswith("_")}


def test_a_well_formed_call_writes_and_counts():
    given = arguments(labels=[np.array([5, -100, 6, 7], np.int32)])
    assert _native.require().pack(*given) == 2
    assert given[3].tolist() == [0, 1, 2, 3]
    assert given[4].tolist() == [-100, -100, 6, 7]
    assert given[5].tolist() == [0, 1, 2, 3]
    assert given[6].tolist() == [0, 4]


def test_documents_are_padded_in_the_same_pass():
    more = {"input_ids": [IDS, IDS[:2]], "labels": [IDS + 4, IDS[:2] + 4], "tiles": [b""] * 2}
    room = {name: np.zeros(11, np.int64) for name in
            ("out_input_ids", "out_labels", "out_position_ids")}  # fmt: skip
    room |= {"out_cu_seqlens": np.zeros(6, np.int32), "out_tiles": np.zeros(0, np.uint8)}
    given = arguments(**more, **room)
    assert _native.require().pack(*given, 3, 9) == 4
    assert given[3].tolist() == [0, 1, 2, 3, 9, 9, 0, 1, 9, 9, 9]
    assert given[4].tolist() == [-100, 5, 6, 7, -100, -100, -100, 5, -100, -100, -100]
    assert given[5].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1]
    assert given[6].tolist() == [0, 6, 9, 11, 11, 11]


@pytest.mark.parametrize(
    ("multiple", "token_id", "changes", "message"),
    [
        (0, 0, {}, "document_multiple must be from 1 to 2147483647, got 0"),
        (2**31, 0, {}, "document_multiple must be from 1 to 2147483647, got 2147483648"),
        (1, -1, {}, "token_id must be from 0 to 2147483647, got -1"),
        (3, 0, {}, "expected at least 6 tokens of 1 documents, got 4 of 1"),
        (2**31 - 1, 0, {}, "expected at least 2147483647 tokens of 1 documents, got 4 of 1"),
        (1, 0, {"input_ids": [IDS[:3]], "labels": [IDS[:3]]}, "at least 3 tokens of 2 documents"),
        (1, 0, {"out_cu_seqlens": np.zeros(1, np.int32)}, "of 1 documents, got 4 of 0"),
    ],
)
def test_padding_without_room_is_refused(multiple, token_id, changes, message):
    given = arguments(**changes)
    with pytest.raises(ValueError, match=message):
        _native.require().pack(*given, multiple, token_id)
    assert not given[3].any()
    with pytest.raises(TypeError, match="takes 8 arguments, got 9"):
        _native.require().pack(*given, multiple)


def test_sequences_may_be_tuples_and_bytes_may_be_any_buffer():
    given = arguments(input_ids=(IDS,), tiles=(b"abcdef", bytearray(b"ghijkl")))
    _native.require().pack(*given)
    assert given[7].tobytes() == b"abcdefghijkl"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": [IDS.astype(np.int64)]}, ValueError, r"input_ids must be int32, got format"),
        ({"input_ids": [IDS.astype(np.float32)]}, ValueError, r"input_ids must be int32"),
        ({"labels": [IDS.astype(np.uint32)]}, ValueError, r"labels must be int32, got format 'I'"),
        ({"labels": [IDS.astype(">i4")]}, ValueError, r"labels must be int32, got format '>i'"),
        ({"tiles": [np.zeros(12, np.int8)]}, ValueError, r"tiles must be uint8, got format 'b'"),
        ({"input_ids": [IDS[:3]]}, ValueError, r"got 4 for 3 \(sample 0\)"),
        ({"input_ids": [IDS[:0]], "labels": [IDS[:0]]}, ValueError, r"got 0 for 0 \(sample 0\)"),
        ({"labels": []}, ValueError, r"one array for each of input_ids: expected 1, got 0"),
        ({"input_ids": [IDS[:3]], "labels": [IDS[:3]]}, ValueError, r"expected 3 tokens of 1"),
        ({"input_ids": [IDS, IDS], "labels": [IDS, IDS]}, ValueError, r"expected 8 tokens of 2"),
        ({"out_labels": np.zeros(3, np.int64)}, ValueError, r"as long as out_input_ids"),
        ({"out_position_ids": np.zeros(5, np.int64)}, ValueError, r"as long as out_input_ids"),
        ({"out_input_ids": np.zeros(4, np.int32)}, ValueError, r"out_input_ids must be int64"),
        ({"out_cu_seqlens": np.zeros(2, np.int64)}, ValueError, r"out_cu_seqlens must be int32"),
        ({"out_cu_seqlens": np.zeros(0, np.int32)}, ValueError, r"must not be empty"),
        ({"out_cu_seqlens": np.zeros(3, np.int32)}, ValueError, r"got 4 of 2"),
        ({"out_tiles": np.zeros(11, np.uint8)}, ValueError, r"expected 12, got 11"),
        ({"tiles": []}, ValueError, r"expected 0, got 12"),
        ({"input_ids": [odd_address(4, np.int32)]}, ValueError, r"input_ids must be aligned to 4"),
        ({"out_labels": odd_address(4, np.int64)}, ValueError, r"out_labels must be aligned to 8"),
        ({"labels": [memoryview(bytearray(17))[1:].cast("i")]}, ValueError, r"aligned to 4"),
        ({"out_labels": read_only(np.zeros(4, np.int64))}, ValueError, r"read-only"),
        ({"input_ids": [np.zeros(8, np.int32)[::2]]}, ValueError, r"not C-contiguous"),
        ({"input_ids": [None]}, TypeError, r"bytes-like object is required, not 'NoneType'"),
        ({"input_ids": 3}, TypeError, r"object of type 'int' has no len"),
        ({"tiles": {0}}, TypeError, r"not a sequence|does not support indexing"),
    ],
)
def test_wrong_arguments_of_pack_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        _native.require().pack(*arguments(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offsets": np.zeros(0, np.int32)}, r"offsets must not be empty"),
        ({"offsets": np.zeros(2, np.float64)}, r"offsets must be int64, got format 'd'"),
        ({"offsets": np.zeros(2, np.int16)}, r"offsets must be int32, got format 'h'"),
        ({"values": IDS[:3]}, r"lie in the 3 values"),
        ({"label_values": IDS[:3]}, r"lie in the 3 values"),
        ({"offsets": np.array([0, 2**31 - 1], np.int32)}, r"got \[0, 2147483647\)"),
        ({"label_offsets": np.array([-(2**63), 2**63 - 1])}, r"got \[-9223372036854775808, "),
        ({"rows": np.zeros(1, np.int32)}, r"rows must be int64"),
        ({"rows": np.array([1])}, r"column of 1 lists, got 1"),
        ({"rows": np.array([-1])}, r"column of 1 lists, got -1"),
        ({"rows": np.zeros(2, np.int64)}, r"expected 8 tokens of 2 samples, got 4 of 1"),
        ({"rows": np.zeros(0, np.int64)}, r"expected 0 tokens of 0 samples, got 4 of 1"),
    ],
)
def test_wrong_arguments_of_pack_list_are_refused(changes, message):
    given = list_arguments(**changes)
    with pytest.raises(ValueError, match=message):
        _native.require().pack_list(*given)
    assert not given[5].any()  # nothing was written


@pytest.mark.parametrize(
    "name", ["pack", "pack_list", "image_to_tiles", "turn_upright", "normalize"]
)
def test_the_number_of_arguments_is_checked(name):
    with pytest.raises(TypeError, match=rf"{name}\(\) takes \d arguments, got 1"):
        getattr(_native.require(), name)(1)


@given(
    columns=st.integers(1, 4),
    rows=st.integers(1, 4),
    height=st.integers(0, 5),
    width=st.one_of(st.integers(0, 5), st.integers(30, 70)),
)
def test_tiles_are_the_cells_of_the_grid(columns, rows, height, width):
    rng = np.random.default_rng(height)
    image = rng.integers(0, 256, (rows * height, columns * width, 3), dtype=np.uint8)
    out = np.full((rows * columns, 3, height, width), 9, np.uint8)
    _native.require().image_to_tiles(image, columns, rows, out)
    for row in range(rows):
        for column in range(columns):
            cell = image[row * height :, column * width :][:height, :width]
            assert (out[row * columns + column] == cell.transpose(2, 0, 1)).all()


IMAGE = np.zeros((4, 6, 3), np.uint8)
TILES = np.zeros((6, 3, 2, 2), np.uint8)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((IMAGE[..., 0].copy(), 3, 2, TILES), ValueError, r"shape \(height, width, 3\)"),
        ((np.zeros((4, 6, 4), np.uint8), 3, 2, TILES), ValueError, r"shape \(height, width, 3\)"),
        ((IMAGE.astype(np.int32), 3, 2, TILES), ValueError, r"image must be uint8"),
        ((IMAGE, 4, 2, TILES), ValueError, r"height 4 and width 6 must divide into 4 columns"),
        ((IMAGE, 3, 3, TILES), ValueError, r"and 3 rows"),
        ((IMAGE, 0, 2, TILES), ValueError, r"columns must be at least 1, got 0"),
        ((IMAGE, 3, -1, TILES), ValueError, r"rows must be at least 1, got -1"),
        ((IMAGE, 2**64, 2, TILES), OverflowError, r"too big"),
        ((IMAGE, 3.0, 2, TILES), TypeError, r"float"),
        ((IMAGE, 3, 2, TILES[:5]), ValueError, r"shape \(columns \* rows, 3, 2, 2\)"),
        ((IMAGE, 3, 2, TILES.reshape(6, 3, 4)), ValueError, r"shape \(columns \* rows, 3, 2, 2\)"),
        ((IMAGE, 3, 2, TILES.reshape(6, 3, 1, 4)), ValueError, r"shape \(columns \* rows"),
        ((IMAGE[:0], 3, 2**62, TILES[:0]), ValueError, r"shape \(columns \* rows"),
        ((IMAGE, 3, 2, read_only(TILES.copy())), ValueError, r"read-only"),
    ],
)
def test_wrong_arguments_of_image_to_tiles_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        _native.require().image_to_tiles(*given)


@given(
    height=st.integers(0, 5),
    width=st.one_of(st.integers(0, 5), st.integers(30, 70)),
    orientation=st.integers(1, 8),
)
def test_every_orientation_moves_each_pixel_once(height, width, orientation):
    image = np.arange(3 * height * width).astype(np.uint8).reshape(height, width, 3)
    out = np.full((height, width, 3) if orientation < 5 else (width, height, 3), 9, np.uint8)
    _native.require().turn_upright(image, orientation, out)
    expected = image.transpose(1, 0, 2) if orientation >= 5 else image
    expected = expected[::-1] if orientation in (3, 4, 7, 8) else expected
    expected = expected[:, ::-1] if orientation in (2, 3, 6, 7) else expected
    assert (out == expected).all()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ((IMAGE[..., :2].copy(), 2, IMAGE), ValueError, r"image must have the shape"),
        ((IMAGE[0], 2, IMAGE), ValueError, r"image must have the shape"),
        ((IMAGE, 0, IMAGE.copy()), ValueError, r"orientation must be at least 1, got 0"),
        ((IMAGE, 9, IMAGE.copy()), ValueError, r"orientation must be 1 to 8, got 9"),
        ((IMAGE, 5, IMAGE.copy()), ValueError, r"out must have the shape \(6, 4, 3\)"),
        ((IMAGE, 4, np.zeros((6, 4, 3), np.uint8)), ValueError, r"shape \(4, 6, 3\)"),
        ((IMAGE, 2, np.zeros((4, 6, 4), np.uint8)), ValueError, r"shape \(4, 6, 3\)"),
        ((IMAGE, 2, np.zeros((4, 18), np.uint8)), ValueError, r"shape \(4, 6, 3\)"),
        ((IMAGE, 2, np.zeros((4, 6, 3), np.int8)), ValueError, r"out must be uint8"),
        ((IMAGE, 2, read_only(IMAGE.copy())), ValueError, r"read-only"),
        ((IMAGE, "2", IMAGE), TypeError, r"str"),
    ],
)
def test_wrong_arguments_of_turn_upright_are_refused(given, error, message):
    with pytest.raises(error, match=message):
        _native.require().turn_upright(*given)


@given(num_tiles=st.integers(0, 3), plane=st.integers(0, 70), bits=st.sampled_from([16, 32, 64]))
def test_values_are_looked_up_in_the_table_of_their_channel(num_tiles, plane, bits):
    dtype = np.dtype(f"i{bits // 8}")
    tiles = np.arange(num_tiles * 3 * plane).astype(np.uint8).reshape(num_tiles, 3, plane)
    table = (np.arange(768) * 41 - 9000).astype(dtype).reshape(3, 256)
    out = np.zeros_like(tiles, dtype)
    _native.require().normalize(tiles, table, out)
    assert (out == np.stack([table[c][tiles[:, c]] for c in range(3)], axis=1)).all()


TABLE = np.zeros((3, 256), np.int32)
FLOATS = np.zeros((6, 3, 2, 2), np.int32)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (TILES[:, :2].copy(), TABLE, FLOATS),
            r"the shape \(num_tiles, 3, \.\.\.\)",
        ),
        ((TILES.ravel(), TABLE, FLOATS), r"tiles must have the shape"),
        ((TILES.astype(np.int32), TABLE, FLOATS), r"tiles must be uint8"),
        ((TILES, TABLE[:, :255].copy(), FLOATS), r"as tiles, 72: got 765 and 72"),
        ((TILES, TABLE, FLOATS[:5]), r"as tiles, 72: got 768 and 60"),
        ((TILES, TABLE, FLOATS.astype(np.int16)), r"out must be int32, got format 'h' of 2"),
        ((TILES, TABLE.astype(np.int16), FLOATS), r"out must be int16, got format 'i' of 4"),
        ((TILES, TABLE.astype(np.float32), FLOATS), r"table must be int32, got format 'f'"),
        ((TILES, TABLE.astype(np.int8), FLOATS), r"table must be int32, got format 'b'"),
        ((TILES, odd_address(768, np.int32), FLOATS), r"table must be aligned to 4"),
        ((TILES, TABLE, read_only(FLOATS.copy())), r"read-only"),
        ((TILES, TABLE, np.zeros((6, 3, 2, 4), np.int32)[..., ::2]), r"not C-contiguous"),
    ],
)
def test_wrong_arguments_of_normalize_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        _native.require().normalize(*given)


def test_buffers_are_given_back():
    memory = bytearray(12)
    _native.require().pack(*arguments(tiles=[memory]))
    memory.append(0)  # raises BufferError while somebody holds the memory
    memory = bytearray(12)
    with pytest.raises(ValueError, match="as long as"):
        _native.require().pack(*arguments(tiles=[memory], out_labels=np.zeros(3, np.int64)))
    memory.append(0)


def test_other_threads_run_while_it_packs():
    ids = np.zeros(2_000_000, np.int32)
    outs = [np.zeros(len(ids), np.int64) for _ in range(3)]
    given = arguments(
        input_ids=[ids],
        labels=[ids],
        out_input_ids=outs[0],
        out_labels=outs[1],
        out_position_ids=outs[2],
    )
    finished = 0

    def work():
        nonlocal finished
        for _ in range(20):
            _native.require().pack(*given)
            finished += 1

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=work)
    seen = set()
    try:
        # from here on a thread gives the interpreter up by itself or not at all
        sys.setswitchinterval(100)
        thread.start()
        while thread.is_alive():
            seen.add(finished)
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert seen & set(range(1, 20)), "this thread stood still until all was packed"


def test_choose_names_the_backends():
    assert _native.choose("numpy") is None
    assert _native.choose("native") is _native.choose("auto") is _native.require()
    with pytest.raises(ConfigError, match="'auto', 'native', 'numpy', got 'gpu'"):
        _native.choose("gpu")
