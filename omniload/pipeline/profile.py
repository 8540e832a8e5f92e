"""Measures layers: their times, and the bytes that autograd keeps for the backward pass.

The only module of the package that imports torch.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from omniload.errors import ConfigError
from omniload.pipeline.kinds import LayerKind, ParamBytes, Shapes
from omniload.pipeline.profile_fit import LayerSample, design_of, fit_samples
from omniload.pipeline.profile_kinds import check_lists, kind_names, representatives, tied_layers
from omniload.pipeline.table import CostTable

__all__ = ["ProfileBatch", "kept_storages", "profile_layers"]

Layer = Callable[[Any], Any]
Storages = dict[int, int]  # bytes, by address

_NESTED = (tuple, list, dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfileBatch:
    """One micro-batch to measure layers with.

    Args:
        inputs: what the first layer takes: a tensor, or a tuple with tensors.
        num_tiles: image tiles in it.
        num_tokens: tokens in it.
        sum_squares: sum of the squared sample lengths.
        labels: what the loss takes besides the output of the last layer; None: no loss.
    """

    inputs: Any
    num_tiles: float
    num_tokens: float
    sum_squares: float
    labels: Any = None

    @classmethod
    def from_lengths(
        cls, inputs: Any, *, lengths: Sequence[int], num_tiles: int, labels: Any = None
    ) -> ProfileBatch:
        """Make one of the lengths of its samples, for example the differences of `cu_seqlens`.

        Args:
            inputs: what the first layer takes.
            lengths: tokens of each sample.
            num_tiles: image tiles in it.
            labels: what the loss takes besides the output of the last layer.
        """
        tokens = np.asarray(lengths, np.float64)
        return cls(
            inputs=inputs,
            num_tiles=num_tiles,
            num_tokens=float(tokens.sum()),
            sum_squares=float(np.square(tokens).sum()),
            labels=labels,
        )


def profile_layers(
    layers: Sequence[Layer],
    batches: Sequence[ProfileBatch],
    *,
    parts: Sequence[str] | None = None,
    kinds: Sequence[str] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    device: torch.device | str | None = None,
    repeats: int = 5,
    warmup: int = 2,
    name: str = "",
) -> CostTable:
    """Measure what each kind of layer takes, and fit costs to it.

    Every batch runs through all layers, one after the other. Layers of one class whose parameters
    have the same shapes, types and gradients are of one kind; one of each kind is timed, the second
    where there are several. A list with two blocks of each part is enough to measure a large model:
    put the kinds of the table into the `layers` of a longer one with `dataclasses.replace`.

    Kept bytes are the storages that autograd saves, each counted once, without parameters, buffers,
    and what a layer before has saved and passed on. Tensors that a custom autograd function keeps
    outside `save_for_backward` are not seen. Nor is what is formed and freed within a pass, the
    caching allocator's rounding and fragments, workspaces of libraries, and buffers of
    collectives: the table's `reserve_bytes` stands for them.

    Args:
        layers: modules or functions, each of which takes what the one before returns: the layers of
            a DeepSpeed `PipelineModule`, built. Their mode and device are yours to set.
        batches: micro-batches whose tiles, tokens and lengths vary independently; 4 at least.
        parts: part of each layer, see `LayerKind.part`; None: "language" for all.
        kinds: name of the kind of each layer; None: by class and parameters.
        loss_fn: called with the last output and the labels; its cost is counted to the last layer,
            which then isn't recomputed.
        device: where to measure; None: where the first parameter is.
        repeats: measurements of each pass, of which the shortest counts.
        warmup: passes before them.
        name: name of the model, for messages.

    Returns:
        A table of source "measured", for one GPU. Set the machine's fields and data parallelism
        with `dataclasses.replace`; `CostTable.corrected_by` takes it to correct an analytic table.

    Raises:
        ConfigError: no layers, names that don't fit them, or batches that can't tell costs apart.
    """
    used_parts = ["language"] * len(layers) if parts is None else list(parts)
    check_lists(layers, parts=used_parts, kinds=kinds, has_loss=loss_fn is not None)
    if repeats < 1 or warmup < 0:
        raise ConfigError(f"repeats must be at least 1, warmup 0: got {repeats} and {warmup}.")
    design = design_of(_shapes_of(batches))
    names = list(kinds or kind_names(layers, used_parts, has_loss=loss_fn is not None))
    weights = _weights(layers)
    target = device or (weights[0].device if weights else "cpu")
    runs = _Runs(device=torch.device(target), repeats=repeats, warmup=warmup, loss_fn=loss_fn)
    found: dict[int, list[LayerSample]] = {layer: [] for layer in representatives(names)}
    grads = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    try:
        for batch in batches:
            for layer, sample in runs.through(layers, batch, set(found)):
                found[layer].append(sample)
    finally:
        for weight, grad in zip(weights, grads, strict=True):
            weight.grad = grad
    measured = tuple(
        _layer_kind(
            layers[layer],
            name=names[layer],
            part=used_parts[layer],
            samples=samples,
            design=design,
            has_loss=loss_fn is not None and layer == len(layers) - 1,
        )
        for layer, samples in found.items()
    )
    return CostTable(
        kinds=measured,
        layers=tuple(names),
        tied=tied_layers(layers),
        param_bytes=_param_bytes(layers),
        source="measured",
        name=name,
    )


def _shapes_of(batches: Sequence[ProfileBatch]) -> Shapes:
    columns = ("num_tiles", "num_tokens", "sum_squares")
    tiles, tokens, squares = (
        np.array([getattr(batch, column) for batch in batches], np.float64) for column in columns
    )
    return Shapes(num_tiles=tiles, num_tokens=tokens, sum_squares=squares)


def kept_storages(run: Callable[[], Any]) -> tuple[Any, Storages]:
    """Run a forward pass and list the storages that autograd saves in it.

    Args:
        run: the forward pass.

    Returns:
        What it returned, and bytes of each storage by its address. They are valid as long as the
        returned tensors live.
    """
    saved: Storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(_storages([tensor]))
        return tensor.detach()  # the tensor itself may be an output: its graph would keep itself

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    return result, saved


@dataclass(frozen=True, kw_only=True)
class _Runs:
    """How passes are measured."""

    device: torch.device
    repeats: int
    warmup: int
    loss_fn: Callable[[Any, Any], Any] | None

    def through(
        self, layers: Sequence[Layer], batch: ProfileBatch, chosen: set[int]
    ) -> Iterator[tuple[int, LayerSample]]:
        """Run a batch through all layers, and measure the chosen ones."""
        inputs = _map_tensors(lambda tensor: tensor.to(self.device), batch.inputs)
        labels = _map_tensors(lambda tensor: tensor.to(self.device), batch.labels)
        held: Storages = {}  # saved by a layer before, and passed on by all since
        came: Storages = {}  # inputs of the layer before that it passed on
        for layer, call in enumerate(layers):
            is_last = layer == len(layers) - 1
            step = _with_loss(call, self.loss_fn, labels) if is_last and self.loss_fn else call
            leaves = _map_tensors(functools.partial(_leaf, wants_grad=layer > 0), inputs)
            given = _storages(_tensors(leaves))
            output, saved = kept_storages(functools.partial(step, leaves))
            owned = _storages(_weights([call]))
            fresh = {key: size for key, size in saved.items() if key not in owned}
            kept = sum(size for key, size in fresh.items() if key not in held)
            kept_recompute = sum(size for key, size in given.items() if key not in came)
            inputs = _map_tensors(torch.Tensor.detach, output)
            del output  # and with it what it keeps
            passed = _storages(_tensors(inputs))
            held = {key: size for key, size in {**held, **fresh}.items() if key in passed}
            came = {key: size for key, size in given.items() if key in passed}
            if layer in chosen:
                sent = 0 if step is not call else sum(each.nbytes for each in _tensors(inputs))
                forward, backward, recompute = self._times(call, step, leaves)
                yield (
                    layer,
                    LayerSample(
                        forward_s=forward,
                        backward_s=backward,
                        recompute_s=recompute,
                        kept_bytes=kept,
                        kept_bytes_recompute=kept_recompute,
                        output_bytes=sent,
                    ),
                )

    def _times(self, call: Layer, step: Layer, leaves: Any) -> tuple[float, float, float]:
        """Time forward and backward pass, and what recomputation adds to the latter, seconds."""
        weights = _weights([call])

        def again(inputs: Any) -> Any:
            return checkpoint(step, inputs, use_reentrant=False)

        # in turn, so that what slows the machine for a while slows both
        passes = [
            (self._pass(step, leaves, weights), self._pass(again, leaves, weights))
            for _ in range(self.warmup + self.repeats)
        ]
        used = passes[self.warmup :]
        forward = min(plain[0] for plain, _ in used)
        backward = min(plain[1] for plain, _ in used)
        longer = min(recomputed[1] for _, recomputed in used)
        return forward, backward, max(longer - backward, 0.0)

    def _pass(self, run: Layer, leaves: Any, weights: list[torch.Tensor]) -> tuple[float, float]:
        ticks = [self._now()]
        result = run(leaves)
        ticks.append(self._now())
        outputs = [tensor for tensor in _tensors(result) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in outputs]
        ticks.append(self._now())
        if outputs:
            torch.autograd.backward(outputs, gradients)
        ticks.append(self._now())
        for tensor in [*_tensors(leaves), *weights]:
            tensor.grad = None
        forward, _, backward = self._between(ticks)
        return forward, backward if outputs else 0.0

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, ticks: list[Any]) -> list[float]:
        if self.device.type != "cuda":
            return [late - early for early, late in itertools.pairwise(ticks)]
        torch.cuda.synchronize(self.device)
        return [early.elapsed_time(late) / 1e3 for early, late in itertools.pairwise(ticks)]


def _with_loss(layer: Layer, loss_fn: Callable[[Any, Any], Any], labels: Any) -> Layer:
    return lambda inputs: loss_fn(layer(inputs), labels)


def _layer_kind(
    layer: Layer,
    *,
    name: str,
    part: str,
    samples: Sequence[LayerSample],
    design: Any,
    has_loss: bool,
) -> LayerKind:
    figures = fit_samples(design, samples)
    weights = list(layer.parameters()) if isinstance(layer, torch.nn.Module) else []
    trainable = any(weight.requires_grad for weight in weights)
    saves = any(each.kept_bytes_recompute < each.kept_bytes for each in samples)
    return LayerKind(
        name=name,
        part=part,
        params=sum(weight.numel() for weight in weights),
        trainable=trainable,
        recomputable=saves and not has_loss,
        # of a frozen layer just this was measured
        backward_frozen_s=None if trainable else figures["backward_s"],
        kept_frozen_bytes=None if trainable else figures["kept_bytes"],
        **figures,
    )


def _param_bytes(layers: Sequence[Layer]) -> ParamBytes:
    """Guess from the first weight: fp32 is trained without a second copy."""
    first = next((each for each in _weights(layers) if each.is_floating_point()), None)
    if first is None or first.element_size() < 4:
        return ParamBytes()
    return ParamBytes(weight=4, gradient=4, optimizer=8)


def _leaf(tensor: torch.Tensor, *, wants_grad: bool) -> torch.Tensor:
    return tensor.detach().requires_grad_(wants_grad and tensor.is_floating_point())


def _weights(layers: Sequence[Layer]) -> list[torch.Tensor]:
    modules = [layer for layer in layers if isinstance(layer, torch.nn.Module)]
    return [each for module in modules for each in (*module.parameters(), *module.buffers())]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for item in items for t in _tensors(item)] if isinstance(value, _NESTED) else []


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(change, item) for key, item in value.items()}
    if isinstance(value, _NESTED):
        return type(value)(_map_tensors(change, item) for item in value)
    return value


def _storages(tensors: Sequence[torch.Tensor]) -> Storages:
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}
