"""Raw records of any known style to turns and images; what all readers of raw data share."""

from __future__ import annotations

from omniload.conversations.normalise import (
    COLUMNS,
    IMAGE_FIELDS,
    Conversation,
    caption_turns,
    listed_images,
    normalise,
    record_key,
)
from omniload.conversations.refused import RefusedError, refusal, refused_image
from omniload.conversations.values import (
    MAX_IMAGE_BYTES,
    bounded,
    data_uri,
    parse_json,
    read_conversation,
)

__all__ = [
    "COLUMNS",
    "IMAGE_FIELDS",
    "MAX_IMAGE_BYTES",
    "Conversation",
    "RefusedError",
    "bounded",
    "caption_turns",
    "data_uri",
    "listed_images",
    "normalise",
    "parse_json",
    "read_conversation",
    "record_key",
    "refusal",
    "refused_image",
]
