"""Model, optimizer and loader saved together, with ZeRO or a pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omniload.adapters.deepspeed.module import BalancedPipelineModule
from omniload.errors import ConfigError, StateError
from omniload.loader import DataLoader

__all__ = ["load_checkpoint", "save_checkpoint"]

_KEY, _NAMES = "omniload", "omniload_client_state"
#: Beside DeepSpeed's files of a tag: what decides who can load them.
_FILE = "omniload.json"


def save_checkpoint(
    engine: Any,
    loader: DataLoader,
    folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
) -> None:
    """Save an engine with the state of its loader, in DeepSpeed's `client_state`.

    Call it on all ranks, after a whole step.

    Args:
        engine: any DeepSpeed engine.
        loader: what it is fed from.
        folder: as for `engine.save_checkpoint`.
        tag: name of this state; None: the number of steps.
        client_state: more to be saved, by names other than "omniload".

    Raises:
        ConfigError: `client_state` has a state of a loader already.
    """
    given = dict(client_state or {})
    if _KEY in given:
        raise ConfigError(f"client_state must not have the key {_KEY!r}: the loader's state is it.")
    state = {**given, _KEY: loader.state_dict(), _NAMES: sorted(given)}
    place = f"global_step{engine.global_steps}" if tag is None else tag
    engine.save_checkpoint(os.fspath(folder), tag=place, client_state=state)
    if not isinstance(engine.module, BalancedPipelineModule):
        return
    if torch.distributed.get_rank() == 0:
        text = json.dumps(_facts(engine), indent=1)
        (Path(folder) / str(place) / _FILE).write_text(text + "\n", encoding="utf-8")
    torch.distributed.barrier()


def load_checkpoint(
    engine: Any,
    loader: DataLoader,
    folder: str | os.PathLike[str],
    *,
    tag: str | None = None,
    load_module_only: bool = False,
    strict: bool = True,
) -> dict[str, Any]:
    """Go on where `save_checkpoint` was called: same weights, same optimizer, next batch.

    Call it on all ranks, before `pipeline_batches` or at any time between two steps.

    The weights of a pipeline are saved by layer, but the state of its optimizer by stage, and under
    ZeRO by data-parallel rank. DeepSpeed converts that of Adam under ZeRO-1: run `python -m
    deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder FOLDER/TAG
    --output_folder FOLDER/OTHER`, put `"checkpoint": {"load_universal": true}` in the config, and
    load the tag OTHER.

    Args:
        engine: made as the saved one was.
        loader: made as the saved one was; see `DataLoader.load_state_dict` for what may differ.
        folder: as for `engine.save_checkpoint`.
        tag: None: the newest.
        load_module_only: begin with a new state of the optimizer. A pipeline under another plan
            needs this, or what is said above.
        strict: as for `DataLoader.load_state_dict`.

    Returns:
        What was given to `save_checkpoint` as client_state.

    Raises:
        StateError: nothing was saved there, or without the state of a loader; the optimizer of a
            pipeline with other bounds, or with ZeRO of other data-parallel ranks.
    """
    is_pipeline = isinstance(engine.module, BalancedPipelineModule)
    if is_pipeline and not load_module_only and not engine.load_universal_checkpoint():
        _check_facts(engine, Path(folder), tag)
    path, found = engine.load_checkpoint(
        os.fspath(folder), tag=tag, load_module_only=load_module_only
    )
    if path is None:
        raise StateError(
            f"there must be a saved state in {os.fspath(folder)!r}"
            f"{'' if tag is None else f' under the tag {tag!r}'}, but DeepSpeed found none."
        )
    state = dict(found or {})
    if _KEY not in state:
        raise StateError(
            f"{path} has no state of a loader: save with omniload.adapters.deepspeed."
            "save_checkpoint."
        )
    loader.load_state_dict(state[_KEY], strict=strict)
    return {name: state[name] for name in state.get(_NAMES, ())}


def _facts(engine: Any) -> dict[str, Any]:
    """Say what the saved state of a pipeline's optimizer belongs to."""
    is_sharded = engine.zero_optimization_stage() > 0 or engine.bfloat16_enabled()
    return {
        "parts": list(engine.module.plan.parts),
        "optimizer_ranks": engine.dp_world_size if is_sharded else 1,
    }


def _check_facts(engine: Any, folder: Path, tag: str | None) -> None:
    """Refuse what DeepSpeed would fail on, or half load, on some ranks.

    Raises:
        StateError: the optimizer's state doesn't fit this engine.
    """
    try:
        place = (folder / "latest").read_text(encoding="utf-8").strip() if tag is None else tag
        saved = json.loads((folder / str(place) / _FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # saved by other means: DeepSpeed says what it finds
    for name, now in _facts(engine).items():
        if saved.get(name) != now:
            raise StateError(
                f"the optimizer's state in {folder / str(place)} must be of the same stages and, "
                f"where it is shared out, data-parallel ranks: expected {name}={now}, got "
                f"{saved.get(name)}. To keep it, convert a state of Adam under ZeRO-1 with "
                "deepspeed.checkpoint.ds_to_universal; see load_checkpoint. Or pass "
                "load_module_only=True: weights and the loader's place are taken up, and the "
                "optimizer begins anew."
            )
