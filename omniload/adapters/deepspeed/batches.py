"""Batches for a pipeline: inputs for its first stage, labels for its last, nothing for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from omniload.adapters.deepspeed.engine import prepare_engine, stop_timer
from omniload.batch import PackedBatch
from omniload.errors import ConfigError
from omniload.loader import DataLoader
from omniload.loader.iterator import BatchIterator
from omniload.loss import LOSS_KINDS
from omniload.transforms import TileTransform
from omniload.world import World

__all__ = ["PipelineBatches", "pipeline_batches"]

Tensors: TypeAlias = tuple[torch.Tensor, ...]


def pipeline_batches(
    loader: DataLoader,
    engine: Any,
    *,
    inputs: Callable[[PackedBatch], Tensors] | None = None,
    labels: Callable[[PackedBatch], Tensors] | None = None,
    loss: str = "token",
) -> PipelineBatches:
    """Feed a pipeline engine from a loader; call it on all ranks.

    The loader becomes that of this rank's stage (`DataLoader.set_reads`): on the first it works as
    always, on the last it reads labels and no image, on those between it walks its plan and reads
    nothing. Training goes on where the loader stands, also inside an epoch. The loader's state is
    the same on all ranks after each step, so save `loader.state_dict()` as ever.

        batches = pipeline_batches(loader, engine)
        while loader.epoch < num_epochs:
            for _ in batches.steps():
                loss = engine.train_batch(batches)

    `engine.train_batch(batches)` may also be called without `steps()`: the batches then go on with
    the next epoch by themselves. To evaluate, make batches of another loader:
    `engine.eval_batch(others, num_micro_batches=accumulation of that loader)` in `others.steps()`.

    Args:
        loader: made with `world=module.world` and with the accumulation of the engine.
        engine: what `deepspeed.initialize` returned for a `BalancedPipelineModule`.
        inputs: what the first layer gets of a batch on the engine's device: a tuple of tensors,
            floats first. None: pixel_values, in the type of the model, (num_tiles, 3, height,
            width), one blank tile where the batch has none, so that the vision encoder is in every
            graph; input_ids and position_ids, int64 (num_tokens,); cu_seqlens, int32
            (num_documents + 1,).
        labels: what the loss gets of a batch, likewise. None: labels, int64 (num_tokens,), and
            weights, float32 (num_tokens,), for `token_loss`.
        loss: "token", "sample" or "sqrt": the mean that the weights are for; see
            `PackedBatch.loss_weights`.

    Raises:
        ConfigError: another engine; a loader of another world, or with tail="empty"; another
            `loss`.
    """
    prepare_engine(engine)
    _check_loader(loader, engine)
    if loss not in LOSS_KINDS:  # not on the last stage alone: the others would wait for it
        known = ", ".join(map(repr, LOSS_KINDS))
        raise ConfigError(f"loss must be one of {known}, got {loss!r}.")
    is_last = engine.is_last_stage()
    loader.set_reads("all" if engine.is_first_stage() else "labels" if is_last else "nothing")
    batches = PipelineBatches(
        loader,
        engine,
        inputs=inputs or _PixelInputs(loader, dtype=_float_type(engine)),
        labels=labels or _Labels(loss),
    )
    _follow(engine)
    return batches


class PipelineBatches(Iterator[tuple[Tensors | None, Tensors | None]]):
    """What `pipeline_batches` returns: an iterator for `train_batch` and `eval_batch`.

    Args:
        loader: of this stage.
        engine: the engine.
        inputs: from a batch to the inputs of the first layer.
        labels: from a batch to what the loss gets.
    """

    def __init__(
        self,
        loader: DataLoader,
        engine: Any,
        *,
        inputs: Callable[[PackedBatch], Tensors],
        labels: Callable[[PackedBatch], Tensors],
    ) -> None:
        self._loader, self._engine = loader, engine
        self._inputs, self._labels = inputs, labels
        self._batches: BatchIterator | None = None
        self._reads = engine.is_first_stage() or engine.is_last_stage()

    @property
    def loader(self) -> DataLoader:
        """The loader of this stage."""
        return self._loader

    def steps(self) -> Iterator[int]:
        """Go through the steps that are left of this epoch: as many on every rank.

        Yields:
            Number of the step in the epoch; call `engine.train_batch` with these batches once.

        Raises:
            ConfigError: the step was not trained, or more than one was.
        """
        self._open()
        epoch = self._loader.epoch
        state = self._loader.state_dict()
        while state["epoch"] == epoch:
            step = state["step"]
            yield step
            state = self._loader.state_dict()
            if state["epoch"] == epoch and state["step"] != step + 1:
                raise ConfigError(
                    "each of steps() must be trained once: call engine.train_batch(batches) in the "
                    f"loop. After step {step} the loader stands at step {state['step']}."
                )
        batches, self._batches = self._batches, None
        if batches is not None:
            next(
                batches, None
            )  # the loader goes to the next epoch when it finds this one exhausted

    def __next__(self) -> tuple[Tensors | None, Tensors | None]:
        batch = self._next().to(self._engine.device, non_blocking=True)
        engine = self._engine
        return (
            self._inputs(batch) if engine.is_first_stage() else None,
            self._labels(batch) if engine.is_last_stage() else None,
        )

    def begin(self, num_micro_batches: int) -> None:
        """Get ready for a step; called on all ranks, since ranks compare their plans here."""
        accumulation = self._loader.plan.accumulation
        if num_micro_batches != accumulation:
            raise ConfigError(
                "a step must have as many micro-batches in the loader as in the engine: expected "
                f"{num_micro_batches}, got accumulation={accumulation}. Set the loader's "
                "accumulation to gradient_accumulation_steps, or call "
                "engine.set_train_batch_size(micro_batch_size * accumulation * dp_world_size)."
            )
        self._open()

    def end(self, num_micro_batches: int) -> None:
        """Follow a step on the stages that read nothing."""
        if not self._reads:
            for _ in range(num_micro_batches):
                self._next()

    def _open(self) -> None:
        if self._batches is None or self._batches.is_closed:
            state = self._loader.state_dict()
            if state["step"]:  # iter() would begin the epoch again
                self._loader.load_state_dict(state)
            self._batches = iter(self._loader)
        if micro_step := self._loader.state_dict()["micro_step"]:
            raise ConfigError(
                "a pipeline starts between two optimizer steps, but the loader stands behind "
                f"micro-step {micro_step} of a step. Load a state that was saved after train_batch."
            )

    def _next(self) -> PackedBatch:
        if self._batches is not None:
            batch = next(self._batches, None)
            if batch is not None:
                return batch
        self._batches = iter(self._loader)
        return next(self._batches)


class _PixelInputs:
    """The inputs of a model that begins with a vision encoder on tiles."""

    def __init__(self, loader: DataLoader, *, dtype: torch.dtype) -> None:
        self._transform = loader.transform
        self._dtype = dtype

    def __call__(self, batch: PackedBatch) -> Tensors:
        pixels = self._pixels(batch)
        return pixels, batch.input_ids, batch.position_ids, batch.cu_seqlens

    def _pixels(self, batch: PackedBatch) -> torch.Tensor:
        if batch.num_tiles == 0:
            height, width = self._transform.filler(with_image=True).tiles.shape[2:]
            return torch.zeros(1, 3, height, width, dtype=self._dtype, device=batch.device)
        transform = self._transform
        # ours round once, to the type of the model; others give what they give
        options = {"dtype": self._dtype} if isinstance(transform, TileTransform) else {}
        pixels = transform.model_inputs(batch, **options).get("pixel_values")
        if not isinstance(pixels, torch.Tensor) or pixels.ndim != 4:
            raise ConfigError(
                "the inputs of the first layer must be given where the transform makes no "
                "pixel_values (num_tiles, 3, height, width): pass inputs= to pipeline_batches, a "
                "function from a PackedBatch to a tuple of tensors, floats first."
            )
        return pixels.to(self._dtype)


class _Labels:
    """Labels and weights for `token_loss`."""

    def __init__(self, loss: str) -> None:
        self._loss = loss

    def __call__(self, batch: PackedBatch) -> Tensors:
        weights = batch.loss_weights(self._loss, ranks="mean", engine_divides_accumulation=True)
        return batch.labels, weights


def _float_type(engine: Any) -> torch.dtype:
    if engine.bfloat16_enabled():
        return torch.bfloat16
    return torch.float16 if engine.fp16_enabled() else torch.float32


def _check_loader(loader: DataLoader, engine: Any) -> None:
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"loader must be an omniload.DataLoader, got {type(loader).__name__}.")
    wanted: World = engine.module.world
    for name in ("dp_rank", "dp_world_size"):
        if getattr(loader.world, name) != getattr(wanted, name):
            raise ConfigError(
                "the loader must know that the stages of a pipeline share a batch: expected "
                f"{name}={getattr(wanted, name)} on rank {wanted.rank}, got "
                f"{getattr(loader.world, name)}. Make it with DataLoader(world=module.world)."
            )
    if loader.tail == "empty":
        raise ConfigError(
            "a pipeline needs as many micro-batches on every rank: make the loader with "
            "tail='filler', got tail='empty'."
        )


def _follow(engine: Any) -> None:
    """Tell batches where steps begin and end, on the stages that are never asked for data too."""
    if "_exec_schedule" in vars(engine):
        return
    run, set_iterator = engine._exec_schedule, engine.set_dataiterator
    fed: list[Any] = [None]

    def set_dataiterator(iterator: Any) -> None:
        fed[0] = iterator
        set_iterator(iterator)

    def exec_schedule(steps: Any) -> None:
        batches = fed[0]
        if isinstance(batches, (DataLoader, BatchIterator)):
            stop_timer(engine)
            raise ConfigError(
                "an engine with a pipeline takes inputs and labels, and no batches of a loader: "
                "call it with what pipeline_batches(loader, engine) returned, got "
                f"{type(batches).__name__}."
            )
        if not isinstance(batches, PipelineBatches):
            run(steps)
            return
        try:
            batches.begin(steps.micro_batches)
        except Exception:
            stop_timer(engine)  # else the next step of a caller who mends it would find it running
            raise
        run(steps)
        batches.end(steps.micro_batches)

    engine.set_dataiterator, engine._exec_schedule = set_dataiterator, exec_schedule
