"""Small real shards with real JPEGs, and transforms that misbehave, for the tests of the loader."""

import io
import random
import time

import numpy as np
import torch
from PIL import Image

from omniload.errors import SampleError, ShardError
from omniload.images import InternVLTiles, image_size
from omniload.index import LengthIndex
from omniload.shards import open_shards, write_shards
from omniload.transforms.prepare import prepare_sample
from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer
from omniload.types import Message, Record, Sample

TOKENS_PER_TILE = 4
POLICY = InternVLTiles(size=28, min_tiles=1, max_tiles=4, thumbnail=True)


def encoder():
    return ConversationEncoder(
        tokenizer=load_tokenizer(None),
        template=load_template("chatml"),
        loss="assistant",
        tokens_per_tile=TOKENS_PER_TILE,
    )


def jpeg(rng):
    height, width = rng.integers(20, 90, size=2)
    pixels = rng.integers(0, 256, size=(height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG", quality=80)
    return file.getvalue()


def record(row, encode, rng, num_images):
    images = tuple(jpeg(rng) for _ in range(num_images))
    words = rng.integers(1, 30, size=2)
    messages = (
        Message(role="user", content="<image>" * num_images + "what " * int(words[0])),
        Message(role="assistant", content="that " * int(words[1])),
    )
    sizes = [image_size(image) for image in images]
    ready = prepare_sample(messages, sizes, encoder=encode, policy=POLICY)
    return Record(
        row=row,
        key=f"key-{row}",
        source="text" if num_images == 0 else "pictures",
        shard="",
        images=images,
        image_sizes=np.array(sizes, np.int32).reshape(-1, 2),
        image_num_tiles=np.asarray(ready.image_num_tiles, np.int32),
        image_spans=np.asarray(ready.image_spans, np.int32).reshape(-1, 2),
        input_ids=ready.input_ids,
        labels=ready.labels,
        messages=messages,
    )


def write_data(folder, *, num_rows=24, num_images=(0, 1, 2), seed=0, damage=None):
    """Write shards; row i has `num_images[i % len(num_images)]` images.

    damage: row whose first image is cut to half after its lengths were measured.
    """
    rng = np.random.default_rng(seed)
    encode = encoder()
    records = [record(i, encode, rng, num_images[i % len(num_images)]) for i in range(num_rows)]
    if damage is not None:
        whole = records[damage]
        images = (whole.images[0][: len(whole.images[0]) // 2], *whole.images[1:])
        fields = {name: getattr(whole, name) for name in Record.__dataclass_fields__}
        records[damage] = Record(**{**fields, "images": images})
    settings = {
        "encoder": encode.settings(),
        "tiling": POLICY.settings(),
        "max_tokens": None,
        "oversize": "truncate",
    }
    write_shards(folder, records, settings=settings, max_bytes=20_000)
    return folder


def assert_same(left, right):
    """Two batches are equal to the last bit."""
    assert list(left) == list(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name], right[name]), name
    for name in (
        "max_seqlen",
        "step",
        "micro_step",
        "is_last_micro_step",
        "num_loss_tokens",
        "num_loss_tokens_step",
        "is_filler",
        "dp_world_size",
        "accumulation",
    ):
        assert getattr(left, name) == getattr(right, name), name


def assert_same_run(left, right):
    left, right = list(left), list(right)
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert_same(one, other)


def rows_of(batches):
    return [row for batch in batches for row in batch.sample_ids.tolist()]


class Wrapped:
    """A user's own transform around that of the shards; spawned workers import it from here."""

    fingerprint = "wrapped/1"

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, record, rng):
        return self.inner(record, rng)

    def filler(self, with_image):
        return self.inner.filler(with_image)

    def lengths(self, record):
        return self.inner.lengths(record)

    def model_inputs(self, batch):
        return self.inner.model_inputs(batch)


class Noisy(Wrapped):
    """Changes pixels at random; lengths stay."""

    fingerprint = "noisy/1"

    def __call__(self, record, rng):
        sample = self.inner(record, rng)
        noise = rng.integers(0, 256, size=sample.tiles.shape, dtype=np.uint8)
        return changed(sample, tiles=sample.tiles ^ noise)


class Torchy(Wrapped):
    """Draws from torch's generator, as many image libraries do."""

    fingerprint = "torchy/1"

    def __call__(self, record, rng):
        sample = self.inner(record, rng)
        noise = torch.randint(0, 256, sample.tiles.shape, dtype=torch.uint8).numpy()
        return changed(sample, tiles=sample.tiles ^ noise)


class Longer(Wrapped):
    """Adds a token to one row and hides it from `lengths`."""

    fingerprint = "longer/1"
    row = 5

    def __call__(self, record, rng):
        sample = self.inner(record, rng)
        if record.row != self.row:
            return sample
        ids = np.append(sample.input_ids, np.int32(1))
        return changed(sample, input_ids=ids, labels=np.append(sample.labels, np.int32(-100)))


class Failing(Wrapped):
    """Fails on one row, in a way of its own."""

    fingerprint = "failing/1"
    row = 7

    def __call__(self, record, rng):
        if record.row == self.row:
            raise KeyError("no such colour")
        return self.inner(record, rng)


class Slow(Wrapped):
    """Takes longer than anybody waits for."""

    fingerprint = "slow/1"

    def __call__(self, record, rng):
        time.sleep(60)
        return self.inner(record, rng)


class Swapped(Wrapped):
    """Returns a sample under the number of another row."""

    fingerprint = "swapped/1"

    def __call__(self, record, rng):
        return changed(self.inner(record, rng), sample_id=0)


class OtherLengths(Wrapped):
    """Has other lengths than the shards, and says so."""

    fingerprint = "other-lengths/1"

    def lengths(self, record):
        num_tokens, num_tiles, num_loss_tokens = self.inner.lengths(record)
        return num_tokens + 1, num_tiles, num_loss_tokens


def changed(sample, **fields):
    old = {name: getattr(sample, name) for name in Sample.__dataclass_fields__}
    return Sample(**{**old, **fields})


def flip_until_a_row_is_damaged(folder, *, seed=0):
    """Flip one byte of a shard so that some, but not all, of its rows can't be read; those rows."""
    chance = random.Random(seed)
    while True:
        shard = chance.choice(sorted(folder.glob("shard-*.arrow")))
        data = bytearray(shard.read_bytes())
        place, whole = chance.randrange(len(data)), data[:]
        data[place] ^= 1 << chance.randrange(8)
        shard.write_bytes(data)
        bad = unreadable_rows(folder)
        if bad and not set(rows_of_shard(folder, shard.name)) <= set(bad):
            return bad
        shard.write_bytes(whole)


def unreadable_rows(folder):
    """Rows that can't be read one by one."""
    shards, bad = open_shards(folder), []
    for row in range(len(shards)):
        try:
            shards.read(row)
        except (ShardError, SampleError):
            bad.append(row)
    return bad


def rows_of_shard(folder, name):
    shards = open_shards(folder)
    number = shards.shard_names.index(name)
    return [row for row in range(len(shards)) if shards.locate(row)[0] == number]


class MemoryRows:
    """Rows of text that are made up when they are read: a source of any size, for many cycles."""

    location = "memory"

    def __init__(self, num_rows, *, shard_rows=100, most_tokens=60, seed=0):
        tokens = np.random.default_rng(seed).integers(2, most_tokens, num_rows)
        self.index = LengthIndex.from_arrays(
            num_tokens=tokens, num_tiles=np.zeros(num_rows, np.int32)
        )
        self.settings = {"encoder": encoder().settings(), "tiling": POLICY.settings()}
        self.fingerprint = f"{num_rows:08x}{seed:08x}{most_tokens:016x}"
        self.shard_names = [f"shard-{i}" for i in range(-(-num_rows // shard_rows))]
        self.shard_rows = shard_rows
        self.sources = {"text": num_rows}
        self.prefetched = []

    def __len__(self):
        return len(self.index)

    def locate(self, row):
        return divmod(row, self.shard_rows)

    def read(self, row):
        ids = np.full(int(self.index.num_tokens[row]), row % 97 + 1, np.int32)
        return Record(
            row=row,
            key=f"key-{row}",
            source="text",
            shard=self.shard_names[row // self.shard_rows],
            images=(),
            image_sizes=np.zeros((0, 2), np.int32),
            image_num_tiles=np.zeros(0, np.int32),
            image_spans=np.zeros((0, 2), np.int32),
            input_ids=ids,
            labels=ids,
        )

    def at_epoch(self, epoch):
        return self

    def prefetch(self, shards):
        self.prefetched.append(tuple(shards))


class RemoteRows(MemoryRows):
    location = "s3://bucket/shards"


class ChangingRows(MemoryRows):
    """Rows that are others in each epoch, as those of a mixture are."""

    def at_epoch(self, epoch):
        rows = MemoryRows(len(self) + epoch, most_tokens=50 + epoch, seed=epoch)
        return rows
