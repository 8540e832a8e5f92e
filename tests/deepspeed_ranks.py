"""One of several real gloo processes that train with DeepSpeed; writes what it saw to a file.

python -m tests.deepspeed_ranks RANK SIZE FOLDER SHARDS PROGRAM...
"""

import gc
import json
import os
import sys
import threading
import traceback
from argparse import Namespace
from collections import Counter
from functools import partial
from pathlib import Path

import deepspeed
import psutil
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

import omniload
from omniload.adapters.deepspeed import (
    BalancedPipelineModule,
    load_checkpoint,
    pipeline_batches,
    save_checkpoint,
)
from tests.deepspeed_defects import CRASHES, SMALL_PROGRAMS
from tests.deepspeed_parts import (
    NUM_LAYERS,
    Case,
    clone,
    make_layers,
    make_loader,
    make_optimizer,
    rows_for,
)
from tests.deepspeed_zero import zero


def config_of(case):
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": case.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
        "pipeline": case.pipeline,
    }


def make_module(case, shards, layers=None):
    topology = None
    if case.tp > 1:
        topology = PipeModelDataParallelTopology(
            num_pp=len(case.parts) - 1, num_mp=case.tp, num_dp=case.dp
        )
    uneven = [1] * NUM_LAYERS
    return BalancedPipelineModule(
        layers or make_layers(shards, frozen=case.frozen),
        plan=case.plan,
        topology=topology,
        recompute_by_batch=(lambda x: uneven if len(x[0]) > 3 else None) if case.uneven else None,
    )


def make_engine(case, module, *, make=make_optimizer, **changes):
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=make(weights), config=config_of(case) | changes
    )
    return engine


def start(case, shards):
    module = make_module(case, shards)
    engine = make_engine(case, module)
    loader = make_loader(
        rows_for(shards, case),
        world=module.world,
        accumulation=case.accumulation,
        workers=case.workers,
        skip=case.skip,
    )
    return engine, loader


def weights_of(engine):
    module = engine.module
    return {
        module._local_start + index: clone(layer.state_dict())
        for index, layer in enumerate(module.forward_funcs)
    }


def count_forwards(module):
    """Count the forward passes of each layer, and of the first product of attention and MLP."""
    counts = Counter()
    for index, layer in enumerate(module.forward_funcs, start=module._local_start):
        counts[index, "graph"] = 0
        for name in ("", "attention.qkv", "mlp.0"):
            part = dict(layer.named_modules()).get(name)
            if part is not None:

                def count(_, given, key=(index, name), index=index):
                    counts[key] += 1
                    if key[1] == "":
                        counts[index, "graph"] += given[0][0].requires_grad

                part.register_forward_pre_hook(count)
    return counts


def train(case, shards):
    engine, loader = start(case, shards)
    batches = pipeline_batches(loader, engine)
    counts = count_forwards(engine.module)
    losses = [float(engine.train_batch(batches)) for _ in range(case.steps)]
    return {
        "losses": losses,
        "forwards": counts,
        "weights": weights_of(engine),
        "state": loader.state_dict(),
    }


PLAIN = Case(parts=(0, 5, 9))
MIXED = (1, "attention", "mlp", 0, 1, "attention", "mlp", 1, 0)
PAIRS = {
    "plain": Case(parts=(0, 5, 9), clip=0.5),
    "recompute": Case(parts=(0, 3, 9), recompute=MIXED, clip=0.5),
    "texts": Case(parts=(0, 3, 9), data="texts"),
    "frozen": Case(parts=(0, 2, 9), frozen=True, uneven=True),
}
TRIPLES = {
    "three": Case(parts=(0, 2, 6, 9), recompute=MIXED, workers=1),
    "skips": Case(parts=(0, 3, 6, 9), data="damaged"),
    "frozen_middle": Case(parts=(0, 1, 3, 9), frozen=True, recompute=MIXED),
}
FOURS = {
    "four": Case(parts=(0, 2, 4, 7, 9), accumulation=5),
    "dp_pp": Case(parts=(0, 4, 9), dp=2, accumulation=2, clip=0.5),
    "tp_pp": Case(parts=(0, 4, 9), tp=2, recompute=MIXED),
    "tp_pp_whole": Case(
        parts=(0, 6, 9), tp=2, pipeline={"pipe_partitioned": False, "grad_partitioned": False}
    ),
}
BF16 = {
    "bf16": Case(parts=(0, 5, 9), recompute=MIXED, bf16=True, zero=1),
    "bf16_frozen": Case(parts=(0, 2, 9), frozen=True, bf16=True),
}
RUNS = {**PAIRS, **BF16, **TRIPLES, **FOURS}


