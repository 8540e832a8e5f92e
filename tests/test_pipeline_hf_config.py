"""Models described by a Hugging Face `config.json`: against the real ones of transformers."""

import json

import numpy as np
import pytest
import torch

from omniload.errors import ConfigError
from omniload.pipeline import hf_config, hf_defaults
from omniload.pipeline.analytic import cost_table
from omniload.pipeline.hf_config import from_hf_config
from omniload.pipeline.presets import preset


def parameters(model):
    """Parameters of a transformers model by the kinds of the table."""
    found = dict.fromkeys(("vision_block", "projector", "embedding", "language_block", "head"), 0)
    for name, weight in model.named_parameters():
        places = name.split(".")
        is_block = any(place.isdigit() for place in places)
        if "vision_tower" in name or "visual" in name:
            kind = "projector" if "merger" in name else "vision_block" if is_block else ""
            kind = "" if "deepstack" in name else kind
        elif "projector" in name:
            kind = "projector"
        elif "embed_tokens" in name:
            kind = "embedding"
        else:
            kind = "head" if "lm_head" in name else "language_block" if is_block else ""
        if kind:
            found[kind] += weight.numel()
    return found


SMALL_TEXT = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 160_000,
}  # fmt: skip
CONFIGURATIONS = {
    "llava": {"vision_feature_layer": -1},
    "llava_next": {"vision_feature_layer": -1},
    "llava with pixtral": {
        "text_config": {**SMALL_TEXT, "model_type": "mistral", "head_dim": 80},
        "vision_config": {"model_type": "pixtral", "num_hidden_layers": 3},
        "vision_feature_layer": -1,
    },
    "mistral3": {
        "text_config": {**SMALL_TEXT, "model_type": "mistral"},
        "vision_config": {"model_type": "pixtral", "num_hidden_layers": 3},
    },
    "llava_onevision": {"text_config": {**SMALL_TEXT, "model_type": "qwen2"}},
    "internvl": {"text_config": {**SMALL_TEXT, "model_type": "qwen2"}, "tie_word_embeddings": True},
    "qwen2_vl": {"text_config": SMALL_TEXT, "vision_config": {"hidden_size": 512}},
    "qwen2_5_vl": {
        "text_config": SMALL_TEXT,
        "vision_config": {"hidden_size": 1280, "out_hidden_size": 512},
    },
    "qwen3_vl": {
        "text_config": {**SMALL_TEXT, "head_dim": 128}, "vision_config": {"out_hidden_size": 512}
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_configuration_gives_the_parameters_of_the_real_model(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind.split()[0], **CONFIGURATIONS[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        real = parameters(transformers.AutoModelForImageTextToText.from_config(config))
    table = cost_table(from_hf_config(tmp_path))
    for name in real:
        counted = int(table.params[np.array(table.layers) == name].sum())
        if name == "head" and table.tied:
            assert counted == real["embedding"]
        else:
            assert counted == pytest.approx(real[name], rel=0.005), name


def test_images_as_they_are_have_a_patch_for_a_tile():
    vision = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096,
              "num_hidden_layers": 24}  # fmt: skip
    text = {"model_type": "mistral", **SMALL_TEXT}
    for kind, tokens in (("llava", 1.0), ("mistral3", 0.25)):
        config = {"model_type": kind, "vision_config": vision, "text_config": text}
        found = from_hf_config({**config, "vision_feature_layer": -1}, image_patches=3000).encoder
        assert (found.tokens_per_tile, found.sizes.patches, found.attended) == (tokens, 1, 3000)


def test_models_that_normalise_queries_and_keys_keep_their_inputs_too():
    vision = {"model_type": "internvl_vision"}
    config = {"model_type": "internvl", "vision_config": vision}
    kept = [
        cost_table(from_hf_config({**config, "text_config": {**SMALL_TEXT, "model_type": kind,
                                                             "head_dim": 64}})).kind(-2).kept_bytes
        for kind in ("qwen2", "qwen3")
    ]  # fmt: skip
    assert kept[1].token - kept[0].token == 2 * (8 + 2) * 64
    known = cost_table(preset("siglip-so400m+qwen3-8b")).kind(-2).kept_bytes.token
    assert known == 2 * (4 * 4096 + 3 * (32 + 8) * 128 + 3 * 12288)


def test_defaults_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    known = {**hf_defaults.TEXT_DEFAULTS, **hf_defaults.VISION_DEFAULTS}
    for kind, defaults in known.items():
        if kind == "intern_vit_6b":  # lives beside its weights, not in transformers
            continue
        config = transformers.AutoConfig.for_model(kind)
        if kind in hf_config._QWEN:
            config = config.vision_config
        for name, value in defaults.items():
            got = getattr(config, name)
            assert (got[0] if isinstance(got, (list, tuple)) else got) == value, (kind, name)


def internvl_chat():
    return {
        "model_type": "internvl_chat", "downsample_ratio": 0.5, "force_image_size": 448,
        "select_layer": -1, "_name_or_path": "OpenGVLab/InternVL-Chat-V1-5",
        "vision_config": {"model_type": "intern_vit_6b", "hidden_size": 3200, "image_size": 448,
                          "intermediate_size": 12800, "num_hidden_layers": 45, "patch_size": 14},
        "llm_config": {"model_type": "internlm2", "hidden_size": 6144, "intermediate_size": 16384,
                       "num_hidden_layers": 48, "num_attention_heads": 48, "vocab_size": 92553,
                       "num_key_value_heads": 8, "tie_word_embeddings": False},
    }  # fmt: skip


def test_the_published_configuration_is_the_preset():
    found = from_hf_config(internvl_chat())
    known = preset("internvl-6b-20b")
    assert found.name == "OpenGVLab/InternVL-Chat-V1-5"
    assert found.encoder == known.encoder
    assert cost_table(found).kinds == cost_table(known).kinds


def test_old_files_of_qwen_have_the_language_model_at_the_top(tmp_path):
    old = {
        "model_type": "qwen2_vl", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": True,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(old))
    found = from_hf_config(tmp_path / "config.json")
    known = preset("qwen2-vl-7b")
    assert found.encoder == known.encoder
    assert found.projector == known.projector
    assert found.tied_embeddings
    assert from_hf_config(old, image_patches=300).encoder.attended == 300


def test_layers_behind_the_chosen_one_are_not_counted():
    def layers(chosen):
        changed = {**internvl_chat(), "select_layer": chosen}
        return from_hf_config(changed).encoder.sizes.layers

    assert [layers(chosen) for chosen in (-1, -2, -4, 10)] == [45, 44, 42, 10]
    with pytest.raises(ConfigError, match=r"must be numbers of 45 layers .*got 46"):
        layers(46)
    clip = {
        "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096,
        "num_hidden_layers": 24, "image_size": 336, "patch_size": 14,
    }  # fmt: skip
    llava = {
        "model_type": "llava", "vision_config": clip, "text_config": {"model_type": "llama"}
    }  # fmt: skip
    assert from_hf_config(llava).encoder.sizes.layers == 23
    assert from_hf_config({**llava, "vision_feature_layer": [-2, -6]}).encoder.sizes.layers == 23
    assert from_hf_config(llava).encoder.tokens_per_tile == 576
    full = {**llava, "vision_feature_select_strategy": "full"}
    assert from_hf_config(full).encoder.tokens_per_tile == 577


def without(section, name):
    changed = internvl_chat()
    changed[section] = {key: value for key, value in changed[section].items() if key != name}
    return changed


def with_text(**values):
    changed = internvl_chat()
    changed["llm_config"] = {**changed["llm_config"], **values}
    return changed


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ({}, "model_type of the configuration must be one of llava, .*got None"),
        ({"model_type": "gpt2"}, "got 'gpt2'. Measure the layers of other models"),
        ({"model_type": "llava"}, "must have a section vision_config, got model_type"),
        (
            {"model_type": "llava", "vision_config": {}},
            "must have a section text_config or llm_config, got model_type, vision_config",
        ),
        (
            without("llm_config", "vocab_size"),
            r"llm_config of the configuration must have vocab_size: got .*\(model_type 'internlm2'",
        ),
        (with_text(hidden_size="big"), "hidden_size of llm_config .* got 'big'"),
        (with_text(num_experts=8), "without experts, got num_experts: .*and plan with --table"),
        ({**internvl_chat(), "downsample_ratio": 0}, r"downsample_ratio .* in \(0, 1\], got 0"),
        ("/nowhere/at/all", "config.json of a model must be readable"),
    ],
)
def test_configurations_that_say_too_little_are_refused(source, match):
    with pytest.raises(ConfigError, match=match):
        from_hf_config(source)


def test_files_that_are_no_configuration_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="must be JSON"):
        from_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must be an object, got list"):
        from_hf_config(tmp_path)
