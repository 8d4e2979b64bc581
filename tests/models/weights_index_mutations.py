"""One thing wrong with a checkpoint of several files and their index.

Knows: weight maps, links, missing files. Does not know: the inside of a file (weights_mutations.py), the loader.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.models.weights_mutations import SINGLE, Checkpoint, Kind, Mutation, store

INDEX = "model.safetensors.index.json"


def _split(draw: random.Random, whole: Checkpoint, folder: Path) -> dict[str, str]:
    """Two to four files; returns the weight map that is right for them."""
    files, weight_map = draw.randrange(2, 5), {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = whole.part(list(whole.entries)[number::files])
        store(folder, part.header, part.data, name)
        weight_map.update(dict.fromkeys(part.entries, name))
    return weight_map


def _write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_byte(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A byte of the index is another, or the index ends there."""
    _write_index(folder, _split(draw, whole, folder))
    text = bytearray((folder / INDEX).read_bytes())
    at = turn % len(text)
    if draw.random() < 0.4:
        del text[at:]
    else:
        text[at] = draw.choice(b'0123456789[]{},:"a \x00\x80/.\\')
    (folder / INDEX).write_bytes(text)
    return Mutation(whole.values)


def index_value(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """The index gives something that is no file of weights in this folder."""
    weight_map: dict[str, Any] = dict(_split(draw, whole, folder))
    name = draw.choice(list(weight_map))
    (folder / "circle").symlink_to("circle")
    (folder / "inner").mkdir()
    wrong: tuple[Any, ...] = (
        None,
        1,
        [],
        {},
        True,
        "",
        ".",
        "..",
        "../model",
        "/dev/zero",
        "/etc/passwd",
        "a\x00b",
        "x" * 5000,
        "\ud800",
    )
    weight_map[name] = draw.choice((*wrong, "circle", "inner", "circle/x", INDEX, "absent.safetensors", "~/x", "\n"))
    _write_index(folder, weight_map)
    return Mutation(named=(repr(name), repr(weight_map[name])[:40], INDEX, str(weight_map[name])))


def whole_index(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    _split(draw, whole, folder)
    depth = draw.choice((10, 2000, 100_000))
    texts = ["", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * depth, '{"weight_map":' * depth]
    texts += [
        '{"weight_map": {"a": ' + "9" * 5000 + "}}",
        '{"weight_map": {"a": "b", "a": "b"}}',
        "[" * depth + "]" * depth,
    ]
    (folder / INDEX).write_text(draw.choice(texts))
    return Mutation(named=(INDEX,))


def index_disagrees(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A tensor that is listed in another file, not listed, or listed although there is none."""
    weight_map = _split(draw, whole, folder)
    name = draw.choice(list(weight_map))
    other = draw.choice([file for file in set(weight_map.values()) if file != weight_map[name]])
    change = draw.randrange(3)
    if change == 0:
        weight_map[name] = other
    elif change == 1:
        del weight_map[name]
    else:
        name = "ghost"
        weight_map[name] = other
    _write_index(folder, weight_map)
    return Mutation(named=(repr(name),))


def files_disagree(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A file is missing, cut off, empty, another one's copy, or joined by a single file of everything."""
    weight_map = _split(draw, whole, folder)
    _write_index(folder, weight_map)
    first, second = draw.sample(sorted(set(weight_map.values())), 2)
    change, file = draw.randrange(5), folder / first
    if change == 0:
        file.unlink()
    elif change == 1:
        file.write_bytes(file.read_bytes()[: draw.randrange(file.stat().st_size)])
    elif change == 2:
        file.write_bytes(b"")
    elif change == 3:
        file.write_bytes((folder / second).read_bytes())
        return Mutation(named=tuple(map(repr, whole.entries)))
    else:
        store(folder, whole.header, whole.data)
        return Mutation(named=(SINGLE,))
    return Mutation(named=(first,))


def leads_out(draw: random.Random, turn: int, whole: Checkpoint, folder: Path) -> Mutation:
    """A file, or all of them, that is a link to outside the folder."""
    outside = folder.parent / "outside"
    outside.mkdir()
    if draw.random() < 0.5:
        store(outside, whole.header, whole.data)
        (folder / SINGLE).symlink_to(draw.choice((outside / SINGLE, Path("../outside") / SINGLE)))
        return Mutation(named=(SINGLE,))
    weight_map = _split(draw, whole, folder)
    file = draw.choice(sorted(set(weight_map.values())))
    (folder / file).rename(outside / file)
    way = draw.randrange(3)
    if way == 0:
        (folder / file).symlink_to(outside / file)
    elif way == 1:
        weight_map = {name: f"../outside/{home}" if home == file else home for name, home in weight_map.items()}
    else:
        (folder / "inner").symlink_to(outside)
        weight_map = {name: f"inner/{home}" if home == file else home for name, home in weight_map.items()}
    _write_index(folder, weight_map)
    return Mutation(named=(file,))


SEVERAL_FILES: tuple[Kind, ...] = (*(index_byte, index_value, whole_index, index_disagrees, files_disagree, leads_out),)