def resumed(shards, folder):
    """Two steps, saved; two more in a new engine; and the next loss under another partition."""
    engine, loader = start(PLAIN, shards)
    batches = pipeline_batches(loader, engine)
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    save_checkpoint(engine, loader, folder / "saved", client_state={"note": 7})
    engine, loader = start(PLAIN, shards)
    note = load_checkpoint(engine, loader, folder / "saved")["note"]
    batches = pipeline_batches(loader, engine)
    losses += [float(engine.train_batch(batches)) for _ in range(2)]
    other, loader = start(Case(parts=(0, 2, 9)), shards)
    load_checkpoint(other, loader, folder / "saved", load_module_only=True)
    batches = pipeline_batches(loader, other)
    moved = float(other.train_batch(batches))
    return {"losses": losses, "weights": weights_of(engine), "note": note, "moved": moved}


def moved(shards, folder):
    """What two stages saved, loaded by three."""
    engine, loader = start(Case(parts=(0, 2, 4, 9)), shards)
    load_checkpoint(engine, loader, folder / "saved", load_module_only=True)
    batches = pipeline_batches(loader, engine)
    return {"loss": float(engine.train_batch(batches))}


def other_accumulation(shards, folder):
    """The number of micro-batches of a step changes between two steps."""
    engine, loader = start(PLAIN, shards)
    batches = pipeline_batches(loader, engine)
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    state = loader.state_dict()
    engine.set_train_batch_size(2)
    try:
        engine.train_batch(batches)
        error = ""
    except omniload.ConfigError as found:
        error = str(found)
    loader = make_loader(shards, world=engine.module.world, accumulation=2)
    loader.load_state_dict(state)
    batches = pipeline_batches(loader, engine)
    losses.append(float(engine.train_batch(batches)))
    return {"losses": losses, "weights": weights_of(engine), "error": error}


def epochs(shards, folder):
    """`steps()` goes through epochs, and states can be loaded between steps."""
    engine, loader = start(PLAIN, shards)
    batches = pipeline_batches(loader, engine)
    seen, states = [], {}
    while loader.epoch < 2:
        epoch = loader.epoch
        for step in batches.steps():
            engine.train_batch(batches)
            seen.append((epoch, step))
            states[epoch, step] = loader.state_dict()
    loader.load_state_dict(states[0, 1])
    again = next(batches.steps())
    engine.train_batch(batches)
    loader.load_state_dict(states[0, 1])  # with batches of an epoch that is under way
    engine.train_batch(batches)
    same = loader.state_dict() == states[0, 2]
    before = loader.state_dict()["step"]
    engine.train_batch(pipeline_batches(loader, engine))  # goes on inside the epoch
    went_on = loader.state_dict()["step"] - before
    loader.load_state_dict(states[0, 3])
    evaluated = float(engine.eval_batch(batches))
    return {
        "seen": seen,
        "per_epoch": len(make_loader(shards, world=engine.module.world, accumulation=3)) // 3,
        "again": again,
        "went_on": went_on,
        "same": same,
        "evaluated": evaluated,
    }


def refusals(shards, folder):
    """What is asked for in vain, on all ranks alike."""
    found = {}

    def refused(name, make):
        try:
            make()
            found[name] = ""
        except omniload.ConfigError as error:
            found[name] = str(error)

    module = make_module(PLAIN, shards)
    engine = make_engine(PLAIN, module)
    loader = make_loader(shards, world=None, accumulation=3)
    refused("world", lambda: pipeline_batches(loader, engine))
    refused("engine", lambda: pipeline_batches(loader, module))
    refused("loader", lambda: pipeline_batches([], engine))
    empty = omniload.DataLoader(
        shards, budget=omniload.Budget(tokens=420), world=module.world, tail="empty"
    )
    refused("tail", lambda: pipeline_batches(empty, engine))
    inside = make_loader(shards, world=module.world, accumulation=3)
    next(iter(inside))
    place = inside.state_dict()
    inside.load_state_dict(place)
    refused("inside", lambda: engine.train_batch(pipeline_batches(inside, engine)))
    refused("layers", lambda: make_module(Case(parts=(0, 4, 8), recompute=(0,) * 8), shards))
    refused("stages", lambda: make_module(Case(parts=(0, 4, 6, 9)), shards))
    refused("part", lambda: make_module(Case(parts=(0, 5, 9), recompute=("mlp",) * 9), shards))
    frozen = make_layers(shards)
    for layer in frozen:
        layer.requires_grad_(False)
    refused("all_frozen", lambda: make_module(PLAIN, shards, frozen))
    good = make_loader(shards, world=module.world, accumulation=3)
    refused("loss", lambda: pipeline_batches(good, engine, loss="tokens"))
    pipeline_batches(good, engine)
    refused("plain_loader", lambda: engine.train_batch(good))
    refused("plain_batches", lambda: engine.train_batch(iter(good)))
    interval = {"activation_checkpoint_interval": 1}
    refused("interval", lambda: start(Case(parts=(0, 5, 9), pipeline=interval), shards))
    return found


