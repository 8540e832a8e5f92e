"""Recompute by layer in plain torch: same gradients, fewer kept bytes, no more than asked."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from omniload import ConfigError
from omniload.adapters.recompute import LayerRunner, apply_recompute


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.attn = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(0.3)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.drop(self.mlp(x))


def keep_products(ctx, op, *args, **kwargs):
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = {"products": keep_products, "both": ("attn", "mlp")}
CHOICES = (0, 1, "attention", "mlp", "products", "both")


def run(block, forward):
    """Gradients, and the bytes that the graph kept beside weights."""
    weights = {weight.data_ptr() for weight in block.parameters()}
    kept = {}

    def keep(tensor):
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    torch.manual_seed(1)
    x = torch.randn(16, 8, requires_grad=True)
    block.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward(x)
    held = sum(kept.values())
    output.square().sum().backward()
    return [x.grad, *(weight.grad.clone() for weight in block.parameters())], held


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_are_those_without_recompute(block, choice):
    expected, _ = run(block, block)
    runner = LayerRunner(block, selective=SELECTIVE)
    found, _ = run(block, lambda x: runner(x, choice))
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)


def test_a_choice_holds_for_one_call_only(block):
    runner = LayerRunner(block, selective=SELECTIVE)
    before = run(block, lambda x: runner(x, 0))[1]
    held = {choice: run(block, lambda x, c=choice: runner(x, c))[1] for choice in CHOICES}
    assert held[0] == before
    assert held["attention"] < before
    assert held["mlp"] < held["attention"]
    assert run(block, block)[1] == before


def test_the_recomputed_part_runs_twice_and_nothing_else(block):
    runs = {"attn": 0, "mlp": 0}
    for name in runs:

        def count(*_, name=name):
            runs[name] += 1

        getattr(block, name)[0].register_forward_pre_hook(count)
    runner = LayerRunner(block)
    run(block, lambda x: runner(x, "mlp"))
    assert runs == {"attn": 1, "mlp": 2}


def test_nothing_is_recomputed_without_gradients(block):
    runner = LayerRunner(block.eval())
    with torch.no_grad():
        x = torch.randn(2, 8)
        assert torch.equal(runner(x, 1), block(x))


def test_functions_are_recomputed_whole_or_not():
    runner = LayerRunner(torch.sin, name="layer 3")
    x = torch.ones(2, requires_grad=True)
    runner(x, 1).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2).cos())
    with pytest.raises(ConfigError, match="needs a submodule of layer 3 named one of mlp, ffn"):
        runner.check("mlp")


def test_an_unknown_choice_is_refused(block):
    with pytest.raises(ConfigError, match=r"recompute of Block must be 0, 1 or one of 'attention'"):
        LayerRunner(block).check("half")
    with pytest.raises(ConfigError, match="got 2"):
        LayerRunner(block).check(2)


@pytest.mark.parametrize("choice", CHOICES)
def test_a_policy_by_module_name_is_applied_to_a_model(choice):
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    names = list(model.state_dict())
    expected, before = run(model, model)
    apply_recompute(model, {"1": choice}, selective=SELECTIVE)
    found, held = run(model, model)
    for left, right in zip(expected, found, strict=True):
        assert torch.equal(left, right)
    assert held == before if choice == 0 else held < before
    assert list(model.state_dict()) == names


def test_a_policy_for_a_module_that_is_not_there_is_refused():
    model = nn.Sequential(Block())
    with pytest.raises(ConfigError, match=r"must name modules of Sequential: got 'blocks.7'"):
        apply_recompute(model, {"blocks.7": 1})
    with pytest.raises(ConfigError, match="of 0 must be 0, 1 or one of"):
        apply_recompute(model, {"0": "everything"})
