"""`omniload state`: what a saved loader state says, in plain words, and whether data fits it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.errors import ConfigError, StateError

if TYPE_CHECKING:
    from omniload.loader.state import LoaderState

__all__ = ["compare_with_data", "describe", "explain_state", "find_states"]

_DEEPEST = 6  # how far into a checkpoint a state is looked for


def explain_state(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON file or torch checkpoint with a state in it; or a DeepSpeed checkpoint "
            "folder.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option("--data", help="Folder of shards: say whether the state fits it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a saved state: where it stands, what it was saved with, and what it goes on with.

    Checkpoints are read with weights_only, so nothing in them is run. With --data the exit code is
    1 where the state doesn't fit.

    Example: `omniload state checkpoint.pt --data shards/`
    """
    found = []
    for path, at, state in find_states(file):
        shown: dict[str, Any] = {"file": str(path), "at": at, **describe(state)}
        if data is not None:
            shown["differences"] = compare_with_data(state, data)
            shown["fits"] = not shown["differences"]
        found.append(shown)
    if not found:
        raise StateError(
            f"{file} holds no state of omniload: expected what state_dict() of a DataLoader or a "
            "PlanBatchSampler returned, at any depth of a checkpoint."
        )
    if as_json:
        print(json.dumps({"states": found}))
    else:
        for shown in found:
            _print(shown, data)
    if data is not None and not all(shown["fits"] for shown in found):
        raise typer.Exit(1)


def find_states(path: Path) -> Iterator[tuple[Path, str, Mapping[str, Any]]]:
    """Look for states in a file, or in the files of a DeepSpeed checkpoint.

    Returns:
        Each state, with the file and the names of the entries that lead to it, joined by dots.

    Raises:
        StateError: a file that is neither JSON nor a checkpoint, or can't be read safely.
    """
    seen = set()
    for file in _files(path):
        for at, state in _states_in(_read(file), ()):
            text = json.dumps(state, sort_keys=True)
            if text not in seen:  # each rank of DeepSpeed saves the same one
                seen.add(text)
                yield file, at, state


def describe(state: Mapping[str, Any]) -> dict[str, Any]:
    """Say what a state means.

    Returns:
        "kind" and "lines", words for people; and "state", its own fields.

    Raises:
        StateError: it is damaged, or was edited.
    """
    if "dp_world_size" not in state:
        return _describe_sampler(state)
    from omniload.loader.state import LoaderState

    found = LoaderState.from_dict(state)
    return {"kind": "DataLoader", "lines": _lines(found), "state": dict(state)}


def compare_with_data(state: Mapping[str, Any], data: str) -> list[str]:
    """Say how a state and a set of rows differ.

    Args:
        state: of a DataLoader.
        data: as for `omniload.DataLoader`.

    Returns:
        What differs, in words; none: it fits.
    """
    from omniload.loader.sources import open_source
    from omniload.loader.state import LoaderState
    from omniload.transforms import transform_from_settings

    if "dp_world_size" not in state:
        raise ConfigError("--data compares states of a DataLoader; a sampler's knows no data.")
    found, source = LoaderState.from_dict(state), open_source(data)
    differences = [
        f"{name}: {saved!r} in the state, {own!r} in {data}"
        for name, saved, own in (
            ("rows", found.num_rows, len(source)),
            ("data", found.data, source.fingerprint),
        )
        if saved != own
    ]
    try:
        transform = transform_from_settings(dict(source.settings)).fingerprint
    except ConfigError:
        return differences  # only a transform of the user's own understands them
    if transform != found.transform:
        differences.append(
            f"transform: {found.transform!r} in the state, {transform!r} made for {data}; the "
            "same where the loader is given the transform that it had"
        )
    return differences


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise StateError(f"{path} must be a file or a folder: there is none.")
    latest = path / "latest"
    folder = path / latest.read_text().strip() if latest.is_file() else path
    files = sorted(folder.glob("*model_states.pt"))
    if not files:
        raise StateError(
            f"{path} must be a file, or a checkpoint that DeepSpeed wrote: no *model_states.pt is "
            f"in {folder}."
        )
    return files


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        head = file.read(64).lstrip()
    if head[:1] in (b"{", b"["):
        try:
            return json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise StateError(f"{path} must be JSON, but can't be read: {error}.") from None
    if not zipfile.is_zipfile(path):  # torch would only speak of how it maps memory
        raise StateError(
            f"{path} must be JSON or a checkpoint that torch.save wrote: its first bytes are "
            f"{head[:8]!r}, and it is no zip file, as checkpoints are. Give the file into which "
            "the training loop saved state_dict()."
        )
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for what is no checkpoint
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise StateError(
            f"{path} must be a checkpoint that torch.load reads with weights_only=True, which runs "
            f"nothing in it: {reason[0]}"
        ) from None


