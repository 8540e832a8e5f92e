"""A Hugging Face processor as a transform: its image processor makes the tiles."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from omniload.errors import ConfigError, SampleError
from omniload.images import TilePolicy
from omniload.transforms.choose import family_transform
from omniload.transforms.processor_layout import as_tiles, call_options, check_layout
from omniload.transforms.tile import TileTransform
from omniload.types import Record, Sample

__all__ = ["HFProcessorTransform"]

UInt8Array = npt.NDArray[np.uint8]


class HFProcessorTransform:
    """Tokens as stored, tiles by a Hugging Face image processor instead of omniload's own code.

    For a model whose processor resizes or pads in a way of its own. The layout of an image must
    still be that of the tiling policy that the shards were made with, because plan and tokens rest
    on it: sizes of patches, merging and resolutions are compared at once, number, size and grid of
    the tiles for each image. A difference is an error that shows both.

    With shards for "navit" it takes Pixtral's image processor, whose resized image is cut into
    patches row by row.

    Rescaling and normalising are switched off in the processor, so that tiles travel as uint8;
    `model_inputs` normalises with the processor's mean and standard deviation.

    Args:
        processor: a processor or an image processor of transformers; or a folder of a model, which
            is loaded without a download and without running code from it.
        settings: `manifest.settings` of the shards.

    Raises:
        ConfigError: not an image processor, one whose normalisation omniload can't do or whose
            layout is not that of the shards, or transformers isn't installed for a folder.
    """

    def __init__(self, processor: Any | str | os.PathLike[str], settings: dict[str, Any]) -> None:
        if isinstance(processor, (str, os.PathLike)):
            processor = _load(os.fspath(processor))
        image_processor = getattr(processor, "image_processor", processor)
        if not callable(image_processor) or not callable(getattr(image_processor, "to_dict", None)):
            raise ConfigError(
                "HFProcessorTransform takes a processor or an image processor of transformers, got "
                f"{type(processor).__name__}."
            )
        mean, std = _normalisation(image_processor)
        transform = family_transform(settings)
        check_layout(processor, image_processor.to_dict(), transform.policy)
        self._transform = transform.with_pixels(
            ProcessorTiles(image_processor),
            fingerprint=_fingerprint(image_processor),
            mean=mean,
            std=std,
        )

    @property
    def tile_transform(self) -> TileTransform:
        """What makes all but the pixels."""
        return self._transform

    @property
    def fingerprint(self) -> str:
        """32 hex digits of all settings, the processor's too."""
        return self._transform.fingerprint

    def __call__(self, record: Record, rng: np.random.Generator) -> Sample:
        """Decode the images of a record and let the processor cut them.

        Args:
            record: as stored.
            rng: not used: a processor is not random.

        Raises:
            SampleError: as `TileTransform`; or the processor gives other tiles than the policy.
        """
        return self._transform(record, rng)

    def filler(self, with_image: bool) -> Sample:
        """Make a sample that trains nothing; see `TileTransform.filler`.

        Args:
            with_image: whether it has a blank image.
        """
        return self._transform.filler(with_image)

    def lengths(self, record: Record) -> tuple[int, int, int]:
        """Say what the sample of a record will have: (num_tokens, num_tiles, num_loss_tokens).

        Args:
            record: as stored.
        """
        return self._transform.lengths(record)

    def model_inputs(self, batch: Any, *, dtype: Any = None, loss: str = "sum") -> dict[str, Any]:
        """Name the tensors of a batch as the family of the tiling policy does.

        Args:
            batch: a PackedBatch.
            dtype: floating type of the pixels; None: torch.float32.
            loss: as in `PackedBatch.model_inputs`.
        """
        return self._transform.model_inputs(batch, dtype=dtype, loss=loss)


class ProcessorTiles:
    """Cuts one image with an image processor.

    Args:
        image_processor: of transformers.
    """

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor
        self._facts = image_processor.to_dict()

    def __call__(self, image: UInt8Array, policy: TilePolicy, *, out: UInt8Array) -> None:
        """Write the tiles of an image.

        Args:
            image: uint8 (h, w, 3), RGB.
            policy: the policy that says how many there are.
            out: uint8 (num_tiles, 3, size, size).

        Raises:
            SampleError: the processor fails, or gives another number or size of tiles.
        """
        from PIL import Image

        try:
            result = self._processor(
                images=[Image.fromarray(image)],
                do_rescale=False,
                do_normalize=False,
                return_tensors="np",
                **call_options(self._facts, policy),
            )
            result["pixel_values"] = np.asarray(result["pixel_values"])
        except Exception as error:  # a processor can fail in any way that Python can
            raise SampleError(
                f"the image processor failed with {type(error).__name__}: {error}"
            ) from error
        height, width = image.shape[:2]
        tiles = as_tiles(result, policy, width, height)
        if tiles.shape != out.shape:
            raise SampleError(
                f"the image processor must give the tiles that the policy counts: expected "
                f"{out.shape} (tiles, channels, height, width), got {tiles.shape}. Preprocess with "
                "the tiling of this processor, or set its size to that of the tiles."
            )
        _check_values(tiles)
        np.copyto(out, tiles, casting="unsafe")


def _check_values(pixels: npt.NDArray[Any]) -> None:
    if pixels.dtype != np.uint8 and pixels.size:
        rounded = np.rint(pixels)
        if (rounded != pixels).any() or pixels.min() < 0 or pixels.max() > 255:
            raise SampleError(
                "the image processor must give whole numbers from 0 to 255 with do_rescale=False "
                f"and do_normalize=False, got {pixels.dtype} from {pixels.min()} to {pixels.max()}."
            )


def _normalisation(image_processor: Any) -> tuple[tuple[float, ...], tuple[float, ...]]:
    facts = image_processor.to_dict()
    factor = facts.get("rescale_factor", 1 / 255)
    if not facts.get("do_rescale", True) or abs(factor * 255 - 1) > 1e-6:
        raise ConfigError(
            "the image processor must rescale by 1/255, the only way in which omniload normalises: "
            f"got do_rescale={facts.get('do_rescale')}, rescale_factor={factor}."
        )
    if not facts.get("do_normalize", True):
        return (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    mean, std = facts.get("image_mean"), facts.get("image_std")
    if mean is None or std is None:
        raise ConfigError(
            f"the image processor must have image_mean and image_std, got {mean} and {std}."
        )
    return tuple(mean), tuple(std)


def _fingerprint(image_processor: Any) -> str:
    text = json.dumps(image_processor.to_dict(), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _load(folder: str) -> Any:
    try:
        from transformers import AutoImageProcessor, AutoProcessor
    except ImportError as error:
        raise ConfigError(
            f"transformers must be installed to load a processor from {folder!r} "
            f"(pip install transformers): {error}"
        ) from error
    failures = []
    for loader in (AutoProcessor, AutoImageProcessor):
        try:
            return loader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # whatever a damaged or foreign folder leads to
            failures.append(f"{loader.__name__}: {error}")
    raise ConfigError(f"no processor can be loaded from {folder!r}: {'; '.join(failures)}")
