"""Whether a Hugging Face model keeps packed samples apart, judged by its config and its code."""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from omniload.errors import ConfigError

__all__ = ["PackReport", "decoder_of", "has_mrope", "pack_for"]

_log = logging.getLogger(__name__)

#: Layers that a reset of the positions, or cu_seqlens, keeps inside of a sample.
_SAFE_LAYERS = ("full_attention", "sliding_attention", "attention")
_CARRIES_OVER = re.compile(
    r"linear_?att|mamba|(?-i:SSM)|conv|recurrent|rglru|rwkv|retention|deltanet|lightning|lstm"
    r"|hyena|hybrid",
    re.IGNORECASE,
)
#: Attention of transformers that masks by position_ids, where it is not flash attention.
_MASKED = ("sdpa", "eager", "flex_attention")
_TRY = "Try it with omniload.check_isolation(model, batch)"


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What `pack_for` found.

    Args:
        safe: packed samples don't see each other, if the model is called as `backend` says.
        backend: "transformers": call it with `batch.model_inputs()`, or with
            `batch.attention("transformers")`; with position_rows=4 not so, but as said there.
            "padded": with `batch.padded()`, one row a sample.
        position_rows: rows of position_ids that the model reads samples from. 1; or 4 with M-RoPE,
            which `QwenTransform.model_inputs(batch)` and `mrope_position_ids=` of
            `batch.attention` give. `batch.model_inputs()` has one row, and would mix samples.
        reason: why, in a sentence or two.
    """

    safe: bool
    backend: str
    position_rows: int
    reason: str


def pack_for(model: Any) -> PackReport:
    """Say how a Hugging Face model must be called for packed samples not to see each other.

    It reads config, classes and source; nothing is run, and transformers is not imported. What it
    doesn't know it calls unsafe. A warning is logged where packing would mix samples.

    Args:
        model: a model of transformers, also wrapped by torch.compile, DistributedDataParallel,
            FSDP, DeepSpeed or PEFT.

    Returns:
        The report.

    Raises:
        ConfigError: not a torch module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    model = _unwrapped(model)
    decoder = decoder_of(model)
    config = getattr(decoder, "config", None)
    found = "it has no config to judge by." if config is None else _obstacle(model, decoder, config)
    if found is not None:
        report = PackReport(
            safe=False,
            backend="padded",
            position_rows=1,
            reason=f"{_own_class(model).__name__} may mix packed samples: {found} {_TRY}, or use "
            "batch.padded().",
        )
        _log.warning("%s", report.reason)
        return report
    rows = 4 if has_mrope(decoder) else 1
    return PackReport(
        safe=True, backend="transformers", position_rows=rows, reason=_how(config, rows)
    )


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Take off torch.compile, DistributedDataParallel, FSDP, DeepSpeed and PEFT, in any order."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if not isinstance(inner, torch.nn.Module):
            inner = getattr(model, "module", None)
        if not isinstance(inner, torch.nn.Module):
            get_base = getattr(model, "get_base_model", None)
            inner = get_base() if callable(get_base) else None
        if not isinstance(inner, torch.nn.Module) or inner is model:
            return model
        model = inner


def decoder_of(model: torch.nn.Module) -> torch.nn.Module:
    """Find the language model, without vision or audio towers."""
    model = _unwrapped(model)
    get = getattr(model, "get_decoder", None)
    try:
        found = get() if callable(get) else None
    except (AttributeError, NotImplementedError, ValueError):
        found = None
    if getattr(found, "config", None) is None:  # `decoder` is the name of the head in a few models
        found = getattr(model, "base_model", None)
    return _unwrapped(found) if isinstance(found, torch.nn.Module) else model


def _own_class(module: torch.nn.Module) -> type:
    """Return the class that a model was written as: fully_shard puts one of torch before it."""
    classes = type(module).__mro__
    is_shard = any(c.__module__.startswith("torch.distributed") for c in classes)
    written = (c for c in classes if c.__module__.startswith("transformers."))
    return next(written, classes[0]) if is_shard else classes[0]


def _obstacle(model: torch.nn.Module, decoder: torch.nn.Module, config: Any) -> str | None:
    """Name what may mix samples; None if nothing does."""
    configs = (config, getattr(model, "config", None))
    if any(getattr(one, "is_encoder_decoder", False) for one in configs):
        return "it is an encoder-decoder, whose cross attention knows no samples."
    both_ways = getattr(config, "use_bidirectional_attention", None) == "all"
    if both_ways or getattr(config, "is_causal", True) is False:
        return "its attention is not causal, and masks of that kind don't heed position_ids."
    layer = next(_carrying_layers(decoder, config), None)
    if layer is not None:
        return (
            f"'{layer}' carries state from token to token, and position_ids don't stop it. Some "
            "such models keep samples apart where causal-conv1d and flash-linear-attention or "
            "mamba-ssm are installed, given cu_seq_lens_q and seq_idx "
            "(batch.attention('transformers', seq_idx=True))."
        )
    if any("crossattention" in type(part).__name__.lower() for part in decoder.modules()):
        return "its cross attention sees the images of all samples of the row."
    types = getattr(config, "layer_types", None) or ()
    unknown = sorted({str(kind) for kind in types} - set(_SAFE_LAYERS))
    if unknown or getattr(config, "attention_chunk_size", None):
        named = ", ".join(unknown) or "chunked_attention"
        return f"its layers ({named}) see other tokens in a packed row than in a row of their own."
    parts = (model, decoder)
    if any("position_ids" not in inspect.signature(part.forward).parameters for part in parts):
        return "it takes no position_ids, from which samples could be told."
    has_images = getattr(getattr(model, "config", None), "vision_config", None) is not None
    kinds = {"token_type_ids", "mm_token_type_ids"} & set(
        inspect.signature(model.forward).parameters
    )
    if has_images and kinds and not has_mrope(decoder):
        return f"its images see themselves both ways, by a mask made of {kinds.pop()}."
    return _attention_obstacle(decoder, config)


