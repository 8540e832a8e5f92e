"""The batch that a training loop receives: one buffer, typed views, and what a model takes.

All tensors of a batch lie in one uint8 buffer, so that it crosses processes, is pinned, and goes
to a device as a single tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omniload._layout import BatchSizes, TensorBuffer
from omniload.errors import ConfigError
from omniload.kernels.reference import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    normalize_table,
    normalize_tiles,
)

__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "PackedBatch"]

#: What the number that a model returns is; see `PackedBatch.loss_scale`.
_LOSSES = ("sum", "mean", "step")
#: What an engine does with the gradients of the ranks.
_RANKS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PackedBatch(TensorBuffer):
    """One micro-batch on one rank: samples laid end to end in one row, without padding.

    Also a mapping of its tensors by name. It is made by `omniload.packing.pack`.

    Args:
        buffer: uint8 (num_bytes,), holds all tensors.
        sizes: where they lie in it.
        max_seqlen: tokens of the longest sample; a Python int, since attention kernels compile
            anew for each value that is a tensor.
        step: optimizer step in the epoch, from 0.
        micro_step: place in the accumulation of this step, from 0.
        is_last_micro_step: the optimizer steps after this batch.
        num_loss_tokens: labels of this batch that give loss.
        num_loss_tokens_step: the same over all ranks and micro-steps of the step.
        is_filler: runs through the model but counts for nothing.
        dp_world_size: data-parallel ranks among which the step is dealt.
        accumulation: micro-steps of a step.

    Raises:
        ConfigError: counts that contradict each other.
    """

    max_seqlen: int
    step: int
    micro_step: int
    is_last_micro_step: bool
    num_loss_tokens: int
    num_loss_tokens_step: int
    is_filler: bool
    dp_world_size: int
    accumulation: int

    def __post_init__(self) -> None:
        if self.dp_world_size < 1 or self.accumulation < 1:
            raise ConfigError(
                "dp_world_size and accumulation must be at least 1, got "
                f"{self.dp_world_size} and {self.accumulation}."
            )
        if self.num_loss_tokens > self.num_loss_tokens_step:
            raise ConfigError(
                "num_loss_tokens_step must count the loss tokens of all ranks and micro-steps: "
                f"expected at least {self.num_loss_tokens} (this batch), got "
                f"{self.num_loss_tokens_step} (step={self.step}, micro_step={self.micro_step}, "
                f"sample_ids={self.sample_ids.tolist()[:10]}). A "
                "transform that changes labels must say so in `lengths`."
            )

    def __repr__(self) -> str:
        filler = ", filler" if self.is_filler else ""
        return (
            f"PackedBatch(step={self.step}.{self.micro_step}{filler}, samples={self.num_samples}, "
            f"tokens={self.num_tokens}, tiles={self.num_tiles}, loss_tokens="
            f"{self.num_loss_tokens}/{self.num_loss_tokens_step}, device='{self.device}')"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        facts = tuple(getattr(self, name) for name in _FACTS)
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
            - cu_seq_lens_q, cu_seq_lens_k: int32 (num_samples + 1,).
            - max_length_q, max_length_k: Python ints.
            - num_items_in_batch: Python int, the loss tokens of the whole step over all ranks and
              micro-steps, at least 1. Hugging Face models divide the sum of their losses by it; it
              is left out for loss="mean", where they must not.

            For loss="mean" and a batch without a loss token (a filler), the last label is set, so
            that the model's mean is a number and not 0 / 0. Its `loss_scale` is 0: it adds nothing.

        Raises:
            ConfigError: an unknown loss, or a row of one token, which has no mean.
        """
        _check_option("loss", loss, _LOSSES)
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
        }
        if loss != "mean":
            inputs["num_items_in_batch"] = max(self.num_loss_tokens_step, 1)
        return inputs

    def loss_scale(
        self,
        loss: str = "sum",
        ranks: str = "mean",
        engine_divides_accumulation: bool = False,
    ) -> float:
        """Return the factor for this batch's loss that makes the step a mean over its loss tokens.

        `(model(**batch.model_inputs(loss=...)).loss * batch.loss_scale(loss=...)).backward()` in
        each micro-step gives, after the engine has combined ranks and micro-steps, the gradient of
        the mean over all loss tokens of the step: every token weighs the same, however the samples
        are dealt. 0.0 for a batch without loss tokens.

        =====================================  ======  ===========================
        engine                                 ranks   engine_divides_accumulation
        =====================================  ======  ===========================
        DistributedDataParallel                mean    False
        FSDP, fully_shard                      mean    False
        fully_shard, gradient divide factor 1  sum     False
        all_reduce(SUM) of your own, one rank  sum     False
        DeepSpeed, ZeRO or pipeline            mean    True
        Accelerate, accumulation given to it   mean    True
        Accelerate, accumulation not given     mean    False
        Lightning, accumulate_grad_batches     mean    True
        Hugging Face Trainer                   multiply by nothing: see below
        =====================================  ======  ===========================

        - DDP and FSDP average gradients over ranks; a plain loop adds them up over micro-steps.
        - DeepSpeed divides by gradient_accumulation_steps in `engine.backward`, unless told
          `scale_wrt_gas=False`, and since 0.18.3 for a plain `loss.backward` too.
        - Accelerate's `backward` divides by the `gradient_accumulation_steps` that `Accelerator`
          was given; with DeepSpeed it leaves that to DeepSpeed.
        - Hugging Face's Trainer counts the labels that are not -100, over all micro-steps and,
          with `average_tokens_across_devices`, over all ranks: as no first label counts here, that
          is `num_loss_tokens_step`. A model that takes `num_items_in_batch` gets this count. Its
          loss is multiplied by the number of ranks, because DDP averages, and not divided by the
          accumulation: that already is the mean over the step.

        Args:
            loss: what the model returns: "sum" of its token losses; their "mean"; or "step", the
                sum divided by `num_items_in_batch`, as Hugging Face models do that are given it.
            ranks: whether the engine takes the "mean" or the "sum" of gradients over ranks.
            engine_divides_accumulation: the engine divides each loss by the number of
                micro-steps.

        Returns:
            The factor.

        Raises:
            ConfigError: an unknown option.
        """
        _check_option("loss", loss, _LOSSES)
        _check_option("ranks", ranks, _RANKS)
        if self.num_loss_tokens == 0:
            return 0.0
        factor = self.dp_world_size if ranks == "mean" else 1
        if engine_divides_accumulation:
            factor *= self.accumulation
        if loss == "step":
            return float(factor)
        if loss == "mean":
            factor *= self.num_loss_tokens
        return factor / self.num_loss_tokens_step


def _check_option(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}.")


_FACTS = (
    "max_seqlen",
    "step",
    "micro_step",
    "is_last_micro_step",
    "num_loss_tokens",
    "num_loss_tokens_step",
    "is_filler",
    "dp_world_size",
    "accumulation",
)


def _restore(buffer: torch.Tensor, sizes: Sequence[int], facts: Sequence[Any]) -> PackedBatch:
    named = dict(zip(_FACTS, facts, strict=True))
    return PackedBatch(buffer=buffer, sizes=BatchSizes(*sizes), **named)
