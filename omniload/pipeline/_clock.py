"""Compiled loops over programs with blocking transfers, in whole nanoseconds.

What a stage does next depends on its own clock and on that of the neighbour it waits for, so the
stages can be taken in any order; each is run on until it has to wait.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from omniload._jit import jit

__all__ = ["run_blocking", "run_steps", "search_orders"]

Int64Array = npt.NDArray[np.int64]

# the numbers of `schedules.Kind`, as the compiled code needs them
_FORWARD, _BACKWARD = 0, 1
_SEND_ACTIVATION, _RECEIVE_ACTIVATION, _RECEIVE_GRADIENT = 3, 4, 6
_SWAP, _INSERT = 0, 1  # ways to change an order


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


@jit
def search_orders(
    kinds: Int64Array,
    micro_batches: Int64Array,
    orders: Int64Array,
    places: Int64Array,
    counts: Int64Array,
    forward: Int64Array,
    backward: Int64Array,
    transfer: Int64Array,
    gradient_transfer: Int64Array,
    draws: Int64Array,
    alone: int,
    together: int,
) -> Int64Array:
    """Change the orders of pipelines that meet at the end of a step, and keep what helps.

    First each pipeline by itself: two micro-batches change places, or one is put elsewhere. Then
    the slowest one, time and again: within itself, or with a micro-batch of another pipeline.

    Args:
        kinds: as for `run_blocking`, as `micro_batches`.
        micro_batches: as there.
        orders: int64 (num_pipelines, places in the step), written: the micro-batch at each place.
        places: int64, the same shape: of each pipeline the places that may change.
        counts: int64 (num_pipelines,), how many these are.
        forward: int64 (num_stages, num_micro_batches), of all pipelines together.
        backward: the same.
        transfer: int64 (num_stages - 1, num_micro_batches).
        gradient_transfer: the same.
        draws: int64 (n, 3), random numbers of at least 0.
        alone: trials of each pipeline by itself.
        together: trials on the slowest pipeline.

    Returns:
        int64 (num_pipelines,), when the last stage of each is done.
    """
    none = np.empty((0, 0), np.int64)
    num_pipelines = len(orders)
    program = (kinds, micro_batches)
    times = (forward, backward, transfer, gradient_transfer)
    done = np.zeros(num_pipelines, np.int64)
    before = orders[0].copy()
    for which in range(num_pipelines):
        order = orders[which]
        done[which] = run_blocking(*program, order, *times, none, none)
        for number in range(alone if counts[which] > 1 else 0):
            before[:] = order
            way = _SWAP if number % 2 == 0 else _INSERT
            _move(order, places[which], counts[which], draws[number % len(draws)], way)
            found = run_blocking(*program, order, *times, none, none)
            if found < done[which]:
                done[which] = found
            else:
                order[:] = before
    for number in range(together if num_pipelines > 1 else 0):
        which = int(np.argmax(done))
        order = orders[which]
        draw = draws[(alone + number) % len(draws)]
        if counts[which] == 0:
            break
        if number % 4 < 2:
            before[:] = order
            _move(order, places[which], counts[which], draw, number % 2)
            found = run_blocking(*program, order, *times, none, none)
            if found < done[which]:
                done[which] = found
            else:
                order[:] = before
            continue
        other = (which + 1 + draw[2] % (num_pipelines - 1)) % num_pipelines
        if counts[other] == 0:
            continue
        one = places[which, draw[0] % counts[which]]
        two = places[other, draw[1] % counts[other]]
        order[one], orders[other, two] = orders[other, two], order[one]
        found = run_blocking(*program, order, *times, none, none)
        others = done[which]
        if found < done[which]:
            others = run_blocking(*program, orders[other], *times, none, none)
        if found < done[which] and others < done[which]:
            done[which], done[other] = found, others
        else:
            order[one], orders[other, two] = orders[other, two], order[one]
    return done


@jit
def _move(order: Int64Array, places: Int64Array, count: int, draw: Int64Array, way: int) -> None:
    """Swap two of the places that may change, or take one out and insert it elsewhere."""
    one, two = draw[0] % count, draw[1] % count
    if way == _SWAP:
        first, second = places[one], places[two]
        order[first], order[second] = order[second], order[first]
        return
    moved = order[places[one]]
    step = 1 if two > one else -1
    for at in range(one, two, step):
        order[places[at]] = order[places[at + step]]
    order[places[two]] = moved
