"""A raw sample to a record: images measured, text tokenised, by settings that are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from omniload.conversations import RefusedError, refused_image
from omniload.errors import ConfigError, SampleError, ShardError
from omniload.images import Policy, image_size, policy_from_settings
from omniload.transforms.jinja import JinjaTemplate
from omniload.transforms.pieces import ImageStrings
from omniload.transforms.prepare import Oversize, Prepared, prepare_sample
from omniload.transforms.templates import DataTemplate, RoleFormat
from omniload.transforms.text import ConversationEncoder
from omniload.transforms.tokenizer import LoadedTokenizer
from omniload.types import Message, Record

__all__ = ["SampleMaker", "encoder_from_json", "encoder_to_json"]


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleMaker:
    """Makes records of conversations with images; picklable.

    Args:
        encoder: tokenizer, template and loss policy.
        policy: the tiling policy.
        max_tokens: most tokens of a sample; None: no limit.
        oversize: what becomes of samples over it; see `prepare_sample`.
    """

    encoder: ConversationEncoder
    policy: Policy
    max_tokens: int | None = None
    oversize: Oversize = "truncate"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], encoder: ConversationEncoder) -> Self:
        """Make the maker that these settings describe.

        Args:
            settings: as `settings()` gave them.
            encoder: the one that they were made with.

        Raises:
            ConfigError: a setting is missing or out of range, or the encoder is another one.
        """
        given = encoder.settings()
        stored = settings.get("encoder")
        if stored != given:
            named = stored if isinstance(stored, Mapping) else {}
            names = sorted(name for name in given if given[name] != named.get(name))
            raise ConfigError(
                "the encoder must be the one that the settings name, but these differ: "
                f"{', '.join(names)}."
            )
        return cls(
            encoder=encoder,
            policy=policy_from_settings(dict(settings.get("tiling") or {})),
            max_tokens=settings.get("max_tokens"),
            oversize=settings.get("oversize", "truncate"),
        )

    def settings(self) -> dict[str, Any]:
        """Give everything that decides lengths and tokens, as plain JSON."""
        return {
            "encoder": self.encoder.settings(),
            "tiling": self.policy.settings(),
            "max_tokens": self.max_tokens,
            "oversize": self.oversize,
        }

    def prepare(
        self, messages: Sequence[Message], images: Sequence[bytes]
    ) -> tuple[list[tuple[int, int]], Prepared]:
        """Measure the images and tokenise the text.

        Args:
            messages: the conversation, one mark for each image.
            images: encoded image files; only their headers are looked at.

        Returns:
            (width, height) of each image, and the sample as a shard would store it.

        Raises:
            SampleError: it can't be used; says why.
        """
        sizes = []
        for number, data in enumerate(images):
            try:
                sizes.append(image_size(data))
            except SampleError as error:
                raise refused_image(error, number, len(images)) from None
        prepared = prepare_sample(
            messages,
            sizes,
            encoder=self.encoder,
            policy=self.policy,
            max_tokens=self.max_tokens,
            oversize=self.oversize,
        )
        if prepared.num_loss_tokens == 0:
            raise RefusedError("no loss token", "no token of it gives loss")
        return sizes, prepared

    def record(
        self,
        messages: Sequence[Message],
        images: Sequence[bytes],
        *,
        row: int,
        key: str,
        source: str,
        shard: str,
    ) -> Record:
        """Make a record.

        Args:
            messages: as for `prepare`.
            images: as for `prepare`.
            row: its number.
            key: its name.
            source: name of its data set.
            shard: file that it is from.

        Raises:
            SampleError: it can't be used; says why.
        """
        sizes, prepared = self.prepare(messages, images)
        return Record(
            row=row,
            key=key,
            source=source,
            shard=shard,
            images=tuple(images),
            image_sizes=np.array(sizes, dtype=np.int32).reshape(-1, 2),
            image_num_tiles=prepared.image_num_tiles,
            image_spans=prepared.image_spans,
            input_ids=prepared.input_ids,
            labels=prepared.labels,
            messages=tuple(messages),
        )


def encoder_to_json(encoder: ConversationEncoder) -> dict[str, Any]:
    """Write an encoder down, tokenizer and template included, as plain JSON.

    Raises:
        ConfigError: its template is of a kind that can't be stored.
    """
    template = encoder.template
    if not isinstance(template, (DataTemplate, JinjaTemplate)):
        raise ConfigError(
            "a template must be one that `load_template` gives, to be stored with an index: got "
            f"{type(template).__name__}."
        )
    kind = "data" if isinstance(template, DataTemplate) else "jinja"
    return {
        "tokenizer": asdict(encoder.tokenizer),
        "template": {"kind": kind, **asdict(template)},
        "loss": encoder.loss,
        "tokens_per_tile": encoder.tokens_per_tile,
    }


def encoder_from_json(data: Any) -> ConversationEncoder:
    """Make an encoder again; no code but jinja in its sandbox is ever run.

    Args:
        data: what `encoder_to_json` gave.

    Raises:
        ShardError: it is something else.
    """
    try:
        fields = dict(data["template"])
        kind = fields.pop("kind")
        image = ImageStrings(**fields.pop("image"))
        template: DataTemplate | JinjaTemplate
        if kind == "jinja":
            template = JinjaTemplate(image=image, **fields)
        else:
            roles = {name: RoleFormat(**texts) for name, texts in fields.pop("roles").items()}
            special = tuple(fields.pop("special_tokens"))
            template = DataTemplate(roles=roles, image=image, special_tokens=special, **fields)
        return ConversationEncoder(
            tokenizer=LoadedTokenizer(**data["tokenizer"]),
            template=template,
            loss=data["loss"],
            tokens_per_tile=data["tokens_per_tile"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShardError(
            f"the stored encoder is damaged: {type(error).__name__}: {error}. Run `omniload index` "
            "again."
        ) from None
