"""Recompute by layer in plain torch: nothing, all, or a part of a layer, always non-reentrant.

Activation checkpointing by another name: what a layer made in its forward pass is dropped and made
anew in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from omniload.errors import ConfigError

__all__ = ["PARTS", "Choice", "LayerRunner", "Selective", "apply_recompute"]

#: 0: nothing is recomputed; 1: the whole layer; a name: what `Selective` says of it.
Choice: TypeAlias = int | str
#: Name -> submodules that are recomputed, or a policy of torch's selective checkpointing.
Selective: TypeAlias = Mapping[str, Sequence[str] | Callable[..., Any]]

#: The names that plans use, and what the submodules are called in common models.
PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention", "attn", "self_attn", "self_attention"),
    "mlp": ("mlp", "ffn", "feed_forward"),
}


class LayerRunner:
    """Runs a layer so that it recomputes what is asked for at each call.

    Args:
        layer: a module or a function.
        selective: names beside "attention" and "mlp", or in place of them. A sequence names
            submodules, by their path in the layer; those that are there are recomputed. A callable
            is a policy `(ctx, op, *args, **kwargs) -> CheckpointPolicy` of
            `torch.utils.checkpoint.create_selective_checkpoint_contexts`.
        name: of the layer, for messages.
    """

    def __init__(
        self, layer: Callable[[Any], Any], *, selective: Selective | None = None, name: str = ""
    ) -> None:
        self._layer = layer
        self._selective: Selective = {**PARTS, **(selective or {})}
        self._name = name or type(layer).__name__
        self._switches: dict[str, list[_Switch]] = {}

    def check(self, choice: Choice) -> None:
        """Check that the layer can recompute this.

        Raises:
            ConfigError: an unknown name, or a layer without such a submodule.
        """
        if choice in (0, 1):
            return
        if not isinstance(choice, str) or choice not in self._selective:
            raise ConfigError(
                f"recompute of {self._name} must be 0, 1 or one of "
                f"{', '.join(map(repr, sorted(self._selective)))}, got {choice!r}. Name your own "
                "with selective={name: submodules or policy}."
            )
        if not callable(self._selective[choice]):
            self._parts(choice)

    def __call__(self, inputs: Any, choice: Choice) -> Any:
        """Run the layer."""
        if choice == 0 or not torch.is_grad_enabled():
            return self._layer(inputs)
        if isinstance(choice, int):
            return checkpoint(self._layer, inputs, use_reentrant=False)
        self.check(choice)
        policy = self._selective[choice]
        if callable(policy):
            contexts = partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self._layer, inputs, use_reentrant=False, context_fn=contexts)
        switches = self._parts(choice)
        for switch in switches:
            switch.on = True
        try:
            return self._layer(inputs)
        finally:
            for switch in switches:
                switch.on = False

    def _parts(self, choice: str) -> list[_Switch]:
        """Find the submodules of a part, and make them recompute when they are told to."""
        if choice not in self._switches:
            paths = self._selective[choice]
            assert not callable(paths)  # told apart by the callers
            layer: Any = self._layer
            children = dict(layer.named_modules()) if isinstance(layer, nn.Module) else {}
            found = [children[path] for path in paths if path in children]
            if not found:
                raise ConfigError(
                    f"recompute={choice!r} needs a submodule of {self._name} named one of "
                    f"{', '.join(paths)}, got {', '.join(filter(None, children)) or 'none'}. Use "
                    f"1, or name it with selective={{{choice!r}: (path,)}}."
                )
            self._switches[choice] = [_Switch.of(module) for module in found]
        return self._switches[choice]


def apply_recompute(
    model: nn.Module, policy: Mapping[str, Choice], *, selective: Selective | None = None
) -> None:
    """Make modules of a model recompute, in place: for training without a pipeline.

    Names and weights of the model stay as they are; only `forward` of the named modules changes.

    Args:
        model: any module.
        policy: path of a module in the model -> 0, 1 or a name, for example
            {"vision.blocks.0": 1, "blocks.3": "mlp"}.
        selective: see `LayerRunner`.

    Raises:
        ConfigError: a path that is not there, or a choice that its module can't do.
    """
    modules = dict(model.named_modules())
    for path, choice in policy.items():
        if path not in modules:
            raise ConfigError(
                f"policy must name modules of {type(model).__name__}: got {path!r}, which is not "
                "among its named_modules()."
            )
        runner = LayerRunner(modules[path], selective=selective, name=path)
        runner.check(choice)
        if choice == 0:
            continue
        if isinstance(choice, str) and not callable(runner._selective[choice]):
            for switch in runner._parts(choice):
                switch.on = True
            continue
        wanted = None if isinstance(choice, int) else runner._selective[choice]
        _Switch.of(modules[path], policy=wanted).on = True


class _Switch:
    """The forward of a module, which recomputes itself while the switch is on."""

    def __init__(self, module: nn.Module, policy: Any) -> None:
        self._forward = module.forward
        self._options: dict[str, Any] = {}
        if policy is not None:
            self._options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
        self.on = False

    @classmethod
    def of(cls, module: nn.Module, policy: Any = None) -> _Switch:
        present = vars(module).get("forward")
        if isinstance(present, cls):
            return present
        switch = cls(module, policy)
        vars(module)["forward"] = switch
        return switch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.on or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **self._options, **kwargs)
