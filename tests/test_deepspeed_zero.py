"""ZeRO 1, 2 and 3 in two real processes, fed from our loader, saved and resumed."""

import pytest
import torch

from omniload import World
from tests.deepspeed_launch import launch
from tests.deepspeed_parts import make_loader, make_optimizer, write_rows

pytest.importorskip("deepspeed")
zero = pytest.importorskip("tests.deepspeed_zero")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("data") / "shards")


@pytest.fixture(scope="module")
def results(shards, tmp_path_factory):
    return launch(tmp_path_factory.mktemp("zero") / "out", shards, 2, "zero")[0]


def train_alone(shards, steps):
    model = zero.make_model(shards)
    optimizer = make_optimizer(model.parameters())
    loaders = [
        iter(make_loader(shards, world=World(dp_rank=rank, dp_world_size=2), accumulation=2))
        for rank in range(2)
    ]
    losses = []
    for _ in range(steps):
        total = 0.0
        for _ in range(2):
            for loader in loaders:
                batch = next(loader)
                loss = model(**batch.model_inputs()).loss / batch.num_loss_tokens_step
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_one_process_does(results, shards, stage):
    torch.set_num_threads(1)
    reference = train_alone(shards, 3)
    for seen in results:
        assert seen["zero"][f"{stage}-False"]["losses"] == pytest.approx(reference, abs=1e-5)
        # bfloat16 keeps 8 bits
        assert seen["zero"][f"{stage}-True"]["losses"] == pytest.approx(reference, rel=2e-2)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_goes_on_exactly_after_a_saved_state(results, stage, bf16):
    for seen in results:
        found = seen["zero"][f"{stage}-{bf16}"]
        assert found["resumed"] == found["losses"][2:]
        assert found["note"] == stage
        assert (found["state"]["epoch"], found["state"]["step"]) == (0, 3)
