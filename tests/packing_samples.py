"""Samples for the tests of packing: by hand, at random, and by hypothesis."""

import numpy as np
from hypothesis import strategies as st

from omniload.types import IGNORE_INDEX, Sample

IMAGE_TOKEN = 7
VOCAB = 50


def make_sample(
    sample_id, *, text, tiles_per_image=(), tokens_per_tile=4, size=28, seed=None, labelled=0.5
):
    """Text tokens with images between them; the last half (or share) of the text gives loss."""
    rng = np.random.default_rng(sample_id if seed is None else seed)
    ids, spans = list(rng.integers(8, VOCAB, max(text // 2, 1))), []
    for tiles in tiles_per_image:
        spans.append((len(ids), len(ids) + tiles * tokens_per_tile))
        ids += [IMAGE_TOKEN] * (tiles * tokens_per_tile)
    ids += list(rng.integers(8, VOCAB, max(text - text // 2, 1))) if text > 1 else []
    labels = np.full(len(ids), IGNORE_INDEX)
    loss = round(labelled * text)
    if loss:
        labels[-loss:] = ids[-loss:]
    labels[np.array(ids) == IMAGE_TOKEN] = IGNORE_INDEX
    images = len(tiles_per_image)
    return Sample(
        sample_id=sample_id,
        input_ids=np.array(ids, np.int32),
        labels=labels.astype(np.int32),
        tiles=rng.integers(0, 256, (sum(tiles_per_image), 3, size, size), dtype=np.uint8),
        image_num_tiles=np.array(tiles_per_image, np.int32),
        image_sizes=rng.integers(1, 4000, (images, 2)).astype(np.int32),
        image_grids=np.array([(tiles, 1) for tiles in tiles_per_image], np.int32).reshape(-1, 2),
        image_spans=np.array(spans, np.int32).reshape(-1, 2),
    )


def make_filler(*, tiles=1, tokens_per_tile=4, size=28, text=3):
    sample = make_sample(
        -1,
        text=text,
        tiles_per_image=(tiles,) if tiles else (),
        tokens_per_tile=tokens_per_tile,
        size=size,
        seed=0,
        labelled=0,
    )
    sample.tiles[:] = 0
    return sample


@st.composite
def samples(draw, max_samples=6):
    """Lists of samples, among them none, of one token, without tiles, with many images."""
    height, width = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    token = st.integers(-(2**31), 2**31 - 1)
    label = st.one_of(st.just(IGNORE_INDEX), token)
    made = []
    for sample_id in range(draw(st.integers(0, max_samples))):
        ids = draw(st.lists(token, min_size=1, max_size=40))
        labels = draw(st.lists(label, min_size=len(ids), max_size=len(ids)))
        tiles = draw(st.lists(st.integers(0, 4), max_size=4))
        pixels = np.random.default_rng(draw(st.integers(0, 99)))
        bounds = [sorted(draw(st.tuples(*[st.integers(0, len(ids))] * 2))) for _ in tiles]
        pairs = [draw(st.tuples(*[st.integers(0, 9999)] * 2)) for _ in tiles]
        made.append(
            Sample(
                sample_id=sample_id,
                input_ids=np.array(ids, np.int32),
                labels=np.array(labels, np.int32),
                tiles=pixels.integers(0, 256, (sum(tiles), 3, height, width), dtype=np.uint8),
                image_num_tiles=np.array(tiles, np.int32),
                image_sizes=np.array(pairs, np.int32).reshape(-1, 2),
                image_grids=np.array(pairs, np.int32).reshape(-1, 2) + np.int32(1),
                image_spans=np.array(bounds, np.int32).reshape(-1, 2),
            )
        )
    return made
