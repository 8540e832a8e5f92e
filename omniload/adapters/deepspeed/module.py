"""A DeepSpeed pipeline with planned bounds, planned recompute and shapes that change."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import set_random_seed
from torch import nn

from omniload.adapters.deepspeed.frozen import anchor_output, detach_floats
from omniload.adapters.deepspeed.losses import token_loss
from omniload.adapters.deepspeed.plans import read_plan
from omniload.adapters.recompute import Choice, LayerRunner, Selective
from omniload.errors import ConfigError
from omniload.pipeline.plan import PipelinePlan
from omniload.world import World

__all__ = ["BalancedPipelineModule"]

_log = logging.getLogger(__name__)


class BalancedPipelineModule(PipelineModule):  # type: ignore[misc]
    """A `deepspeed.PipelineModule` that follows a plan; train it with `pipeline_batches`.

    The plan gives the bounds of the stages and what each layer recomputes. Recompute is always
    non-reentrant and needs no setting of DeepSpeed. Shapes are sent with every micro-batch, so each
    may have another length.

    A layer takes what the layer before it returned: a tensor or a tuple of tensors. What a later
    layer needs beside the hidden state (cu_seqlens, position ids, image places) goes along in that
    tuple: floats first, integers last, at every micro-batch in the same order and types.

    Frozen layers (`requires_grad` False before this is made) are paid for as little as DeepSpeed
    allows: a stage whose layers, and all before it, are frozen runs no backward pass. A stage of
    frozen layers alone gets a parameter of one element, `anchor`, because DeepSpeed's optimizers
    refuse a rank without one; it stays 0.

    Weights are saved by layer, so `load_checkpoint(load_module_only=True)` takes them up under any
    other plan. The state of the optimizer is saved by stage and fits the same plan only.

    Args:
        layers: modules, `LayerSpec`, `TiedLayerSpec` or functions, as for DeepSpeed.
        plan: a `PipelinePlan`, a mapping with its fields, or the path of its JSON file.
        loss_fn: `loss_fn(output of the last layer, labels)`; None: that output is the loss.
        num_stages: None: as many as the plan has.
        topology: axes of parallelism, with "pipe" and "data"; None: pipe and data.
        selective: names that the plan uses for recomputing a part; see `LayerRunner`.
        recompute_by_batch: called with the first input of this stage at each micro-batch; returns
            choices for all layers as in the plan, for example fewer where the row is short, or None
            for those of the plan.
        seed_layers: seed the generators before a layer is made and run, as DeepSpeed does; then
            weights don't depend on the bounds.
        seed_fn: what to seed with; None: DeepSpeed's own.
        base_seed: the first seed.

    Raises:
        ConfigError: a plan for other layers or another number of stages; a selective choice that a
            layer can't do; a tied layer with parameters that DeepSpeed would not keep equal; no
            stage with a parameter that is trained.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        *,
        plan: PipelinePlan | Mapping[str, Any] | str | os.PathLike[str],
        loss_fn: Callable[..., torch.Tensor] | None = token_loss,
        num_stages: int | None = None,
        topology: Any = None,
        selective: Selective | None = None,
        recompute_by_batch: Callable[[Any], Sequence[Choice] | None] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], None] | None = None,
        base_seed: int = 1234,
    ) -> None:
        specs = list(layers)
        # attributes are set before nn.Module is: bounds are asked for inside its constructor
        self._plan = read_plan(plan)
        _check_plan(self._plan, specs, num_stages, topology)
        super().__init__(
            layers=specs,
            num_stages=None if topology is not None else self._plan.num_stages,
            topology=topology,
            loss_fn=loss_fn,
            seed_layers=seed_layers,
            seed_fn=seed_fn,
            base_seed=base_seed,
            dynamic_shape=True,
        )
        self._recompute_by_batch = recompute_by_batch
        self._runners = [
            LayerRunner(layer, selective=selective, name=f"layer {index} ({_name(layer)})")
            for index, layer in enumerate(self.forward_funcs, start=self._local_start)
        ]
        for runner, choice in zip(self._runners, self._local(self._plan.recompute), strict=True):
            runner.check(choice)
        _check_tied(self.tied_comms)
        #: whether no stage before this one trains anything; `prepare_engine` finds out
        self.inputs_are_frozen = False
        self.anchor: nn.Parameter | None = None
        _check_trained(self.is_trained, self.world_size)
        if not self.is_trained:
            device = next(self.parameters(), torch.empty(0)).device
            # one element, and not none: DeepSpeed can't broadcast a scalar on a CPU
            self.anchor = nn.Parameter(torch.zeros(1, device=device))
        self._mark_parameters()

    @property
    def plan(self) -> PipelinePlan:
        """The plan that it follows."""
        return self._plan

    @property
    def world(self) -> World:
        """Who this process is: give it to `omniload.DataLoader(world=)`.

        The ranks of one pipeline, and of one tensor-parallel group, read the same batches.
        """
        grid = self._grid
        size = grid.data_parallel_size
        return World(
            dp_rank=grid.data_parallel_id,
            dp_world_size=size,
            rank=self.global_rank,
            world_size=self.world_size,
            local_rank=self.local_rank,
            node_rank=World.from_env().node_rank,
            replica_rank=grid.get_model_parallel_rank(),
            replica_size=self.world_size // size,
        )

    @property
    def is_trained(self) -> bool:
        """Whether a layer of this stage has a parameter that requires a gradient."""
        anchor = vars(self).get("_parameters", {}).get("anchor")
        return any(p.requires_grad for p in self.parameters() if p is not anchor)

    def forward(self, forward_input: Any) -> Any:
        """Run the layers of this stage."""
        self.micro_offset += 1
        seed = self.base_seed * (self.micro_offset + 1)
        x = forward_input
        if self.inputs_are_frozen:
            x = detach_floats(x)
        chosen = self._recompute_by_batch(x) if self._recompute_by_batch is not None else None
        choices = self._plan.recompute if chosen is None else chosen
        if len(choices) != len(self._plan.recompute):
            raise ConfigError(
                "recompute_by_batch must return one choice for each layer of the model: expected "
                f"{len(self._plan.recompute)}, got {len(choices)}."
            )
        for index, (runner, choice) in enumerate(
            zip(self._runners, self._local(choices), strict=True), start=self._local_start
        ):
            self.curr_layer = index
            if self.seed_layers:
                (self.seed_fn or set_random_seed)(seed + index)
            x = runner(x, choice)
        x = _contiguous(x)
        return x if self.anchor is None else anchor_output(x, self.anchor)

    def _partition_layers(self, method: str = "plan") -> None:
        """Set the bounds of this stage; called by DeepSpeed's constructor."""
        self.parts = list(self._plan.parts)
        stage = self._topo.get_coord(self.global_rank).pipe
        if self.global_rank == 0:
            _log.info("pipeline stages by plan: bounds %s", self.parts)
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    def _precompute_checkpointable_values(self) -> None:
        """Refuse DeepSpeed's own recompute; called by its engine and `set_checkpoint_interval`."""
        if self.activation_checkpoint_interval > 0:
            raise ConfigError(
                "activation_checkpoint_interval must be 0, because the plan says what is "
                f"recomputed: got {self.activation_checkpoint_interval}. Remove it from the "
                "DeepSpeed config, and set recompute in the plan."
            )

    def _local(self, values: Sequence[Choice]) -> Sequence[Choice]:
        return values[self._local_start : self._local_stop]

    def _mark_parameters(self) -> None:
        # Without the mark the gradient norm of fp32 training is that of stage 0 alone, so that
        # clipping would depend on the bounds.
        counts = self._grid.get_slice_parallel_rank() == 0
        for parameter in self.parameters():
            if not hasattr(parameter, "ds_pipe_replicated"):
                parameter.ds_pipe_replicated = False
            if counts and not parameter.ds_pipe_replicated:
                parameter.model_parallel = True


