"""Lengths of a data set, wherever they are: shards, a Parquet or CSV file, or made up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError
from omniload.tools.data import is_mixture_file, open_data

if TYPE_CHECKING:
    from omniload.index import LengthIndex

__all__ = ["FILE_COLUMNS", "matched_tiles", "read_length_file", "read_lengths"]

#: how a file names the columns; for the help of commands
FILE_COLUMNS = "num_tokens and num_tiles (or n_tokens and n_tiles)"

_REQUIRED = (("num_tokens", "n_tokens"), ("num_tiles", "n_tiles"))  # our name, the other one
_OPTIONAL = ("num_loss_tokens", "n_loss_tokens")


def read_lengths(path: Path | None, *, samples: int, seed: int) -> tuple[LengthIndex, str]:
    """Read the lengths of a data set, or make some up.

    Args:
        path: a folder of shards or indexed tars, the .yaml file of a mixture (its epoch 0), or a
            Parquet or CSV file; None: made-up lengths.
        samples: rows to make up.
        seed: their seed.

    Returns:
        The index, and what it is, in words.

    Raises:
        ConfigError: a file that can't be read or lacks the columns.
        ShardError: a folder without shards.
    """
    if path is None:
        from omniload.tools.lengths import make_lengths

        return make_lengths(samples, seed=seed), f"{samples} made-up rows, seed {seed}"
    if path.is_dir():
        from omniload.shards import open_shards
        from omniload.tars import is_tar_set, open_tars

        if is_tar_set(path):
            return open_tars(path).index, f"tars {path.name}"
        return open_shards(path).index, f"shards {path.name}"
    if is_mixture_file(path):
        return open_data(path).index, f"mixture {path.name}"
    return read_length_file(path), f"lengths {path.name}"


def read_length_file(path: Path) -> LengthIndex:
    """Read the lengths of a Parquet or CSV file; `num_loss_tokens` (`n_loss_tokens`) may be there.

    Raises:
        ConfigError: no such file, another format, missing columns, or values that are no lengths.
    """
    from omniload.index import LengthIndex

    table = _read_table(path)
    columns = {}
    for names in (*_REQUIRED, _OPTIONAL):
        found = [name for name in names if name in table.column_names]
        if found:
            columns[names[0]] = table[found[0]].to_numpy()
        elif names != _OPTIONAL:
            raise ConfigError(
                f"{path} must have a column {' or '.join(names)}, got {table.column_names}."
            )
    try:
        return LengthIndex.from_arrays(**columns)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _read_table(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(
            f"{path} must be a folder of shards or tars, a mixture, or a file of lengths: there is "
            "no such file or folder. For data at a URL name it in the .yaml file of a mixture, "
            "with a cache."
        )
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    try:
        if path.suffix.lower() == ".csv":
            return pyarrow.csv.read_csv(path)
        return pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise ConfigError(
            f"lengths must be a shard folder, a Parquet file or a .csv file with the columns "
            f"{FILE_COLUMNS}: {error}"
        ) from None


def matched_tiles(index: LengthIndex, budget_tokens: int) -> int:
    """Choose the tile budget that is used up together with the tokens.

    It is `ceil(budget_tokens * mean tiles / mean tokens)`, and at least the tiles of every row.
    """
    tokens, tiles = int(index.num_tokens.sum(dtype=int)), int(index.num_tiles.sum(dtype=int))
    matched = -(-budget_tokens * tiles // tokens) if tokens else 0
    return max(matched, int(index.num_tiles.max(initial=0)))
