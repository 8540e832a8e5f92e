# ruff: noqa: N999
"""Types of the C++ extension. Every argument is an object with the buffer protocol, C-contiguous.

All sizes and bounds are checked before memory is touched; a wrong one raises ValueError, a wrong
type TypeError. The interpreter lock is released around the work.
"""

from collections.abc import Sequence

from typing_extensions import Buffer

def pack(
    input_ids: Sequence[Buffer],
    labels: Sequence[Buffer],
    tiles: Sequence[Buffer],
    out_input_ids: Buffer,
    out_labels: Buffer,
    out_position_ids: Buffer,
    out_cu_seqlens: Buffer,
    out_tiles: Buffer,
    document_multiple: int = 1,
    token_id: int = 0,
    /,
) -> int: ...
def pack_list(
    values: Buffer,
    offsets: Buffer,
    label_values: Buffer,
    label_offsets: Buffer,
    rows: Buffer,
    out_input_ids: Buffer,
    out_labels: Buffer,
    out_position_ids: Buffer,
    out_cu_seqlens: Buffer,
    /,
) -> int: ...
def image_to_tiles(image: Buffer, columns: int, rows: int, out: Buffer, /) -> None: ...
def resize(image: Buffer, columns: int, rows: int, out: Buffer, use_vectors: bool, /) -> None: ...
def resize_is_quick() -> bool: ...
def turn_upright(image: Buffer, orientation: int, out: Buffer, /) -> None: ...
def normalize(tiles: Buffer, table: Buffer, out: Buffer, /) -> None: ...
def mrope_position_ids(
    cu_seqlens: Buffer,
    image_spans: Buffer,
    image_grid_thw: Buffer,
    merge: int,
    out: Buffer,
    /,
) -> None: ...
def block_mask(
    cu_seqlens: Buffer,
    image_spans: Buffer | None,
    kind: int,
    window: int,
    num_tokens: int,
    q_block: int,
    kv_block: int,
    row_width: int,
    column_width: int,
    /,
) -> tuple[bytearray, bytearray, int, int, int, int]: ...
