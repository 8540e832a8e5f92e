"""Streams of several ranks, for tests/test_stream.py; also run by torchrun."""

import json
import sys
from pathlib import Path

import numpy as np

from omniload.errors import OmniloadError
from omniload.stream import StreamLoader
from omniload.types import Budget, Sample


def text(number, tokens):
    """A sample of text; all but the first label give loss."""
    values = np.arange(number, number + tokens, dtype=np.int32) % 1000 + 1
    return Sample(sample_id=number, input_ids=values, labels=values)


def a_filler():
    ids = np.ones(3, np.int32)
    return Sample(sample_id=-1, input_ids=ids, labels=np.full(3, -100, np.int32))


class Numbers:
    """A stream of numbered texts, dealt to the parts in turn."""

    def __init__(self, count):
        self.count = count

    def __call__(self, part):
        return (text(i, 1 + i * 7 % 50) for i in range(part.index, self.count, part.count))


class Unequal:
    """Rank 1 has a tenth of what rank 0 has; or, with `empty`, nothing."""

    def __init__(self, empty=False):
        self.empty = empty

    def counts(self):
        return [150, 0 if self.empty else 15]

    def __call__(self, part):
        first = 1000 * part.rank
        numbers = range(first + part.worker, first + self.counts()[part.rank], part.num_workers)
        return (text(i, 1 + i * 7 % 50) for i in numbers)


def failing(part):
    for i in range(100):
        if part.rank == 1 and i == 60:
            raise ValueError("boom")
        yield text(1000 * part.rank + i, 30)


def opening(part):
    if part.rank == 1:
        raise ValueError("boom")
    return [text(i, 30) for i in range(10)]


def modality(folder):
    from omniload.shards import open_shards
    from omniload.transforms import transform_from_settings

    shards = open_shards(folder / "data")
    with_image = shards.index.num_tiles > 0

    def open_part(part):
        rows = np.flatnonzero(with_image if part.rank == 0 else ~with_image)
        return (shards.read(row) for row in rows.tolist())

    transform = transform_from_settings(dict(shards.settings))
    return StreamLoader(
        open_part,
        budget=Budget(tokens=800, tiles=16),
        transform=transform,
        buffer=4,
        uniform_modality=True,
    ), list(range(len(shards)))


def of_kind(kind, folder, rank):
    """A loader, and the samples that all ranks together must get of it."""
    if kind == "modality":
        return modality(folder)
    broken = {"failing": failing, "opening": opening}
    source = broken.get(kind, Unequal(empty=kind == "empty"))
    counts = [] if kind in broken else source.counts()
    return StreamLoader(
        source,
        budget=Budget(tokens=64),
        buffer=8,
        accumulation=2,
        num_workers=2 if kind == "workers" else 0,
        filler=a_filler(),
    ), [1000 * r + i for r, count in enumerate(counts) for i in range(count)]


def run(kind, folder, rank):
    loader, expected = of_kind(kind, folder, rank)
    facts = {"ids": [], "places": [], "expected": expected, "has_tiles": [], "tokens": [],
             "denominators": [], "loss_tokens": [], "dummies": 0}  # fmt: skip
    try:
        for batch in loader:
            facts["ids"] += batch.sample_ids.tolist()
            facts["places"].append([batch.step, batch.micro_step, batch.is_last_micro_step])
            facts["has_tiles"].append(batch.num_tiles > 0)
            facts["tokens"].append(batch.num_tokens)
            facts["dummies"] += len(batch.sample_lengths) > len(batch.sample_ids)
            if batch.micro_step == 0:
                facts["loss_tokens"].append(0)
                facts["denominators"].append(
                    [batch.num_loss_tokens_step, batch.num_loss_samples_step,
                     batch.sqrt_loss_tokens_step]
                )  # fmt: skip
            facts["loss_tokens"][-1] += batch.num_loss_tokens
    except (OmniloadError, ValueError) as error:
        facts["error"] = str(error)
    return facts | {"steps": loader.counts.steps, "fillers": loader.counts.fillers}


def main(folder):
    import torch.distributed

    from tests.loader_data import write_data

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if rank == 0:
        write_data(folder / "data", num_rows=24)
    torch.distributed.barrier()
    kinds = ("unequal", "workers", "empty", "modality", "failing", "opening")
    facts = {kind: run(kind, folder, rank) for kind in kinds}
    (folder / f"{rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
