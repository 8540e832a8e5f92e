"""`omniload bench images`: encoded images to packed tiles, next to the usual way and the floor."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from omniload.images import InternVLTiles

__all__ = ["images"]

_DEFAULT = ("photo:640x480", "photo:1280x720", "page:1654x2339", "photo:4032x3024")
_KINDS = ("photo", "page")
_TOKENS_PER_TILE = 256
_WHOLE = ("float32", "uint8", "stored")


def images(
    image: Annotated[
        list[str] | None,
        typer.Option(help="KIND:WIDTHxHEIGHT, the kind photo or page; may be repeated."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images of a micro-batch.")] = 4,
    max_tiles: Annotated[int, typer.Option(min=1, help="Most tiles of a grid.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of timing.")] = 7,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the rendered images.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare ways from the bytes of JPEGs to the one tensor of tiles of a micro-batch.

    float32 is the usual way: PIL decodes, resizes and crops, each tile becomes a float tensor and
    is normalised, all tiles of the micro-batch are stacked. uint8 is this package: transform and
    pack. Both give the same pixels (normalised or not; the table says where they differ). stored is
    uint8 from images that preprocess --store resized has written. The rest are parts of uint8.
    CPU time of one thread, as a worker process has it, which keeps its freed memory. Results are
    written to memory that was used before; in a worker process it is new shared memory, of which
    float32 needs four times as much. Images are rendered, each of its own seed, quality 90.

    Example: `omniload bench images --image photo:1280x720`
    """
    from omniload._memory import keep_freed_memory
    from omniload.images import InternVLTiles, pil_info, resize_backend
    from omniload.tools.bench_common import emit, one_thread

    policy = InternVLTiles(max_tiles=max_tiles)
    keep_freed_memory()
    with one_thread():
        rows = [
            row
            for name in image or _DEFAULT
            for row in _figures(
                name, [_encoded(name, seed + i) for i in range(batch)], policy, repeats
            )
        ]
    info = pil_info()
    notes = (
        f"PIL is {'Pillow-SIMD' if info.simd else 'plain Pillow'} {info.version}; uint8 resizes "
        f"with {resize_backend()}. ms: CPU time of one thread for each image of a micro-batch of "
        f"{batch}, median of {repeats} rounds. times: time by that of uint8. KB/tile: handed to "
        "the device for each tile. differ %, levels: values that are not those of uint8, and by "
        "how much at most. grid, thumb: resizing. rest: cells, checks, tokens; parts are timed "
        "apart, so it is rough on a busy machine."
    )
    emit("images", rows, as_json, notes)


@dataclass(frozen=True, kw_only=True)
class _Size:
    kind: str
    width: int
    height: int

    @classmethod
    def parse(cls, name: str) -> _Size:
        from omniload.errors import ConfigError

        kind, _, size = name.partition(":")
        width, _, height = size.partition("x")
        if kind not in _KINDS or not (width.isdecimal() and height.isdecimal()):
            raise ConfigError(
                f"--image must be KIND:WIDTHxHEIGHT with a kind of {_KINDS}, got {name!r}."
            )
        if not (0 < int(width) <= 20_000 and 0 < int(height) <= 20_000):
            raise ConfigError(f"--image must have sides of 1 to 20000 pixels, got {name!r}.")
        return cls(kind=kind, width=int(width), height=int(height))


