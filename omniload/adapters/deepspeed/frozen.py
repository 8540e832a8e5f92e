"""Frozen stages: what DeepSpeed needs so that a stage without a gradient can take part."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["anchor_output", "detach_floats"]


class _Anchored(torch.autograd.Function):
    """Passes a tensor on, and gives a parameter a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(anchor)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor, torch.Tensor]:
        (anchor,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(anchor)


def anchor_output(output: Any, anchor: torch.Tensor) -> Any:
    """Hang the first float tensor of an output on a parameter, in the graph and without effect.

    Args:
        output: a tensor or a tuple of tensors.
        anchor: a parameter of any shape.
    """
    if not torch.is_grad_enabled():
        return output
    if isinstance(output, torch.Tensor):
        return _Anchored.apply(output, anchor)  # type: ignore[no-untyped-call]
    tensors = list(output)
    for place, tensor in enumerate(tensors):
        if tensor.is_floating_point():
            tensors[place] = _Anchored.apply(tensor, anchor)  # type: ignore[no-untyped-call]
            break
    return tuple(tensors)


def detach_floats(inputs: Any) -> Any:
    """Cut the graph at the inputs of a stage."""
    if isinstance(inputs, torch.Tensor):
        return inputs.detach()
    return tuple(tensor.detach() for tensor in inputs)
