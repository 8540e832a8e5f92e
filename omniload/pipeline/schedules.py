"""The order in which a stage works: instruction lists of DeepSpeed, and other schedules to compare.

DeepSpeed's training schedule runs on a clock of slots, forward and backward in turn: stage s of N
runs the forward pass of micro-batch m in slot 2m + s, its backward pass in slot 2m + 2N - 1 - s.
All else follows: what the slot before has made is sent when the input of this slot is received, and
the order of the two is what pairs them up with those of the neighbour.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError

__all__ = [
    "SCHEDULES",
    "Instruction",
    "Kind",
    "Program",
    "inference_instructions",
    "make_program",
    "num_buffers",
    "train_instructions",
]

Int64Array = npt.NDArray[np.int64]

#: Schedules that can be simulated. "deepspeed" has blocking transfers, the others don't wait.
SCHEDULES = ("deepspeed", "1f1b", "gpipe", "interleaved", "zero-bubble")


class Kind(IntEnum):
    """What an instruction does; the numbers are those of the compiled loops."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT = 2  # the part of the backward pass that makes gradients of weights, where it is split
    SEND_ACTIVATION = 3
    RECEIVE_ACTIVATION = 4
    SEND_GRADIENT = 5
    RECEIVE_GRADIENT = 6
    LOAD = 7
    REDUCE_TIED = 8
    REDUCE = 9
    OPTIMIZER = 10


class Instruction(NamedTuple):
    """One instruction of a stage.

    Args:
        kind: what it does.
        micro_batch: which one, by its place in the step; -1: none.
        stage: the run of layers that it works on; more than one a device when interleaved.
    """

    kind: Kind
    micro_batch: int = -1
    stage: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """The instructions of all devices as arrays, for the compiled loops.

    Args:
        schedule: its name, one of `SCHEDULES`.
        kinds: int64 (num_devices, most), `Kind`; -1 after the last instruction.
        micro_batches: int64 (num_devices, most), places in the step.
        stages: int64 (num_devices, most), stages.
        num_stages: stages; a multiple of the devices.
    """

    schedule: str
    kinds: Int64Array
    micro_batches: Int64Array
    stages: Int64Array
    num_stages: int

    @property
    def blocking(self) -> bool:
        """Whether sender and receiver of a transfer wait for each other."""
        return self.schedule == "deepspeed"


def train_instructions(
    num_stages: int, num_micro_batches: int, stage: int
) -> list[list[Instruction]]:
    """List what DeepSpeed's pipeline engine does on one stage in one training step.

    The same instructions in the same order as `deepspeed.runtime.pipe.schedule.TrainSchedule`.

    Args:
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of the step.
        stage: the stage, from 0.

    Returns:
        For each slot its instructions.

    Raises:
        ConfigError: no stages or micro-batches, or no such stage.
    """
    _check_sizes(num_stages, num_micro_batches, stage)
    first, last = stage == 0, stage == num_stages - 1
    num_slots = 2 * (num_micro_batches + num_stages - 1)
    slots: list[list[Instruction]] = []
    for slot in range(num_slots):
        forward = slot - stage
        backward = slot - (2 * num_stages - 1 - stage)
        into: list[Instruction] = []
        if forward % 2 == 0:
            new, made = forward // 2, (backward - 1) // 2
            if 0 <= made < num_micro_batches and not first:
                into.append(Instruction(Kind.SEND_GRADIENT, made, stage))
            if 0 <= new < num_micro_batches:
                if not first:
                    into.append(Instruction(Kind.RECEIVE_ACTIVATION, new, stage))
                if first or last:
                    into.append(Instruction(Kind.LOAD, new, stage))
                into.append(Instruction(Kind.FORWARD, new, stage))
        else:
            new, made = backward // 2, (forward - 1) // 2
            if 0 <= new < num_micro_batches and not last:
                into.append(Instruction(Kind.RECEIVE_GRADIENT, new, stage))
            if 0 <= made < num_micro_batches and not last:
                into.append(Instruction(Kind.SEND_ACTIVATION, made, stage))
            if 0 <= new < num_micro_batches:
                into.append(Instruction(Kind.BACKWARD, new, stage))
        slots.append(into)
    slots[-1] += [Instruction(Kind.REDUCE_TIED), Instruction(Kind.REDUCE)]
    slots[-1].append(Instruction(Kind.OPTIMIZER))
    return slots


def inference_instructions(
    num_stages: int, num_micro_batches: int, stage: int
) -> list[list[Instruction]]:
    """List what DeepSpeed's pipeline engine does on one stage in one evaluation step.

    The same instructions in the same order as `deepspeed.runtime.pipe.schedule.InferenceSchedule`:
    micro-batch m passes stage s in slot m + s, and stages of even number send before they receive.

    Args:
        num_stages: stages of the pipeline.
        num_micro_batches: micro-batches of the step.
        stage: the stage, from 0.

    Returns:
        For each slot its instructions.

    Raises:
        ConfigError: no stages or micro-batches, or no such stage.
    """
    _check_sizes(num_stages, num_micro_batches, stage)
    first, last = stage == 0, stage == num_stages - 1
    slots: list[list[Instruction]] = []
    for slot in range(num_micro_batches + num_stages - 1):
        new, made = slot - stage, slot - stage - 1
        valid = 0 <= new < num_micro_batches
        into = []
        if valid and (first or last):
            into.append(Instruction(Kind.LOAD, new, stage))
        transfers = []
        if 0 <= made < num_micro_batches and not last:
            transfers.append(Instruction(Kind.SEND_ACTIVATION, made, stage))
        if valid and not first:
            transfers.append(Instruction(Kind.RECEIVE_ACTIVATION, new, stage))
        into += transfers if stage % 2 == 0 else transfers[::-1]
        if valid:
            into.append(Instruction(Kind.FORWARD, new, stage))
        slots.append(into)
    return slots