def reads(shards, folder):
    """What each stage reads, and whether it has workers."""
    engine, loader = start(TRIPLES["three"], shards)
    threads = threading.active_count()
    batches = pipeline_batches(loader, engine)
    for _ in range(12):  # ten steps are an epoch
        engine.train_batch(batches)
    workers = bool(psutil.Process().children()) or threading.active_count() > threads
    figures = loader.stats().this_epoch
    return {"workers": workers, "state": loader.state_dict(), "bytes": figures.bytes_read}


def moved_optimizer(shards, folder):
    """What ZeRO-1 saved of two stages, converted by DeepSpeed and loaded under other bounds."""
    case, other = Case(parts=(0, 5, 9), zero=1), Case(parts=(0, 3, 9), zero=1)
    adam = partial(torch.optim.AdamW, lr=0.01)  # DeepSpeed converts the state of Adam alone
    engine = make_engine(case, make_module(case, shards), make=adam)
    loader = make_loader(shards, world=engine.module.world, accumulation=case.accumulation)
    batches = pipeline_batches(loader, engine)
    losses = [float(engine.train_batch(batches)) for _ in range(2)]
    save_checkpoint(engine, loader, folder / "zero-1", tag="two")
    losses += [float(engine.train_batch(batches)) for _ in range(2)]
    engine = make_engine(other, make_module(other, shards), make=adam)
    try:
        load_checkpoint(engine, loader, folder / "zero-1")
        refused = ""
    except omniload.StateError as error:
        refused = str(error)
    if torch.distributed.get_rank() == 0:
        ds_to_universal.main(
            Namespace(
                input_folder=str(folder / "zero-1" / "two"),
                output_folder=str(folder / "zero-1" / "any"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    torch.distributed.barrier()
    universal = {"checkpoint": {"load_universal": True}}
    engine = make_engine(other, make_module(other, shards), make=adam, **universal)
    load_checkpoint(engine, loader, folder / "zero-1", tag="any")
    batches = pipeline_batches(loader, engine)
    moved = [float(engine.train_batch(batches)) for _ in range(2)]
    return {"losses": losses, "refused": refused, "moved": moved}


PROGRAMS = {
    "resumed": resumed,
    "moved": moved,
    "moved_optimizer": moved_optimizer,
    "other_accumulation": other_accumulation,
    "epochs": epochs,
    "refusals": refusals,
    "reads": reads,
    "zero": zero,
    **SMALL_PROGRAMS,
}


def main(rank, size, folder, shards, *names):
    folder = Path(folder)
    torch.set_num_threads(1)
    # the groups of a module that is thrown away wait for their threads, which may wait for Python
    gc.disable()
    # else DeepSpeed compiles an operator for shared memory, which takes minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(
        dist_backend="gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=int(rank),
        world_size=int(size),
        auto_mpi_discovery=False,
        verbose=False,
    )
    results = {}
    crashing = [name for name in names if name in CRASHES]
    for name in (name for name in names if name not in CRASHES):
        try:
            if name in RUNS:
                results[name] = train(RUNS[name], shards)
            else:
                results[name] = PROGRAMS[name](shards, folder)
        except Exception:
            sys.stderr.write(f"\nrank {rank} in {name}\n{traceback.format_exc()}")
            sys.stderr.flush()
            raise
        print(json.dumps({"rank": rank, "done": name}), flush=True)
    torch.save(results, folder / f"rank-{rank}.pt")
    for name in crashing:
        # what one rank dies of, the others see as a lost connection: so it comes last, and ends all
        try:
            CRASHES[name]()
            results[name] = {"error": ""}
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        torch.save(results, folder / f"rank-{rank}.pt")
        os._exit(0)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
