"""Records and shards of random content."""

import numpy as np

from omniload.shards import write_shards
from omniload.types import Message, Record


def make_record(i, seed=0, num_images=None, num_tokens=None):
    """A record whose content is a function of (i, seed)."""
    rng = np.random.default_rng((seed, i))
    images = int(rng.integers(0, 3)) if num_images is None else num_images
    tokens = int(rng.integers(2, 60)) if num_tokens is None else num_tokens
    labels = rng.integers(0, 1000, tokens).astype(np.int32)
    labels[rng.random(tokens) < 0.5] = -100
    return Record(
        row=-1,
        key=f"schlüssel-{i}",
        source="odd" if i % 2 else "even",
        shard="",
        images=tuple(rng.bytes(int(rng.integers(1, 2000))) for _ in range(images)),
        image_sizes=rng.integers(1, 500, (images, 2)).astype(np.int32),
        image_num_tiles=rng.integers(1, 13, images).astype(np.int32),
        image_spans=np.zeros((images, 2), np.int32),
        input_ids=rng.integers(0, 1000, tokens).astype(np.int32),
        labels=labels,
        messages=(
            Message(role="user", content="frage " * (i % 5)),
            Message(role="assistant", content="äöü 漢", weight=(None, 0, 1)[i % 3]),
        ),
    )


def make_shards(folder, count, *, max_bytes=1 << 20, seed=0, with_messages=True):
    """A folder of shards; returns the records."""
    records = [make_record(i, seed) for i in range(count)]
    write_shards(
        folder,
        records,
        settings={"tiles": 12, "loss": "assistant"},
        max_bytes=max_bytes,
        with_messages=with_messages,
    )
    return records


def assert_same(found, expected):
    """Compare two records, but where they are stored."""
    assert found.key == expected.key
    assert found.source == expected.source
    assert found.images == expected.images
    for name in ("image_sizes", "image_num_tiles", "image_spans", "input_ids", "labels"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == np.int32
        np.testing.assert_array_equal(left, right)
    assert found.messages == expected.messages


def assert_all_the_same(shards, records):
    """Compare all rows of a set with the records that it was made of."""
    for row, record in enumerate(records):
        found = shards.read(row)
        assert found.row == row
        assert_same(found, record)
