"""A step of a pipeline as a drawing: who works on what, who waits, and what memory holds.

One HTML file without scripts or anything from elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from omniload.tools.pipeline_planning import Planned

__all__ = ["draw_step"]

_Floats = npt.NDArray[np.float64]

_WIDTH, _LEFT, _RIGHT = 1400.0, 90.0, 20.0
_ROW, _GAP = 34.0, 10.0
_MEMORY = 70.0  # height of one memory curve
_MOST_TICKS = 10

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 14px system-ui, sans-serif; margin: 24px; color: #1c2733; background: #fff; }
h1 { font-size: 18px; margin: 0 0 4px; }
p { margin: 2px 0 10px; color: #51606e; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: #51606e; }
.forward { fill: #4e8fd0; } .backward { fill: #57a773; }
.send-activation, .receive-activation { fill: #e3a43c; }
.send-gradient, .receive-gradient { fill: #c77b2b; }
.box { stroke: #fff; stroke-width: .5; } .box:hover { stroke: #000; stroke-width: 1.2; }
.number { fill: #fff; text-anchor: middle; pointer-events: none; }
.lane { fill: #f1f3f5; } .tick { stroke: #dde2e6; }
.curve { fill: #b9cfe6; stroke: #4e8fd0; stroke-width: 1; }
.static { stroke: #51606e; stroke-dasharray: 4 3; } .limit { stroke: #c0392b; }
.legend span { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 16px;
  vertical-align: -1px; }
.legend .l-forward { background: #4e8fd0; } .legend .l-backward { background: #57a773; }
.legend .l-act { background: #e3a43c; } .legend .l-grad { background: #c77b2b; }
.legend .l-wait { background: #f1f3f5; border: 1px solid #dde2e6; }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ subtitle }}</p>
<p class="legend"><span class="l-forward"></span>forward
<span class="l-backward"></span>backward, recomputation included
<span class="l-act"></span>activations on their way <span class="l-grad"></span>gradients on their way
<span class="l-wait"></span>waiting</p>
<svg viewBox="0 0 {{ width }} {{ height }}" role="img" aria-label="{{ title }}">
{% for tick in ticks %}<line class="tick" x1="{{ tick.x }}" x2="{{ tick.x }}" y1="16" y2="{{ height - 4 }}"/>
<text x="{{ tick.x }}" y="11" text-anchor="middle">{{ tick.label }}</text>
{% endfor %}{% for lane in lanes %}<rect class="lane" x="{{ left }}" y="{{ lane.y }}" width="{{ lane.width }}" height="{{ row }}"/>
<text x="0" y="{{ lane.y + row / 2 }}">stage {{ lane.stage }}</text>
<text x="0" y="{{ lane.y + row / 2 + 13 }}">{{ lane.busy }} busy</text>
{% for box in lane.boxes %}<rect class="box {{ box.kind }}" x="{{ box.x }}" y="{{ box.y }}" width="{{ box.width }}" height="{{ box.height }}"><title>{{ box.words }}</title></rect>
{% if box.number is not none %}<text class="number" x="{{ box.middle }}" y="{{ lane.y + row / 2 + 4 }}">{{ box.number }}</text>
{% endif %}{% endfor %}{% endfor %}{% for curve in curves %}<path class="curve" d="{{ curve.path }}"><title>{{ curve.words }}</title></path>
<line class="static" x1="{{ left }}" x2="{{ right }}" y1="{{ curve.static_y }}" y2="{{ curve.static_y }}"><title>{{ curve.static_words }}</title></line>
{% if curve.limit_y is not none %}<line class="limit" x1="{{ left }}" x2="{{ right }}" y1="{{ curve.limit_y }}" y2="{{ curve.limit_y }}"><title>limit</title></line>
{% endif %}<text x="0" y="{{ curve.y + 14 }}">memory {{ curve.stage }}</text>
<text x="0" y="{{ curve.y + 28 }}">{{ curve.peak }}</text>
{% endfor %}</svg>
<p>Numbers are micro-batches of the step. Hover over a box for its times. Curves: activations of the
micro-batches as they are, and what is formed anew, above weights, gradients, optimizer and reserve (dashed){% if limited %};
red is the limit, which holds for micro-batches that fill the budget{% endif %}.</p>
</body></html>
"""  # noqa: E501


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """Time to places on the page."""

    step_ns: int

    @property
    def scale(self) -> float:
        return (_WIDTH - _LEFT - _RIGHT) / max(self.step_ns, 1)

    def x(self, when_ns: float) -> float:
        return round(_LEFT + when_ns * self.scale, 2)


