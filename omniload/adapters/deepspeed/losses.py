"""The loss of a pipeline's last stage: a weighted sum, exact over ranks and micro-batches."""

from __future__ import annotations

import torch
from torch.nn import functional

from omniload.errors import ConfigError

__all__ = ["token_loss"]


def token_loss(logits: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of one micro-batch, such that DeepSpeed's mean is that of the whole step.

    DeepSpeed divides the loss by the micro-batches and takes the mean over data-parallel ranks;
    the weights of `PackedBatch.loss_weights` undo both. So the result of `train_batch` is the mean
    over all loss tokens of the step (or over samples, as `pipeline_batches(loss=)` says), however
    they are dealt.

    Args:
        logits: (num_tokens, vocab_size), or (1, num_tokens, vocab_size).
        targets: labels, int64 (num_tokens,), not shifted; and weights, float32 (num_tokens,). This
            is what `pipeline_batches` gives.

    Returns:
        A scalar, float32.

    Raises:
        ConfigError: not one row of logits for each label.
    """
    labels, weights = targets
    rows = logits.flatten(0, -2)
    if len(rows) != len(labels):
        raise ConfigError(
            "the last layer must return logits (num_tokens, vocab_size) of the packed row: "
            f"expected {len(labels)} tokens, got {tuple(logits.shape)}."
        )
    # The output at t predicts token t + 1. The last token of a sample would predict the next
    # sample's first, whose label is -100.
    losses = functional.cross_entropy(rows[:-1].float(), labels[1:], reduction="none")
    return (losses * weights[1:]).sum()