def _states_in(value: Any, at: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if isinstance(value, Mapping):
        if "schema" in value and "checksum" in value and "epoch" in value:
            yield ".".join(at), value
            return
        items: Sequence[tuple[Any, Any]] = list(value.items())
    elif isinstance(value, (list, tuple)):
        items = list(enumerate(value))
    else:
        return
    if len(at) < _DEEPEST:
        for name, inner in items:
            yield from _states_in(inner, (*at, str(name)))


def _lines(state: LoaderState) -> list[str]:
    inside = state.micro_step > 0
    place = f"epoch {state.epoch}, {state.step:,} steps of it done"
    if inside:
        place += f", and {state.micro_step} of {state.accumulation} micro-batches of the next"
    ranks = f"{state.dp_world_size} data-parallel rank{'s' if state.dp_world_size != 1 else ''}"
    shape = f"{ranks}, accumulation {state.accumulation}"
    if inside:
        goes_on = f"inside a step: on {shape}, and with the same sync and cost, only"
    else:
        goes_on = "between two steps: on any number of ranks, with any accumulation, sync and cost"
    window = "the planner's choice" if state.window_rows is None else f"{state.window_rows:,}"
    return [
        f"place: {place}",
        f"in the order: window {state.window}, {state.groups:,} groups of it used",
        f"saved on: {shape}",
        f"goes on: {goes_on}; with any number of workers",
        f"budget: {state.budget_tokens:,} tokens, {_limit(state.budget_tiles)} tiles, "
        f"{_limit(state.budget_samples)} samples",
        f"order: {state.order}, seed {state.seed}, rows of a window: {window}",
        f"left out: over the budget: {state.oversize}; excluded: {state.excluded}",
        f"balance: {state.balance}",
        f"data: {state.num_rows:,} rows, {state.data}",
        f"transform: {state.transform}",
        f"plan of the epoch: {state.plan}",
    ]


def _describe_sampler(state: Mapping[str, Any]) -> dict[str, Any]:
    from omniload.sampler.state import read_state

    found = read_state(state)
    position = found["position"]
    lines = [
        f"place: epoch {found['epoch']}, {found['step']:,} steps of it done",
        f"in the order: window {position['window']}, {position['groups']:,} groups of it used",
        f"order of the epoch: {found['order']}",
    ]
    if "micro_step" in position:
        lines.append(
            f"goes on: inside a step, after {position['micro_step']} micro-batches: on "
            f"{position['dp_world_size']} ranks, accumulation {position['accumulation']} only"
        )
    return {"kind": "PlanBatchSampler", "lines": lines, "state": dict(found)}


def _limit(value: int | None) -> str:
    return "no limit of" if value is None else f"{value:,}"


def _print(shown: Mapping[str, Any], data: str | None) -> None:
    where = f" at {shown['at']}" if shown["at"] else ""
    print(f"state of a {shown['kind']} in {shown['file']}{where}")
    for line in shown["lines"]:
        print(f"  {line}")
    if data is None:
        return
    print(f"  fits {data}" if shown["fits"] else f"  does NOT fit {data}:")
    for difference in shown["differences"]:
        print(f"    {difference}")
