"""Small models that show what plain DeepSpeed gets wrong, and that omniload's adapter mends."""

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import clip_grad_norm_
from torch import nn

from omniload import ConfigError
from omniload.adapters.deepspeed import BalancedPipelineModule, prepare_engine

WIDTH = 4
#: rows of each micro-batch: three in a step, of different length
ROWS = (3, 7, 5)


class Layer(nn.Module):
    """(hidden, count, side): a float, an integer, another float; each layer uses all three."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        x, count, y = inputs
        return self.main(x) + y[: len(x)] * count.sum(), count, self.side(y)


class Unused(nn.Module):
    """(hidden, side): the side is a float that depends on nothing trained and that nobody uses."""

    def __init__(self):
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return self.main(inputs[0]), inputs[1].detach()


class Plain(nn.Module):
    """One float, one integer."""

    def __init__(self):
        super().__init__()
        self.main = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs):
        return self.main(inputs[0]), inputs[1]


class First(nn.Module):
    """Takes the hidden state alone."""

    def forward(self, inputs):
        return inputs[0]


def layers_of(kind, number):
    torch.manual_seed(1)
    return [*(kind() for _ in range(number)), First()]


def data(kind):
    """Endless micro-batches: (inputs, labels)."""
    generator = torch.Generator().manual_seed(2)
    while True:
        for rows in ROWS:
            x, y = torch.randn(2, rows, WIDTH, generator=generator)
            count = torch.ones(rows, dtype=torch.int64)
            inputs = {Layer: (x, count, torch.cat([y, y])), Unused: (x, y), Plain: (x, count)}
            yield inputs[kind], torch.randn(rows, WIDTH, generator=generator)


def loss_fn(output, labels):
    return (output - labels).square().sum()


def train_alone(kind, number, steps=2):
    layers = layers_of(kind, number)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches, losses = data(kind), []
    for _ in range(steps):
        total = 0.0
        for _ in ROWS:
            inputs, labels = next(batches)
            loss = loss_fn(model(inputs), labels) / len(ROWS)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(kind, parts, *, mended, tp=1, steps=2):
    layers = layers_of(kind, parts[-1] - 1)
    topology = PipeModelDataParallelTopology(num_pp=len(parts) - 1, num_mp=tp, num_dp=1)
    if mended:
        plan = {"parts": list(parts)}
        module = BalancedPipelineModule(layers, plan=plan, topology=topology, loss_fn=loss_fn)
    else:
        module = PipelineModule(
            layers,
            topology=topology,
            loss_fn=loss_fn,
            partition_method="uniform",
            dynamic_shape=True,
        )
        assert list(module.parts) == list(parts)
    return train_module(module, kind, mended=mended, steps=steps)


def train_module(module, kind, *, mended, steps):
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(ROWS),
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
        },
    )
    if mended:
        prepare_engine(engine)
    batches = data(kind)
    return [float(engine.train_batch(batches)) for _ in range(steps)]


def clip_norm(shards, folder):
    """The norm that DeepSpeed clips by, of gradients of one, without and with our marks."""
    module = BalancedPipelineModule(layers_of(Plain, 3), plan={"parts": [0, 1, 4]}, loss_fn=loss_fn)
    found = {}
    for name in ("marked", "plain"):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
            if name == "plain":
                parameter.model_parallel = False
        found[name] = float(clip_grad_norm_(module.parameters(), 1.0, mpu=module.mpu()))
    return found | {"squared": 3 * (WIDTH * WIDTH + WIDTH)}


def frozen_refused(shards, folder):
    """Plain DeepSpeed has no optimizer for a stage without a trained parameter."""
    layers = layers_of(Plain, 3)
    for layer in layers:
        layer.requires_grad_(False)
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    optimizer = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}
    try:
        deepspeed.initialize(
            model=module,
            model_parameters=[],
            config={"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer},
        )
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


def tied(shards, folder):
    """One weight on the first and the last stage."""
    torch.manual_seed(1)
    plan = {"parts": [0, 1, 3], "recompute": [0, 1, 1]}
    middle = nn.Linear(WIDTH, WIDTH)
    partly = TiedLayerSpec("main", nn.Linear, WIDTH, WIDTH)
    try:
        BalancedPipelineModule([partly, middle, partly], plan=plan, loss_fn=loss_fn)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    spec = TiedLayerSpec("main", nn.Linear, WIDTH, WIDTH, tied_weight_attr=["weight", "bias"])
    module = BalancedPipelineModule([spec, middle, spec], plan=plan, loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.01),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": len(ROWS),
                "gradient_clipping": 0.0, "steps_per_print": 10**9},
    )  # fmt: skip
    prepare_engine(engine)
    batches = ((inputs[0], labels) for inputs, labels in data(Plain))
    start = {name: value.clone() for name, value in module.tied_modules.state_dict().items()}
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    return {
        "refused": refused,
        "losses": losses,
        "tied": start,
        "middle": middle.state_dict(),
        "after": module.tied_modules.state_dict(),
    }


def specs(shards, folder):
    """Layers made on their stage alone, seeded by number: the same under any bounds."""
    losses = []
    for parts in ((0, 1, 4), (0, 3, 4)):
        module = BalancedPipelineModule(
            [*(LayerSpec(Plain) for _ in range(3)), LayerSpec(First)],
            plan={"parts": list(parts), "recompute": [1, 0, 1, 0]},
            loss_fn=loss_fn,
            seed_layers=True,
        )
        losses.append(train_module(module, Plain, mended=True, steps=2))
    return {"losses": losses}


SMALL_PROGRAMS = {
    "specs": specs,
    "clip_norm": clip_norm,
    "frozen_refused": frozen_refused,
    "tied": tied,
    "unused_float": lambda shards, folder: {"losses": train(Unused, (0, 2, 4), mended=True)},
    "mixed_tuple": lambda shards, folder: {"losses": train(Layer, (0, 2, 4, 6), mended=True)},
    "partitioned": lambda shards, folder: {"losses": train(Plain, (0, 2, 4), mended=True, tp=2)},
}
CRASHES = {
    "crash_unused_float": lambda: train(Unused, (0, 2, 4), mended=False),
    "crash_mixed_tuple": lambda: train(Layer, (0, 2, 4, 6), mended=False),
    "crash_partitioned": lambda: train(Plain, (0, 2, 4), mended=False, tp=2),
}
