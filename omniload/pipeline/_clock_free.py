"""The compiled loop over programs whose transfers go on beside the work, in whole nanoseconds."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["run_free"]

Int64Array = npt.NDArray[np.int64]

_FORWARD, _BACKWARD = 0, 1  # the numbers of `schedules.Kind`, as the compiled code needs them


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
