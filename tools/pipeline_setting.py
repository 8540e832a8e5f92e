"""The one setting of `omniload bench pipeline`, and the made-up data that it runs on.

The published figures (Yao et al., ICML 2025, table 1) name neither the machine's efficiency nor the
parallel sizes or the lengths of the 1.2 million samples. The values here were chosen before the
benchmark was first run; the 6B + 34B model and all other parts use them unchanged. The benchmark
prints beside the figures what other values would give.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from omniload.index import LengthIndex
from omniload.pipeline.models import Machine
from omniload.tools.lengths import KINDS, Kind, make_lengths
from omniload.types import Budget

__all__ = ["INTERNVL_MIX", "PUBLISHED", "SETTING", "Setting", "internvl_lengths"]

_SHARES = {"text": 6, "diagrams": 18, "charts": 26}

#: Half of the samples have one tile and the text of a general instruction mix (log-normal with a
#: median of 250 tokens and a mean of 330, an assumption), 6 % have no image, and 44 % have the
#: lengths of document and chart sets, in the proportion of AI2D and ChartQA.
INTERNVL_MIX: tuple[Kind, ...] = (
    Kind(
        name="one-tile",
        share=50,
        tiles={1: 1},
        text=(10, 73, 151, 250, 415, 654, 859, 1432, 2400),
    ),
    *(replace(kind, share=_SHARES[kind.name]) for kind in KINDS if kind.name in _SHARES),
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained: machine, parallel sizes, data.

    Args:
        stages: stages of the pipeline.
        data_parallel: copies of it.
        micro_batches: micro-batches of a step on each copy.
        memory_gb: of one GPU.
        zero_stage: 1: optimizer states are shared out over the copies.
        vision_efficiency: share of the peak that the encoder reaches.
        language_efficiency: the same for the language model.
        tokens: most tokens of a pack; its tiles are matched to the data.
        padded: samples of a padded micro-batch, for the baseline.
        num_samples: of the whole data set, for GPU days.
        steps: simulated steps of each draw of the data.
    """

    stages: int = 4
    data_parallel: int = 4
    micro_batches: int = 32
    memory_gb: float = 80.0
    zero_stage: int = 1
    vision_efficiency: float = 0.40
    language_efficiency: float = 0.55
    tokens: int = 4096
    padded: int = 4
    num_samples: int = 1_200_000
    steps: int = 12

    @property
    def machine(self) -> Machine:
        """An A100 with these efficiencies."""
        return Machine(
            vision_efficiency=self.vision_efficiency, language_efficiency=self.language_efficiency
        )

    @property
    def slots(self) -> int:
        """Micro-batches of a step on all copies together."""
        return self.data_parallel * self.micro_batches

    def budget(self, index: LengthIndex) -> Budget:
        """Match the tiles of a pack to the data: as many as go with its tokens."""
        tokens, tiles = int(index.num_tokens.sum(dtype=int)), int(index.num_tiles.sum(dtype=int))
        matched = -(-self.tokens * tiles // tokens)
        return Budget(tokens=self.tokens, tiles=max(matched, int(index.num_tiles.max())))


SETTING = Setting()

#: GPU days on A100 80 GB of one pass over 1.2 million samples: model -> arm -> days.
PUBLISHED: dict[str, dict[str, float]] = {
    "internvl-6b-20b": {"baseline": 61.8, "data": 51.9, "model": 29.0, "memory": 21.3},
    "internvl-6b-34b": {"baseline": 75.4, "memory": 30.5},
}


def internvl_lengths(count: int, *, seed: int = 0) -> LengthIndex:
    """Draw the lengths of a data set like that of the published runs.

    Args:
        count: rows.
        seed: any integer.
    """
    return make_lengths(count, seed=seed, kinds=INTERNVL_MIX)
