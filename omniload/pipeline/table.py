"""The cost table of a model: which layers a pipeline has, and what each of them costs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline.correct import corrected_kinds
from omniload.pipeline.kinds import LayerKind, Linear, ParamBytes, Selective, Shapes
from omniload.pipeline.table_checks import check_layers, check_machine
from omniload.pipeline.table_json import table_from_dict, table_to_dict

__all__ = ["CostTable", "LayerKind", "Linear", "ParamBytes", "Recompute", "Selective", "Shapes"]

#: What is recomputed of a layer: 0 nothing, 1 all of it, or the name of a selective option.
Recompute = int | str

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """What every layer of a pipeline costs on one GPU, and what the machine between them does.

    All accessors know what is frozen: a layer that neither is nor follows a trainable one has no
    backward pass, keeps no activations and is never recomputed; a frozen layer behind a trainable
    one passes gradients on, but forms none of weights.

    Args:
        kinds: the kinds of layers; figures after tensor parallelism.
        layers: name of the kind of each layer, in the order of the pipeline.
        tied: groups of layer numbers that share their weights; each stage that has one of a group
            holds a copy.
        pinned: stage that a layer must be on, by layer number.
        tensor_parallel: GPUs that share a layer; what the figures were divided by.
        data_parallel: copies of the pipeline.
        zero_stage: 1: optimizer states are shared out over data-parallel ranks; 0: they are not.
        param_bytes: bytes that a parameter takes.
        reserve_bytes: memory of a GPU that no figure here counts: the CUDA context, workspaces
            of libraries, buffers of NCCL, fragments of the allocator.
        p2p_bytes_per_s: bytes a second between neighbouring stages, of one GPU.
        p2p_latency_s: time of a transfer whatever its size.
        source: "analytic", "measured" or "corrected" (analytic, scaled by measured times).
        name: name of the model, for messages.

    Raises:
        ConfigError: a layer of an unknown kind, groups or pins that name no layer, numbers that
            can't be.
    """

    kinds: tuple[LayerKind, ...]
    layers: tuple[str, ...]
    tied: tuple[tuple[int, ...], ...] = ()
    pinned: Mapping[int, int] = field(default_factory=dict)
    tensor_parallel: int = 1
    data_parallel: int = 1
    zero_stage: int = 1
    param_bytes: ParamBytes = field(default_factory=ParamBytes)
    reserve_bytes: float = 6e9
    p2p_bytes_per_s: float = 20e9
    p2p_latency_s: float = 0.0
    source: str = "analytic"
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kinds", tuple(self.kinds))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "tied", tuple(tuple(group) for group in self.tied))
        object.__setattr__(self, "pinned", dict(self.pinned))
        check_layers(self)
        check_machine(self)

    @property
    def num_layers(self) -> int:
        """Layers of the pipeline."""
        return len(self.layers)

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer, by number."""
        return self._kind_of_layer[layer]

    @cached_property
    def kind_index(self) -> npt.NDArray[np.int64]:
        """int64 (num_layers,): place in `kinds` of the kind of each layer."""
        places = {kind.name: place for place, kind in enumerate(self.kinds)}
        return np.array([places[name] for name in self.layers], np.int64)

    @cached_property
    def trainable(self) -> BoolArray:
        """Whether each layer has weights that get gradients, bool (num_layers,)."""
        return np.array([kind.trainable and kind.params > 0 for kind in self._kind_of_layer])

    @cached_property
    def has_backward(self) -> BoolArray:
        """Whether each layer or one before it is trainable, bool (num_layers,)."""
        return np.logical_or.accumulate(self.trainable)

    @cached_property
    def params(self) -> npt.NDArray[np.int64]:
        """int64 (num_layers,): parameters of one GPU."""
        return np.array([kind.params for kind in self._kind_of_layer], np.int64)

    @cached_property
    def static_bytes(self) -> Float64Array:
        """float64 (num_layers,): weights, gradients and optimizer states of each layer."""
        return np.array(
            [
                kind.params
                * self.param_bytes.per_param(
                    trainable=kind.trainable,
                    zero_stage=self.zero_stage,
                    data_parallel=self.data_parallel,
                )
                for kind in self._kind_of_layer
            ]
        )

    def forward(self, shapes: Shapes) -> Float64Array:
        """Seconds of the forward pass, float64 (num_layers, num_micro_batches)."""
        return self._rows(shapes, lambda layer, kind: kind.forward_s)

    def backward(self, shapes: Shapes) -> Float64Array:
        """Seconds of the backward pass without recomputation, (num_layers, num_micro_batches)."""

        def row(layer: int, kind: LayerKind) -> Linear:
            if not self.has_backward[layer]:
                return Linear()
            if kind.trainable:
                # the first layer with a backward pass sends no gradient on; its cost is not known
                return kind.backward_s
            if kind.backward_frozen_s is None:
                return kind.backward_s.scaled(0.5)
            return kind.backward_frozen_s

        return self._rows(shapes, row)

    def recompute(
        self, shapes: Shapes, choice: Recompute | Sequence[Recompute] = 1
    ) -> Float64Array:
        """Seconds that recomputation adds to the backward pass, (num_layers, num_micro_batches).

        Args:
            shapes: the micro-batches.
            choice: one for each layer, or one for all layers that offer it.

        Raises:
            ConfigError: a layer doesn't offer its choice.
        """
        chosen = self.choices(choice)

        def row(layer: int, kind: LayerKind) -> Linear:
            if chosen[layer] == 0 or not self.has_backward[layer]:
                return Linear()
            option = _option(kind, chosen[layer])
            return kind.recompute_s if option is None else option.recompute_s

        return self._rows(shapes, row)

    def kept(self, shapes: Shapes, choice: Recompute | Sequence[Recompute] = 0) -> Float64Array:
        """Bytes of activations that micro-batches in flight keep, (num_layers, num_micro_batches).

        Args:
            shapes: the micro-batches.
            choice: what is recomputed: one for each layer, or one for all layers that offer it.

        Raises:
            ConfigError: a layer doesn't offer its choice.
        """
        chosen = self.choices(choice)

        def whole(layer: int, kind: LayerKind) -> Linear:
            if not self.has_backward[layer]:
                return Linear()
            if kind.trainable or kind.kept_frozen_bytes is None:
                return kind.kept_bytes
            return kind.kept_frozen_bytes

        def row(layer: int, kind: LayerKind) -> Linear:
            option = _option(kind, chosen[layer])
            if option is not None:
                return option.kept_bytes
            return kind.kept_bytes_recompute if chosen[layer] == 1 else whole(layer, kind)

        # recomputation never keeps more: a frozen layer may keep less than an option of its kind
        return np.minimum(self._rows(shapes, row), self._rows(shapes, whole))

    def output(self, shapes: Shapes) -> Float64Array:
        """Bytes sent forward when a stage ends after the layer, (num_layers, num_micro_batches)."""
        return self._rows(shapes, lambda layer, kind: kind.output_bytes)

    def gradient(self, shapes: Shapes) -> Float64Array:
        """Bytes sent back when a stage ends after the layer, (num_layers, num_micro_batches)."""
        return self._rows(
            shapes,
            lambda layer, kind: kind.output_bytes if self.has_backward[layer] else Linear(),
        )

    def choices(self, choice: Recompute | Sequence[Recompute]) -> tuple[Recompute, ...]:
        """Spread a choice over the layers, and check it.

        Args:
            choice: one for each layer, or one for all layers that offer it (0 for the others).

        Raises:
            ConfigError: not one a layer, or a layer doesn't offer its choice.
        """
        if isinstance(choice, (int, str)):
            return tuple(choice if choice in kind.choices else 0 for kind in self._kind_of_layer)
        if len(choice) != self.num_layers:
            raise ConfigError(
                f"recompute must have one entry a layer: expected {self.num_layers}, got "
                f"{len(choice)}."
            )
        for layer, (each, kind) in enumerate(zip(choice, self._kind_of_layer, strict=True)):
            if each not in kind.choices:
                raise ConfigError(
                    f"recompute of layer {layer} ({kind.name}) must be one of "
                    f"{list(kind.choices)}, got {each!r}."
                )
        return tuple(choice)

    def corrected_by(
        self, measured: CostTable, shapes: Shapes, *, names: Mapping[str, str] | None = None
    ) -> CostTable:
        """Scale times and bytes of each kind so that they are the measured ones.

        A measured table has the layers that fit one GPU; this one has all of the model, tensor
        parallelism, and ways to recompute a part of a layer.

        Args:
            measured: what `omniload.pipeline.profile_layers` returned.
            shapes: micro-batches as they will come.
            names: name of the measured kind of each kind of this table; None: the one of its name,
                or else the only one of its part. Others get the ratio of all times measured.

        Raises:
            ConfigError: no kind was measured, or under another tensor parallelism.
        """
        if measured.tensor_parallel != self.tensor_parallel:
            raise ConfigError(
                "tables must be of one tensor parallelism: expected "
                f"{self.tensor_parallel}, got {measured.tensor_parallel}. Set that of the measured "
                "one by dataclasses.replace if its layers were measured in that way."
            )
        kinds = corrected_kinds(self.kinds, measured.kinds, shapes, names=names)
        return replace(self, kinds=kinds, source="corrected")

    def to_json(self) -> str:
        """Write the table as a JSON object."""
        return json.dumps(table_to_dict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """Read a table that `to_json` wrote.

        Raises:
            ConfigError: not such a table, or one of another version.
        """
        return cls(**table_from_dict(text))

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of all figures: plans name the table that they were made from."""
        plain = json.dumps(table_to_dict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()[:16]

    @cached_property
    def _kind_of_layer(self) -> tuple[LayerKind, ...]:
        by_name = {kind.name: kind for kind in self.kinds}
        return tuple(by_name[name] for name in self.layers)

    def _rows(self, shapes: Shapes, row: Callable[[int, LayerKind], Linear]) -> Float64Array:
        linears = [row(layer, kind) for layer, kind in enumerate(self._kind_of_layer)]
        table = np.array([[each.tile, each.token, each.token_pair, each.fixed] for each in linears])
        tile, token, token_pair, fixed = (column[:, np.newaxis] for column in table.T)
        # product by product, each one rounding: the same on every machine
        rows: Float64Array = (
            tile * shapes.num_tiles + token * shapes.num_tokens + token_pair * shapes.sum_squares
        )
        return np.asarray(rows + fixed)


def _option(kind: LayerKind, choice: Recompute) -> Selective | None:
    return next((option for option in kind.selective if option.name == choice), None)