def _carrying_layers(decoder: torch.nn.Module, config: Any) -> Iterator[str]:
    for kind in getattr(config, "layer_types", None) or ():
        if _CARRIES_OVER.search(str(kind)):
            yield str(kind)
    for module in decoder.modules():
        name = type(module).__name__
        is_stateful = isinstance(module, (torch.nn.Conv1d, torch.nn.RNNBase))
        # the Conv1D of transformers is a linear layer
        if is_stateful or (name != "Conv1D" and _CARRIES_OVER.search(name)):
            yield name


def _attention_obstacle(decoder: torch.nn.Module, config: Any) -> str | None:
    implementation = str(getattr(config, "_attn_implementation", None))
    own_class = _own_class(decoder)
    home = own_class.__module__
    if not home.startswith("transformers."):
        return f"its code ({home}) is not part of transformers."
    if "flash" in implementation:
        own = next((n for n in _class_names(decoder) if n.endswith("FlashAttention2")), None)
        return own and f"{own} calls flash attention by itself, maybe without telling it samples."
    if implementation not in _MASKED:
        return f"its attention implementation is {implementation!r}."
    masking = sys.modules.get("transformers.masking_utils")
    finds_samples = hasattr(masking, "find_packed_sequence_indices")
    if not finds_samples or not _masks_by_position(own_class):
        return (
            f"with attn_implementation={implementation!r} it doesn't make its mask from "
            "position_ids. Load it with attn_implementation='flash_attention_2'."
        )
    return None


def _masks_by_position(decoder: type) -> bool:
    """Say if the forward gives position_ids to the mask functions of transformers.

    Some models don't, and then nothing in their masks tells one sample from the next.
    """
    try:
        source = inspect.getsource(inspect.unwrap(decoder.forward))  # type: ignore[attr-defined]
        tree = ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return False
    nodes = list(ast.walk(tree))
    given = [
        any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.keys)
        for node in nodes
        if isinstance(node, ast.Dict)
    ]
    functions = {node.id for node in nodes if isinstance(node, ast.Name) and _makes_masks(node.id)}
    for node in nodes:
        # chosen first, called later: f = create_causal_mask if ... else ...
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            chosen = (node.value.body, node.value.orelse)
            if all(getattr(part, "id", None) in functions for part in chosen):
                functions |= {getattr(target, "id", "") for target in node.targets}
    calls = [
        node
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) in functions
    ]
    for call in calls:
        names = [keyword.arg for keyword in call.keywords]
        if "position_ids" not in names and not (None in names and any(given)):
            return False
    return bool(calls)


def _makes_masks(name: str) -> bool:
    """Know the mask functions of transformers for causal models by their names."""
    return name == "create_masks_for_generate" or (
        name.startswith("create_") and name.endswith("causal_mask")
    )


def has_mrope(decoder: torch.nn.Module) -> bool:
    """Say if positions have rows for time, height and width.

    The config may leave the sections out: then the code of the rotary embedding has a default.
    """
    config = getattr(decoder, "config", None)
    for name in ("rope_parameters", "rope_scaling"):
        settings = getattr(config, name, None)
        if isinstance(settings, dict) and "mrope_section" in settings:
            return True
    for part in decoder.modules():
        if "rotary" in type(part).__name__.lower():
            try:
                if "mrope_section" in inspect.getsource(type(part)):
                    return True
            except (OSError, TypeError):
                continue
    return False


def _class_names(module: torch.nn.Module) -> Iterator[str]:
    return (type(part).__name__ for part in module.modules())


def _how(config: Any, rows: int) -> str:
    implementation = str(config._attn_implementation)
    if "flash" in implementation:
        told = f"{implementation} reads the samples from cu_seq_lens_q and cu_seq_lens_k."
    else:
        told = (
            f"{implementation} masks by the resets of position_ids, but only without an "
            "attention_mask (a 2-D one of ones turns it off), with use_cache=False and a batch "
            "of one row."
        )
        if implementation != "flex_attention":
            told += " The mask is dense: its memory grows with the square of the tokens."
    if rows == 4:
        told += " position_ids need 4 rows: text positions first, then M-RoPE's three."
    return told
