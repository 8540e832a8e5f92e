"""What DeepSpeed's pipeline engine needs for micro-batches of changing shape, done to one engine.

Nothing of DeepSpeed's classes is changed: the engine gets instructions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine

from omniload.adapters.deepspeed.module import BalancedPipelineModule
from omniload.errors import ConfigError

__all__ = ["prepare_engine", "stop_timer"]

Instruction: TypeAlias = Callable[..., Any]

#: What the engine remembers of the shapes of the first micro-batch, with tensor parallelism.
_REMEMBERED = (
    "meta_buffer",
    "pipe_partition_input_meta_cache",
    "pipe_partition_output_meta_cache",
    "pipe_partition_grad_meta_cache",
    "grad_partition_grad_layer_meta_cache",
)


def prepare_engine(engine: Any) -> None:
    """Make a pipeline engine fit for packed micro-batches; `pipeline_batches` calls it.

    Call it on all ranks: they tell each other which stages train nothing. Calling it again does no
    harm. What it mends in DeepSpeed, each held by a test that fails once DeepSpeed has mended it:

    - Buffers for received tensors are shared by activations and gradients, whatever their types.
    - With tensor parallelism, shapes of the first micro-batch are taken for those of all others.
    - A float tensor of the activations that has no gradient, or gets none, ends the backward pass.

    Args:
        engine: what `deepspeed.initialize` returned for a `BalancedPipelineModule`.

    Raises:
        ConfigError: another engine or module.
    """
    if not isinstance(engine, PipelineEngine) or not isinstance(
        engine.module, BalancedPipelineModule
    ):
        module = getattr(engine, "module", engine)
        raise ConfigError(
            "engine must be what deepspeed.initialize returned for a BalancedPipelineModule, got "
            f"{type(engine).__name__} of {type(module).__name__}."
        )
    module = engine.module
    facts: list[Any] = [None] * module.world_size
    torch.distributed.all_gather_object(facts, (engine.stage_id, module.is_trained))
    module.inputs_are_frozen = not any(
        trained for stage, trained in facts if stage < engine.stage_id
    )
    if "_INSTRUCTION_MAP" not in vars(engine):
        engine._INSTRUCTION_MAP = _mended(engine._INSTRUCTION_MAP)


def stop_timer(engine: Any) -> None:
    """Stop the timer of a step that ended before it began."""
    timer = engine.timers(TRAIN_BATCH_TIMER)
    if getattr(timer, "started_", False):
        timer.stop()


def _mended(instructions: Mapping[type, Instruction]) -> dict[type, Instruction]:
    pools: dict[type, list[Any]] = {schedule.RecvActivation: [], schedule.RecvGrad: []}
    before: dict[type, Instruction] = {
        schedule.BackwardPass: _give_graph_to_outputs,
        schedule.SendGrad: _give_gradient_to_inputs,
    }

    def mend(kind: type, instruction: Instruction) -> Instruction:
        prepare = before.get(kind)

        def run(engine: Any, **arguments: Any) -> Any:
            for name in _REMEMBERED:
                setattr(engine, name, None)
            if kind in pools:
                engine._grad_layer_buf = pools[kind]
            if prepare is not None:
                prepare(engine, **arguments)
            return instruction(engine, **arguments)

        return run

    return {kind: mend(kind, instruction) for kind, instruction in instructions.items()}


def _give_graph_to_outputs(engine: Any, buffer_id: int) -> None:
    """Let the backward pass begin at outputs that depend on nothing trained, and do nothing."""
    if engine.is_last_stage():
        return
    whole = engine.pipe_buffers["output_tensors"]
    if engine.is_pipe_partitioned:
        whole[buffer_id] = _with_graph(whole[buffer_id])
        return
    outputs = engine.pipe_buffers["outputs"]
    given = outputs[buffer_id]
    outputs[buffer_id] = (
        _with_graph(given)
        if isinstance(given, torch.Tensor)
        else tuple(_with_graph(tensor) for tensor in given)
    )


def _with_graph(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.requires_grad or not tensor.is_floating_point():
        return tensor
    return tensor.detach().requires_grad_()


def _give_gradient_to_inputs(engine: Any, buffer_id: int) -> None:
    """Send zeros for inputs that had no influence; the stage before waits for a gradient."""
    inputs = engine.pipe_buffers["inputs"][buffer_id]
    for tensor in (inputs,) if isinstance(inputs, torch.Tensor) else inputs:
        if tensor.is_floating_point() and tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
