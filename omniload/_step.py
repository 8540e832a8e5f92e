"""The place of a batch in its optimizer step, and what its loss weighs there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from omniload._layout import TensorBuffer
from omniload.errors import ConfigError
from omniload.loss import token_weights
from omniload.types import SkippedSample

__all__ = ["LOSSES", "RANKS", "StepRow", "check_dtype", "check_option"]

#: What the number that a model returns is; see `StepRow.loss_scale`.
LOSSES = ("sum", "mean", "step")
#: What an engine does with the gradients of the ranks.
RANKS = ("mean", "sum")


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class StepRow(TensorBuffer):
    """A row that knows the totals of its step; the base of `PackedBatch`, which says more."""

    step: int
    micro_step: int
    is_last_micro_step: bool
    num_loss_tokens: int
    num_loss_tokens_step: int
    num_loss_samples_step: int | None = None
    sqrt_loss_tokens_step: float | None = None
    is_filler: bool
    dp_world_size: int
    accumulation: int
    #: samples that could not be used, each replaced by a blank one; on_bad_sample="skip" only
    skipped_samples: tuple[SkippedSample, ...] = ()

    @property
    def skipped(self) -> torch.Tensor:
        """int64 (n,), rows of the index that could not be used; on the CPU.

        Each has its place in the batch, with as many tokens and tiles, no label, and -1 in
        `sample_ids`.
        """
        return torch.tensor([sample.row for sample in self.skipped_samples], dtype=torch.int64)

    @property
    def num_loss_tokens_missing(self) -> int:
        """Loss tokens of this batch that `num_loss_tokens_step` counts and that were skipped.

        See `omniload.loss.exact_factor` for a mean over what is there.
        """
        return sum(sample.num_loss_tokens for sample in self.skipped_samples)

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
        are dealt. 0.0 for a batch without loss tokens. For means over samples, `loss_weights`.
        Samples that were skipped still count in the mean; `omniload.loss.exact_factor` makes up for
        them.

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
        check_option("loss", loss, LOSSES)
        factor = self._undo_engine(ranks, engine_divides_accumulation)
        if self.num_loss_tokens == 0:
            return 0.0
        if loss == "step":
            return float(factor)
        if loss == "mean":
            factor *= self.num_loss_tokens
        return factor / self.num_loss_tokens_step

    def loss_weights(
        self,
        kind: str = "token",
        *,
        ranks: str = "mean",
        engine_divides_accumulation: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return what each token's loss weighs, so that the step is a mean of the wanted kind.

        `(token_loss * weights).sum().backward()` in each micro-step gives, after the engine has
        combined ranks and micro-steps, the gradient of the mean. Nothing else is multiplied or
        divided. The weights stand where the labels stand, and labels are not shifted:

            losses = cross_entropy(logits[0, :-1], batch.labels[1:], reduction="none")
            (losses * batch.loss_weights("sqrt")[1:]).sum().backward()

        Over the samples i of the step with n_i > 0 loss tokens, with the mean loss l_i of each:

        ========  =============================  ==============================================
        kind      a token of sample i weighs     the loss of the step
        ========  =============================  ==============================================
        "token"   1 / sum(n)                     sum(n_i l_i) / sum(n): mean over tokens
        "sample"  1 / (n_i * number of samples)  mean(l_i): mean over samples
        "sqrt"    n_i ** -0.5 / sum(n ** 0.5)    sum(n_i ** 0.5 l_i) / sum(n ** 0.5): between them
        ========  =============================  ==============================================

        times the number of ranks where the engine takes their mean, times the accumulation where it
        divides by it, as in the table of `loss_scale`. "token" is
        `loss_scale(loss="sum")` at each label that gives loss. The totals of the step come from the
        length index, equal on all ranks to the last bit and without communication. The models of
        Hugging Face return only a reduced loss: take their logits.

        Paper: the square root is "square averaging" of InternVL 2.5 (arXiv 2412.05271).

        Args:
            kind: "token", "sample" or "sqrt".
            ranks: whether the engine takes the "mean" or the "sum" of gradients over ranks.
            engine_divides_accumulation: the engine divides each loss by the number of
                micro-steps.
            dtype: of the result; computed in float64.

        Returns:
            `dtype` (num_tokens,) on the batch's device; 0 where the label is -100.

        Raises:
            ConfigError: an unknown option, or a batch that was packed without the totals of its
                step.
        """
        check_dtype(dtype)
        factor = self._undo_engine(ranks, engine_divides_accumulation)
        totals: dict[str, float | None] = {
            "token": self.num_loss_tokens_step,
            "sample": self.num_loss_samples_step,
            "sqrt": self.sqrt_loss_tokens_step,
        }
        total = totals.get(kind)
        # a batch that holds all loss tokens of its step has the totals in itself
        if total is None and kind in totals and self.num_loss_tokens < self.num_loss_tokens_step:
            name = {"sample": "num_loss_samples_step", "sqrt": "sqrt_loss_tokens_step"}[kind]
            raise ConfigError(
                f"loss_weights({kind!r}) needs the totals of the step: expected {name} to be "
                "given to `pack`, got None. A DataLoader gives it; else compute it with "
                "omniload.loss.LossTotals.of(num_loss_tokens of all samples of the step)."
            )
        weights = token_weights(self.labels, self.cu_seqlens, kind=kind, total=total)
        return (weights * factor).to(dtype)

    def _undo_engine(self, ranks: str, divides_accumulation: bool) -> int:
        check_option("ranks", ranks, RANKS)
        factor = self.dp_world_size if ranks == "mean" else 1
        return factor * self.accumulation if divides_accumulation else factor


def check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype must be a floating type of torch, got {dtype!r}.")


def check_option(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, valid))}, got {value!r}.")
