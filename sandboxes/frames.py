"""The frames between the host and the supervisor: two lengths, a JSON header, raw bytes. Standard library only, used on both sides."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

LENGTHS = struct.Struct(">II")
loads = json.loads


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


class Inbox:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
        """Add bytes; yields each frame that is whole by now."""
        self._data += data
        while len(self._data) >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self._data)
            start, end = LENGTHS.size + head, LENGTHS.size + head + body
            if len(self._data) < end:
                return
            header, payload = json.loads(bytes(self._data[LENGTHS.size : start])), bytes(self._data[start:end])
            del self._data[:end]
            yield header, payload