def _encoded(name: str, seed: int) -> bytes:
    """Render an image and encode it as JPEG."""
    import numpy as np
    from PIL import Image

    size = _Size.parse(name)
    rng = np.random.default_rng(seed)
    pixels = (_photo if size.kind == "photo" else _page)(size, rng)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def _photo(size: _Size, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Smooth shapes, some edges, and the noise of a camera."""
    import numpy as np
    from PIL import Image, ImageDraw

    width, height = size.width, size.height
    small = rng.integers(0, 256, (height // 40 + 2, width // 40 + 2, 3), dtype=np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(image)
    for _ in range(60):
        left, top = int(rng.integers(0, width)), int(rng.integers(0, height))
        right, bottom = left + width // 12, top + height // 12
        draw.rectangle((left, top, right, bottom), fill=tuple(rng.integers(0, 256, 3).tolist()))
    noise = rng.integers(-6, 7, (height, width, 1), dtype=np.int16)
    found: npt.NDArray[np.uint8] = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
    return found


def _page(size: _Size, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Render lines of words, black on white, as a scan has them."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (size.width, size.height), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default()
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    for top in range(40, size.height - 40, 18):
        words = ["".join(rng.choice(letters, int(rng.integers(2, 11)))) for _ in range(40)]
        text = " ".join(words)[: max(size.width // 7, 1)]
        draw.text((40, top), text, fill="black", font=font)
    return np.array(image)


def _figures(
    name: str, batch: list[bytes], policy: InternVLTiles, repeats: int
) -> list[dict[str, Any]]:
    from omniload.tools.bench_common import measure

    ways = _ways(batch, policy)
    differ, levels = _difference(ways)
    timings = measure(ways, repeats=repeats, clock=time.thread_time)
    medians = {way: timing.median_s / len(batch) for way, timing in timings.items()}
    ours = medians["uint8"]
    parts = [way for way in ways if way not in _WHOLE]
    rest = ours - sum(medians[part] for part in parts)
    tile_kb = 3 * policy.size * policy.size / 1024
    rows = []
    for way, seconds in {**medians, "rest": rest}.items():
        whole = way in _WHOLE
        is_float = way == "float32"
        rows.append(
            {
                "image": name,
                "way": way if whole else f"- {way}",
                "ms": seconds * 1e3,
                "times": seconds / ours,
                "KB/tile": tile_kb * (4 if is_float else 1) if whole else "",
                "differ %": differ if is_float else "",
                "levels": levels if is_float else "",
            }
        )
    return rows


def _ways(batch: list[bytes], policy: InternVLTiles) -> dict[str, Callable[[], Any]]:
    import torch

    from omniload.images import decode, image_size, is_stored, resize, store_tiles

    width, height = image_size(batch[0])
    columns, rows = policy.grid(width, height)
    size, num_tiles = policy.size, policy.num_tiles(width, height)
    shape = (len(batch) * num_tiles, 3, size, size)
    stored = [store_tiles(data, policy) for data in batch]
    pixels = [decode(data) for data in batch]
    ways: dict[str, Callable[[], Any]] = {
        "float32": partial(_float_batch, batch, policy, torch.empty(shape)),
        "uint8": _packer(batch, policy, (width, height)),
        **({"stored": _packer(stored, policy, (width, height))} if is_stored(stored[0]) else {}),
        "decode": partial(_each, decode, batch),
        "grid": partial(_each, partial(resize, width=columns * size, height=rows * size), pixels),
    }
    if num_tiles > columns * rows:
        ways["thumb"] = partial(_each, partial(resize, width=size, height=size), pixels)
    return ways


def _each(call: Callable[[Any], Any], values: list[Any]) -> None:
    for value in values:
        call(value)


def _float_batch(batch: list[bytes], policy: InternVLTiles, out: torch.Tensor) -> torch.Tensor:
    """Stack in memory that has been written before, as that of uint8 has: no page is new."""
    import torch

    tiles = [tile for data in batch for tile in _float_tiles(data, policy)]
    return torch.stack(tiles, out=out)


def _float_tiles(data: bytes, policy: InternVLTiles) -> list[torch.Tensor]:
    """Make float tiles as training code with PIL and torchvision's transforms does."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as file:
        image = file.convert("RGB")
    size = policy.size
    columns, rows = policy.grid(*image.size)
    grid = image.resize((columns * size, rows * size), Image.Resampling.BICUBIC)
    tiles = [
        grid.crop((column * size, row * size, (column + 1) * size, (row + 1) * size))
        for row in range(rows)
        for column in range(columns)
    ]
    if policy.num_tiles(*image.size) > len(tiles):
        tiles.append(image.resize((size, size), Image.Resampling.BICUBIC))
    return [_normalized(tile) for tile in tiles]


def _normalized(tile: Any) -> torch.Tensor:
    """ToTensor and Normalize, step by step as torchvision does them."""
    import numpy as np
    import torch

    from omniload.kernels.reference import IMAGENET_MEAN, IMAGENET_STD

    pixels = torch.from_numpy(np.array(tile)).permute(2, 0, 1).contiguous()
    values = pixels.to(torch.float32).div(255)
    mean, std = (torch.tensor(given).view(3, 1, 1) for given in (IMAGENET_MEAN, IMAGENET_STD))
    return values.sub_(mean).div_(std)


def _packer(batch: list[bytes], policy: InternVLTiles, size: tuple[int, int]) -> Callable[[], Any]:
    """Transform and pack records with one image each and little text, as a worker does."""
    import numpy as np

    from omniload.packing import pack, reserve
    from omniload.transforms import TileTransform
    from omniload.types import Record

    num_tiles = policy.num_tiles(*size)
    num_tokens = num_tiles * _TOKENS_PER_TILE
    ids = np.zeros(num_tokens + 32, np.int32)
    records = [
        Record(
            row=row,
            key="image",
            source="bench",
            shard="",
            input_ids=ids,
            labels=ids,
            image_num_tiles=np.array([num_tiles], np.int32),
            image_sizes=np.array([size], np.int32),
            image_spans=np.array([[16, 16 + num_tokens]], np.int32),
            images=(data,),
        )
        for row, data in enumerate(batch)
    ]
    transform = TileTransform(
        policy, tokens_per_tile=_TOKENS_PER_TILE, image_token_id=1, pad_token_id=0
    )
    rng = np.random.default_rng(0)

    def packed() -> Any:
        reserved = reserve(records, tile_shape=transform.tile_shape)
        places = zip(records, reserved.tiles, strict=True)
        samples = [transform.write(record, rng, tiles=tiles) for record, tiles in places]
        return pack(samples, reserved=reserved).tiles

    return packed


def _difference(ways: dict[str, Callable[[], Any]]) -> tuple[float, int]:
    """Compare both ways: (share of the values that differ, %; by how many levels at most).

    Figures of ways that give different images would say nothing.
    """
    import torch

    from omniload.kernels.reference import IMAGENET_MEAN, IMAGENET_STD

    floats, tiles = ways["float32"](), ways["uint8"]()
    mean, std = (torch.tensor(given).view(3, 1, 1) for given in (IMAGENET_MEAN, IMAGENET_STD))
    found = floats.mul(std).add_(mean).mul_(255).round_()
    if found.shape != tiles.shape or (levels := found.sub_(tiles).abs_()).mean() > 0.5:
        raise RuntimeError("float32 and uint8 give different images.")
    return 100 * float((levels != 0).float().mean()), int(levels.max())