def _check_plan(
    plan: PipelinePlan, layers: Sequence[Any], num_stages: int | None, topology: Any
) -> None:
    if len(layers) != plan.num_layers:
        raise ConfigError(
            f"the plan must cover all layers of the model: expected {len(layers)}, got "
            f"{plan.num_layers} (parts={list(plan.parts)}). Plan again for these layers."
        )
    wanted = num_stages if topology is None else topology.get_dim("pipe")
    if wanted is not None and wanted != plan.num_stages:
        raise ConfigError(
            f"the plan must have as many stages as the pipeline: expected {wanted}, got "
            f"{plan.num_stages} (parts={list(plan.parts)}). Plan again, or change num_stages."
        )
    if not torch.distributed.is_initialized():
        raise ConfigError(
            "a pipeline needs torch.distributed: start the program with torchrun or deepspeed, and "
            "call deepspeed.init_distributed() before this."
        )
    size = torch.distributed.get_world_size()
    if topology is None and size % plan.num_stages:
        raise ConfigError(
            f"the number of processes must be a multiple of the {plan.num_stages} stages of the "
            f"plan, got {size}."
        )


def _check_trained(is_trained: bool, num_ranks: int) -> None:
    """Check that some stage trains something; a collective."""
    found: list[Any] = [None] * num_ranks
    torch.distributed.all_gather_object(found, is_trained)
    if not any(found):
        raise ConfigError(
            "a layer of some stage must have a parameter to train, but requires_grad is False for "
            "all of them. Freeze fewer layers."
        )


def _check_tied(tied: Mapping[str, Any]) -> None:
    """Check that DeepSpeed keeps all parameters of tied layers equal, not their `weight` alone."""
    for key, shared in tied.items():
        named = shared["weight_attr"]
        loose = [
            name
            for name, parameter in shared["module"].named_parameters()
            if parameter.requires_grad and name not in named
        ]
        if loose and len(shared["ranks"]) > 1:
            raise ConfigError(
                f"tied layers on several stages must name all their parameters: {key!r} has "
                f"{loose} beside {list(named)}, and each stage would train its own. Set "
                f"TiedLayerSpec(tied_weight_attr={[*named, *loose]}), or freeze them."
            )


def _contiguous(output: Any) -> Any:
    """Lay tensors out as they are sent to the next stage: transposed ones can't be."""
    if isinstance(output, torch.Tensor):
        return output.contiguous()
    if isinstance(output, tuple):
        return tuple(tensor.contiguous() for tensor in output)
    return output  # of a last layer that gives something of its own


def _name(layer: Any) -> str:
    if isinstance(layer, partial):  # a tied layer with a forward of its own
        return _name(layer.args[0]) if layer.args else _name(layer.func)
    if isinstance(layer, (LayerSpec, TiedLayerSpec)):
        return str(layer.typename.__name__)
    return str(getattr(layer, "__name__", type(layer).__name__))
