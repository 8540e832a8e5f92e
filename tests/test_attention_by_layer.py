"""Layers of different types get masks of different kinds, each made once."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from omniload.errors import ConfigError
from omniload.packing import pack
from tests.packing_samples import make_sample
from tests.test_attention import by_hand, heads

BATCH = pack([make_sample(0, text=9, tiles_per_image=(2,)), make_sample(1, text=11)], pad_to=16)
LAYERS = {
    "full_attention": {"kind": "prefix"},
    "sliding_attention": {"kind": "prefix", "window": 4},
    "text_only": {"kind": "causal", "window": 4},
    "last": {"kind": "prefix"},
}


def test_each_type_of_layer_sees_what_its_settings_say():
    given = BATCH.attention_by_layer("sdpa", LAYERS)
    assert list(given) == list(LAYERS)
    qkv = heads(BATCH.num_tokens)
    for layer, settings in LAYERS.items():
        found = scaled_dot_product_attention(*qkv, **given[layer])
        torch.testing.assert_close(found, by_hand(BATCH, qkv, **settings), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("backend", "name"), [("flex", "block_mask"), ("sdpa", "attn_mask")])
def test_equal_settings_share_one_mask(backend, name):
    given = BATCH.attention_by_layer(backend, LAYERS)
    assert given["last"][name] is given["full_attention"][name]
    assert len({id(arguments[name]) for arguments in given.values()}) == 3


def test_tensors_are_the_same_only_as_one_object():
    ids = torch.zeros(3, BATCH.num_tokens, dtype=torch.int64)
    layers = {"a": {"mrope_position_ids": ids}, "b": {"mrope_position_ids": ids}}
    given = BATCH.attention_by_layer("transformers", layers)
    assert given["a"]["position_ids"] is given["b"]["position_ids"]
    layers["b"] = {"mrope_position_ids": ids.clone()}
    given = BATCH.attention_by_layer("transformers", layers)
    assert given["a"]["position_ids"] is not given["b"]["position_ids"]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (None, "layers must map each type of layer to its settings"),
        ({}, "got {}"),
        ({"full": 4}, "got {'full': 4}"),
        (["full"], r"got \['full'\]"),
        ({"full": {"widow": 4}}, "must be of kind, window, .* got 'widow' for 'full'"),
        ({"full": {"backend": "flex"}}, "got 'backend' for 'full'"),
        ({"full": {"window": 0}}, "window must be an integer of at least 1 token"),
    ],
)
def test_wrong_settings_are_named(layers, message):
    with pytest.raises(ConfigError, match=message):
        BATCH.attention_by_layer("sdpa", layers)
