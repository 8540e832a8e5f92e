"""The batch that a training loop receives: one buffer, typed views, and what a model takes.

All tensors of a batch lie in one uint8 buffer, so that it crosses processes, is pinned, and goes
to a device as a single tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from omniload._layer_types import check_layers, same_settings
from omniload._layout import BatchSizes
from omniload._normalize import normalize_tiles
from omniload._step import LOSSES, check_dtype, check_option
from omniload._unpack import SampleRow
from omniload.attention import AttentionOptions, AttentionRow, attention_arguments
from omniload.errors import ConfigError
from omniload.kernels.reference import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    normalize_table,
)

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "PackedBatch"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedBatch(SampleRow):
    """One micro-batch on one rank: samples laid end to end in one row.

    Without padding, unless it was asked for: see `omniload.Padding`.

    Also a mapping of its tensors by name. It is made by `omniload.packing.pack`.

    Args:
        buffer: uint8 (num_bytes,), holds all tensors.
        sizes: where they lie in it.
        max_seqlen: tokens of the longest document; a Python int, since attention kernels compile
            anew for each value that is a tensor.
        sample_lengths: tokens of each sample, padding left out; on the host.
        sample_images: images of each sample; on the host.
        document_multiple: what documents were padded to; 1: not at all.
        step: optimizer step in the epoch, from 0.
        micro_step: place in the accumulation of this step, from 0.
        is_last_micro_step: the optimizer steps after this batch.
        num_loss_tokens: labels of this batch that give loss.
        num_loss_tokens_step: the same over all ranks and micro-steps of the step.
        num_loss_samples_step: samples of the step with a loss token; None: not known.
        sqrt_loss_tokens_step: sum over the samples of the step of the root of their loss tokens;
            None: not known.
        is_filler: runs through the model but counts for nothing.
        dp_world_size: data-parallel ranks among which the step is dealt.
        accumulation: micro-steps of a step.

    Raises:
        ConfigError: counts that contradict each other.
    """

    max_seqlen: int

    def __repr__(self) -> str:
        filler = ", filler" if self.is_filler else ""
        padding = f" ({self.num_padding_tokens} padding)" if self.num_padding_tokens else ""
        return (
            f"PackedBatch(step={self.step}, micro_step={self.micro_step}{filler}, "
            f"samples={self.num_samples}, tokens={self.num_tokens}{padding}, "
            f"tiles={self.num_tiles}, loss_tokens={self.num_loss_tokens}/"
            f"{self.num_loss_tokens_step}, device='{self.device}')"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        facts = tuple([getattr(self, name) for name in _facts()])
        return _restore, (self.buffer, tuple(self.sizes), facts)

    # -- training ---------------------------------------------------------------------------------

    def model_inputs(
        self,
        dtype: torch.dtype = torch.float32,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        loss: str = "sum",
    ) -> dict[str, Any]:
        """Return the keyword arguments of a Hugging Face-like model, on the batch's device.

        Args:
            dtype: floating type of the pixels.
            mean: per-channel mean of the normalisation, RGB, pixels scaled to [0, 1].
            std: per-channel standard deviation.
            loss: what the model returns, "sum", "mean" or "step"; see `loss_scale`.

        Returns:
            - input_ids, labels, position_ids: int64 (1, num_tokens). Labels are not shifted.
            - pixel_values: `dtype` (num_tiles, 3, height, width), `(x / 255 - mean) / std` rounded
              once; None where the batch has no tile.
            - cu_seq_lens_q, cu_seq_lens_k: int32 (num_documents + 1,).
            - max_length_q, max_length_k: Python ints.
            - use_cache: False. With a cache, their default, the models of Hugging Face stop reading
              the samples from position_ids, and mix them silently.
            - num_items_in_batch: Python int, the loss tokens of the whole step over all ranks and
              micro-steps, at least 1. Hugging Face models divide the sum of their losses by it; it
              is left out for loss="mean", where they must not.

            For loss="mean" and a batch without a loss token (a filler), the last label is set, so
            that the model's mean is a number and not 0 / 0. Its `loss_scale` is 0: it adds nothing.

        Raises:
            ConfigError: an unknown loss or type, or a row of one token, which has no mean.
        """
        check_option("loss", loss, LOSSES)
        check_dtype(dtype)
        labels = self.labels
        if loss == "mean" and self.num_loss_tokens == 0:
            if self.num_tokens < 2:
                raise ConfigError(
                    "a mean loss needs a row of at least 2 tokens, because the first label is "
                    f"ignored: got {self.num_tokens} (step={self.step}, micro_step="
                    f"{self.micro_step}). Use a model that sums, with loss='sum'."
                )
            labels = labels.clone()
            labels[-1] = self.input_ids[-1]
        pixels = None
        if self.num_tiles:
            table = normalize_table(mean, std, dtype=dtype, device=self.device)
            pixels = normalize_tiles(self.tiles, table)
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids[None],
            "labels": labels[None],
            "position_ids": self.position_ids[None],
            "pixel_values": pixels,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen,
            "use_cache": False,
        }
        if loss != "mean":
            inputs["num_items_in_batch"] = max(self.num_loss_tokens_step, 1)
        return inputs

    def attention(
        self,
        backend: str,
        *,
        kind: str = "causal",
        window: int | None = None,
        max_seqlen: int | None = None,
        block_size: int | tuple[int, int] = 128,
        compact: bool = False,
        dtype: torch.dtype | None = None,
        max_tokens: int = 8192,
        mrope_position_ids: torch.Tensor | None = None,
        seq_idx: bool = False,
        context_parallel: int = 1,
    ) -> dict[str, Any]:
        """Return what an attention kernel wants of this row, as keyword arguments of its call.

        ==============  ==========================================================================
        backend         call it with `**batch.attention(backend)`
        ==============  ==========================================================================
        "flash"         `flash_attn_varlen_func(q, k, v, ...)` of flash-attn 2, 3 and 4
        "torch_varlen"  `torch.nn.attention.varlen.varlen_attn(q, k, v, ...)`, as installed
        "flex"          `flex_attention(q, k, v, ...)`: a BlockMask, all eight tensors
        "sdpa"          `scaled_dot_product_attention(q, k, v, ...)`: a dense mask
        "transformers"  the forward of a Hugging Face model, beside `input_ids` and `labels`
        "megatron"      `PackedSeqParams(...)` of Megatron Core, format THD
        "flashmask"     `flashmask_attention(q, k, v, ...)`
        "xformers"      `BlockDiagonalCausalMask.from_seqlens(...)`, BlockDiagonalMask for "full"
        ==============  ==========================================================================

        A document sees itself alone. Offsets are int32 on the batch's device, lengths Python
        integers. Nothing waits for the device. An option that the backend doesn't read is an error.

        Args:
            backend: one of the above.
            kind: "causal", "full" or "prefix": causal, but each image sees itself whole; see
                `omniload.masks.intervals`. Kernels without a mask can't do "prefix".
            window: a sliding window of so many tokens, the token itself included.
            max_seqlen: what to tell as the longest document, at least that; a constant spares
                compiled kernels and captured graphs another variant.
            block_size: "flex": tokens of a block.
            compact: "flex": see `omniload.masks.block_mask`.
            dtype: "sdpa": an additive mask of this type, 0 or -inf; None: bool, True where seen.
            max_tokens: "sdpa": refuse rows that are longer, since the mask grows with the square.
            mrope_position_ids: "transformers": int (3, num_tokens), rows t, h and w of M-RoPE.
                They get the text positions as a row before them, int64 (4, 1, num_tokens): from
                that row such models see where samples begin.
            seq_idx: "transformers": also give int32 (1, num_tokens), the document of each token,
                which models with convolutions or recurrent layers need.
            context_parallel: "megatron": ranks among which each document is dealt.

        Raises:
            ConfigError: an unknown backend; an option or kind that it can't do; a row too long for
                a dense mask; documents not padded for the context-parallel ranks.
        """
        if dtype is not None:
            check_dtype(dtype)
        row = AttentionRow(
            cu_seqlens=self.cu_seqlens,
            position_ids=self.position_ids,
            image_spans=self.image_spans,
            num_tokens=self.num_tokens,
            max_seqlen=self.max_seqlen,
            sample_lengths=self.sample_lengths,
            document_multiple=self.document_multiple,
        )
        options = AttentionOptions(
            kind=kind,
            window=window,
            max_seqlen=max_seqlen,
            block_size=block_size,
            compact=compact,
            dtype=dtype,
            max_tokens=max_tokens,
            mrope_position_ids=mrope_position_ids,
            seq_idx=seq_idx,
            context_parallel=context_parallel,
        )
        return attention_arguments(row, backend, options)

    def attention_by_layer(
        self, backend: str, layers: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        """Return `attention` for each type of layer; equal settings share one mask.

        Gemma 3 on images: `batch.attention_by_layer("flex", {"full_attention": {"kind": "prefix"},
        "sliding_attention": {"kind": "prefix", "window": 512}})`.

        Args:
            backend: see `attention`.
            layers: type of layer -> keyword arguments of `attention`.

        Returns:
            Type of layer -> keyword arguments of its kernel's call.

        Raises:
            ConfigError: settings that `attention` doesn't know or refuses.
        """
        check_layers(layers)
        found: dict[str, dict[str, Any]] = {}
        for layer, given in layers.items():
            same = next((name for name in found if same_settings(layers[name], given)), None)
            found[layer] = self.attention(backend, **given) if same is None else {**found[same]}
        return found


@functools.cache  # asked for each batch
def _facts() -> tuple[str, ...]:
    """Name the fields that are neither buffer nor views: plain numbers, for pickling."""
    own = [f.name for f in fields(PackedBatch) if f.init]
    return tuple([name for name in own if name not in ("buffer", "sizes")])


def _restore(buffer: torch.Tensor, sizes: Sequence[int], facts: Sequence[Any]) -> PackedBatch:
    named = dict(zip(_facts(), facts, strict=True))
    return PackedBatch(buffer=buffer, sizes=BatchSizes(*sizes), **named)
