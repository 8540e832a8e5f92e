"""Sizes of known encoders and language models, and the pairs that were published.

Each entry is checked against the size that its authors state, which stands beside it, in billions
of parameters; the sizes themselves are those of the released configurations.
"""

from __future__ import annotations

from dataclasses import dataclass

from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel
from omniload.pipeline.models import Encoder, ModelDescription

__all__ = [
    "ENCODERS",
    "LANGUAGE_MODELS",
    "PAIRS",
    "PUBLISHED_PAIRS",
    "EncoderPreset",
    "LanguagePreset",
    "preset",
    "projector_widths",
]


@dataclass(frozen=True, kw_only=True)
class EncoderPreset:
    """A released encoder.

    Args:
        encoder: its sizes.
        projector: "internvl", "llava" or "qwen": how its models join it to a language model.
        billions: parameters, as stated by its authors.
        source: where the figures are from.
    """

    encoder: Encoder
    projector: str
    billions: float
    source: str


@dataclass(frozen=True, kw_only=True)
class LanguagePreset:
    """A released language model.

    Args:
        sizes: its sizes.
        billions: parameters, as stated by its authors.
        source: where the figures are from.
        tied: embedding and head share one matrix.
        qk_norm: queries and keys are normalised.
    """

    sizes: LanguageModel
    billions: float
    source: str
    tied: bool = False
    qk_norm: bool = False


def _square(
    layers: int,
    width: int,
    mlp: int,
    *,
    side: int,
    special: int = 1,
    joined: int = 4,
    layer_scale: bool = False,
    qk_norm: bool = False,
) -> Encoder:
    """Make an encoder of square tiles of side * side patches; the class token is dropped behind."""
    sizes = VisionModel(
        layers=layers, width=width, patches=side * side + special, mlp_ratio=mlp / width
    )
    return Encoder(
        sizes=sizes,
        tokens_per_tile=side * side / joined,
        joined=joined,
        layer_scale=layer_scale,
        qk_norm=qk_norm,
    )


def _qwen(mlp: int, *, gated: bool, attended: int) -> Encoder:
    sizes = VisionModel(layers=32, width=1280, patches=1, mlp_ratio=mlp / 1280, gated=gated)
    return Encoder(sizes=sizes, tokens_per_tile=0.25, joined=4, attended=attended)


def _decoder(
    layers: int, width: int, heads: tuple[int, int], mlp: int, vocabulary: int, head_dim: int = 128
) -> LanguageModel:
    return LanguageModel(
        layers=layers,
        width=width,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        mlp_ratio=mlp / width,
        vocabulary=vocabulary,
    )


_INTERNVL = "OpenGVLab model cards; 448 px, patches of 14, 256 tokens a tile"
_EVA = "EVA-CLIP model configurations, at the 448 px tiles of the published pairs"

#: Encoders by name. One tile of all but Qwen's is a square image; one of Qwen's is a patch.
ENCODERS: dict[str, EncoderPreset] = {
    "internvit-300m": EncoderPreset(
        encoder=_square(24, 1024, 4096, side=32, layer_scale=True),
        projector="internvl", billions=0.304, source=_INTERNVL,
    ),
    # 48 layers, of which the last three are dropped
    "internvit-6b": EncoderPreset(
        encoder=_square(45, 3200, 12800, side=32, layer_scale=True, qk_norm=True),
        projector="internvl", billions=5.54, source=_INTERNVL,
    ),
    "siglip-so400m": EncoderPreset(
        encoder=_square(27, 1152, 4304, side=27, special=0, joined=1),
        projector="llava", billions=0.428,
        source="google/siglip-so400m-patch14-384; the stated size has its pooling head in it",
    ),
    # LLaVA runs 23 of these: it takes what the layer before the last gives
    "clip-l-336": EncoderPreset(
        encoder=_square(24, 1024, 4096, side=24, joined=1),
        projector="llava", billions=0.304, source="openai/clip-vit-large-patch14-336",
    ),
    "eva-g": EncoderPreset(
        encoder=_square(40, 1408, 6144, side=32),
        projector="internvl", billions=1.01, source=_EVA,
    ),
    "eva-e": EncoderPreset(
        encoder=_square(64, 1792, 15360, side=32),
        projector="internvl", billions=4.4, source=_EVA,
    ),
    "eva-8b": EncoderPreset(
        encoder=_square(32, 4096, 20480, side=32),
        projector="internvl", billions=7.5, source=_EVA,
    ),
    "eva-18b": EncoderPreset(
        encoder=_square(48, 5120, 25600, side=32),
        projector="internvl", billions=17.5, source=_EVA,
    ),
    # attention over a whole image: 1024 patches are one of 448 px
    "qwen2-vit": EncoderPreset(
        encoder=_qwen(5120, gated=False, attended=1024), projector="qwen", billions=0.675,
        source="Qwen/Qwen2-VL-7B-Instruct; the stated size has the projector in it",
    ),
    # attention over windows of 8 * 8 patches in 28 layers, over a whole image in 4
    "qwen2.5-vit": EncoderPreset(
        encoder=_qwen(3420, gated=True, attended=184), projector="qwen", billions=0.675,
        source="Qwen/Qwen2.5-VL-7B-Instruct; the stated size has the projector in it",
    ),
}  # fmt: skip

_RELEASED = "config.json of the released model"

