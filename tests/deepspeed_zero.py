"""ZeRO without a pipeline: `deepspeed.initialize` and our loader, saved and resumed."""

import deepspeed
import torch

from examples.tiny_vlm import TinyVLM
from omniload import World
from omniload.adapters.deepspeed import load_checkpoint, save_checkpoint
from omniload.shards import open_shards
from tests.deepspeed_parts import make_loader, make_optimizer

ACCUMULATION = 2
VARIANTS = ((1, False), (2, False), (3, False), (1, True), (2, True), (3, True))


def make_model(shards):
    torch.manual_seed(0)
    settings = dict(open_shards(shards).manifest.settings)
    encoder, size = settings["encoder"], settings["tiling"]["size"]
    return TinyVLM(
        vocab_size=encoder["vocab_size"],
        image_token_id=encoder["image_token_id"],
        tokens_per_tile=encoder["tokens_per_tile"],
        tile_size=size,
        patch_size=size // 4,
        width=16,
        num_heads=2,
        num_layers=1,
    )


def start(shards, stage, bf16):
    model = make_model(shards)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
    )
    return engine, make_loader(shards, world=World.from_env(), accumulation=ACCUMULATION)


def steps(engine, loader, number):
    """Train; the mean loss of each step over its tokens on all ranks."""
    dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32
    batches, losses = iter(loader), []
    for _ in range(number):
        total = torch.zeros(1)
        for _ in range(ACCUMULATION):
            batch = next(batches).to(engine.device)
            loss = engine(**batch.model_inputs(dtype=dtype)).loss
            total += loss.detach().float() / batch.num_loss_tokens_step
            engine.backward(loss * batch.loss_scale(engine_divides_accumulation=True))
            engine.step()
        torch.distributed.all_reduce(total)
        losses.append(float(total))
    return losses


def zero(shards, folder):
    """Three steps unbroken; and three steps with a new engine and loader after the first two."""
    found = {}
    for stage, bf16 in VARIANTS:
        saved = folder / f"zero-{stage}-{bf16}"
        engine, loader = start(shards, stage, bf16)
        losses = steps(engine, loader, 2)
        save_checkpoint(engine, loader, saved, client_state={"note": stage})
        losses += steps_more(engine, loader)
        engine, loader = start(shards, stage, bf16)
        note = load_checkpoint(engine, loader, saved)["note"]
        found[f"{stage}-{bf16}"] = {
            "losses": losses, "resumed": steps(engine, loader, 1), "note": note,
            "state": loader.state_dict(),
        }  # fmt: skip
    return found


def steps_more(engine, loader):
    """One more step of the epoch that runs."""
    loader.load_state_dict(loader.state_dict())  # iter() would begin the epoch again
    return steps(engine, loader, 1)
