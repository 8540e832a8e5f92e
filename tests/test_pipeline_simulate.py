"""The simulator runs DeepSpeed's instructions, keeps its bounds, and accounts for all time."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omniload.errors import ConfigError
from omniload.pipeline.schedules import (
    SCHEDULES,
    Kind,
    inference_instructions,
    make_program,
    num_buffers,
    train_instructions,
)
from omniload.pipeline.simulate import StageTimes, gpu_days, simulate

NAMES = {
    Kind.FORWARD: "ForwardPass",
    Kind.BACKWARD: "BackwardPass",
    Kind.SEND_ACTIVATION: "SendActivation",
    Kind.RECEIVE_ACTIVATION: "RecvActivation",
    Kind.SEND_GRADIENT: "SendGrad",
    Kind.RECEIVE_GRADIENT: "RecvGrad",
    Kind.LOAD: "LoadMicroBatch",
    Kind.REDUCE_TIED: "ReduceTiedGrads",
    Kind.REDUCE: "ReduceGrads",
    Kind.OPTIMIZER: "OptimizerStep",
}


def named(slots, buffers):
    return [
        [(NAMES[op.kind], op.micro_batch % buffers if op.micro_batch >= 0 else None) for op in slot]
        for slot in slots
    ]


def of_deepspeed(schedule):
    return [[(op.name, op.kwargs.get("buffer_id")) for op in slot] for slot in schedule]


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_instructions_are_those_of_deepspeed(num_stages):
    real = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for micro_batches in (1, 2, 3, 4, 7, 8, 13):
        for stage in range(num_stages):
            at = (num_stages, micro_batches, stage)
            train = real.TrainSchedule(micro_batches, num_stages, stage)
            assert num_buffers(*at) == train.num_pipe_buffers()
            assert named(train_instructions(*at), num_buffers(*at)) == of_deepspeed(train)
            evaluate = real.InferenceSchedule(micro_batches, num_stages, stage)
            assert named(inference_instructions(*at), 2) == of_deepspeed(evaluate)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_runs_each_micro_batch_once_forward_and_back(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    for devices in (1, 2, 3, 5):
        for micro_batches in (devices, 3 * devices):
            program = make_program(schedule, devices, micro_batches, chunks=chunks)
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                found = program.kinds == kind
                pairs = zip(program.stages[found], program.micro_batches[found], strict=True)
                stages = range(devices * chunks)
                assert sorted(pairs) == [(s, m) for s in stages for m in range(micro_batches)]


def even_times(num_stages, micro_batches, forward, backward):
    shape = (num_stages, micro_batches)
    still = np.zeros((num_stages - 1, micro_batches), np.int64)
    return StageTimes(
        forward=np.full(shape, forward, np.int64),
        backward=np.full(shape, backward, np.int64),
        transfer=still,
        gradient_transfer=still,
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_equal_work_takes_the_time_of_the_published_formulas(num_stages):
    n = num_stages
    for m in (n, 2 * n, 5 * n):
        times = even_times(n, m, 10, 20)  # gradients of weights are half of the backward pass
        for schedule in ("deepspeed", "1f1b", "gpipe"):
            assert simulate(times, schedule=schedule).step_ns == (m - 1) * 30 + n * 30
        assert simulate(times, schedule="zero-bubble").step_ns == m * 30 + (n - 1) * 10
        halves = even_times(2 * n, m, 5, 10)
        found = simulate(halves, schedule="interleaved", chunks=2)
        assert found.step_ns == m * 30 + (n - 1) * 15


@st.composite
def stage_times(draw):
    num_stages = draw(st.integers(1, 5))
    micro_batches = draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape, between = (num_stages, micro_batches), (num_stages - 1, micro_batches)

    return StageTimes(
        forward=rng.integers(0, 100, shape),
        backward=rng.integers(0, 200, shape),
        transfer=rng.integers(0, 40, between),
        gradient_transfer=rng.integers(0, 40, between),
    )


@settings(deadline=None)
@given(stage_times(), st.sampled_from(["deepspeed", "1f1b", "gpipe", "zero-bubble"]))
def test_no_step_is_quicker_than_its_busiest_stage_or_its_longest_path(times, schedule):
    step = simulate(times, schedule=schedule)
    busiest = (times.forward.sum(axis=1) + times.backward.sum(axis=1)).max()
    backward = times.backward - (times.weight if schedule == "zero-bubble" else 0)
    path = times.forward.sum(axis=0) + backward.sum(axis=0)
    path = path + times.transfer.sum(axis=0) + times.gradient_transfer.sum(axis=0)
    assert step.step_ns >= max(busiest, path.max())
    one_by_one = times.work_ns + times.transfer.sum() + times.gradient_transfer.sum()
    assert step.step_ns <= one_by_one


@settings(deadline=None)
@given(stage_times())
def test_blocking_transfers_are_never_quicker_than_free_ones(times):
    assert simulate(times).step_ns >= simulate(times, schedule="1f1b").step_ns


@settings(deadline=None)
@given(st.lists(st.integers(0, 99), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 3))
def test_equal_micro_batches_stay_below_the_closed_form_and_meet_it_with_equal_stages(
    stages, micro_batches, ratio
):
    m, n = micro_batches, len(stages)
    column = np.array(stages, np.int64)[:, np.newaxis]
    still = np.zeros((n - 1, m), np.int64)
    forward = np.repeat(column, m, axis=1)
    times = StageTimes(
        forward=forward, backward=ratio * forward, transfer=still, gradient_transfer=still
    )
    whole = column[:, 0] * (1 + ratio)
    assert simulate(times).step_ns <= (m - 1) * whole.max() + whole.sum()
    assert simulate(times).step_ns >= m * whole.max() + whole[: whole.argmax()].sum()
    same = even_times(n, m, stages[0], ratio * stages[0])
    assert simulate(same).step_ns == (n + m - 1) * whole[0]


@settings(deadline=None)
@given(stage_times(), st.sampled_from(["deepspeed", "1f1b", "gpipe", "zero-bubble"]))
def test_events_respect_the_order_of_a_pipeline(times, schedule):
    step = simulate(times, schedule=schedule)
    at = {(e.kind, e.stage, e.micro_batch): e for e in step.events()}
    last = times.num_stages - 1
    for (kind, stage, m), event in at.items():
        if kind == Kind.FORWARD:
            assert event.end_ns - event.start_ns == times.forward[stage, m]
            if stage:
                sent = at[kind, stage - 1, m].end_ns + times.transfer[stage - 1, m]
                assert event.start_ns >= sent
        if kind == Kind.BACKWARD:
            assert event.start_ns >= at[Kind.FORWARD, stage, m].end_ns
            if stage < last:
                sent = at[kind, stage + 1, m].end_ns + times.gradient_transfer[stage, m]
                assert event.start_ns >= sent
        if kind == Kind.SEND_ACTIVATION:
            other = at[Kind.RECEIVE_ACTIVATION, stage + 1, m]
            assert (event.start_ns, event.end_ns) == (other.start_ns, other.end_ns)
    for device in range(times.num_stages):
        mine = [e for e in step.events() if e.device == device]
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(mine))


@settings(deadline=None)
@given(st.lists(stage_times(), min_size=1, max_size=1), st.integers(0, 50))
def test_bubbles_account_for_all_of_the_time(ranks, end_ns):
    step = simulate(ranks, end_s=end_ns / 1e9)
    bubbles = step.bubbles
    parts = (bubbles.work, bubbles.warm_up, bubbles.imbalance, bubbles.variation,
             bubbles.transfers, bubbles.ranks)  # fmt: skip
    if step.step_ns:
        assert sum(parts) == pytest.approx(1.0)
        busy = ranks[0].work_ns / ranks[0].num_stages + end_ns
        assert bubbles.work == pytest.approx(busy / step.step_ns)
        assert bubbles.transfers >= 0
        assert bubbles.ranks == pytest.approx(0)


def test_bubbles_name_their_cause():
    even = even_times(4, 8, 100, 200)
    assert simulate(even).bubbles.warm_up == pytest.approx(3 / 11)
    assert simulate(even).bubbles.total == pytest.approx(3 / 11)
    uneven = StageTimes.from_seconds([[1.0] * 8, [3.0] * 8], [[2.0] * 8, [6.0] * 8])
    assert simulate(uneven).bubbles.imbalance > 0.2
    assert simulate(uneven).bubbles.variation == pytest.approx(0)
    sizes = np.array([1.0, 9.0] * 8)
    various = StageTimes.from_seconds([sizes] * 2, [sizes] * 2)
    assert simulate(various).bubbles.variation > 0.2
    assert simulate(various).bubbles.imbalance == pytest.approx(0)
    slow_link = StageTimes.from_seconds([[1.0] * 8] * 2, [[1.0] * 8] * 2, 0.5)
    assert simulate(slow_link).bubbles.transfers > 0.1
    waiting = simulate([even, even.take([0, 1])]).bubbles
    assert waiting.ranks == pytest.approx((11 - 5) / 11 / 2)


def test_ranks_meet_at_the_end_of_the_step():
    short, long = even_times(2, 3, 10, 20), even_times(2, 5, 10, 20)
    step = simulate([short, long], end_s=7e-9)
    assert step.rank_ns.tolist() == [120, 180]
    assert step.step_ns == 187
    assert {event.rank for event in step.events()} == {0, 1}


@settings(deadline=None)
@given(stage_times())
def test_memory_holds_as_many_micro_batches_as_are_in_flight(times):
    n, m = times.forward.shape
    kept = np.random.default_rng(0).integers(1, 100, (n, m))
    for schedule, most in (("deepspeed", n), ("1f1b", n), ("gpipe", m)):
        step = simulate(times, schedule=schedule)
        counts = step.memory(np.ones((n, m)))
        curves = step.memory(kept, static=1000.0)
        for stage in range(n):
            expected = m if schedule == "gpipe" else min(most - stage, m)
            longest = max(counts[stage][1])
            assert longest <= expected
            if (times.forward > 0).all() and (times.backward > 0).all():
                assert longest == expected
            when, held = curves[stage]
            assert (np.diff(when) >= 0).all()
            assert held[0] == held[-1] == 1000
            assert held.max() <= 1000 + np.sort(kept[stage])[-expected:].sum()


def test_memory_of_chosen_micro_batches_is_exact():
    times = even_times(2, 3, 10, 20)
    when, held = simulate(times).memory([[5, 7, 11], [1, 2, 3]], static=[100, 200])[0]
    # forward 0 and 1 at once, then micro-batch 2 takes the place of 0
    assert when.tolist() == [0, 0, 10, 60, 60, 90, 120]
    assert held.tolist() == [100, 105, 112, 107, 118, 111, 100]
    # the last stage forms something anew in each backward pass
    when, held = simulate(times).memory([[5, 7, 11], [1, 2, 3]], static=[0, 200], working=50)[1]
    assert when.tolist() == [0, 10, 20, 40, 40, 40, 50, 70, 70, 70, 80, 100, 100]
    assert held.tolist() == [200, 201, 251, 201, 200, 202, 252, 202, 200, 203, 253, 203, 200]


def test_gpu_days_scale_with_steps_and_gpus():
    assert gpu_days(8.64, num_samples=1000, samples_per_step=10, num_gpus=4) == pytest.approx(0.04)
    with pytest.raises(ConfigError, match="samples_per_step must be finite and above 0, got 0"):
        gpu_days(1.0, num_samples=1, samples_per_step=0, num_gpus=1)


def test_wrong_sizes_are_refused():
    times = even_times(4, 6, 1, 1)
    with pytest.raises(ConfigError, match="schedule must be one of deepspeed, 1f1b"):
        simulate(times, schedule="magic")
    with pytest.raises(ConfigError, match="multiple of the devices: got 6 for 4"):
        simulate(times, schedule="interleaved")
    with pytest.raises(ConfigError, match="needs schedule='interleaved'"):
        simulate(times, chunks=2)
    with pytest.raises(ConfigError, match="multiple of the chunks a device: got 4 stages, 3"):
        simulate(times, chunks=3, schedule="interleaved")
    with pytest.raises(ConfigError, match="all ranks must have the same stages"):
        simulate([times, even_times(2, 6, 1, 1)])
    with pytest.raises(ConfigError, match="at least 1 of micro-batches, got 0"):
        train_instructions(2, 0, 0)
    with pytest.raises(ConfigError, match="stage must be one of 0 to 1, got 2"):
        inference_instructions(2, 1, 2)
    with pytest.raises(ConfigError, match=r"transfer must be int64 of shape \(1, 3\)"):
        StageTimes(
            forward=np.zeros((2, 3), np.int64),
            backward=np.zeros((2, 3), np.int64),
            transfer=np.zeros((2, 3), np.int64),
            gradient_transfer=np.zeros((1, 3), np.int64),
        )
    with pytest.raises(ConfigError, match="times must be finite"):
        StageTimes.from_seconds([[float("nan")]], [[1.0]])
    with pytest.raises(ConfigError, match="kept must have one entry a stage"):
        simulate(times).memory(np.ones((2, 2)))
