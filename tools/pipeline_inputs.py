"""What `omniload plan-pipeline` plans for: the layers of a model, and the micro-batches of data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.index import LengthIndex
    from omniload.pipeline.kinds import Shapes
    from omniload.pipeline.models import Machine, ModelDescription
    from omniload.pipeline.table import CostTable
    from omniload.types import Budget

__all__ = [
    "DataShapes",
    "Parallel",
    "corrected",
    "describe",
    "read_data",
    "read_shapes",
    "read_table",
]

_MADE_UP_ROWS = 40_000
_MADE_UP_EPOCH = 1_200_000  # rows that GPU days are told for, when there is no data
_MOST_STEPS = 16  # of the plan, whose micro-batches stand for all
_MOST_GROUPS = 8192


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How the GPUs are used.

    Args:
        stages: stages of the pipeline.
        tensor: GPUs that share a layer.
        data: copies of the pipeline.
        zero: 0 or 1, the ZeRO stage.
    """

    stages: int
    tensor: int = 1
    data: int = 1
    zero: int = 1

    @classmethod
    def of(
        cls, *, stages: int, tensor: int, data: int | None, gpus: int | None, zero: int
    ) -> Parallel:
        """Fill in the copies from the number of GPUs.

        Raises:
            ConfigError: GPUs that are no multiple of a pipeline, or that contradict the copies.
        """
        size = stages * tensor
        if gpus is not None:
            if gpus % size or gpus < size:
                raise ConfigError(
                    f"--gpus must be a multiple of stages times tensor-parallel ranks: expected a "
                    f"multiple of {size}, got {gpus}."
                )
            if data not in (None, gpus // size):
                raise ConfigError(
                    f"--gpus must be stages x tensor x data-parallel ranks: expected "
                    f"{size * (data or 1)}, got {gpus}. Leave out --data-parallel or --gpus."
                )
            data = gpus // size
        return cls(stages=stages, tensor=tensor, data=data or 1, zero=zero)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.stages * self.tensor * self.data


@dataclass(frozen=True, kw_only=True, eq=False)
class DataShapes:
    """The micro-batches that the plan of the loader makes of a data set.

    Args:
        shapes: micro-batches in the order of the plan.
        worst: one that fills the budget.
        budget: bounds of a micro-batch.
        num_samples: rows of an epoch.
        samples_per_step: rows of a step on all ranks, on average.
        note: where they are from, in words.
        made_up: there was no data.
    """

    shapes: Shapes
    worst: Shapes
    budget: Budget
    num_samples: int
    samples_per_step: float
    note: str
    made_up: bool


def describe(
    model: str | None, config: Path | None, *, image_patches: int, freeze: Sequence[str]
) -> ModelDescription | None:
    """Describe the model of a name or of a `config.json`; None: neither was given.

    Raises:
        ConfigError: both, or one that isn't known.
    """
    from omniload.pipeline.hf_config import from_hf_config
    from omniload.pipeline.presets import preset

    if model is not None and config is not None:
        raise ConfigError(f"give --model or --config, not both: got {model!r} and {config}.")
    if model is None and config is None:
        if freeze:
            raise ConfigError(
                f"--freeze needs --model or --config, got {', '.join(freeze)} for a table alone: "
                "it says itself what is trained."
            )
        return None
    found = preset(model) if model else from_hf_config(config, image_patches=image_patches)  # type: ignore[arg-type]
    return found.freeze(*freeze)


def read_table(
    described: ModelDescription | None, table: Path | None, *, machine: Machine, parallel: Parallel
) -> CostTable:
    """Make the cost table of a model: counted, or measured where there is no description.

    Args:
        described: the model; None: the table has all of its layers.
        table: file of a measured table; None: there is none.
        machine: what a GPU reaches.
        parallel: how GPUs are used.

    Raises:
        ConfigError: neither of the two, or a table that can't be used.
    """
    from omniload.pipeline.analytic import cost_table

    if described is not None:
        return cost_table(
            described,
            machine=machine,
            tensor_parallel=parallel.tensor,
            data_parallel=parallel.data,
            zero_stage=parallel.zero,
        )
    if table is None:
        raise ConfigError(
            "a plan needs a model: give --model NAME, --config config.json or --table FILE."
        )
    measured = _read_measured(table)
    if measured.tensor_parallel != parallel.tensor:
        raise ConfigError(
            "--tensor-parallel must be that of the table: expected "
            f"{measured.tensor_parallel}, got {parallel.tensor}."
        )
    return replace(measured, data_parallel=parallel.data, zero_stage=parallel.zero)


def corrected(counted: CostTable, table: Path | None, shapes: Shapes) -> CostTable:
    """Correct counted costs by a measured table, if there is one.

    Raises:
        ConfigError: a table that can't be used.
    """
    return counted if table is None else counted.corrected_by(_read_measured(table), shapes)


def _read_measured(table: Path) -> CostTable:
    from omniload.pipeline.table import CostTable

    try:
        return CostTable.from_json(table.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--table must be a file that can be read: {error}.") from None


def read_data(paths: Sequence[Path], *, seed: int) -> tuple[LengthIndex, str]:
    """Read the lengths of data sets, one after the other, or make some up.

    Returns:
        The index of all rows, and what it is, in words.
    """
    from omniload.index import LengthIndex
    from omniload.tools.length_files import read_lengths
    from omniload.tools.pipeline_setting import internvl_lengths

    if not paths:
        note = (
            f"no --data: {_MADE_UP_ROWS:,} made-up rows, half of one tile, 6 % text, the rest "
            f"documents and charts; GPU days are those of {_MADE_UP_EPOCH:,} such rows"
        )
        return internvl_lengths(_MADE_UP_ROWS, seed=seed), note
    found = [read_lengths(path, samples=0, seed=seed) for path in paths]
    if len(found) == 1:
        return found[0]
    columns = ("num_tokens", "num_tiles", "num_loss_tokens")
    index = LengthIndex.from_arrays(
        **{name: np.concatenate([getattr(each, name) for each, _ in found]) for name in columns}
    )
    return index, " + ".join(note for _, note in found)


def read_shapes(
    paths: Sequence[Path],
    *,
    tokens: int,
    tiles: int | None,
    parallel: Parallel,
    micro_batches: int,
    seed: int,
) -> DataShapes:
    """Plan data as the loader would, and take the shapes of its micro-batches.

    Args:
        paths: shard folders, or files of lengths; none: made-up lengths.
        tokens: tokens that a micro-batch may hold.
        tiles: tiles that it may hold; None: matched to the data.
        parallel: how GPUs are used.
        micro_batches: micro-batches of a step on each rank.
        seed: of the order, and of made-up lengths.

    Raises:
        ConfigError: no row that fits.
    """
    from omniload.pipeline.kinds import Shapes
    from omniload.plan import make_plan
    from omniload.tools.length_files import matched_tiles
    from omniload.types import Budget, Groups

    index, note = read_data(paths, seed=seed)
    budget = Budget(tokens=tokens, tiles=matched_tiles(index, tokens) if tiles is None else tiles)
    plan = make_plan(
        index,
        budget=budget,
        dp_world_size=parallel.data,
        accumulation=micro_batches,
        oversize="drop",
        seed=seed,
    )
    used = len(index) - len(plan.dropped)
    if used == 0:
        raise ConfigError(
            f"there must be rows that fit {budget}: got {len(index)} rows ({note}), none does."
        )
    if len(plan.dropped):
        note += f"; {len(plan.dropped):,} rows over the budget left out"
    slots = parallel.data * micro_batches
    steps = max(1, min(plan.num_steps, _MOST_STEPS, _MOST_GROUPS // slots))
    groups = [plan.step_groups(step) for step in range(steps)]
    rows = np.concatenate([each.rows for each in groups])
    sizes = np.concatenate([np.diff(each.offsets) for each in groups])
    sizes = sizes[sizes > 0]  # fillers of a last step are no sample of what comes
    together = Groups(rows=rows, offsets=np.concatenate([[0], np.cumsum(sizes)]))
    lengths = {"num_tiles": index.num_tiles, "num_tokens": index.num_tokens}
    longest = float(np.max(index.num_tokens[index.num_tokens <= tokens]))
    return DataShapes(
        shapes=Shapes.from_groups(together, **lengths),
        worst=Shapes(
            num_tiles=np.array([budget.tiles], np.float64),
            num_tokens=np.array([tokens], np.float64),
            sum_squares=np.array([tokens * longest]),
        ),
        budget=budget,
        num_samples=used if paths else _MADE_UP_EPOCH,
        samples_per_step=float(sizes.mean()) * slots,
        note=note,
        made_up=not paths,
    )
