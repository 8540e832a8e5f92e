"""Floating-point operations of one training step, counted from the sizes of a model."""

from __future__ import annotations

from dataclasses import dataclass

from omniload.errors import ConfigError

__all__ = ["LanguageModel", "VisionModel", "language_flops", "vision_flops"]

_MULTIPLY_ADD = 2.0
# Backward passes, in forward passes. Linear layers: one for the gradient of the activations, one
# for that of the weights. Attention kernels: five products instead of two, as they form the scores
# anew (Dao, "FlashAttention-2", 2023, section 4.1).
_ACTIVATIONS, _WEIGHTS, _ATTENTION = 1.0, 1.0, 2.5


@dataclass(frozen=True, kw_only=True)
class VisionModel:
    """The vision transformer of a model, as far as its cost goes.

    Args:
        layers: transformer layers that are run.
        width: hidden size.
        patches: positions of one tile inside the encoder, a class token included.
        mlp_ratio: width of the MLP over `width`.
        gated: the MLP has three matrices instead of two.
        trained: its weights get gradients.
        recompute: forward runs once more in the backward pass (activation checkpointing).

    Raises:
        ConfigError: a size that is not above 0.
    """

    layers: int
    width: int
    patches: int
    mlp_ratio: float = 4.0
    gated: bool = False
    trained: bool = True
    recompute: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self, "layers", "width", "patches", "mlp_ratio")


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """The language model, as far as its cost goes.

    Args:
        layers: transformer layers.
        width: hidden size.
        vocabulary: rows of the output matrix.
        heads: attention heads of the queries.
        kv_heads: heads of keys and values; None: as many as `heads`.
        head_dim: size of a head; None: `width / heads`.
        mlp_ratio: width of the MLP over `width`; with experts, of those a token runs through.
        gated: the MLP has three matrices instead of two.
        trained: its weights get gradients.
        recompute: forward runs once more in the backward pass (activation checkpointing).

    Raises:
        ConfigError: a size that is not above 0.
    """

    layers: int
    width: int
    vocabulary: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: float = 4.0
    gated: bool = True
    trained: bool = True
    recompute: bool = False

    def __post_init__(self) -> None:
        _check_sizes(self, "layers", "width", "vocabulary", "heads", "mlp_ratio")
        for name in ("kv_heads", "head_dim"):
            if getattr(self, name) is not None:
                _check_sizes(self, name)


def vision_flops(vision: VisionModel) -> float:
    """Count the operations of one tile; the patch embedding is left out."""
    linear, attention = _passes(
        trained=vision.trained, backward=vision.trained, recompute=vision.recompute
    )
    mlp = (3 if vision.gated else 2) * vision.mlp_ratio * vision.width
    matrices = vision.width * (4 * vision.width + mlp)
    scores = 2 * vision.patches * vision.width  # each patch with all of its tile
    per_patch = _MULTIPLY_ADD * (linear * matrices + attention * scores)
    return vision.layers * vision.patches * per_patch


def language_flops(language: LanguageModel, *, reached: bool) -> tuple[float, float]:
    """Count the operations of one token, and those of one pair of tokens of the same sample.

    Args:
        language: the model.
        reached: a part before it is trained, so that gradients pass it even when it is frozen.

    Returns:
        Operations of a token in all that is linear in tokens, and the factor of len^2.
    """
    linear, attention = _passes(
        trained=language.trained,
        backward=language.trained or reached,
        recompute=language.recompute,
    )
    head_dim = language.head_dim or language.width / language.heads
    queries, keys = language.heads * head_dim, (language.kv_heads or language.heads) * head_dim
    mlp = (3 if language.gated else 2) * language.mlp_ratio * language.width
    layer = language.width * (2 * queries + 2 * keys + mlp)
    output = language.width * language.vocabulary
    # scores and weighted values of a pair; attention is causal: half of the len^2 pairs
    pair = language.layers * 2 * queries / 2
    return (
        _MULTIPLY_ADD * linear * (language.layers * layer + output),
        _MULTIPLY_ADD * attention * pair,
    )


def _passes(*, trained: bool, backward: bool, recompute: bool) -> tuple[float, float]:
    """Say how many forward passes a training step is worth: of linear layers, of attention."""
    if not backward:
        return 1.0, 1.0
    forward = 2.0 if recompute else 1.0
    return forward + _ACTIVATIONS + (_WEIGHTS if trained else 0.0), forward + _ATTENTION


def _check_sizes(model: VisionModel | LanguageModel, *names: str) -> None:
    for name in names:
        value = getattr(model, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(f"{type(model).__name__}.{name} must be above 0, got {value!r}.")
