"""Pairs of tiles as people type them: those of gate-up, a slash, those of down.

Knows: the fields of expert_tiles.Tiles, and what of them a layer can have. Does not know: which are fast
(bench/experts.py).
"""

from __future__ import annotations

from dataclasses import astuple, fields

from models.kernels.experts.tiles import Tiles, largest_power
from tests.gpu.expert_cases import Layer

SUCH_AS = "16,64,128,3,4,8"  # tiles in a pair that is named

Pair = tuple[Tiles, Tiles]


def products(layer: Layer) -> dict[str, tuple[int, int]]:
    """(outputs, inner) of each."""
    return {"gate-up": (2 * layer.inner, layer.hidden), "down": (layer.hidden, layer.inner)}


def named(pair: Pair) -> str:
    """As --pairs takes it."""
    return "/".join(",".join(map(str, astuple(tiles))) for tiles in pair)


def pair_of(text: str, layer: Layer) -> Pair:
    """What ``named`` made of it. Raises ValueError for what is no pair of tiles, or not one for ``layer``."""
    words = text.split("/")
    if len(words) != 2:
        raise ValueError(f"{text!r} is no pair: type tiles of gate-up, a slash, tiles of down, as {SUCH_AS}/{SUCH_AS}")
    gate_up, down = (
        _tiles_of(f"{name} in {text!r}", word, *size)
        for word, (name, size) in zip(words, products(layer).items(), strict=True)
    )
    return gate_up, down


def _tiles_of(where: str, text: str, outputs: int, inner: int) -> Tiles:
    names, words = [field.name for field in fields(Tiles)], text.split(",")
    if len(words) != len(names) or not all(word.isdecimal() for word in words):
        raise ValueError(f"{where}: {text!r} is not {','.join(names)}: type {len(names)} whole numbers as {SUCH_AS}")
    tiles = Tiles(*map(int, words))
    powers = {"block_m": (8, 256), "block_o": (16, largest_power(outputs)), "block_k": (16, largest_power(inner))}
    for name, (least, most) in {**powers, "warps": (1, 16)}.items():
        number = getattr(tiles, name)
        if not least <= number <= most or number != largest_power(number):
            raise ValueError(f"{where}: {name} is {number}: type a power of two from {least} to {most}")
    if 0 in (tiles.stages, tiles.group):
        raise ValueError(f"{where}: {text!r}: stages and group are at least 1 each: type them as in {SUCH_AS}")
    return tiles
