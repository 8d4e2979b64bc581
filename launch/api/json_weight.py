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


def too_heavy(*data: bytes | bytearray) -> str | None:
    """Why no objects should be made of ``data``, JSON texts of one request, or None."""
    if sum(map(len, data)) <= _LIGHT or sum(map(_weight, data)) <= MOST or sum(map(_exact_weight, data)) <= MOST:
        return None
    return (
        f"it has too many values: at most {MOST}, where a name counts as {_NAME} and a list or object as {_CONTAINER};"
        " send several requests"
    )


def _exact_weight(data: bytes | bytearray) -> int:
    """Or more than MOST. What follows an error in the JSON does not count: no objects are made of it."""
    plain = data.replace(rb"\\", b"").replace(rb"\"", b"")
    return MOST + 1 if plain.count(b'"') > MOST else _weight(b"".join(plain.split(b'"')[::2]))


def _weight(data: bytes | bytearray) -> int:
    """Of JSON without texts; an upper bound where they have these characters, too."""
    return data.count(b",") + _NAME * data.count(b":") + _CONTAINER * (data.count(b"[") + data.count(b"{"))
