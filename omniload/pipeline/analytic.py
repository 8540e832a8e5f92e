"""The analytic cost table: operations and bytes of each layer, counted from the sizes of a model.

Left out, each below about 1 %: patch and position embeddings, norms, activations. A profile
(`omniload.pipeline.profile`) measures what a real layer takes, and corrects the table.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from omniload.flops import LanguageModel, language_flops, vision_flops
from omniload.pipeline.kinds import LayerKind, Linear, ParamBytes, Selective
from omniload.pipeline.models import Encoder, Machine, ModelDescription
from omniload.pipeline.table import CostTable

__all__ = ["cost_table"]

_BF16, _FP32 = 2, 4
_IDS = 8  # bytes of a token id


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """Operations a second, overhead, and what tensor parallelism divides."""

    rate: float
    overhead_s: float
    shares: int

    def seconds(self, work: Linear, passes: int = 1) -> Linear:
        return work.scaled(1 / (self.rate * self.shares)) + Linear(fixed=passes * self.overhead_s)


def cost_table(
    model: ModelDescription,
    *,
    machine: Machine | None = None,
    tensor_parallel: int = 1,
    data_parallel: int = 1,
    zero_stage: int = 1,
    param_bytes: ParamBytes | None = None,
    fused: bool = True,
) -> CostTable:
    """Count what every layer of a model costs on one GPU.

    The pipeline has the blocks of the encoder, the projector, the embedding (which puts the visual
    tokens among those of the text), the blocks of the language model, and norm and head as one.

    Operations are those of `omniload.flops`, the same as `CostModel.from_model`. Kept bytes are
    those of bf16 with flash attention and fused norms and gates: per position 16 h + 4 f of a block
    of the encoder (4 h more with layer scale, 4 h more with normalised queries and keys), 8 h + 4 q
    + 4 k + 6 f of one of the language model (h width, f width of the MLP, q and k widths of queries
    and keys; 2 q + 2 k more with normalised ones), 6 V of the head. Without fused kernels, a block
    of the language model keeps 8 h + 2 f more (and 4 q + 4 k): norms in fp32, and what the
    activation of the gate gives. Where attention or MLP is recomputed, its norm is not: what
    goes into the two stays. Tensor parallelism with sequence
    parallelism divides time, parameters and kept bytes; its own communication is part of
    the efficiency. What is sent between stages is not divided.

    Args:
        model: the sizes.
        machine: what a GPU reaches; None: an A100.
        tensor_parallel: GPUs that share a layer.
        data_parallel: copies of the pipeline, for ZeRO-1.
        zero_stage: 0 or 1.
        param_bytes: bytes of a parameter; None: bf16 with Adam.
        fused: RMS norms and gates are fused kernels; False: they are written in plain torch, as in
            transformers.

    Raises:
        ConfigError: a number that can't be.
    """
    used = machine or Machine()
    shares = tensor_parallel if isinstance(tensor_parallel, int) and tensor_parallel > 0 else 1
    vision, language = (
        _Unit(rate=used.flops_per_s * share, overhead_s=used.layer_overhead_s, shares=shares)
        for share in (used.vision_efficiency, used.language_efficiency)
    )
    kinds = (
        _vision_block(model.encoder, vision, fused=fused),
        _projector(model, vision),
        _embedding(model, language),
        _language_block(model, language, fused=fused),
        _head(model, language),
    )
    counts = (model.encoder.sizes.layers, 1, 1, model.language.layers, 1)
    layers = [kind.name for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    ends = (model.encoder.sizes.layers + 1, len(layers) - 1)
    return CostTable(
        kinds=kinds,
        layers=tuple(layers),
        tied=(ends,) if model.tied_embeddings else (),
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
        zero_stage=zero_stage,
        param_bytes=param_bytes or ParamBytes(),
        reserve_bytes=used.reserve_bytes,
        p2p_bytes_per_s=used.p2p_bytes_per_s,
        p2p_latency_s=used.p2p_latency_s,
        name=model.name,
    )


def _vision_block(encoder: Encoder, unit: _Unit, *, fused: bool) -> LayerKind:
    sizes = encoder.sizes
    width, mlp, matrices = sizes.width, sizes.width * sizes.mlp_ratio, 3 if sizes.gated else 2

    # outputs of both branches; inputs of the norms of queries and keys (plain torch: in fp32, and
    # in bf16 what their weights scale)
    scales = 2 * encoder.layer_scale
    norms, frozen_norms = (encoder.qk_norm * each for each in ((2, 2) if fused else (6, 4)))

    def operations(*, trained: bool) -> float:
        """Of one tile in one block; attention is counted as if a tile had what is attended."""
        attended = encoder.attended or sizes.patches
        one = replace(sizes, layers=1, patches=attended, trained=trained, recompute=False)
        return vision_flops(one) * sizes.patches / attended

    def kept(widths: float, mlps: float) -> Linear:
        """Bytes of so many activations of the block's width, and so many of the MLP's."""
        return Linear(tile=_BF16 * sizes.patches * (widths * width + mlps * mlp) / unit.shares)

    forward = operations(trained=False)
    mlp_forward = 2.0 * sizes.patches * matrices * width * mlp
    weights = 2.0 * sizes.patches * width * (4 * width + matrices * mlp)
    backward = operations(trained=True) - forward
    return LayerKind(
        name="vision_block",
        part="vision",
        forward_s=unit.seconds(Linear(tile=forward)),
        backward_s=unit.seconds(Linear(tile=backward), passes=2),
        backward_frozen_s=unit.seconds(Linear(tile=backward - weights)),
        recompute_s=unit.seconds(Linear(tile=forward)),
        # inputs of both norms and of the matrices behind them, q, k, v, output of attention; of
        # the MLP every matrix but the last gives its output, and the last one takes an input
        kept_bytes=kept(8 + scales + norms, matrices),
        kept_frozen_bytes=kept(6 + frozen_norms, matrices - 1),
        kept_bytes_recompute=kept(1, 0),
        output_bytes=Linear(tile=_BF16 * sizes.patches * width),
        params=_share(width * (4 * width + matrices * mlp), unit),
        trainable=sizes.trained,
        selective=(
            Selective(
                name="attention",
                recompute_s=unit.seconds(Linear(tile=forward - mlp_forward)),
                kept_bytes=kept(4 + scales, matrices),
            ),
            Selective(
                name="mlp",
                recompute_s=unit.seconds(Linear(tile=mlp_forward)),
                kept_bytes=kept(8 + scales + norms, 0),
            ),
        ),
    )


def _projector(model: ModelDescription, unit: _Unit) -> LayerKind:
    encoder, widths = model.encoder, model.projector
    tokens = encoder.tokens_per_tile
    weights = sum(a * b for a, b in itertools.pairwise(widths))
    forward = Linear(tile=2.0 * tokens * weights)
    hidden = sum(widths[1:-1])
    source = Linear(tile=_BF16 * encoder.sizes.patches * encoder.sizes.width / unit.shares)
    return LayerKind(
        name="projector",
        part="projector",
        forward_s=unit.seconds(forward),
        backward_s=unit.seconds(forward.scaled(2), passes=2),
        backward_frozen_s=unit.seconds(forward),
        recompute_s=unit.seconds(forward),
        # the joined features before and after their norm, and both sides of each activation
        kept_bytes=Linear(tile=_BF16 * tokens * 2 * (widths[0] + hidden) / unit.shares),
        kept_frozen_bytes=Linear(tile=_BF16 * tokens * (widths[0] + hidden) / unit.shares),
        kept_bytes_recompute=source,
        output_bytes=Linear(tile=_BF16 * tokens * widths[-1]),
        params=_share(weights + sum(widths[1:]), unit),
        trainable=model.projector_trained,
    )


def _embedding(model: ModelDescription, unit: _Unit) -> LayerKind:
    language = model.language
    return LayerKind(
        name="embedding",
        part="embedding",
        forward_s=unit.seconds(Linear()),
        backward_s=unit.seconds(Linear()),
        backward_frozen_s=unit.seconds(Linear()),
        kept_bytes=Linear(token=_IDS),
        output_bytes=Linear(token=_BF16 * language.width),
        params=_share(language.vocabulary * language.width, unit),
        trainable=language.trained,
        recomputable=False,
    )


def _language_block(model: ModelDescription, unit: _Unit, *, fused: bool) -> LayerKind:
    language = model.language
    width, mlp = language.width, language.width * language.mlp_ratio
    head_dim = language.head_dim or width / language.heads
    queries, keys = language.heads * head_dim, (language.kv_heads or language.heads) * head_dim
    matrices = 3 if language.gated else 2
    attention, gates = width * (2 * queries + 2 * keys), matrices * width * mlp
    forward, backward, frozen = (_block_operations(language, passes=each)
                                 for each in ("forward", "backward", "frozen"))  # fmt: skip
    mlp_forward = Linear(token=2.0 * gates)

    # plain torch: each norm keeps its input in fp32 instead, and in bf16 what its weight scales
    norm, gate = (1, 0) if fused else (3, 1)
    heads, frozen_heads = (2 + model.qk_norm * each for each in (norm, norm - gate))

    def kept(widths: float, qs: float, mlps: float) -> Linear:
        values = widths * width + qs * (queries + keys) + mlps * mlp
        return Linear(token=_BF16 * values / unit.shares)

    return LayerKind(
        name="language_block",
        part="language",
        forward_s=unit.seconds(forward),
        backward_s=unit.seconds(backward, passes=2),
        backward_frozen_s=unit.seconds(frozen),
        recompute_s=unit.seconds(forward),
        # inputs of both norms and of the matrices behind them; q, k, v and the output of attention
        kept_bytes=kept(2 + 2 * norm, heads, matrices + gate),
        kept_frozen_bytes=kept(2 * (norm - gate), frozen_heads, matrices - 1 + gate),
        kept_bytes_recompute=kept(1, 0, 0),
        output_bytes=Linear(token=_BF16 * width),
        params=_share(attention + gates, unit),
        trainable=language.trained,
        selective=(
            Selective(
                name="attention",
                recompute_s=unit.seconds(
                    Linear(token=2.0 * attention, token_pair=forward.token_pair)
                ),
                kept_bytes=kept(2 + 2 * norm, 0, matrices + gate),
            ),
            Selective(
                name="mlp",
                recompute_s=unit.seconds(mlp_forward),
                kept_bytes=kept(2 + 2 * norm, heads, 0),
            ),
        ),
    )


def _head(model: ModelDescription, unit: _Unit) -> LayerKind:
    language = model.language
    weights = language.vocabulary * language.width
    forward = Linear(token=2.0 * weights)
    # logits in bf16, and in fp32 for the loss; the input of the norm and that of the matrix
    kept = (_BF16 + _FP32) * language.vocabulary + 2 * _BF16 * language.width
    return LayerKind(
        name="head",
        part="head",
        forward_s=unit.seconds(forward),
        backward_s=unit.seconds(forward.scaled(2), passes=2),
        backward_frozen_s=unit.seconds(forward),
        kept_bytes=Linear(token=kept / unit.shares),
        output_bytes=Linear(token=_BF16 * language.vocabulary),
        params=_share(weights, unit),
        trainable=language.trained,
        recomputable=False,
    )


def _block_operations(language: LanguageModel, *, passes: str) -> Linear:
    """Count one block: two blocks less one, so that the output matrix drops out."""

    def counted(layers: int, *, trained: bool, reached: bool) -> tuple[float, float]:
        sizes = replace(language, layers=layers, trained=trained, recompute=False)
        return language_flops(sizes, reached=reached)

    def block(*, trained: bool, reached: bool) -> Linear:
        (a, b), (c, d) = (counted(n, trained=trained, reached=reached) for n in (2, 1))
        return Linear(token=a - c, token_pair=b - d)

    forward = block(trained=False, reached=False)
    if passes == "forward":
        return forward
    whole = block(trained=passes == "backward", reached=True)
    return Linear(
        token=whole.token - forward.token, token_pair=whole.token_pair - forward.token_pair
    )


def _share(params: float, unit: _Unit) -> int:
    return math.ceil(round(params) / unit.shares)
