"""The simulator against DeepSpeed's own engine: four processes, with layers that sleep."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from omniload.errors import ConfigError
from omniload.pipeline.order import arrange_micro_batches
from omniload.pipeline.predict import stage_times
from omniload.pipeline.simulate import simulate
from omniload.pipeline.times import StageTimes
from omniload.tools.bench_pipeline_ablation import Draw, pair_table, planner_for
from omniload.tools.pipeline_setting import SETTING

__all__ = ["Run", "engine_cases", "engine_runs"]

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = "tests.sleeping_pipeline"
_MICRO_BATCHES = 12
_MEAN_MS = 50.0  # forward pass of the mean micro-batch: long beside what an instruction takes
_STEPS = 5
_TIMEOUT_S = 300


@dataclass(frozen=True, kw_only=True)
class Run:
    """One step of the engine, and the same simulated.

    Args:
        case: what was run.
        engine_s: the quickest step of the engine, seconds.
        simulated_s: the simulated one.
    """

    case: str
    engine_s: float
    simulated_s: float

    @property
    def over(self) -> float:
        """How much longer the engine takes, as a share."""
        return self.engine_s / self.simulated_s - 1.0


def engine_cases() -> Mapping[str, StageTimes]:
    """Make times of stages to sleep for: packs of 6B + 20B, cut and ordered in several ways."""
    setting = replace(SETTING, data_parallel=1, micro_batches=_MICRO_BATCHES, steps=4)
    table = pair_table("internvl-6b-20b", setting)
    planner = planner_for(table, Draw(setting=setting, seed=0))
    packs = planner.costs.shapes.take(np.arange(_MICRO_BATCHES))
    uniform = tuple(np.linspace(0, table.num_layers, setting.stages + 1).astype(int).tolist())
    ours = planner.plan()
    plans = {
        "uniform": planner.predict(uniform, (0,) * table.num_layers),
        "uniform, recomputed": planner.predict(uniform, None),
        "ours": planner.predict(ours.parts, (0,) * table.num_layers),
        "ours, recomputed": planner.predict(ours.parts, None),
    }
    found = {name: stage_times(table, packs, plan) for name, plan in plans.items()}
    order = arrange_micro_batches(found["ours"])[0]
    found["ours, ordered"] = found["ours"].take(order)
    scale = _MEAN_MS * 1e6 / found["ours"].forward.mean()
    return {name: _scaled(times, scale) for name, times in found.items()}


def _scaled(times: StageTimes, scale: float) -> StageTimes:
    """Scale the work; what is sent is a single number, which takes no time."""
    still = np.zeros_like(times.transfer)
    return StageTimes(
        forward=np.rint(times.forward * scale).astype(np.int64),
        backward=np.rint(times.backward * scale).astype(np.int64),
        transfer=still,
        gradient_transfer=still,
    )


def engine_runs(progress: Callable[[], None] = lambda: None) -> list[Run]:
    """Run all cases on the engine, one after the other.

    Raises:
        ConfigError: not in a checkout, or a run that failed.
    """
    if not (_ROOT / "tests" / "sleeping_pipeline.py").is_file():
        raise ConfigError(
            "--engine needs a checkout: expected tests/sleeping_pipeline.py beside tools/, got an "
            "installed package."
        )
    found = []
    for name, times in engine_cases().items():
        seconds = min(_measured(times))
        found.append(Run(case=name, engine_s=seconds, simulated_s=simulate(times).step_s))
        progress()
    return found


def _measured(times: StageTimes) -> list[float]:
    """Time steps of the engine, seconds."""
    table = {
        "forward_ms": (times.forward / 1e6).tolist(),
        "backward_ms": (times.backward / 1e6).tolist(),
    }
    with tempfile.TemporaryDirectory(prefix="omniload-engine-") as folder:
        file = Path(folder) / "times.json"
        file.write_text(json.dumps(table), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(times.num_stages), "-m", _PROGRAM, str(file)]
        command += ["--steps", str(_STEPS)]
        try:
            done = subprocess.run(
                command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
            )
            seconds: list[float] = json.loads(done.stdout.splitlines()[-1])["step_s"]
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the engine must end within {_TIMEOUT_S} s, and didn't.") from None
        except (subprocess.CalledProcessError, ValueError, IndexError, KeyError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()[-2000:]
            raise ConfigError(
                f"the engine must run (pip install 'omniload-vlm[deepspeed]'): {said}"
            ) from None
    return seconds