#: Language models by name.
LANGUAGE_MODELS: dict[str, LanguagePreset] = {
    name: LanguagePreset(
        sizes=sizes, billions=billions, source=_RELEASED, qk_norm=name.startswith("qwen3-")
    )
    for name, sizes, billions in (
        ("internlm2-1.8b", _decoder(24, 2048, (16, 8), 8192, 92544), 1.89),
        ("internlm2-7b", _decoder(32, 4096, (32, 8), 14336, 92544), 7.74),
        # the vocabulary of InternVL-Chat-1.5, with its image tokens
        ("internlm2-20b", _decoder(48, 6144, (48, 8), 16384, 92553), 19.86),
        ("llama3-8b", _decoder(32, 4096, (32, 8), 14336, 128256), 8.03),
        ("llama3-70b", _decoder(80, 8192, (64, 8), 28672, 128256), 70.6),
        ("yi-34b", _decoder(60, 7168, (56, 8), 20480, 64000), 34.4),
        ("qwen1.5-110b", _decoder(80, 8192, (64, 8), 49152, 152064), 111.0),
        ("qwen2.5-7b", _decoder(28, 3584, (28, 4), 18944, 152064), 7.61),
        ("qwen2.5-72b", _decoder(80, 8192, (64, 8), 29568, 152064), 72.7),
        ("qwen3-8b", _decoder(36, 4096, (32, 8), 12288, 151936), 8.19),
        ("qwen3-32b", _decoder(64, 5120, (64, 8), 25600, 151936), 32.8),
    )
}

#: The nine pairs of the OmniBal paper, each with the tensor parallelism assumed for it.
PUBLISHED_PAIRS: dict[str, int] = {
    "internvl-6b-20b": 2,
    "internvl-6b-34b": 4,
    "internvl-6b-8b": 2,
    "internvl-6b-70b": 8,
    "internvl-6b-110b": 8,
    "eva-8b-8b": 2,
    "eva-e-34b": 4,
    "eva-18b-70b": 8,
    "eva-g-8b": 2,
}

#: Names of pairs, as (encoder, language model).
PAIRS: dict[str, tuple[str, str]] = {
    "internvl-6b-20b": ("internvit-6b", "internlm2-20b"),
    "internvl-6b-34b": ("internvit-6b", "yi-34b"),
    "internvl-6b-8b": ("internvit-6b", "llama3-8b"),
    "internvl-6b-70b": ("internvit-6b", "llama3-70b"),
    "internvl-6b-110b": ("internvit-6b", "qwen1.5-110b"),
    "eva-8b-8b": ("eva-8b", "llama3-8b"),
    "eva-e-34b": ("eva-e", "yi-34b"),
    "eva-18b-70b": ("eva-18b", "llama3-70b"),
    "eva-g-8b": ("eva-g", "llama3-8b"),
    "internvl2-2b": ("internvit-300m", "internlm2-1.8b"),
    "internvl2-8b": ("internvit-300m", "internlm2-7b"),
    # Qwen2's language models have the sizes of Qwen2.5's
    "qwen2-vl-7b": ("qwen2-vit", "qwen2.5-7b"),
    "qwen2-vl-72b": ("qwen2-vit", "qwen2.5-72b"),
    "qwen2.5-vl-7b": ("qwen2.5-vit", "qwen2.5-7b"),
    "qwen2.5-vl-72b": ("qwen2.5-vit", "qwen2.5-72b"),
}


def preset(name: str) -> ModelDescription:
    """Describe a known model.

    Args:
        name: one of `PAIRS`, or any encoder and language model as "encoder+language", for example
            "siglip-so400m+qwen3-8b".

    Raises:
        ConfigError: an unknown name; says which are known.
    """
    vision, plus, language = name.partition("+")
    if not plus:
        if name not in PAIRS:
            raise ConfigError(
                f"model must be one of {', '.join(PAIRS)}, or encoder+language of "
                f"{', '.join(ENCODERS)} and {', '.join(LANGUAGE_MODELS)}: got {name!r}."
            )
        vision, language = PAIRS[name]
    if vision not in ENCODERS:
        raise ConfigError(f"encoder must be one of {', '.join(ENCODERS)}, got {vision!r}.")
    if language not in LANGUAGE_MODELS:
        raise ConfigError(
            f"language model must be one of {', '.join(LANGUAGE_MODELS)}, got {language!r}."
        )
    seen, spoken = ENCODERS[vision], LANGUAGE_MODELS[language]
    return ModelDescription(
        name=name,
        encoder=seen.encoder,
        projector=projector_widths(seen.projector, seen.encoder, spoken.sizes.width),
        language=spoken.sizes,
        tied_embeddings=spoken.tied,
        qk_norm=spoken.qk_norm,
    )


def projector_widths(form: str, encoder: Encoder, width: int) -> tuple[int, ...]:
    """Say the widths of a projector: joined features, hidden layers, the language model.

    Args:
        form: "internvl" or "llava": the hidden layer is as wide as the language model; "qwen": as
            wide as the joined features; "mistral3": one as wide as a feature, then one as wide as
            the language model.
        encoder: the encoder before it.
        width: that of the language model.
    """
    joined = encoder.sizes.width * encoder.joined
    if form == "mistral3":
        return (joined, encoder.sizes.width, width, width)
    return (joined, joined if form == "qwen" else width, width)
