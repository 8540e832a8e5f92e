"""A short checksum over the fields of a state: one that was edited by hand is not taken up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["CHECKSUM", "fields_checksum"]

#: Name of the field that holds it.
CHECKSUM = "checksum"


def fields_checksum(fields: Mapping[str, Any]) -> str:
    """Hash all fields but the checksum itself to 8 hexadecimal digits; their order is no matter.

    Args:
        fields: plain JSON values by name.
    """
    others = {name: value for name, value in fields.items() if name != CHECKSUM}
    text = json.dumps(others, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
