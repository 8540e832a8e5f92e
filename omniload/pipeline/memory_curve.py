"""The memory of one device over a simulated step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload.pipeline.schedules import Kind, Program

__all__ = ["memory_curve"]

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]


def memory_curve(
    program: Program,
    device: int,
    starts: Int64Array,
    ends: Int64Array,
    held: Float64Array,
    anew: Float64Array,
    before: float,
) -> tuple[Int64Array, Float64Array]:
    """Follow the memory of one device over a step.

    Args:
        program: the instructions of all devices.
        device: the device.
        starts: int64 like `program.kinds`, when each instruction starts, nanoseconds.
        ends: the same, when it is done.
        held: bytes (num_stages, num_micro_batches), from forward pass to the end of the backward
            pass, or of the gradients of weights where they are put off.
        anew: bytes of the same shape, there while the backward pass runs.
        before: bytes that are there all the time.

    Returns:
        Times (n,), nanoseconds, and the bytes (n,) from then on.
    """
    kinds = program.kinds[device]
    split = (kinds == Kind.WEIGHT).any()
    at, when, change = [-1], [0], [before]
    for kind, amounts, sign in (
        (Kind.FORWARD, held, 1.0),
        (Kind.BACKWARD, anew, 1.0),
        (Kind.BACKWARD, anew, -1.0),
        (Kind.WEIGHT if split else Kind.BACKWARD, held, -1.0),
    ):
        place = np.flatnonzero(kinds == kind)
        some = sign * amounts[program.stages[device, place], program.micro_batches[device, place]]
        place, some = place[some != 0], some[some != 0]
        at.extend(place)
        when.extend((starts if sign > 0 else ends)[device, place])
        change.extend(some)
    # by instruction, not by time: what ends with one is gone before the next one starts
    order = np.argsort(at, kind="stable")
    return np.array(when, np.int64)[order], np.cumsum(np.array(change)[order])
