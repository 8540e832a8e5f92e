"""M-RoPE: positions of a packed row in time, height and width, as Qwen2-VL and later use them.

Text counts on in all three rows alike. The tokens of an image all start from the position that the
next text token would have had, and add their place in the grid: frame, row, column. The text after
an image goes on one past the greatest of them.

    text   image of 2 x 3      text
    0 1    2 2 2 2 2 2         5 6     time
    0 1    2 2 2 3 3 3         5 6     height
    0 1    2 3 4 2 3 4         5 6     width

Paper: Qwen2-VL (arXiv 2409.12191), section 2.1.
"""

from __future__ import annotations

import numpy as np
import torch

from omniload import _native
from omniload._checks import MAX_INT32, check_count, check_optional_count
from omniload.errors import ConfigError

__all__ = ["mrope_position_ids"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
#: Dtypes and axes of the three tensors, as batches have them.
_USUAL = [(torch.int32, 1), (torch.int32, 2), (torch.int64, 2)]


def mrope_position_ids(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor,
    image_grid_thw: torch.Tensor,
    merge: int,
    *,
    num_tokens: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Compute the three rows of M-RoPE for a packed row; each sample starts at 0.

    In C++ on the CPU. On a device in torch, without waiting for it; there the arguments are not
    checked, because that would wait.

    Args:
        cu_seqlens: int32 (num_samples + 1,), where the samples begin.
        image_spans: int32 (num_images, 2), [start, end) of each image's tokens, in order.
        image_grid_thw: int64 (num_images, 3), patches of each image in time, height and width.
        merge: side of the square of patches that is one token.
        num_tokens: tokens of the row; None: the last of `cu_seqlens`, which waits for the device.
        backend: "auto", "native", or "numpy" for the portable code, which is torch's here; the same
            numbers.

    Returns:
        int64 (3, num_tokens): time, height, width.

    Raises:
        ConfigError: arguments of other types or shapes; samples or spans that don't lie in order,
            a span outside a sample or of another length than its grid, a grid that doesn't divide
            by `merge`.
        NativeUnavailableError: backend="native" without the extension.
    """
    merge = check_count("merge", merge, least=1, of="patch")
    num_tokens = check_optional_count("num_tokens", num_tokens, of="tokens")
    _check_tensors(cu_seqlens, image_spans, image_grid_thw)
    native = _native.choose(backend)
    on_cpu = cu_seqlens.device.type == "cpu"
    if native is None or not on_cpu:
        if on_cpu:
            _check(cu_seqlens, image_spans, image_grid_thw, merge, num_tokens)
        total = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
        return _in_torch(cu_seqlens, image_spans, image_grid_thw, merge, total)
    starts = np.ascontiguousarray(cu_seqlens.numpy(), dtype=np.int32)
    spans = np.ascontiguousarray(image_spans.numpy(), dtype=np.int32)
    grids = np.ascontiguousarray(image_grid_thw.numpy(), dtype=np.int64)
    total = int(starts[-1]) if len(starts) and num_tokens is None else num_tokens or 0
    out = np.empty((3, max(total, 0)), dtype=np.int64)
    try:
        native.mrope_position_ids(starts, spans, grids, merge, out)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return torch.from_numpy(out)


def _check_tensors(
    cu_seqlens: torch.Tensor, image_spans: torch.Tensor, image_grid_thw: torch.Tensor
) -> None:
    given = (cu_seqlens, image_spans, image_grid_thw)
    if all(type(tensor) is torch.Tensor and tensor.is_cpu for tensor in given):
        facts = [(tensor.dtype, tensor.ndim) for tensor in given]
        if facts == _USUAL and image_spans.shape[1] == 2 and image_grid_thw.shape[1] == 3:
            return  # names for what is wrong take longer than the rest
    named = {
        "cu_seqlens": (cu_seqlens, (-1,)),
        "image_spans": (image_spans, (-1, 2)),
        "image_grid_thw": (image_grid_thw, (-1, 3)),
    }
    for name, (tensor, shape) in named.items():
        is_tensor = isinstance(tensor, torch.Tensor)
        fits = is_tensor and tensor.ndim == len(shape) and tensor.shape[1:] == shape[1:]
        if not fits or tensor.dtype not in _INTEGERS or tensor.device.type not in ("cpu", "cuda"):
            wanted = ", ".join(["n", *map(str, shape[1:])])
            got = (
                f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
                if is_tensor
                else type(tensor).__name__
            )
            raise ConfigError(
                f"{name} must be a tensor of integers ({wanted}{',' * (len(shape) == 1)}) on a CPU "
                f"or a CUDA device, got {got}."
            )
        if tensor.device != cu_seqlens.device:
            raise ConfigError(
                f"{name} must lie where cu_seqlens lie: expected {cu_seqlens.device}, got "
                f"{tensor.device}."
            )
        # C++ reads offsets as int32; a greater number must not become another one
        is_wide = tensor.dtype == torch.int64 and name != "image_grid_thw"
        if is_wide and tensor.is_cpu and len(tensor) and int(tensor.max()) > MAX_INT32:
            raise ConfigError(f"{name} must be at most {MAX_INT32}, got {int(tensor.max())}.")


def _in_torch(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor,
    image_grid_thw: torch.Tensor,
    merge: int,
    num_tokens: int,
) -> torch.Tensor:
    places = torch.arange(num_tokens, device=cu_seqlens.device)
    starts = cu_seqlens.long()
    sample = torch.searchsorted(starts[1:].contiguous(), places, right=True)
    first = starts[sample]  # where the token's sample begins
    if len(image_spans) == 0:
        return (places - first).expand(3, -1).clone()
    begins, ends = image_spans.long().unbind(1)
    time, high, wide = image_grid_thw.long().unbind(1)
    high, wide = high // merge, wide // merge
    # an image takes fewer positions than tokens; what all images before a place have saved
    saved = (ends - begins) - torch.stack([time, high, wide]).amax(0)
    saved = torch.cat([saved.new_zeros(1), saved.cumsum(0)])
    ends = ends.contiguous()
    before = torch.searchsorted(ends, places, right=True)
    before_sample = torch.searchsorted(ends, first, right=True)
    image = before.clamp(max=len(ends) - 1)
    inside = (places >= begins[image]) & (places < ends[image])
    anchor = torch.where(inside, begins[image], places)
    text = anchor - first - (saved[before] - saved[before_sample])
    index = torch.where(inside, places - anchor, 0)
    columns, rows = wide[image].clamp(min=1), high[image].clamp(min=1)
    steps = (index // (columns * rows), index // columns % rows, index % columns)
    return torch.stack([text + step for step in steps])


def _check(
    cu_seqlens: torch.Tensor,
    image_spans: torch.Tensor,
    image_grid_thw: torch.Tensor,
    merge: int,
    num_tokens: int | None,
) -> None:
    starts = cu_seqlens.tolist()
    if not starts or starts[0] != 0 or starts != sorted(starts):
        raise ConfigError("cu_seqlens must start with 0 and never fall.")
    if num_tokens is not None and starts[-1] != num_tokens:
        raise ConfigError(
            f"cu_seqlens must end with the number of tokens: expected {num_tokens}, got "
            f"{starts[-1]}."
        )
    spans, grids = image_spans.tolist(), image_grid_thw.tolist()
    if len(spans) != len(grids):
        raise ConfigError(
            "image_grid_thw must have one grid of 3 for each span of 2: got "
            f"{3 * len(grids)} and {2 * len(spans)} numbers."
        )
    last = 0
    for number, ((start, end), (time, high, wide)) in enumerate(zip(spans, grids, strict=True)):
        if min(time, high, wide) < 1 or high % merge or wide % merge:
            raise ConfigError(
                f"image {number} of the row: its grid must divide by merge={merge}, got "
                f"({time}, {high}, {wide})."
            )
        tokens = time * (high // merge) * (wide // merge)
        if start < last or end - start != tokens:
            raise ConfigError(
                f"image {number} of the row: its span must follow the one before and have {tokens} "
                f"tokens, got [{start}, {end})."
            )
        after = next((bound for bound in starts if bound > start), None)
        if after is None or end > after:
            raise ConfigError(
                f"image {number} of the row: its span must lie in one sample, got [{start}, {end})."
            )
        last = end
