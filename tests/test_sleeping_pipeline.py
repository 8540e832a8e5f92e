"""The harness with layers that sleep: the engine takes the time that its instructions must take."""

import pytest

pytest.importorskip("deepspeed")
from tests.sleeping_pipeline import measure


@pytest.mark.slow
def test_a_slow_stage_and_a_slow_micro_batch_are_seen_in_the_step():
    # no time is asserted but the bound that no schedule can beat, and an order with a wide margin
    even = ([[20, 20, 20, 20]] * 2, [[40, 40, 40, 40]] * 2)
    uneven = ([[20, 20, 20, 20], [80, 80, 80, 80]], [[40, 40, 40, 40], [160, 160, 160, 160]])
    fast, slow = min(measure(*even, steps=2)), min(measure(*uneven, steps=2))
    assert fast >= 4 * 0.060 + 0.060
    assert slow >= 4 * 0.240 + 0.060
    assert slow > 2 * fast
