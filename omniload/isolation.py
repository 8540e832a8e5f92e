"""A trial: change one sample of a packed row, and see that no other sample's output moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from omniload._checks import check_count
from omniload.batch import PackedBatch
from omniload.errors import ConfigError
from omniload.model_check import decoder_of, has_mrope

__all__ = ["IsolationReport", "check_isolation"]


@dataclass(frozen=True, kw_only=True)
class IsolationReport:
    """What `check_isolation` saw.

    Args:
        isolated: no sample moved when another was changed.
        leaks: (changed, moved, largest difference of an output), samples counted in the row.
        noise: largest difference between two runs on the same batch; up to it, none is a leak.
    """

    isolated: bool
    leaks: tuple[tuple[int, int, float], ...]
    noise: float


@torch.no_grad()
def check_isolation(
    model: torch.nn.Module,
    batch: PackedBatch,
    *,
    forward: Callable[[PackedBatch], torch.Tensor] | None = None,
    tolerance: float | None = None,
    max_samples: int = 8,
) -> IsolationReport:
    """Change one sample after another, and see that no other sample's output moves.

    Its text is replaced, and the pixels of its images are inverted.

    The model runs in eval mode, without gradients, once for each sample and twice more. A few
    short samples are enough.

    Args:
        model: a model, on the device of the batch.
        batch: at least two samples.
        forward: batch -> output (num_tokens, ...) or (1, num_tokens, ...). None: the logits of the
            model, called with `batch.model_inputs()`, and with four rows of position_ids where
            `pack_for` says so.
        tolerance: difference that is no leak. None: 8 units in the last place of the largest
            output, because mixtures of experts round by what else is in the row. 0.0 demands equal
            bits. Run in float32 or float64: in bfloat16 a small leak hides behind this.
        max_samples: samples that are changed, from the first on.

    Returns:
        The report.

    Raises:
        ConfigError: fewer than two samples, outputs that are not one a token, or arguments of
            other types.
    """
    _check_arguments(model, batch, forward, tolerance)
    max_samples = check_count("max_samples", max_samples, least=1, of="sample")
    run = forward or _logits_of(model)
    was_training = model.training
    model.eval()
    try:
        before = _per_sample(batch, run(batch))
        again = _per_sample(batch, run(batch))
        noise = max(map(_distance, before, again))
        allowed = max(_rounding(before) if tolerance is None else tolerance, noise)
        leaks = []
        for changed in range(min(batch.num_samples, max_samples)):
            after = _per_sample(batch, run(_with_other_content(batch, changed)))
            for moved, (one, other) in enumerate(zip(before, after, strict=True)):
                distance = _distance(one, other)
                if moved != changed and not distance <= allowed:
                    leaks.append((changed, moved, distance))
    finally:
        model.train(was_training)
    return IsolationReport(isolated=not leaks, leaks=tuple(leaks), noise=noise)


def _check_arguments(model: object, batch: object, forward: object, tolerance: Any) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    if not isinstance(batch, PackedBatch):
        raise ConfigError(
            f"batch must be a PackedBatch, got {type(batch).__name__}. omniload.packing.pack makes "
            "one of samples."
        )
    if forward is not None and not callable(forward):
        raise ConfigError(f"forward must be a function of the batch, got {forward!r}.")
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 <= tolerance < math.inf):
        raise ConfigError(f"tolerance must be a number of at least 0, or None, got {tolerance!r}.")
    if batch.num_samples < 2:
        raise ConfigError(f"the batch must hold at least 2 samples, got {batch.num_samples}.")


def _logits_of(model: torch.nn.Module) -> Callable[[PackedBatch], torch.Tensor]:
    rows = 4 if has_mrope(decoder_of(model)) else 1
    floating = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
    dtype = next(floating, torch.float32)

    def run(batch: PackedBatch) -> torch.Tensor:
        inputs = batch.model_inputs(dtype=dtype)
        if rows == 4:
            inputs["position_ids"] = inputs["position_ids"].expand(4, 1, -1)
        unused = ("labels", "num_items_in_batch")
        given = {k: v for k, v in inputs.items() if v is not None and k not in unused}
        logits = model(**given).logits
        return logits if isinstance(logits, torch.Tensor) else torch.as_tensor(logits)

    return run


def _per_sample(batch: PackedBatch, output: torch.Tensor) -> list[torch.Tensor]:
    if not isinstance(output, torch.Tensor):
        raise ConfigError(
            f"forward must give a tensor, got {type(output).__name__}. Return model(...).logits."
        )
    if output.shape[:2] == (1, batch.num_tokens):
        output = output[0]
    if not output.is_floating_point():
        output = output.double()
    return batch.split(output)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    # NaN is a difference: it must not hide behind a comparison
    difference = torch.where(one == other, 0.0, one.double() - other.double())
    return float(difference.abs().max())


def _rounding(outputs: list[torch.Tensor]) -> float:
    # some models write the least number, or minus infinity, where a token can't be an image's
    finite = [torch.where(o.abs() < torch.finfo(o.dtype).max / 2, o, 0) for o in outputs]
    largest = max(float(output.abs().max()) for output in finite)
    return 8 * torch.finfo(outputs[0].dtype).eps * largest


def _with_other_content(batch: PackedBatch, sample: int) -> PackedBatch:
    """Replace each text token of a sample by another one of the row, and invert its images."""
    changed = replace(batch, buffer=batch.buffer.clone())
    is_text = torch.ones(batch.num_tokens, dtype=torch.bool, device=batch.device)
    for start, end in batch.image_spans.tolist():
        is_text[start:end] = False
    known = torch.unique(batch.input_ids[is_text])
    own = torch.zeros_like(is_text)
    start = int(batch.cu_seqlens[sample])
    own[start : start + batch.sample_lengths[sample]] = True
    own &= is_text
    if len(known) < 2 or not own.any():
        raise ConfigError(
            f"sample {sample} of the batch can't be changed: expected text tokens, and two "
            "different ones in the row. Use samples with some text."
        )
    places = torch.searchsorted(known, changed.input_ids[own])
    changed.input_ids[own] = known[(places + 1) % len(known)]
    first = 0
    for span, num_tiles in zip(
        batch.image_spans.tolist(), batch.image_num_tiles.tolist(), strict=True
    ):
        if start <= span[0] < start + batch.sample_lengths[sample]:
            tiles = changed.tiles[first : first + num_tiles]
            tiles.copy_(255 - tiles)
        first += num_tiles
    return changed