def draw_step(planned: Planned) -> str:
    """Draw the first simulated step of a plan, as the first data-parallel rank runs it.

    Returns:
        The HTML page.
    """
    import jinja2

    axis = _Axis(step_ns=planned.step.step_ns)
    lanes = _lanes(planned, axis)
    top = 20 + len(lanes) * (_ROW + _GAP) + _GAP
    curves = _curves(planned, axis, top)
    height = top + len(curves) * (_MEMORY + _GAP)
    bubbles = planned.bubbles
    name = planned.table.name or "model"
    page = jinja2.Environment(autoescape=True, trim_blocks=False).from_string(_PAGE)
    return page.render(
        title=f"One training step of {name} on {planned.plan.num_stages} stages",
        subtitle=(
            f"{axis.step_ns / 1e9:.3f} s; over several steps the GPUs work for "
            f"{100 * bubbles.work:.1f} % of the time, and wait {100 * bubbles.warm_up:.1f} % for "
            f"the pipeline to fill and drain, {100 * bubbles.imbalance:.1f} % for stages that "
            f"differ, {100 * bubbles.variation:.1f} % for micro-batches that differ, "
            f"{100 * bubbles.transfers:.1f} % for transfers, {100 * bubbles.ranks:.1f} % for other "
            "ranks."
        ),
        width=_WIDTH,
        height=height,
        left=_LEFT,
        right=_WIDTH - _RIGHT,
        row=_ROW,
        ticks=_ticks(axis),
        lanes=lanes,
        curves=curves,
        limited=planned.plan.memory_limit_gb is not None,
    )


def _lanes(planned: Planned, axis: _Axis) -> list[dict[str, Any]]:
    step = planned.step
    lanes: list[dict[str, Any]] = []
    for stage in range(step.times[0].num_stages):
        busy = int(step.times[0].forward[stage].sum() + step.times[0].backward[stage].sum())
        lanes.append(
            {
                "stage": stage,
                "y": 20 + stage * (_ROW + _GAP),
                "width": round(axis.step_ns * axis.scale, 2),
                "busy": f"{100 * busy / max(axis.step_ns, 1):.0f} %",
                "boxes": [],
            }
        )
    for event in step.events():
        if event.rank == 0 and event.end_ns > event.start_ns:
            lane = lanes[event.device]
            box = _box(event, axis, lane["y"])
            if box is not None:
                lane["boxes"].append(box)
    return lanes


def _box(event: Any, axis: _Axis, y: float) -> dict[str, Any] | None:
    kind = event.kind.name.lower().replace("_", "-")
    works = kind in ("forward", "backward")
    if not works and not kind.startswith(("send", "receive")):
        return None
    width = (event.end_ns - event.start_ns) * axis.scale
    number = event.micro_batch if works and width > 14 else None
    return {
        "kind": kind,
        "x": axis.x(event.start_ns),
        "middle": axis.x((event.start_ns + event.end_ns) / 2),
        "y": y if works else round(y + _ROW * 0.3, 2),
        "width": max(round(width, 2), 0.2),
        "height": _ROW if works else round(_ROW * 0.4, 2),
        "number": number,
        "words": (
            f"stage {event.stage}, {kind.replace('-', ' ')} of micro-batch {event.micro_batch}: "
            f"{(event.end_ns - event.start_ns) / 1e6:.1f} ms from {event.start_ns / 1e6:.1f} ms"
        ),
    }


def _ticks(axis: _Axis) -> list[dict[str, Any]]:
    whole = axis.step_ns / 1e9
    raw = max(whole / _MOST_TICKS, 1e-6)
    power = 10.0 ** np.floor(np.log10(raw))
    unit = next(power * each for each in (1, 2, 5, 10) if power * each >= raw)
    places = np.arange(0, int(whole / unit) + 1) * unit
    return [{"x": axis.x(when * 1e9), "label": f"{when:g} s"} for when in places.tolist()]


def _curves(planned: Planned, axis: _Axis, top: float) -> list[dict[str, Any]]:
    kept, static, working = _memory(planned)
    limit = planned.plan.memory_limit_gb
    curves = planned.step.memory(kept, static=static, working=working)
    most = max([float(held.max()) for _, held in curves] + [1e9 * (limit or 0.0), 1.0]) * 1.05
    found = []
    for stage, (when, held) in enumerate(curves):
        y = top + stage * (_MEMORY + _GAP)

        def at(amount: float, y: float = y) -> float:
            return round(y + _MEMORY * (1 - amount / most), 2)

        path = [f"M{axis.x(0)},{at(0.0)}"]
        before = float(held[0])
        for moment, amount in zip(when.tolist(), held.tolist(), strict=True):
            path += [f"L{axis.x(moment)},{at(before)}", f"L{axis.x(moment)},{at(amount)}"]
            before = amount
        path += [f"L{axis.x(axis.step_ns)},{at(before)}", f"L{axis.x(axis.step_ns)},{at(0.0)}Z"]
        found.append(
            {
                "stage": stage,
                "y": y,
                "path": " ".join(path),
                "peak": f"peak {held.max() / 1e9:.1f} GB",
                "words": f"stage {stage}: at most {held.max() / 1e9:.2f} GB in this step",
                "static_y": at(float(static[stage])),
                "static_words": f"stage {stage}: {static[stage] / 1e9:.2f} GB are always there",
                "limit_y": None if limit is None else at(limit * 1e9),
            }
        )
    return found


def _memory(planned: Planned) -> tuple[_Floats, _Floats, _Floats]:
    """Count the bytes of the drawn step: kept, always there, and formed anew."""
    from omniload.pipeline.predict import stage_bytes, step_places

    data = planned.data
    places = step_places(len(data.shapes), planned.micro_batches, planned.parallel.data)
    return stage_bytes(planned.table, data.shapes.take(places[0, 0]), planned.plan)
