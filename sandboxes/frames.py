"""The frames between the host and the supervisor: two lengths, a JSON header, raw bytes. Standard library only, used on both sides."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

LENGTHS = struct.Struct(">II")
loads = json.loads

HEADER_BYTES = 64 << 20
"""Longest header: a command or a path of any length that a model writes still fits."""

TYPES: dict[str, tuple[type, ...]] = {
    # the fields of an answer
    "id": (int,), "ready": (bool,), "gone": (str,), "failed": (str,), "refused": (str,), "missing": (bool,), "left": (int,),
    "exit_code": (int,), "seconds": (int, float), "timed_out": (bool,), "dropped": (int,), "split": (int,),
}  # fmt: skip

NEEDED: dict[str, frozenset[str]] = {"run": frozenset({"exit_code", "seconds", "timed_out", "dropped", "split"})}
"""What the answer to an operation must hold when it is neither a refusal nor a failure."""


def pack(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One frame."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(payload)) + text + payload


def check(header: object) -> dict[str, Any]:
    """An answer's header, checked. Raises `ValueError` where it is none."""
    if not isinstance(header, dict):
        raise ValueError("a header that is no object")
    if "id" not in header:
        raise ValueError("a header without `id`")
    for name, value in header.items():
        # bool is an int to isinstance, and no number here
        if name not in TYPES or type(value) not in TYPES[name]:
            raise ValueError(f"a header with {name[:40]!r} of type {type(value).__name__}")
    if "refused" in header and "missing" not in header:
        raise ValueError("a refusal without `missing`")
    return header


class Inbox:
    """Cuts a byte stream into frames. `payload_bytes` is the longest payload that is believed."""

    def __init__(self, payload_bytes: int = (1 << 32) - 1) -> None:
        self._data, self._payload_bytes = bytearray(), payload_bytes

    def feed(self, data: bytes) -> Iterator[tuple[Any, bytes]]:
        """Add bytes; yields each frame that is whole by now. Raises `ValueError` or `RecursionError` at what is no frame."""
        self._data += data
        while len(self._data) >= LENGTHS.size:
            head, body = LENGTHS.unpack_from(self._data)
            if head > HEADER_BYTES or body > self._payload_bytes:
                raise ValueError(f"a frame of {head} and {body} bytes")
            start, end = LENGTHS.size + head, LENGTHS.size + head + body
            if len(self._data) < end:
                return
            header, payload = json.loads(bytes(self._data[LENGTHS.size : start])), bytes(self._data[start:end])
            del self._data[:end]
            yield header, payload
