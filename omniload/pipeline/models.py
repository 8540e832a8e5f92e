"""Descriptions of vision-language models and of the machines that they are trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from omniload.errors import ConfigError
from omniload.flops import LanguageModel, VisionModel

__all__ = ["Encoder", "Machine", "ModelDescription"]

_WEIGHTS = "vision", "projector", "language"  # parts that can be frozen
_MAY_BE_ZERO = {"layer_overhead_s", "p2p_latency_s", "reserve_bytes"}


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A vision encoder, and how its output becomes tokens.

    Args:
        sizes: the transformer; `sizes.patches` are the positions of one tile inside it.
        tokens_per_tile: tokens of the language model that one tile becomes.
        joined: neighbouring patches whose features one token joins (InternVL, Qwen: 4).
        attended: positions that one attends to; None: those of its tile. Where a tile is one patch
            (Qwen, Pixtral), the mean patches of an image (or of a window).
        layer_scale: both branches of a block are scaled by a vector, which keeps them for its
            gradient (InternViT).
        qk_norm: queries and keys are normalised (InternViT-6B).
    """

    sizes: VisionModel
    tokens_per_tile: float
    joined: int = 1
    attended: int | None = None
    layer_scale: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens_per_tile", "joined", "attended"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"Encoder.{name} must be above 0, got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A vision-language model, as far as its costs go.

    Args:
        name: for messages and tables.
        encoder: the vision encoder.
        projector: widths of the chain of linear layers between the two, input first.
        language: the language model.
        projector_trained: the weights of the projector get gradients.
        tied_embeddings: embedding and head share one matrix.
        qk_norm: queries and keys of the language model are normalised (Qwen3).
    """

    name: str
    encoder: Encoder
    projector: tuple[int, ...]
    language: LanguageModel
    projector_trained: bool = True
    tied_embeddings: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        widths = tuple(self.projector)
        object.__setattr__(self, "projector", widths)
        if len(widths) < 2 or not all(isinstance(each, int) and each > 0 for each in widths):
            raise ConfigError(
                f"projector must be two or more widths above 0, got {list(widths)} ({self.name})."
            )
        if widths[-1] != self.language.width:
            raise ConfigError(
                f"projector must end at the width of the language model: expected "
                f"{self.language.width}, got {widths[-1]} ({self.name})."
            )

    def freeze(self, *parts: str) -> ModelDescription:
        """Return the model with parts frozen.

        Args:
            parts: "vision", "projector", "language" (with embedding and head).

        Raises:
            ConfigError: an unknown part.
        """
        for part in parts:
            if part not in _WEIGHTS:
                raise ConfigError(f"parts to freeze are {', '.join(_WEIGHTS)}, got {part!r}.")
        encoder, language = self.encoder, self.language
        if "vision" in parts:
            encoder = replace(encoder, sizes=replace(encoder.sizes, trained=False))
        if "language" in parts:
            language = replace(language, trained=False)
        trained = self.projector_trained and "projector" not in parts
        return replace(self, encoder=encoder, language=language, projector_trained=trained)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a GPU and the links between stages reach; the defaults are those of an A100.

    Args:
        flops_per_s: peak of one GPU in the precision of training.
        vision_efficiency: share of the peak that the encoder reaches.
        language_efficiency: the same for the language model.
        layer_overhead_s: time of one layer's forward pass whatever it holds: launches of kernels.
        p2p_bytes_per_s: bytes a second between neighbouring stages, of one GPU.
        p2p_latency_s: time of a transfer whatever its size.
        reserve_bytes: memory that no figure counts; see `CostTable.reserve_bytes`.
    """

    flops_per_s: float = 312e12
    vision_efficiency: float = 0.45
    language_efficiency: float = 0.50
    layer_overhead_s: float = 0.12e-3
    p2p_bytes_per_s: float = 20e9
    p2p_latency_s: float = 0.0
    reserve_bytes: float = 6e9

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, least = getattr(self, entry.name), entry.name in _MAY_BE_ZERO
            if not math.isfinite(value) or value < 0 or (value == 0 and not least):
                raise ConfigError(f"Machine.{entry.name} must be finite and above 0, got {value}.")
            if entry.name.endswith("efficiency") and value > 1:
                raise ConfigError(
                    f"Machine.{entry.name} is a share of the peak and must be at most 1, got "
                    f"{value}."
                )
