"""One thing wrong with a checkpoint, of many kinds, each drawn from a generator of random numbers.

Knows: the bytes of safetensors files and their index. Does not know: the loader; what it must do is in ``Mutation``.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

SINGLE = "model.safetensors"
ITEM = 4  # bytes of float32
_NO_ENTRIES: tuple[Any, ...] = (None, 1, "x", [], [1])
Entry = dict[str, Any]


@dataclass(frozen=True)
class Mutation:
    """What loading must come to. ``expected``: the bytes it may load, None where it must be refused.

    ``named``: of these a refusal must name one. ``must_load``: nothing is wrong.
    """

    expected: Mapping[str, bytes] | None = None
    named: tuple[str, ...] = ()
    must_load: bool = False


@dataclass(frozen=True)
class Checkpoint:
    """Entries and data of a whole checkpoint in one file; nothing changes it."""

    entries: Mapping[str, Entry]
    values: Mapping[str, bytes]

    @staticmethod
    def of(values: Mapping[str, bytes], tensors: Mapping[str, Tensor]) -> Checkpoint:
        entries, at = {}, 0
        for name, data in values.items():
            shape = list(tensors[name].shape)
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(data)]}
            at += len(data)
        return Checkpoint(entries, values)

    @property
    def header(self) -> bytes:
        return json.dumps(self.entries).encode()

    @property
    def data(self) -> bytes:
        return b"".join(self.values.values())

    def copy(self) -> dict[str, Entry]:
        copied: dict[str, Entry] = json.loads(self.header)
        return copied

    def part(self, names: list[str]) -> Checkpoint:
        """A checkpoint of its own with these tensors, in this order."""
        at, entries = 0, {}
        for name in names:
            size = len(self.values[name])
            entries[name] = {**self.entries[name], "data_offsets": [at, at + size]}
            at += size
        return Checkpoint(entries, {name: self.values[name] for name in names})


Kind = Callable[[random.Random, int, Checkpoint, Path], Mutation]


def store(folder: Path, header: bytes | Mapping[str, Any], data: bytes, name: str = SINGLE) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)


def _numbers(draw: random.Random) -> Any:
    """A number, or what stands in the place of one."""
    large = (2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1, 2**64, 2**80, 10**400)
    return draw.choice((-1, 0.5, True, None, "1", [], math.nan, *large, draw.randrange(2**20)))


# ---- the header's bytes ----


def header_byte(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """One byte of the header is another, is gone, or is one more; the file fits the header's length again."""
    text = bytearray(whole.header)
    at = turn % len(text)
    change = draw.choice(("set", "set", "flip", "delete", "insert"))
    if change == "delete":
        del text[at]
    elif change == "insert":
        text.insert(at, draw.choice(b' 0123456789[]{},:"\\\x00\xff'))
    else:
        text[at] = text[at] ^ 1 << draw.randrange(8) if change == "flip" else draw.choice(b'0123456789[]{},:"a \x80')
    store(folder, bytes(text), whole.data)
    return Mutation(whole.values)


