"""What it costs to make objects of JSON, found from its bytes before any is made.

Knows: what a value, a name, a list or object cost. Does not know: which values a request may have.

Objects are made under the interpreter's lock: ten million lists, 31 MiB of JSON, stop all other threads for eight
seconds, streams and probes among them, and take 900 MiB.
"""

from __future__ import annotations

from typing import Final

MOST: Final = 1 << 20  # about 0.2 s and 100 MiB; values of one request
_NAME: Final = 4  # in values
_CONTAINER: Final = 16  # the garbage collector looks at each, again and again
_LIGHT: Final = 64 << 10  # bytes that are never too many


def too_heavy(data: bytes | bytearray) -> str | None:
    """Why no objects should be made of ``data``, or None."""
    if len(data) <= _LIGHT or _weight(data) <= MOST:
        return None
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') <= MOST and _weight(b"".join(plain.split(b'"')[::2])) <= MOST:
        return None
    return (
        f"it has too many values: at most {MOST}, where a name counts as {_NAME} and a list or object as {_CONTAINER};"
        " send several requests"
    )


def _weight(data: bytes | bytearray) -> int:
    """Of JSON without texts; an upper bound where they have these characters, too."""
    return data.count(b",") + _NAME * data.count(b":") + _CONTAINER * (data.count(b"[") + data.count(b"{"))
