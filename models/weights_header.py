"""What safetensors' own parser does not say: names that stand twice, and which tensor a broken header is broken at.

Knows: the header's layout (8 bytes of little-endian length, then JSON of name -> dtype, shape, data_offsets).
Does not know: models, folders. Loads nothing: a file is read by safetensors only (checkpoint.py).
Source: https://huggingface.co/docs/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

ITEM_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
ITEM_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_EXPLAINED_BYTES = 16 << 20  # Python's objects take many times the bytes of their JSON: larger headers go unexplained
_MOST_BYTES = 100_000_000  # safetensors' own limit
_METADATA = "__metadata__"


class _NoHeader(ValueError):
    """There is no JSON object where the header should be; the text says what is there."""


def refuse_repeated_names(file: Path) -> None:
    """Raises ValueError for a name that stands twice in the header of a file that safetensors can read.

    Its parser keeps the last one, which need not have the dtype and shape of the first.
    """

    def check(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"tensor {quoted(name)} stands twice in its header")
            seen.add(name)

    json.loads(_header_text(file), object_pairs_hook=check)


def quoted(name: object) -> str:
    """A name from a file as a message shows it: on one line, and not at any length."""
    text = repr(name)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def header_fault(file: Path) -> str | None:
    """What is wrong with the header, naming the tensor where it is one's; None if that cannot be known."""
    try:
        text = _header_text(file)
        if len(text) > _EXPLAINED_BYTES:
            return None
        header = json.loads(text)
    except RecursionError:
        return "its header is nested too deeply"
    except (ValueError, OSError) as error:
        return f"{'' if isinstance(error, _NoHeader) else 'its header is no JSON: '}{error}"
    if not isinstance(header, dict):
        return f"its header is a {type(header).__name__}, not an object"
    return _first_fault(header, file.stat().st_size - 8 - len(text.encode()))


def _header_text(file: Path) -> str:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > size - 8:
            declared = f"a header of {length} bytes" if len(start) == 8 else "the length of a header, 8 bytes"
            raise _NoHeader(f"it should begin with {declared}, but has {size} bytes in all")
        if length > _MOST_BYTES:
            raise _NoHeader(f"it declares a header of {length} bytes: more than {_MOST_BYTES} are not allowed")
        return stream.read(length).decode("utf-8")


def _first_fault(header: dict[str, Any], data_bytes: int) -> str | None:
    """Entries one by one, then whether they follow one another without a hole."""
    ranges = []
    for name, entry in header.items():
        if name == _METADATA:
            if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
                return f"its {_METADATA!r} is not an object of texts"
            continue
        fault = _entry_fault(entry, data_bytes)
        if fault:
            return f"tensor {quoted(name)} {fault}"
        ranges.append((*entry["data_offsets"], name))
    end = 0
    for begin, after, name in sorted(ranges):
        if begin != end:
            return f"tensor {quoted(name)} begins at byte {begin}, but the data before it ends at {end}"
        end = after
    return None if end == data_bytes else f"its tensors end at byte {end}, but it has {data_bytes} bytes of data"


def _entry_fault(entry: Any, data_bytes: int) -> str | None:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        return "does not have dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not _is_sizes(shape):
        return f"has the shape {_short(shape)}"
    if not _is_sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        return f"has the data_offsets {_short(offsets)}, but the file has {data_bytes} bytes of data"
    item = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
    if item is None:
        return f"has the dtype {_short(dtype)}, which is not known"
    declared = math.prod(shape) * item
    if declared != offsets[1] - offsets[0]:
        held = offsets[1] - offsets[0]
        return f"of dtype {dtype} and shape {_short(shape)} does not take the {held} bytes of its data_offsets"
    return None


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 2**64 for size in value)


def _short(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) < 2**64 else "of more than 64 bits"
    return text if len(text) <= 80 else f"{text[:77]}..."
