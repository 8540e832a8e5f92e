"""Sizes that a `config.json` of Hugging Face leaves out: those of the class, by `model_type`."""

from __future__ import annotations

__all__ = ["TEXT_DEFAULTS", "VISION_DEFAULTS"]

_QWEN2_VL_TEXT = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
_QWEN2_TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 151936,
}
#: Of language models.
TEXT_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "vocab_size": 32000},
    "mistral": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000},
    "qwen2": _QWEN2_TEXT,
    "qwen3": {**_QWEN2_TEXT, "head_dim": 128},
    "qwen2_vl": _QWEN2_VL_TEXT,
    "qwen2_vl_text": _QWEN2_VL_TEXT,
    "qwen2_5_vl": _QWEN2_VL_TEXT,
    "qwen2_5_vl_text": _QWEN2_VL_TEXT,
    "qwen3_vl_text": {**_QWEN2_TEXT, "head_dim": 128},
}  # fmt: skip
_CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "image_size": 224}
_QWEN_VISION = {"depth": 32, "patch_size": 14, "spatial_merge_size": 2}
#: Of encoders.
VISION_DEFAULTS: dict[str, dict[str, int]] = {
    "clip_vision_model": {**_CLIP, "patch_size": 32},
    "siglip_vision_model": {**_CLIP, "patch_size": 16},
    "pixtral": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24},
    "intern_vit_6b": {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48,
                      "image_size": 224, "patch_size": 14},
    "internvl_vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                        "image_size": 448, "patch_size": 14},
    "qwen2_vl": {**_QWEN_VISION, "embed_dim": 1280, "mlp_ratio": 4},
    "qwen2_5_vl": {**_QWEN_VISION, "intermediate_size": 3420, "window_size": 112},
    "qwen3_vl": {**_QWEN_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
                 "patch_size": 16},
}  # fmt: skip
