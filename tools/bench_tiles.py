"""`omniload bench tiles`: the kernels that make floats of pixels, against what memory can carry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

__all__ = ["tiles"]

_WARM_UP = 5


def tiles(
    num_tiles: Annotated[int, typer.Option(min=1, help="Tiles of 448 x 448 pixels.")] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure the Triton kernels for tiles on a GPU: bytes moved over peak bandwidth.

    Next to them the same in plain torch operations, and a copy of as many bytes, which is what
    the memory carries at best. Every result is first compared with the reference. Needs a GPU.

    Example: `omniload bench tiles --num-tiles 256`
    """
    import torch

    from omniload.errors import ConfigError
    from omniload.tools.bench_common import emit

    if not torch.cuda.is_available():
        raise ConfigError(
            "omniload bench tiles needs a GPU that torch can use, got none. The pixels on a CPU "
            "are measured by `omniload bench images`."
        )
    device = torch.device("cuda")
    peak = _peak_bandwidth(device)
    rows = []
    for case in _cases(num_tiles, device):
        _check(case)
        seconds = _median_s(case.call, repeats)
        rate = case.num_bytes / seconds
        rows.append(
            {
                "kernel": case.name,
                "us": seconds * 1e6,
                "MB": case.num_bytes / 1e6,
                "GB/s": rate / 1e9,
                "% of peak": 100 * rate / peak if peak else "unknown",
            }
        )
    name = torch.cuda.get_device_name(device)
    notes = (
        f"{name}, peak {peak / 1e9:,.0f} GB/s. " if peak else f"{name}, peak unknown. "
    ) + f"us: median of {repeats} runs on the device. MB: bytes read and written once."
    emit("tiles", rows, as_json, notes)


@dataclass(frozen=True, kw_only=True)
class _Case:
    name: str
    call: Callable[[], torch.Tensor]
    expected: Callable[[], torch.Tensor] | None
    num_bytes: int


def _cases(num_tiles: int, device: torch.device) -> list[_Case]:
    import torch

    from omniload.kernels import reference
    from omniload.kernels import tiles as kernels

    generator = torch.Generator(device).manual_seed(0)
    pixels = torch.randint(
        0, 256, (num_tiles, 3, 448, 448), dtype=torch.uint8, device=device, generator=generator
    )
    flat = pixels.flatten()
    grids = torch.tensor([(1, 1)] * num_tiles, dtype=torch.int32, device=device)
    patches = torch.tensor([(32, 32)] * num_tiles, dtype=torch.int32, device=device)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        table = reference.normalize_table(dtype=dtype, device=device)
        size = table.element_size()
        short = str(dtype).removeprefix("torch.")
        both = pixels.numel() * (1 + size)
        qwen: dict[str, Any] = {"patch": 14, "merge": 2, "frames": 2, "table": table}
        expected = partial(reference.normalize_tiles, pixels, table)
        calls: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], int]] = {
            "normalize": (partial(kernels.normalize_tiles, pixels, table), expected, both),
            "normalize, torch": (partial(_in_torch, pixels, dtype), expected, both),
            "images to tiles": (
                partial(kernels.images_to_tiles, flat, grids, 448, table),
                partial(reference.images_to_tiles, flat, grids, 448, table),
                both,
            ),
            "qwen patches": (
                partial(kernels.patchify, flat, patches, **qwen),
                partial(reference.patchify, flat, patches, **qwen),
                pixels.numel() * (1 + 2 * size),
            ),
        }
        found += [
            _Case(name=f"{name}, {short}", call=call, expected=expected, num_bytes=num_bytes)
            for name, (call, expected, num_bytes) in calls.items()
        ]
    copied = torch.empty(pixels.numel(), dtype=torch.float32, device=device)
    found.append(_Case(name="copy", call=copied.clone, expected=None, num_bytes=8 * copied.numel()))
    return found


def _in_torch(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Normalise as a training loop does it on the device."""
    import torch

    from omniload.kernels.reference import IMAGENET_MEAN, IMAGENET_STD

    mean, std = (
        torch.tensor(given, device=pixels.device).view(3, 1, 1)
        for given in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return ((pixels.float() / 255 - mean) / std).to(dtype)


def _check(case: _Case) -> None:
    """Figures of a kernel that computes something else would say nothing."""
    if case.expected is None:
        return
    result, expected = case.call(), case.expected()
    # torch may divide a little differently on a device; the kernels must not differ at all
    close = {"rtol": 1e-2, "atol": 1e-5} if ", torch" in case.name else {"rtol": 0, "atol": 0}
    if result.shape != expected.shape or not result.allclose(expected, **close):
        raise RuntimeError(f"{case.name} does not give what the reference gives.")


def _median_s(call: Callable[[], torch.Tensor], repeats: int) -> float:
    import statistics

    import torch

    for _ in range(_WARM_UP):
        call()
    seconds = []
    for _ in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(seconds))


def _peak_bandwidth(device: torch.device) -> float | None:
    """Bytes a second of the device's memory, from its clock (two transfers each) and its width."""
    import torch

    facts = torch.cuda.get_device_properties(device)
    clock_khz = getattr(facts, "memory_clock_rate", 0)
    width_bits = getattr(facts, "memory_bus_width", 0)
    return 2.0 * int(clock_khz) * 1e3 * int(width_bits) / 8 or None
