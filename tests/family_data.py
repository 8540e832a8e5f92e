"""Records of small pictures under any tiling policy, for the tests of the model families."""

import numpy as np

from omniload.transforms.prepare import prepare_sample
from omniload.transforms.text import ConversationEncoder, load_template, load_tokenizer
from omniload.types import Message, Record
from tests.images_corpus import encode, photo

RNG = np.random.default_rng(0)


def make_encoder(template, tokens_per_tile=4):
    return ConversationEncoder(
        tokenizer=load_tokenizer(),
        template=load_template(template),
        tokens_per_tile=tokens_per_tile,
    )


def make_record(sizes, *, encoder, policy, row=0, **options):
    """A record of pictures of these sizes (width, height), with its tokens under the policy."""
    messages = (
        Message(role="user", content="<image>" * len(sizes) + "What is it?"),
        Message(role="assistant", content=f"Picture {row}."),
    )
    prepared = prepare_sample(messages, sizes, encoder=encoder, policy=policy, **options)
    return Record(
        row=row,
        key=f"key-{row}",
        source="pictures",
        shard="shard-00000.arrow",
        images=tuple(encode(photo(*size, seed=row + n), "PNG") for n, size in enumerate(sizes)),
        image_sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
        image_num_tiles=prepared.image_num_tiles,
        image_spans=prepared.image_spans,
        input_ids=prepared.input_ids,
        labels=prepared.labels,
        messages=messages,
    )


def settings_of(encoder, policy, oversize="truncate"):
    """The settings of a manifest."""
    return {"encoder": encoder.settings(), "tiling": policy.settings(), "oversize": oversize}
