"""Model, optimizer and loader saved together, with ZeRO or a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from omniload.errors import ConfigError, StateError
from omniload.loader import DataLoader

__all__ = ["load_checkpoint", "save_checkpoint"]

_KEY = "omniload"


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
    state = {**given, _KEY: loader.state_dict()}
    engine.save_checkpoint(os.fspath(folder), tag=tag, client_state=state)


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

    Args:
        engine: made as the saved one was.
        loader: made as the saved one was; see `DataLoader.load_state_dict` for what may differ.
        folder: as for `save_checkpoint`.
        tag: None: the newest.
        load_module_only: leave the optimizer as it is. A pipeline under another plan needs this:
            its weights are saved by layer, but the state of its optimizer by stage.
        strict: as for `DataLoader.load_state_dict`.

    Returns:
        What was given to `save_checkpoint` as client_state.

    Raises:
        StateError: nothing was saved there, or without the state of a loader.
    """
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
    loader.load_state_dict(state.pop(_KEY), strict=strict)
    return state
