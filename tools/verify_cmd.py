"""`omniload verify`: whether stored data is as it was written, and where it isn't."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.tools.verify_jobs import Verified

__all__ = ["verify_data"]

#: rows that are decoded unless told otherwise
_DECODED = 200
#: faults that are printed; --json has all that are listed
_SHOWN = 50


def verify_data(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Folder of shards or of indexed tars, URL of shards, or .yaml file of a mixture.",
        ),
    ],
    decode: Annotated[
        str, typer.Option(help='Rows of each set whose images are decoded: a number, or "all".')
    ] = str(_DECODED),
    checksums_only: Annotated[
        bool, typer.Option(help="Compare files with their checksums, and read no rows.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; without it: one a core, at most 16, where it pays."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="For URLs: folder of this machine that holds copies.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check data: checksums, schema and offsets, lengths against the index, images by decoding.

    Damage in one file stops no other: all of it is listed. Ends with code 1 if there is any.

    Example: `omniload verify shards/ --decode all --workers 8`
    """
    from omniload.cache import Cache
    from omniload.tools.progress_bar import bytes_bar
    from omniload.tools.verify_run import verify

    count = _count(decode)
    with bytes_bar("verify", show=not as_json) as tick:
        found = verify(
            data,
            decode=0 if checksums_only else count,
            rows=not checksums_only,
            workers=workers,
            cache=None if cache is None else Cache(folder=cache),
            tick=tick,
        )
    if as_json:
        import json

        print(json.dumps({"path": data, **found.as_dict(), "damaged": _by_file(found)}))
    else:
        _print(data, found)
    if found.num_faults:
        raise typer.Exit(1)


def _count(decode: str) -> int | None:
    if decode == "all":
        return None
    try:
        count = int(decode)
    except ValueError:
        count = -1
    if count < 0:
        raise ConfigError(f'--decode must be a number of rows or "all", got {decode!r}.')
    return count


def _by_file(found: Verified) -> dict[str, str]:
    """Name each damaged file, with the first thing that is wrong in it."""
    files: dict[str, Any] = {}
    for fault in found.faults:
        files.setdefault(fault.file, fault.reason)
    return files


def _print(data: str, found: Verified) -> None:
    checked = (
        f"{found.files:,} files of {found.num_bytes / (1 << 20):,.1f} MiB, {found.rows:,} rows "
        f"read, {found.decoded:,} decoded"
    )
    if not found.num_faults:
        typer.echo(f"{data}: {checked}: all as it was written")
        return
    for fault in found.faults[:_SHOWN]:
        where = f"{fault.set_name}: {fault.file}" if fault.set_name else fault.file
        if fault.row >= 0:
            where += f", row {fault.row}" + (f" ({fault.key!r})" if fault.key else "")
        typer.secho(f"damaged: {where}: {fault.reason}", fg="red", err=True)
    rest = found.num_faults - min(len(found.faults), _SHOWN)
    more = f", {rest:,} of them not shown" if rest else ""
    typer.echo(
        f"{data}: {checked}: {found.num_faults:,} faults{more}, in {len(_by_file(found)):,} files. "
        "Copy these files again, or make them again.",
        err=True,
    )