def num_buffers(num_stages: int, num_micro_batches: int, stage: int) -> int:
    """Count the buffers of activations that DeepSpeed keeps on a stage in training.

    Micro-batch m is in buffer m modulo this number. In evaluation there are always two.
    """
    _check_sizes(num_stages, num_micro_batches, stage)
    return max(2, min(num_stages - stage, num_micro_batches))


def make_program(
    schedule: str, num_devices: int, num_micro_batches: int, *, chunks: int = 1
) -> Program:
    """Make the instructions of all devices for one step.

    Args:
        schedule: one of `SCHEDULES`. "interleaved" is the schedule of Narayanan et al. ("Efficient
            Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, section
            2.2); "zero-bubble" follows ZB-H1 of Qi et al. ("Zero Bubble Pipeline Parallelism",
            2024): gradients of weights are put off, by as many micro-batches as stages are before.
        num_devices: devices in a row.
        num_micro_batches: micro-batches of the step.
        chunks: stages on each device, for "interleaved": stage s is on device s modulo their
            number.

    Returns:
        The program.

    Raises:
        ConfigError: an unknown schedule, or sizes that it can't have.
    """
    _check_sizes(num_devices, num_micro_batches, 0)
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}.")
    if chunks < 1 or (chunks > 1 and schedule != "interleaved"):
        raise ConfigError(
            "chunks must be at least 1, and more than 1 needs schedule='interleaved': got "
            f"{chunks} with {schedule!r}."
        )
    return _program(schedule, int(num_devices), int(num_micro_batches), chunks)


@functools.lru_cache(maxsize=32)  # as dear as simulating it some hundred times
def _program(schedule: str, num_devices: int, num_micro_batches: int, chunks: int) -> Program:
    lists: list[list[Instruction]] = []
    for device in range(num_devices):
        if schedule == "deepspeed":
            slots = train_instructions(num_devices, num_micro_batches, device)
            lists.append([op for slot in slots for op in slot if op.kind < Kind.LOAD])
        elif schedule == "gpipe":
            order = range(num_micro_batches)
            lists.append(
                [Instruction(Kind.FORWARD, m, device) for m in order]
                + [Instruction(Kind.BACKWARD, m, device) for m in order]
            )
        elif schedule == "interleaved":
            lists.append(_interleaved(num_devices, num_micro_batches, device, chunks))
        else:
            delay = device if schedule == "zero-bubble" else None
            lists.append(_one_forward_one_backward(num_devices, num_micro_batches, device, delay))
    return _as_arrays(schedule, lists, num_devices * chunks)


def _one_forward_one_backward(
    num_stages: int, num_micro_batches: int, stage: int, delay: int | None
) -> list[Instruction]:
    """List forward and backward in turn; with a delay, gradients of weights so much later."""
    warm_up = min(num_stages - stage - 1, num_micro_batches)
    ops = [Instruction(Kind.FORWARD, m, stage) for m in range(warm_up)]
    for m in range(num_micro_batches):
        if warm_up + m < num_micro_batches:
            ops.append(Instruction(Kind.FORWARD, warm_up + m, stage))
        ops.append(Instruction(Kind.BACKWARD, m, stage))
        if delay is not None and m >= delay:
            ops.append(Instruction(Kind.WEIGHT, m - delay, stage))
    if delay is not None:
        late = range(max(num_micro_batches - delay, 0), num_micro_batches)
        ops += [Instruction(Kind.WEIGHT, m, stage) for m in late]
    return ops


def _interleaved(
    num_devices: int, num_micro_batches: int, device: int, chunks: int
) -> list[Instruction]:
    if num_micro_batches % num_devices:
        raise ConfigError(
            "schedule 'interleaved' needs micro-batches that are a multiple of the devices: got "
            f"{num_micro_batches} for {num_devices}."
        )
    total = num_micro_batches * chunks
    warm_up = min(total, 2 * (num_devices - device - 1) + (chunks - 1) * num_devices)
    forward, backward = [], []
    for number in range(total):  # runs of `num_devices` micro-batches through one chunk each
        run, place = divmod(number, num_devices)
        chunk = run % chunks
        micro_batch = run // chunks * num_devices + place
        forward.append(Instruction(Kind.FORWARD, micro_batch, chunk * num_devices + device))
        stage = (chunks - 1 - chunk) * num_devices + device
        backward.append(Instruction(Kind.BACKWARD, micro_batch, stage))
    ops = forward[:warm_up]
    for number in range(total):
        ops += forward[warm_up + number : warm_up + number + 1]
        ops.append(backward[number])
    return ops


def _as_arrays(schedule: str, lists: list[list[Instruction]], num_stages: int) -> Program:
    most = max(len(ops) for ops in lists)
    columns = np.full((3, len(lists), most), -1, np.int64)
    for device, ops in enumerate(lists):
        for place, op in enumerate(ops):
            columns[:, device, place] = op.kind, op.micro_batch, op.stage
    columns.flags.writeable = False
    kinds, micro_batches, stages = columns
    return Program(
        schedule=schedule,
        kinds=kinds,
        micro_batches=micro_batches,
        stages=stages,
        num_stages=num_stages,
    )


def _check_sizes(num_stages: int, num_micro_batches: int, stage: int) -> None:
    for name, value in (("stages", num_stages), ("micro-batches", num_micro_batches)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ConfigError(f"a pipeline needs at least 1 of {name}, got {value!r}.")
    if not 0 <= stage < num_stages:
        raise ConfigError(f"stage must be one of 0 to {num_stages - 1}, got {stage!r}.")
