"""Loss normalisation: what every token of a step weighs, whichever rank it is dealt to."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from omniload.errors import ConfigError
from omniload.types import IGNORE_INDEX

__all__ = ["LOSS_KINDS", "LossTotals", "exact_factor", "token_weights"]

#: What is averaged over: tokens, samples, or samples weighted with the root of their loss tokens.
LOSS_KINDS = ("token", "sample", "sqrt")


class LossTotals(NamedTuple):
    """Denominators of a whole step, over all ranks and micro-steps.

    Args:
        num_tokens: tokens that give loss.
        num_samples: samples with such a token.
        sqrt_tokens: sum over the samples of the square root of their loss tokens.
    """

    num_tokens: int
    num_samples: int
    sqrt_tokens: float

    @classmethod
    def of(cls, num_loss_tokens: npt.ArrayLike) -> Self:
        """Add up samples; to the last bit the same in any order and on any machine.

        Args:
            num_loss_tokens: integers (num_samples,), for example a column of the index at the rows
                of a step.
        """
        counts = np.asarray(num_loss_tokens, dtype=np.int64)
        # roots are rounded correctly by IEEE 754, and so is the sum by fsum
        return cls(
            num_tokens=int(counts.sum()),
            num_samples=int(np.count_nonzero(counts)),
            sqrt_tokens=math.fsum(np.sqrt(counts.astype(np.float64)).tolist()),
        )


def token_weights(
    labels: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    kind: str,
    total: float | None,
) -> torch.Tensor:
    """Weigh the tokens of a row so that their weighted losses add up to their part of a mean.

    Nothing is copied to the host: it may run on a device between two kernels.

    Args:
        labels: int64 (num_tokens,).
        cu_seqlens: int32 (num_documents + 1,).
        kind: "token", "sample" or "sqrt"; see `PackedBatch.loss_weights`.
        total: the denominator of the step; None: the row is the whole step.

    Returns:
        float64 (num_tokens,), 0 where the label is -100.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind not in LOSS_KINDS:
        raise ConfigError(f"kind must be one of {', '.join(map(repr, LOSS_KINDS))}, got {kind!r}.")
    gives_loss = labels != IGNORE_INDEX
    if kind == "token":
        parts = gives_loss.double()
        of_row = parts.sum()
    else:
        running = torch.zeros(len(labels) + 1, dtype=torch.int64, device=labels.device)
        torch.cumsum(gives_loss, 0, out=running[1:])
        bounds = cu_seqlens.long()
        counts = running[bounds].diff()
        power = -1.0 if kind == "sample" else -0.5
        # a document without loss has no weight: its tokens are all masked anyway
        each = counts.clamp(min=1).double().pow(power)
        parts = each.repeat_interleave(bounds.diff(), output_size=len(labels)) * gives_loss
        of_row = ((counts > 0) if kind == "sample" else counts.double().sqrt()).sum()
    # a row without any loss token: 0 / 1, and not 0 / 0
    divisor = of_row.clamp(min=1) if total is None else max(total, 1)
    return parts / divisor


def exact_factor(batches: Iterable[Any], *, group: Any = None) -> float:
    """Return what to multiply the gradients of a step with where samples were skipped.

    The denominator of a step is planned, so that no rank has to ask another. A sample that
    `on_bad_sample="skip"` leaves out still counts in it, so the gradient is a little too small: by
    the share of loss tokens that is missing. This adds up one number over the ranks, and gives

        planned / (planned - missing)

    for a mean over tokens, as `loss_scale` and `loss_weights("token")` make it. Call it on all
    ranks before each optimizer step, whether samples were skipped here or not:

        factor = omniload.loss.exact_factor(batches_of_this_step)
        if factor != 1:
            for parameter in model.parameters(): parameter.grad.mul_(factor)

    Args:
        batches: the micro-batches of one optimizer step on this rank, all of them.
        group: process group of the data-parallel ranks; None: all processes, or none.

    Returns:
        The factor; 1.0 where nothing is missing, or everything.

    Raises:
        ConfigError: no batch, or batches of several steps.
    """
    listed = list(batches)
    steps = {(batch.step, batch.num_loss_tokens_step) for batch in listed}
    if len(steps) != 1:
        raise ConfigError(
            "exact_factor needs the micro-batches of one step: got "
            f"{len(listed)} batches of {len(steps)} steps."
        )
    planned = steps.pop()[1]
    missing = sum(batch.num_loss_tokens_missing for batch in listed)
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        on_gpu = "nccl" in distributed.get_backend(group)
        number = torch.tensor([missing], device="cuda" if on_gpu else "cpu")
        distributed.all_reduce(number, group=group)
        missing = int(number.item())
    return planned / (planned - missing) if 0 < missing < planned else 1.0
