"""Sizes of a model from the `config.json` that Hugging Face keeps beside its weights.

The file is read as JSON: transformers is not imported. Such files leave out what equals
the default of their class; `hf_defaults` has those that matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel
from omniload.pipeline.hf_defaults import TEXT_DEFAULTS, VISION_DEFAULTS
from omniload.pipeline.models import Encoder, ModelDescription
from omniload.pipeline.presets import projector_widths

__all__ = ["from_hf_config"]

_LLAVA = ("llava", "llava_next", "llava_onevision")
_INTERNVL = ("internvl_chat", "internvl")
_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_KNOWN = (*_LLAVA, "mistral3", *_INTERNVL, *_QWEN)
_NORMALISED = ("qwen3", "qwen3_vl_text")  # queries and keys
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")

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

    It knows LLaVA, LLaVA-NeXT, LLaVA-OneVision (`llava`, `llava_next`, `llava_onevision`), the
    first also with Pixtral's encoder, Mistral 3 (`mistral3`), InternVL (`internvl_chat`,
    `internvl`) and Qwen2-VL, 2.5 and 3 (`qwen2_vl`, `qwen2_5_vl`, `qwen3_vl`).
    Only layers whose output is used are counted (`vision_feature_layer`, `select_layer`). The
    smaller projectors inside Qwen3's encoder are left out.

    Args:
        source: the file, the folder that has it, or its content.
        image_patches: for Qwen and Pixtral, where a tile is a patch: mean patches of an image.

    Raises:
        ConfigError: no such file, not such a model, experts, or a size that is missing; says which.
    """
    values, where = _read(source)
    kind = values.get("model_type")
    if kind not in _KNOWN:
        raise ConfigError(
            f"model_type of {where} must be one of {', '.join(_KNOWN)}, got {kind!r}. Measure the "
            "layers of other models with omniload.pipeline.profile_layers, or describe them with "
            "omniload.pipeline.ModelDescription."
        )
    vision = _section(values, ("vision_config",), where, VISION_DEFAULTS, fallback=kind)
    language = _language(values, where, kind)
    if kind in _QWEN:
        encoder, form = _qwen(vision, kind, image_patches), "qwen"
    elif kind in _INTERNVL:
        encoder, form = _internvl(values, vision, where), "internvl"
    elif kind == "mistral3" or vision.values.get("model_type") == "pixtral":
        form = "mistral3" if kind == "mistral3" else "llava"
        encoder = _pixtral(values, vision, image_patches)
    else:
        encoder, form = _llava(values, vision), "llava"
    text = values.get("text_config") or values.get("llm_config") or {}
    tied = values.get("tie_word_embeddings")
    if tied is None:
        tied = text.get("tie_word_embeddings", False)
    return ModelDescription(
        name=str(values.get("_name_or_path") or where),
        encoder=encoder,
        projector=projector_widths(form, encoder, language.width),
        language=language,
        tied_embeddings=bool(tied),
        qk_norm=text.get("model_type") in _NORMALISED,
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
        text = _Section(values=values, where=where, defaults=TEXT_DEFAULTS.get(kind, {}))
    else:
        text = _section(values, names, where, TEXT_DEFAULTS, fallback="llama")
    experts = [name for name in _EXPERTS if text.values.get(name)]
    if experts:
        raise ConfigError(
            f"{text.where} must be of a model without experts, got {', '.join(experts)}: what a "
            "token passes and what memory holds differ there. Measure its layers with "
            "omniload.pipeline.profile_layers, and plan with --table."
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


def _pixtral(values: Mapping[str, Any], vision: _Section, image_patches: int) -> Encoder:
    """Images as they are, a tile is a patch; Mistral 3 joins so many of them to a token."""
    merged = values.get("spatial_merge_size", 2) if values["model_type"] == "mistral3" else 1
    width = vision.size("hidden_size")
    sizes = VisionModel(
        layers=_used_layers(vision, values.get("vision_feature_layer", -1)),
        width=width,
        patches=1,
        mlp_ratio=vision.size("intermediate_size") / width,
        gated=True,
    )
    return Encoder(
        sizes=sizes, tokens_per_tile=1 / merged**2, joined=merged**2, attended=image_patches
    )


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
