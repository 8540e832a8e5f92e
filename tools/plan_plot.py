"""The image that `omniload plan --plot` draws."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omniload.errors import ConfigError

if TYPE_CHECKING:
    from omniload.plan.figures import PlanFigures

__all__ = ["draw_loads", "figure_class"]

_STEPS = 100  # more can't be told apart
_RESOURCES = ("tiles", "tokens", "time")


def draw_loads(figures: Mapping[str, PlanFigures], path: Path) -> None:
    """Draw the load of the ranks by step: a row for each grouping, a column for each resource.

    Args:
        figures: name of the grouping -> its figures.
        path: the file; its suffix says the format.

    Raises:
        ConfigError: matplotlib is missing, or can't write this file.
    """
    canvas = figure_class()(figsize=(12, 1 + 1.8 * len(figures)), layout="constrained")
    axes = canvas.subplots(len(figures), len(_RESOURCES), squeeze=False, sharex=True, sharey="col")
    for line, (name, found) in zip(axes, figures.items(), strict=True):
        for axis, resource in zip(line, _RESOURCES, strict=True):
            _draw(axis, found, resource)
        line[0].set_ylabel(name)
    for axis, resource in zip(axes[0], _RESOURCES, strict=True):
        axis.set_title(resource)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    canvas.suptitle("Load of the smallest, mean and largest rank of a step, over the overall mean")
    try:
        canvas.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot must name an image file that can be written: {error}") from None


def figure_class() -> Any:
    """Return the class of matplotlib's figures; pyplot would choose a window system for them.

    Raises:
        ConfigError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: expected it to be installed. "
            "Get it with: pip install 'omniload-vlm[bench]'"
        ) from None
    return Figure


def _draw(axis: Any, figures: PlanFigures, resource: str) -> None:
    steps = figures.steps.measured[:_STEPS]
    loads = getattr(figures.steps, resource)
    unit = loads.mean.mean() or 1.0
    least, mean, most = (values[:_STEPS] / unit for values in (loads.least, loads.mean, loads.most))
    axis.fill_between(steps, least, most, alpha=0.3, linewidth=0, step="mid")
    axis.step(steps, most, where="mid", linewidth=0.8)
    axis.step(steps, mean, where="mid", linewidth=0.8, color="black")
    ratio = getattr(figures, f"dist_{resource}_step")
    axis.annotate(f"dist {ratio:.3f}", (0.99, 0.03), xycoords="axes fraction", ha="right")
