"""What any run of layers would cost as a stage: times and memory in whole numbers.

Everything is rounded once, to nanoseconds and bytes, and then only added and compared, so that a
plan is the same on every machine and a search can be held against brute force.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline._recompute_search import solve_stage
from omniload.pipeline.kinds import Shapes
from omniload.pipeline.layer_bytes import running, static_bytes, working_bytes
from omniload.pipeline.table import CostTable, Recompute
from omniload.pipeline.times import nanoseconds
from omniload.pipeline.trades import Trades, list_trades

__all__ = ["NO_LIMIT", "StageCosts", "memory_limits", "transfer_ns", "worst_shape"]

Int64Array = npt.NDArray[np.int64]

#: Bytes that no stage reaches.
NO_LIMIT = 2**61


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCosts:
    """Costs of all stages that a table allows, for one number of stages and micro-batches.

    Args:
        table: what layers cost.
        shapes: micro-batches as they come; times are means over them.
        worst: one micro-batch that none passes; memory is counted for that.
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of a step.
        selective: use choices that recompute a part of a layer, where the table has them.
    """

    table: CostTable
    shapes: Shapes
    worst: Shapes
    num_stages: int
    num_micro_batches: int
    selective: bool = True

    def __post_init__(self) -> None:
        if len(self.worst) != 1:
            raise ConfigError(f"worst must be one micro-batch, got {len(self.worst)}.")
        if len(self.shapes) == 0:
            raise ConfigError("shapes must have at least one micro-batch.")
        _check_count("num_micro_batches", self.num_micro_batches)
        _check_count("num_stages", self.num_stages)
        if self.num_stages > self.table.num_layers:
            raise ConfigError(
                "a pipeline needs a layer for each stage: got "
                f"{self.num_stages} stages for {self.table.num_layers} layers. Use "
                f"{self.table.num_layers} stages or fewer."
            )

    @cached_property
    def in_flight(self) -> Int64Array:
        """int64 (num_stages,): micro-batches whose activations a stage keeps at once, at most."""
        return np.minimum(np.arange(self.num_stages, 0, -1), self.num_micro_batches)

    @cached_property
    def work_ns(self) -> Int64Array:
        """int64 (num_layers + 1,): mean forward and backward time of the layers before each."""
        layers = nanoseconds(self.table.forward(self.shapes).mean(axis=1))
        layers += nanoseconds(self.table.backward(self.shapes).mean(axis=1))
        return running(layers)

    @cached_property
    def cut_ns(self) -> Int64Array:
        """int64 (num_layers + 1,): what a cut there costs each of its sides; 0 at the ends."""
        both = np.zeros(self.table.num_layers + 1, np.int64)
        both[1:-1] = np.rint(2 * transfer_ns(self.table, self.shapes).mean(axis=1))[:-1]
        return both

    @cached_property
    def static_bytes(self) -> Int64Array:
        """int64 (num_layers + 1, num_layers + 1): what the stage [low, high) always holds."""
        return static_bytes(self.table)

    @cached_property
    def classes(self) -> tuple[tuple[Recompute, ...], ...]:
        """The choices of each class of layers that have one; classes with few layers first."""
        return tuple(choices for _, choices in self._class_list)

    @cached_property
    def class_of(self) -> Int64Array:
        """int64 (num_layers,): the class of each layer; -1: nothing to choose."""
        number = {kind: place for place, (kind, _) in enumerate(self._class_list)}
        kinds = self.table.kind_index
        return np.array(
            [
                number.get(int(kind), -1) if passes else -1
                for kind, passes in zip(kinds, self.table.has_backward, strict=True)
            ],
            np.int64,
        )

    @cached_property
    def class_ends(self) -> Int64Array:
        """int64 (num_classes, num_layers + 1): layers of each class before each layer."""
        found = [running(self.class_of == place) for place in range(len(self.classes))]
        shape = (len(found), self.table.num_layers + 1)
        return np.array(found, np.int64).reshape(shape)

    @cached_property
    def fixed_kept(self) -> Int64Array:
        """int64 (num_layers + 1,): bytes kept a micro-batch by layers without a choice, before."""
        kept = np.where(self.class_of < 0, self.kept_bytes(0), 0)
        return running(kept)

    def kept_bytes(self, choice: Recompute | Sequence[Recompute]) -> Int64Array:
        """int64 (num_layers,): bytes that the worst micro-batch keeps of each layer."""
        return np.ceil(self.table.kept(self.worst, choice)[:, 0]).astype(np.int64)

    def recompute_ns(self, choice: Recompute | Sequence[Recompute]) -> Int64Array:
        """int64 (num_layers,): mean time that recomputation adds to each layer."""
        return nanoseconds(self.table.recompute(self.shapes, choice).mean(axis=1))

    def working_bytes(self, choice: Recompute | Sequence[Recompute]) -> Int64Array:
        """int64 (num_layers,): bytes formed anew while the backward pass of a layer runs."""
        return np.ceil(working_bytes(self.table, self.worst, choice)[:, 0]).astype(np.int64)

    @cached_property
    def trades(self) -> Trades:
        """The best trades of kept bytes for time."""
        options = []
        for place, choices in enumerate(self.classes):
            layer = int(np.flatnonzero(self.class_of == place)[0])
            columns = (self.kept_bytes, self.recompute_ns, self.working_bytes)
            options.append(np.array([[c(choice)[layer] for c in columns] for choice in choices]))
        return list_trades(options, self.class_ends[:, -1])

    @cached_property
    def least_memory(self) -> Int64Array:
        """int64 (num_stages, num_layers + 1, num_layers + 1): bytes a stage needs at the least."""
        trades, layers = self.trades, self.table.num_layers + 1
        fixed = self.fixed_kept[np.newaxis, :] - self.fixed_kept[:, np.newaxis]
        found = np.full((self.num_stages, layers, layers), NO_LIMIT, np.int64)
        for allowance, working in enumerate(trades.working):
            kept = fixed
            for place, ends in enumerate(self.class_ends):
                number = np.maximum(ends[np.newaxis, :] - ends[:, np.newaxis], 0)
                kept = kept + trades.kept[trades.starts[allowance, place][number]]
            held = self.static_bytes + self.in_flight[:, np.newaxis, np.newaxis] * kept + working
            found = np.minimum(found, held)
        return found

    def memory(self, parts: Sequence[int], recompute: Sequence[Recompute]) -> Int64Array:
        """Count the memory of each stage of a plan at its peak.

        Args:
            parts: bounds of the stages, num_stages + 1 numbers.
            recompute: the choice of each layer.

        Returns:
            int64 (num_stages,), bytes, the reserve included.
        """
        kept, working = running(self.kept_bytes(recompute)), self.working_bytes(recompute)
        return np.array(
            [
                self.static_bytes[low, high]
                + self.in_flight[stage] * (kept[high] - kept[low])
                + working[low:high].max(initial=0)
                for stage, (low, high) in enumerate(itertools.pairwise(parts))
            ],
            np.int64,
        )

    def best_recompute(self, low: int, high: int, stage: int, limit: int) -> list[Recompute] | None:
        """Choose what the stage [low, high) recomputes, so that it takes the least time.

        Of the layers of a kind, the first are recomputed: their backward pass comes last, when
        the activations of those behind them are gone.

        Args:
            low: its first layer.
            high: the layer after its last.
            stage: its place.
            limit: bytes that it may hold.

        Returns:
            The choice of each of its layers; None: it doesn't fit.
        """
        trades = self.trades
        picks = np.zeros(len(self.classes), np.int64)
        free = limit - int(self.static_bytes[low, high])
        fixed = int(self.fixed_kept[high] - self.fixed_kept[low])
        arrays = (self.class_ends, trades.starts, trades.kept, trades.ns, trades.working)
        at = (low, high, free, int(self.in_flight[stage]), fixed)
        if solve_stage(*arrays, *at, picks) < 0:
            return None
        chosen: list[Recompute] = [0] * (high - low)
        for place, choices in enumerate(self.classes):
            layers = np.flatnonzero(self.class_of[low:high] == place)
            if len(layers):
                counts = trades.counts[picks[place]]
                saving = [c for c in range(1, len(choices)) for _ in range(counts[c])]
                for layer, choice in zip(layers, saving, strict=False):
                    chosen[layer] = choices[choice]
        return chosen

    @cached_property
    def _class_list(self) -> list[tuple[int, tuple[Recompute, ...]]]:
        kinds, passes = self.table.kind_index, self.table.has_backward
        numbers = np.bincount(kinds[passes], minlength=len(self.table.kinds))
        found = []
        for kind in np.argsort(numbers, kind="stable"):
            choices = self.table.kinds[kind].choices
            if not self.selective:
                choices = tuple(choice for choice in choices if not isinstance(choice, str))
            if numbers[kind] and len(choices) > 1:
                found.append((int(kind), choices))
        return found


def worst_shape(shapes: Shapes) -> Shapes:
    """Make the micro-batch that has the most of everything: none of `shapes` passes it."""
    columns = (shapes.num_tiles, shapes.num_tokens, shapes.sum_squares)
    tiles, tokens, squares = (column.max(initial=0.0, keepdims=True) for column in columns)
    return Shapes(num_tiles=tiles, num_tokens=tokens, sum_squares=squares)


def memory_limits(memory_gb: float | Sequence[float] | None, num_stages: int) -> Int64Array:
    """Spread a limit over the stages.

    Args:
        memory_gb: gigabytes (1e9 bytes) of each GPU, or one number a stage; None: no limit.
        num_stages: stages.

    Returns:
        int64 (num_stages,), bytes.

    Raises:
        ConfigError: not one a stage, or not above 0.
    """
    if memory_gb is None:
        return np.full(num_stages, NO_LIMIT, np.int64)
    given = np.asarray(memory_gb, np.float64)
    if given.ndim > 1 or (given.ndim == 1 and len(given) != num_stages):
        raise ConfigError(
            f"memory_gb must be one number or one a stage ({num_stages}), got {memory_gb!r}."
        )
    if not (np.isfinite(given).all() and (given > 0).all()):
        raise ConfigError(f"memory_gb must be finite and above 0, got {memory_gb!r}.")
    # a number of bytes divided by 1e9 comes back as that number
    limits = np.floor(np.broadcast_to(given, num_stages) * 1e9 + 1e-3)
    limits = np.minimum(limits, NO_LIMIT)
    return np.ascontiguousarray(limits.astype(np.int64))


def transfer_ns(table: CostTable, shapes: Shapes) -> Int64Array:
    """Compute what sending over a cut after each layer takes, one way.

    Gradients take as long as activations: DeepSpeed sends them back over every cut, as zeros where
    nothing before it is trained.

    Returns:
        Nanoseconds, int64 (num_layers, num_micro_batches).
    """
    return nanoseconds(table.p2p_latency_s + table.output(shapes) / table.p2p_bytes_per_s)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}.")
