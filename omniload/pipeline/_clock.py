"""Compiled loops of the simulator: clocks of the devices, in whole nanoseconds.

What a device does next depends on its own clock and on that of the neighbour it waits for, so the
devices can be taken in any order; each is run on until it has to wait.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["run_blocking", "run_free", "run_steps", "search_swaps"]

Int64Array = npt.NDArray[np.int64]

# the numbers of `schedules.Kind`, as the compiled code needs them
_FORWARD, _BACKWARD, _WEIGHT = 0, 1, 2
_SEND_ACTIVATION, _RECEIVE_ACTIVATION, _SEND_GRADIENT, _RECEIVE_GRADIENT = 3, 4, 5, 6


@jit
def run_blocking(
    kinds: Int64Array,
    micro_batches: Int64Array,
    order: Int64Array,
    forward: Int64Array,
    backward: Int64Array,
    transfer: Int64Array,
    gradient_transfer: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
) -> int:
    """Run a program whose transfers keep both sides until they are done.

    Args:
        kinds: int64 (num_stages, most), `schedules.Kind`; -1 after the last instruction.
        micro_batches: int64 (num_stages, most), places in the step.
        order: int64 (num_micro_batches,), the micro-batch at each place.
        forward: int64 (num_stages, num_micro_batches), nanoseconds.
        backward: int64 (num_stages, num_micro_batches), nanoseconds.
        transfer: int64 (num_stages - 1, num_micro_batches), of activations, nanoseconds.
        gradient_transfer: the same of gradients.
        starts: int64 like `kinds`, written: when each instruction starts; or empty.
        ends: int64 like `kinds`, written: when it is done; or empty.

    Returns:
        When the last stage is done; -1: stages wait for each other for ever.
    """
    num_stages, most = kinds.shape
    record = starts.size > 0
    clock = np.zeros(num_stages, np.int64)
    place = np.zeros(num_stages, np.int64)
    moved = True
    while moved:
        moved = False
        for stage in range(num_stages):
            while place[stage] < most:
                at = place[stage]
                kind = kinds[stage, at]
                if kind < 0:
                    break
                which = order[micro_batches[stage, at]]
                start = clock[stage]
                if kind == _FORWARD:
                    clock[stage] += forward[stage, which]
                elif kind == _BACKWARD:
                    clock[stage] += backward[stage, which]
                else:
                    down = kind == _SEND_ACTIVATION or kind == _RECEIVE_GRADIENT
                    other = stage + 1 if down else stage - 1
                    boundary = min(stage, other)
                    there = place[other]
                    # sends have odd numbers, and the receive that fits has the next one
                    if there >= most or kinds[other, there] != (kind + 1 if kind % 2 else kind - 1):
                        break
                    start = max(start, clock[other])
                    if kind <= _RECEIVE_ACTIVATION:
                        end = start + transfer[boundary, which]
                    else:
                        end = start + gradient_transfer[boundary, which]
                    clock[stage] = end
                    clock[other] = end
                    if record:
                        starts[other, there] = start
                        ends[other, there] = end
                    place[other] += 1
                if record:
                    starts[stage, at] = start
                    ends[stage, at] = clock[stage]
                place[stage] += 1
                moved = True
    for stage in range(num_stages):
        if place[stage] < most and kinds[stage, place[stage]] >= 0:
            return -1
    return int(clock.max())


@jit
def run_free(
    kinds: Int64Array,
    micro_batches: Int64Array,
    stages: Int64Array,
    order: Int64Array,
    forward: Int64Array,
    backward: Int64Array,
    weight: Int64Array,
    transfer: Int64Array,
    gradient_transfer: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
) -> int:
    """Run a program whose transfers go on beside the work; only the receiver waits for them.

    Args:
        kinds: int64 (num_devices, most), `schedules.Kind`; -1 after the last instruction.
        micro_batches: int64 (num_devices, most), places in the step.
        stages: int64 (num_devices, most), stage s is on device s modulo their number.
        order: int64 (num_micro_batches,), the micro-batch at each place.
        forward: int64 (num_stages, num_micro_batches), nanoseconds.
        backward: int64 (num_stages, num_micro_batches), nanoseconds, without `weight`.
        weight: int64 (num_stages, num_micro_batches), nanoseconds of gradients of weights.
        transfer: int64 (num_stages - 1, num_micro_batches), of activations, nanoseconds.
        gradient_transfer: the same of gradients.
        starts: int64 like `kinds`, written: when each instruction starts; or empty.
        ends: int64 like `kinds`, written: when it is done; or empty.

    Returns:
        When the last device is done; -1: devices wait for each other for ever.
    """
    num_devices, most = kinds.shape
    num_stages = len(forward)
    record = starts.size > 0
    clock = np.zeros(num_devices, np.int64)
    place = np.zeros(num_devices, np.int64)
    has_input = np.full(forward.shape, -1, np.int64)  # when it is there
    has_gradient = np.full(forward.shape, -1, np.int64)
    has_input[0] = 0
    moved = True
    while moved:
        moved = False
        for device in range(num_devices):
            while place[device] < most:
                at = place[device]
                kind = kinds[device, at]
                if kind < 0:
                    break
                stage = stages[device, at]
                which = order[micro_batches[device, at]]
                start = clock[device]
                if kind == _FORWARD:
                    if has_input[stage, which] < 0:
                        break
                    start = max(start, has_input[stage, which])
                    end = start + forward[stage, which]
                    if stage + 1 < num_stages:
                        sent = transfer[stage, which] if num_devices > 1 else 0
                        has_input[stage + 1, which] = end + sent
                    else:
                        has_gradient[stage, which] = end
                elif kind == _BACKWARD:
                    if has_gradient[stage, which] < 0:
                        break
                    start = max(start, has_gradient[stage, which])
                    end = start + backward[stage, which]
                    if stage > 0:
                        sent = gradient_transfer[stage - 1, which] if num_devices > 1 else 0
                        has_gradient[stage - 1, which] = end + sent
                else:
                    end = start + weight[stage, which]
                clock[device] = end
                if record:
                    starts[device, at] = start
                    ends[device, at] = end
                place[device] += 1
                moved = True
    for device in range(num_devices):
        if place[device] < most and kinds[device, place[device]] >= 0:
            return -1
    return int(clock.max())


@jit
def search_swaps(
    kinds: Int64Array,
    micro_batches: Int64Array,
    order: Int64Array,
    forward: Int64Array,
    backward: Int64Array,
    transfer: Int64Array,
    gradient_transfer: Int64Array,
    swaps: Int64Array,
) -> int:
    """Try swaps of two micro-batches of a program with blocking transfers, keep those that help.

    Args:
        kinds: as for `run_blocking`, as the other arguments not named here.
        micro_batches: as there.
        order: int64 (num_micro_batches,), written: the best order found.
        forward: as there.
        backward: as there.
        transfer: as there.
        gradient_transfer: as there.
        swaps: int64 (n, 2), the places to swap, in turn.

    Returns:
        When the last stage is done with that order.
    """
    none = np.empty((0, 0), np.int64)
    best = run_blocking(
        kinds, micro_batches, order, forward, backward, transfer, gradient_transfer, none, none
    )
    for number in range(len(swaps)):
        one, two = swaps[number, 0], swaps[number, 1]
        order[one], order[two] = order[two], order[one]
        found = run_blocking(
            kinds, micro_batches, order, forward, backward, transfer, gradient_transfer, none, none
        )
        if found < best:
            best = found
        else:
            order[one], order[two] = order[two], order[one]
    return best


@jit
def run_steps(
    kinds: Int64Array,
    micro_batches: Int64Array,
    forward: Int64Array,
    backward: Int64Array,
    transfer: Int64Array,
    gradient_transfer: Int64Array,
) -> Int64Array:
    """Run a program with blocking transfers for many pipelines.

    Args:
        kinds: as for `run_blocking`, as `micro_batches`.
        micro_batches: as there.
        forward: int64 (num_pipelines, num_stages, num_micro_batches), nanoseconds.
        backward: the same.
        transfer: int64 (num_pipelines, num_stages - 1, num_micro_batches).
        gradient_transfer: the same.

    Returns:
        int64 (num_pipelines,), when the last stage of each is done.
    """
    none = np.empty((0, 0), np.int64)
    order = np.arange(forward.shape[2])
    done = np.zeros(len(forward), np.int64)
    for number in range(len(forward)):
        done[number] = run_blocking(
            kinds,
            micro_batches,
            order,
            forward[number],
            backward[number],
            transfer[number],
            gradient_transfer[number],
            none,
            none,
        )
    return done
