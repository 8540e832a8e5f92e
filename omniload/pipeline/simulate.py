"""Simulates training steps of a pipeline: how long they take, who waits for whom, what is kept.

The default follows DeepSpeed's pipeline engine instruction by instruction: transfers keep sender
and receiver until they are done, and the activation of a micro-batch leaves only when the next
backward pass is due. All clocks are whole nanoseconds, so results are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError
from omniload.pipeline._clock import run_blocking
from omniload.pipeline._clock_free import run_free
from omniload.pipeline.memory_curve import memory_curve
from omniload.pipeline.schedules import Kind, Program, make_program
from omniload.pipeline.times import StageTimes, nanoseconds

__all__ = ["Bubbles", "Event", "Simulation", "StageTimes", "gpu_days", "simulate"]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_NS = 1e9
_NOTHING = np.empty((0, 0), np.int64)


class Event(NamedTuple):
    """Something that a stage does, to draw it.

    Args:
        rank: data-parallel rank.
        device: the device, a stage where stages are not interleaved.
        stage: the stage.
        kind: what it does.
        micro_batch: the micro-batch, by its column in `StageTimes`.
        start_ns: when it starts.
        end_ns: when it is done.
    """

    rank: int
    device: int
    stage: int
    kind: Kind
    micro_batch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, kw_only=True)
class Bubbles:
    """What devices do with the time of a step: shares that sum to 1.

    The causes are taken away one after the other, from the last field to the first, and each is the
    time that the step takes less for it. `variation` is negative where the order of the
    micro-batches lets the pipeline fill quicker than equal ones would.

    Args:
        work: forward and backward passes.
        warm_up: filling and draining the pipeline, with equal stages and micro-batches.
        imbalance: stages whose mean times differ.
        variation: micro-batches whose times differ.
        transfers: activations and gradients on their way.
        ranks: waiting for other data-parallel ranks at the end of the step.
    """

    work: float
    warm_up: float
    imbalance: float
    variation: float
    transfers: float
    ranks: float

    @property
    def total(self) -> float:
        """Share of the time in which devices wait."""
        return 1.0 - self.work


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """One simulated step.

    Args:
        times: of each data-parallel rank.
        program: the instructions of all devices, of each rank.
        step_ns: time of the step, nanoseconds.
        rank_ns: int64 (num_ranks,), when each rank is done with its last backward pass.
        starts: of each rank int64 like `program.kinds`, when each instruction starts.
        ends: of each rank the same, when it is done.
        end_ns: time after the last backward pass: reduction of gradients, optimizer.
    """

    times: tuple[StageTimes, ...]
    program: tuple[Program, ...]
    step_ns: int
    rank_ns: Int64Array
    starts: tuple[Int64Array, ...] = field(repr=False)
    ends: tuple[Int64Array, ...] = field(repr=False)
    end_ns: int = 0

    @property
    def step_s(self) -> float:
        """Time of the step, seconds."""
        return self.step_ns / _NS

    @cached_property
    def bubbles(self) -> Bubbles:
        """Shares of the time of all devices, by cause."""
        totals = np.zeros(5)
        for times, program, done in zip(self.times, self.program, self.rank_ns, strict=True):
            totals += (
                times.work_ns / len(program.kinds),
                _step(times.evened(over_stages=True), program),
                _step(times.evened(over_stages=False), program),
                _step(times.without_transfers(), program),
                done,
            )
        whole = max(self.step_ns, 1)
        work, even, stages, free, all_of_it = map(float, totals / (len(self.times) * whole))
        end = self.end_ns / whole  # work too: all devices are busy with the optimizer
        return Bubbles(
            work=work + end,
            warm_up=even - work,
            imbalance=stages - even,
            variation=free - stages,
            transfers=all_of_it - free,
            ranks=1.0 - end - all_of_it,
        )

    def events(self) -> list[Event]:
        """List all that the devices do, by rank, device and time."""
        found = []
        for rank, program in enumerate(self.program):
            columns = (program.stages, program.kinds, program.micro_batches)
            for device, place in zip(*np.nonzero(program.kinds >= 0), strict=True):
                stage, kind, which = (int(column[device, place]) for column in columns)
                start, end = (int(a[rank][device, place]) for a in (self.starts, self.ends))
                found.append(Event(rank, int(device), stage, Kind(kind), which, start, end))
        return found

    def memory(
        self,
        kept: npt.ArrayLike,
        *,
        static: npt.ArrayLike = 0.0,
        working: npt.ArrayLike = 0.0,
        rank: int = 0,
    ) -> list[tuple[Int64Array, Float64Array]]:
        """Follow the memory of each device over the step.

        A micro-batch keeps its activations from the start of its forward pass to the end of its
        backward pass (of its gradients of weights, where they are put off).

        Args:
            kept: bytes (num_stages, num_micro_batches), activations of each.
            static: bytes (num_devices,), or one number: weights, gradients, optimizer, reserve.
            working: bytes like `kept`, or of a shape that spreads to it: what is formed anew while
                the backward pass runs. `omniload.pipeline.predict.stage_bytes` gives all three.
            rank: data-parallel rank.

        Returns:
            For each device the times (n,), nanoseconds, and the bytes (n,) from then on.

        Raises:
            ConfigError: arrays of another shape.
        """
        program, times = self.program[rank], self.times[rank]
        held = np.asarray(kept, np.float64)
        if held.shape != times.forward.shape:
            raise ConfigError(
                f"kept must have one entry a stage and micro-batch: expected shape "
                f"{times.forward.shape}, got {held.shape}."
            )
        anew = np.broadcast_to(np.asarray(working, np.float64), held.shape)
        base = np.broadcast_to(np.asarray(static, np.float64), (len(program.kinds),))
        return [
            memory_curve(program, device, self.starts[rank], self.ends[rank], held, anew, before)
            for device, before in enumerate(base)
        ]


def simulate(
    times: StageTimes | Sequence[StageTimes],
    *,
    schedule: str = "deepspeed",
    chunks: int = 1,
    end_s: float = 0.0,
) -> Simulation:
    """Simulate one step.

    Args:
        times: of the micro-batches in the order in which they run; of each data-parallel rank,
            which may have different numbers of micro-batches. Ranks meet at the end of the step.
        schedule: one of `omniload.pipeline.schedules.SCHEDULES`. "deepspeed" is what DeepSpeed's
            pipeline engine does: 1F1B with blocking transfers. The others are there to compare:
            their transfers go on beside the work, which no engine quite reaches.
        chunks: stages on each device, for "interleaved".
        end_s: time of the reduction of gradients and of the optimizer, seconds.

    Returns:
        The step.

    Raises:
        ConfigError: ranks with different numbers of stages, an unknown schedule, or sizes that it
            can't have.

    Cost: about 20 ns an instruction.
    """
    ranks = (times,) if isinstance(times, StageTimes) else tuple(times)
    stages = {each.num_stages for each in ranks}
    if len(stages) != 1:
        raise ConfigError(f"all ranks must have the same stages, got {sorted(stages)}.")
    num_stages = stages.pop()
    if chunks < 1 or num_stages % chunks:
        raise ConfigError(
            f"stages must be a multiple of the chunks a device: got {num_stages} stages, {chunks}."
        )
    programs = {
        each.num_micro_batches: make_program(
            schedule, num_stages // chunks, each.num_micro_batches, chunks=chunks
        )
        for each in ranks
    }
    chosen = tuple(programs[each.num_micro_batches] for each in ranks)
    starts = tuple(np.zeros_like(program.kinds) for program in chosen)
    ends = tuple(np.zeros_like(program.kinds) for program in chosen)
    rank_ns = np.array([_step(*each) for each in zip(ranks, chosen, starts, ends, strict=True)])
    end_ns = int(nanoseconds(end_s))
    return Simulation(
        times=ranks,
        program=chosen,
        step_ns=int(rank_ns.max()) + end_ns,
        rank_ns=rank_ns,
        starts=starts,
        ends=ends,
        end_ns=end_ns,
    )


def gpu_days(step_s: float, *, num_samples: int, samples_per_step: float, num_gpus: int) -> float:
    """Compute the GPU days of one pass over a data set.

    Args:
        step_s: time of a step, seconds.
        num_samples: samples of the data set.
        samples_per_step: samples of a step on all ranks together, on average.
        num_gpus: GPUs: stages times tensor-parallel times data-parallel ranks.

    Raises:
        ConfigError: a number that is not above 0.
    """
    given = {"step_s": step_s, "num_samples": num_samples, "samples_per_step": samples_per_step,
             "num_gpus": num_gpus}  # fmt: skip
    for name, value in given.items():
        if not (np.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and above 0, got {value!r}.")
    return step_s * (num_samples / samples_per_step) * num_gpus / 86400.0


def _step(
    times: StageTimes,
    program: Program,
    starts: Int64Array = _NOTHING,
    ends: Int64Array = _NOTHING,
) -> int:
    order = np.arange(times.num_micro_batches)
    transfers = (times.transfer, times.gradient_transfer)
    if program.blocking:
        places = (program.kinds, program.micro_batches, order)
        return int(run_blocking(*places, times.forward, times.backward, *transfers, starts, ends))
    weight = times.weight_ns
    split = bool((program.kinds == Kind.WEIGHT).any())
    backward = times.backward - weight if split else times.backward
    return int(
        run_free(
            program.kinds,
            program.micro_batches,
            program.stages,
            order,
            times.forward,
            np.ascontiguousarray(backward),
            weight,
            *transfers,
            starts,
            ends,
        )
    )
