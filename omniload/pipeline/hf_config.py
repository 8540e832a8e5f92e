"""Sizes of a model from the `config.json` that Hugging Face keeps beside its weights.

The file is read as JSON: transformers is not imported. Such files leave out what equals
the default of their class, so the defaults that matter stand here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel
from omniload.pipeline.models import Encoder, ModelDescription
from omniload.pipeline.presets import projector_widths

__all__ = ["from_hf_config"]

_LLAVA = ("llava", "llava_next", "llava_onevision")
_INTERNVL = ("internvl_chat", "internvl")
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")

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
_TEXT_DEFAULTS: dict[str, dict[str, int]] = {
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
_VISION_DEFAULTS: dict[str, dict[str, int]] = {
    "clip_vision_model": {**_CLIP, "patch_size": 32},
    "siglip_vision_model": {**_CLIP, "patch_size": 16},
    "intern_vit_6b": {"hidden_size": 3200, "intermediate_size": 12800, "num_hidden_layers": 48,
                      "image_size": 224, "patch_size": 14},
    "internvl_vision": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                        "image_size": 448, "patch_size": 14},
    "qwen2_vl": {**_QWEN_VISION, "embed_dim": 1280, "mlp_ratio": 4},
    "qwen2_5_vl": {**_QWEN_VISION, "intermediate_size": 3420, "window_size": 112},
    "qwen3_vl": {**_QWEN_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
                 "patch_size": 16},
}  # fmt: skip
_HAS_NO_CLASS_TOKEN = ("siglip_vision_model",)


@dataclass(frozen=True, kw_only=True)
class _Section:
    """One section of a configuration, with the defaults of its class."""

    values: Mapping[str, Any]
    where: str
    defaults: Mapping[str, int] = field(default_factory=dict)

    def size(self, name: str) -> int:
        """Read a size that has to be there; of a pair, such as [448, 448], the first of the two."""
        value = self.values.get(name, self.defaults.get(name))
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise ConfigError(
                f"{self.where} must have {name}: got {', '.join(sorted(self.values)) or 'nothing'} "
                f"(model_type {self.values.get('model_type')!r}). Write it into the file."
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} of {self.where} must be an integer above 0, got {value!r}.")
        return value

    def optional(self, name: str) -> int | None:
        """Read a size that may be left out or null."""
        found = self.values.get(name, self.defaults.get(name)) is not None
        return self.size(name) if found else None


def from_hf_config(
    source: str | Path | Mapping[str, Any], *, image_patches: int = 1024
) -> ModelDescription:
    """Describe the model of a Hugging Face `config.json`.

    It knows LLaVA, LLaVA-NeXT, LLaVA-OneVision (`llava`, `llava_next`, `llava_onevision`), InternVL
    (`internvl_chat`, `internvl`) and Qwen2-VL, 2.5 and 3 (`qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`).
    Only layers whose output is used are counted (`vision_feature_layer`, `select_layer`). The
    smaller projectors inside Qwen3's encoder are left out.

    Args:
        source: the file, the folder that has it, or its content.
        image_patches: for Qwen, where a tile is a patch: mean patches of an image.

    Raises:
        ConfigError: no such file, not such a model, experts, or a size that is missing; says which.
    """
    values, where = _read(source)
    kind = values.get("model_type")
    known = (*_LLAVA, *_INTERNVL, *_QWEN)
    if kind not in known:
        raise ConfigError(
            f"model_type of {where} must be one of {', '.join(known)}, got {kind!r}. Describe "
            "other models with omniload.pipeline.ModelDescription."
        )
    vision = _section(values, ("vision_config",), where, _VISION_DEFAULTS, fallback=kind)
    language = _language(values, where, kind)
    if kind in _QWEN:
        encoder, form = _qwen(vision, kind, image_patches), "qwen"
    elif kind in _INTERNVL:
        encoder, form = _internvl(values, vision, where), "internvl"
    else:
        encoder, form = _llava(values, vision), "llava"
    tied = values.get("tie_word_embeddings")
    if tied is None:
        text = values.get("text_config") or values.get("llm_config") or {}
        tied = text.get("tie_word_embeddings", False)
    return ModelDescription(
        name=str(values.get("_name_or_path") or where),
        encoder=encoder,
        projector=projector_widths(form, encoder, language.width),
        language=language,
        tied_embeddings=bool(tied),
    )


def _read(source: str | Path | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "the configuration"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config.json of a model must be readable: {error}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} must be JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be an object, got {type(values).__name__}.")
    return values, str(path)


def _section(
    values: Mapping[str, Any],
    names: tuple[str, ...],
    where: str,
    defaults: Mapping[str, Mapping[str, int]],
    *,
    fallback: str,
) -> _Section:
    name = next((each for each in names if values.get(each) is not None), None)
    if name is None or not isinstance(values[name], Mapping):
        raise ConfigError(
            f"{where} must have a section {' or '.join(names)}, got {', '.join(sorted(values))}."
        )
    kind = str(values[name].get("model_type", fallback))
    known = defaults.get(kind) or defaults.get(kind.removesuffix("_vision")) or {}
    return _Section(values=values[name], where=f"{name} of {where}", defaults=known)


def _language(values: Mapping[str, Any], where: str, kind: str) -> LanguageModel:
    names = ("text_config", "llm_config")
    if kind in _QWEN and not any(values.get(name) for name in names):
        # files from before 2025 have the sizes of the language model at the top
        text = _Section(values=values, where=where, defaults=_TEXT_DEFAULTS.get(kind, {}))
    else:
        text = _section(values, names, where, _TEXT_DEFAULTS, fallback="llama")
    experts = [name for name in _EXPERTS if text.values.get(name)]
    if experts:
        raise ConfigError(
            f"{text.where} must be of a model without experts, got {', '.join(experts)}. Describe "
            "it with omniload.pipeline.ModelDescription, or measure its layers."
        )
    width = text.size("hidden_size")
    return LanguageModel(
        layers=text.size("num_hidden_layers"),
        width=width,
        vocabulary=text.size("vocab_size"),
        heads=text.size("num_attention_heads"),
        kv_heads=text.optional("num_key_value_heads"),
        head_dim=text.optional("head_dim"),
        mlp_ratio=text.size("intermediate_size") / width,
    )


def _square(vision: _Section, *, side: int, layers: int) -> VisionModel:
    width = vision.size("hidden_size")
    special = 0 if vision.values.get("model_type") in _HAS_NO_CLASS_TOKEN else 1
    return VisionModel(
        layers=layers,
        width=width,
        patches=side * side + special,
        mlp_ratio=vision.size("intermediate_size") / width,
    )


def _used_layers(vision: _Section, chosen: Any) -> int:
    """Count the layers up to the one whose output is taken; -1 is the last, 0 the embedding."""
    layers = vision.size("num_hidden_layers")
    places = chosen if isinstance(chosen, list) else [chosen]
    if not all(isinstance(each, int) and -layers <= each <= layers for each in places):
        raise ConfigError(
            f"the layers whose output is taken must be numbers of {layers} layers of "
            f"{vision.where}, got {chosen!r}."
        )
    return max((each if each >= 0 else layers + 1 + each for each in places), default=layers)


def _llava(values: Mapping[str, Any], vision: _Section) -> Encoder:
    one_vision = values["model_type"] == "llava_onevision"
    chosen = values.get("vision_feature_layer", -1 if one_vision else -2)
    side = vision.size("image_size") // vision.size("patch_size")
    sizes = _square(vision, side=side, layers=_used_layers(vision, chosen))
    strategy = values.get("vision_feature_select_strategy", "full" if one_vision else "default")
    dropped = 1 if strategy == "default" else 0  # the class token
    return Encoder(sizes=sizes, tokens_per_tile=sizes.patches - dropped)


def _internvl(values: Mapping[str, Any], vision: _Section, where: str) -> Encoder:
    kind = values["model_type"]
    chosen = values.get("select_layer", values.get("vision_feature_layer", -1))
    size = values.get("force_image_size") or vision.size("image_size")
    side = size // vision.size("patch_size")
    ratio = values.get("downsample_ratio", 0.5)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ConfigError(f"downsample_ratio of {where} must be in (0, 1], got {ratio!r}.")
    name, default = ("use_qk_norm", False) if kind == "internvl" else ("qk_normalization", True)
    normed = vision.values.get(name, default)
    return Encoder(
        sizes=_square(vision, side=side, layers=_used_layers(vision, chosen)),
        tokens_per_tile=(side * ratio) ** 2,
        joined=round(1 / ratio**2),
        layer_scale=True,
        qk_norm=bool(normed),
    )


def _qwen(vision: _Section, kind: str, image_patches: int) -> Encoder:
    layers, joined = vision.size("depth"), vision.size("spatial_merge_size") ** 2
    if kind == "qwen2_vl":
        width = vision.size("embed_dim")
        ratio = float(vision.size("mlp_ratio"))
    else:
        width = vision.size("hidden_size")
        ratio = vision.size("intermediate_size") / width
    attended = image_patches
    if kind == "qwen2_5_vl":
        full = len(vision.values.get("fullatt_block_indexes", (7, 15, 23, 31)))
        window = (vision.size("window_size") // vision.size("patch_size")) ** 2
        attended = round((full * image_patches + (layers - full) * window) / layers)
    sizes = VisionModel(
        layers=layers, width=width, patches=1, mlp_ratio=ratio, gated=kind == "qwen2_5_vl"
    )
    return Encoder(sizes=sizes, tokens_per_tile=1 / joined, joined=joined, attended=attended)
