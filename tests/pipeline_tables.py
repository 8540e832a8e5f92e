"""Small random cost tables of whole numbers, and slow searches to hold plans against."""

import itertools

import numpy as np
from hypothesis import strategies as st

from omniload.pipeline.kinds import LayerKind, Linear, ParamBytes, Selective, Shapes
from omniload.pipeline.table import CostTable

ONE = Shapes(num_tiles=np.ones(1), num_tokens=np.ones(1), sum_squares=np.ones(1))


def ns(value):
    return Linear(fixed=value * 1e-9)


def size(value):
    return Linear(fixed=float(value))


@st.composite
def tables(draw, most_layers=6, frozen=True, tied=True):
    small = st.integers(0, 20)
    kinds = []
    for name in ("eye", "mind", "mouth")[: draw(st.integers(1, 3))]:
        kept = draw(st.integers(5, 40))
        recomputable = draw(st.booleans())
        selective = ()
        if recomputable and draw(st.booleans()):
            selective = (
                Selective(name="part", recompute_s=ns(draw(small)), kept_bytes=size(draw(small))),
            )
        kinds.append(
            LayerKind(
                name=name,
                part="language",
                forward_s=ns(draw(st.integers(1, 50))),
                backward_s=ns(2 * draw(st.integers(1, 25))),
                recompute_s=ns(draw(small)),
                kept_bytes=size(kept),
                kept_bytes_recompute=size(draw(st.integers(0, kept))),
                output_bytes=size(draw(small)),
                params=draw(st.integers(1, 5)),
                trainable=not frozen or draw(st.booleans()),
                recomputable=recomputable,
                selective=selective,
            )
        )
    names = st.sampled_from([kind.name for kind in kinds])
    layers = draw(st.lists(names, min_size=2, max_size=most_layers))
    group = draw(st.sets(st.integers(0, len(layers) - 1), min_size=2, max_size=2))
    return CostTable(
        kinds=tuple(kinds),
        layers=tuple(layers),
        tied=(tuple(group),) if tied and draw(st.booleans()) else (),
        param_bytes=ParamBytes(weight=1, gradient=2, optimizer=3),
        zero_stage=0,
        reserve_bytes=7,
        p2p_bytes_per_s=1e9,
    )


def stage_memory(table, layers, choices, in_flight):
    """Bytes of a stage, from the words of the documentation."""
    static = table.static_bytes[layers].sum()
    for group in table.tied:
        mine = [layer for layer in group if layer in layers]
        if mine:
            static -= table.static_bytes[mine].sum()
            static += table.static_bytes[list(group)].max()
    every = [0] * table.num_layers
    for layer, choice in zip(layers, choices, strict=True):
        every[layer] = choice
    whole, kept = table.kept(ONE)[:, 0], table.kept(ONE, every)[:, 0]
    anew = 0.0
    for layer in layers:
        if table.has_backward[layer] and every[layer] == 1:
            anew = max(anew, whole[layer])
        elif table.has_backward[layer] and every[layer] != 0:
            anew = max(anew, whole[layer] - kept[layer])
    return table.reserve_bytes + static + in_flight * kept[layers].sum() + anew


def stage_time(table, layers, choices, num_layers):
    """Nanoseconds of a stage: its layers, what they recompute, and transfers at its ends."""
    every = [0] * table.num_layers
    for layer, choice in zip(layers, choices, strict=True):
        every[layer] = choice
    work = table.forward(ONE) + table.backward(ONE) + table.recompute(ONE, every)
    total = round(work[layers].sum() * 1e9)
    sent = 2 * table.output(ONE)  # gradients go back over every cut
    for cut in (layers[0] - 1, layers[-1]):
        if 0 <= cut < num_layers - 1:
            total += round(sent[cut, 0])  # a byte takes a nanosecond
    return total


def brute_force(table, *, num_stages, num_micro_batches, limit):
    """The least (M - 1) * longest + sum over all cuts and all choices; None: nothing fits."""
    num_layers = table.num_layers
    least = {}
    for low, high in itertools.combinations(range(num_layers + 1), 2):
        layers = list(range(low, high))
        for choices in itertools.product(*(table.kind(layer).choices for layer in layers)):
            time = stage_time(table, layers, choices, num_layers)
            for stage in range(num_stages):
                in_flight = min(num_stages - stage, num_micro_batches)
                if stage_memory(table, layers, choices, in_flight) <= limit:
                    at = (stage, low, high)
                    least[at] = min(least.get(at, time), time)
    best = None
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        bounds = (0, *cuts, num_layers)
        stages = [least.get((s, *pair)) for s, pair in enumerate(itertools.pairwise(bounds))]
        if None not in stages:
            value = (num_micro_batches - 1) * max(stages) + sum(stages)
            best = value if best is None else min(best, value)
    return best