def header_bytes(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A stretch of the header is random bytes, or stands somewhere else as well."""
    text = bytearray(whole.header)
    begin, length = draw.randrange(len(text)), draw.randrange(2, 40)
    other = draw.randrange(len(text))
    text[begin : begin + length] = draw.choice((draw.randbytes(length), text[other : other + length]))
    store(folder, bytes(text), whole.data)
    # Two entries may have been exchanged whole; the bytes of a tensor are then those of its offsets.
    return Mutation(whole.values)


def declared_header_length(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    true = len(whole.header)
    wrong = draw.choice((0, 1, true - 1, true + 1, true * 2, 10**8, 10**8 + 1, 2**31, 2**40, 2**63, 2**64 - 1))
    (folder / SINGLE).write_bytes(struct.pack("<Q", wrong) + whole.header + whole.data)
    return Mutation(named=(SINGLE,))


def cut_in_header(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """The file ends at every byte of length and header, one after the other."""
    text = struct.pack("<Q", len(whole.header)) + whole.header
    (folder / SINGLE).write_bytes(text[: turn % len(text)])
    return Mutation(named=(SINGLE,))


def cut_in_data(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    store(folder, whole.header, whole.data[: draw.randrange(len(whole.data))])
    return Mutation(named=tuple(map(repr, whole.entries)))


def longer_data(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    store(folder, whole.header, whole.data + bytes(draw.randrange(1, 5000)))
    return Mutation(named=("its tensors end at byte",))


def no_header(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    depth = draw.choice((10, 1000, 100_000))
    texts = (
        b"",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"[" * depth,
        b'{"a":' * depth,
        b'{"a":' + b"9" * 5000 + b"}",
        b"\xff" * 9,
    )
    store(folder, draw.choice(texts), whole.data)
    return Mutation(named=(SINGLE,))


# ---- entries ----


def entry_value(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A dtype, shape, offset or whole entry is of a wrong type or size."""
    header = whole.copy()
    name = draw.choice(list(header))
    entry = header[name]
    where = draw.choice(("shape", "shape item", "offset", "offsets", "dtype", "entry", "missing"))
    if where == "shape item":
        entry["shape"][draw.randrange(len(entry["shape"]))] = _numbers(draw)
    elif where == "offset":
        entry["data_offsets"][draw.randrange(2)] = _numbers(draw)
    elif where == "missing":
        del entry[draw.choice(list(entry))]
    elif where == "entry":
        header[name] = draw.choice(_NO_ENTRIES)
    else:
        key = {"shape": "shape", "offsets": "data_offsets", "dtype": "dtype"}[where]
        entry[key] = draw.choice((None, 1, "x", {}, [], [1], [1, 2, 3], [_numbers(draw), _numbers(draw)]))
    store(folder, header, whole.data)
    # NaN and Infinity are no JSON: then there is no tensor to name.
    return Mutation(whole.values, named=(*map(repr, header), *_shown(header), "is no JSON"))


def _shown(names: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"`{name}`" for name in names)


def huge_shape(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    header = whole.copy()
    name = draw.choice(list(header))
    header[name]["shape"] = [draw.choice((2**20, 2**40, 2**62, 2**63)) for _ in range(draw.randrange(1, 5))]
    if draw.random() < 0.5:
        header[name]["data_offsets"][1] = 2 ** draw.randrange(30, 64)
    store(folder, header, whole.data)
    return Mutation(named=(repr(name),))


def other_shape(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """As many elements in another shape."""
    header = whole.copy()
    name = draw.choice(list(header))
    shape = header[name]["shape"]
    other = draw.choice(([math.prod(shape)], [1, *shape], [*shape, 1], shape[::-1]))
    header[name]["shape"] = other
    store(folder, header, whole.data)
    same = list(whole.entries[name]["shape"]) == other
    return Mutation(whole.values if same else None, named=(repr(name),), must_load=same)


def other_dtype(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A dtype of as many bytes, or with its bytes made to fit, or one that nobody knows."""
    header = whole.copy()
    name = draw.choice(list(header))
    header[name]["dtype"] = draw.choice(("I32", "U32", "F16", "BF16", "F64", "F8_E4M3", "BOOL", "C64", "f32", "", "X9"))
    store(folder, header, whole.data)
    return Mutation(named=(repr(name),))


def integer_tensor(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A sound file with a tensor of integers or bytes in its place."""
    names = list(whole.entries)
    name, item = draw.choice(names), draw.choice((("I8", 1), ("I64", 8), ("U8", 1), ("F8_E5M2", 1), ("BOOL", 1)))
    header, data, at = whole.copy(), b"", 0
    for other in names:
        size = len(whole.values[other])
        size = size // ITEM * item[1] if other == name else size
        header[other]["data_offsets"] = [at, at + size]
        data += bytes(size)
        at += size
    header[name]["dtype"] = item[0]
    store(folder, header, data)
    return Mutation(named=(repr(name),))


def overlap_or_hole(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """Tensors that share bytes, or leave some to nobody."""
    header = whole.copy()
    name, other = draw.sample(list(header), 2)
    if draw.random() < 0.4:
        header[name]["data_offsets"] = list(header[other]["data_offsets"])
    else:
        shift = draw.choice((-1, 1)) * draw.randrange(1, 400)
        header[name]["data_offsets"] = [max(0, at + shift) for at in header[name]["data_offsets"]]
    if draw.random() < 0.3:
        header[name]["shape"] = list(header[other]["shape"])
    store(folder, header, whole.data)
    return Mutation(named=tuple(map(repr, header)))


def reversed_offsets(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    header = whole.copy()
    name = draw.choice(list(header))
    header[name]["data_offsets"].reverse()
    store(folder, header, whole.data)
    return Mutation(named=(repr(name),))


def twice_in_header(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A name with two entries: the same, of another shape, or of another dtype."""
    name = draw.choice(list(whole.entries))
    entry = dict(whole.entries[name])
    change = draw.randrange(3)
    if change == 1:
        entry["shape"] = [math.prod(entry["shape"])]
    elif change == 2:
        entry["dtype"] = "I32"
    extra = f"{json.dumps(name)}: {json.dumps(entry)}".encode()
    text = whole.header
    text = b"{" + extra + b", " + text[1:] if draw.random() < 0.5 else text[:-1] + b", " + extra + b"}"
    store(folder, text, whole.data)
    return Mutation(named=(repr(name),))


# ---- tensors ----


def missing_tensor(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    gone = draw.choice(list(whole.entries))
    rest = whole.part([name for name in whole.entries if name != gone])
    store(folder, rest.header, rest.data)
    return Mutation(named=(repr(gone),))


def renamed_tensor(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    name = draw.choice(list(whole.entries))
    fresh = draw.choice(
        ("", "x", name.upper(), name + " ", name + "\n", "\x00", "a/../b", "é", "%s{}", "n" * 9999, name[:-1])
    )
    header = {fresh if key == name else key: entry for key, entry in whole.entries.items()}
    store(folder, header, whole.data)
    return Mutation(named=(repr(name), repr(fresh)[:99]))


def another_tensor(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    header, end = whole.copy(), len(whole.data)
    name = draw.choice(("model.layers.2.mlp.up_proj.weight", "", "x", "\n", "lm_head.bias"))
    size = draw.choice((0, 1, 64))
    header[name] = {"dtype": "F32", "shape": [size], "data_offsets": [end, end + ITEM * size]}
    store(folder, header, whole.data + bytes(ITEM * size))
    return Mutation(named=(repr(name),))


# ---- nothing wrong ----


def harmless(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """Blanks, metadata, another order of entries or of the data."""
    names = list(whole.entries)
    draw.shuffle(names)
    moved = whole.part(names) if draw.random() < 0.5 else whole
    header: dict[str, Any] = {name: moved.entries[name] for name in names}
    if draw.random() < 0.5:
        header = {"__metadata__": {"format": "pt", "x": "y" * draw.randrange(300)}, **header}
    text = json.dumps(header, indent=draw.choice((None, 1)), separators=draw.choice((None, (",", ":"))))
    store(folder, text.encode() + b" " * draw.randrange(20), moved.data)
    return Mutation(whole.values, must_load=True)


def other_values(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """Whatever the numbers are, NaNs with a payload among them, they arrive bit for bit."""
    name = draw.choice(list(whole.values))
    value = bytearray(whole.values[name])
    for _ in range(draw.randrange(1, 6)):
        at = draw.randrange(len(value) // ITEM) * ITEM
        special = (0x7F800001, 0xFFC12345, 0x7FC00000, 0xFF800000, 0x80000000, 1, draw.randrange(2**32))
        value[at : at + ITEM] = struct.pack("<I", draw.choice(special))
    changed = replace(whole, values={**whole.values, name: bytes(value)})
    store(folder, changed.header, changed.data)
    return Mutation(changed.values, must_load=True)


ONE_FILE: tuple[Kind, ...] = (
    *(header_byte, header_bytes, declared_header_length, cut_in_header, cut_in_data, longer_data, no_header),
    *(entry_value, huge_shape, other_shape, other_dtype, integer_tensor, overlap_or_hole, reversed_offsets),
    *(twice_in_header, missing_tensor, renamed_tensor, another_tensor, harmless, other_values),
)
