"""Launch shapes follow the traits of the GPU, and those of an H200 are the ones that were measured on it."""

from __future__ import annotations

import dataclasses
import hashlib
from types import SimpleNamespace

import pytest
import torch

from models.kernels.experts.tiles import long_list_tiles
from models.kernels.matmul.candidates import (
    candidates_for,
    default_choice,
    first_wave,
    prefetch_columns,
    wide_candidates,
)
from models.kernels.matmul.choice_table import Gemv, LinearShape
from models.kernels.traits import H200, traits_of
from models.kv_group import keys_and_values

CUDA = torch.device("cuda", 0)
SIZES = (
    *((6144, 4096), (1024, 3072), (4096, 12288), (151936, 1024), (96, 60), (24576, 4096), (4096, 4096), (128256, 8192)),
)
SHAPES = [
    LinearShape(rows, outputs, inner, dtype, normed, gate_up)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096)  # the buckets of that time
    for outputs, inner in SIZES
    for dtype in (torch.bfloat16, torch.float32)
    for normed, gate_up in ((False, False), (True, False), (True, True))
]
LISTS = [
    (mean, *sizes)
    for mean in (64.0, 200.0, 512.0, 1000.0)
    for sizes in ((8, 4096, 14336), (64, 2048, 768), (4, 4096, 14336))
]
HALF = dataclasses.replace(H200, multiprocessors=66)


def digest(found: object) -> str:
    return hashlib.sha256(str(found).encode()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "shared_kib", "dependent", "hopper"),
    [((9, 0), 132, 227, True, True), ((8, 0), 108, 163, False, False), ((8, 9), 142, 99, False, False),
     ((10, 0), 148, 227, True, False), ((13, 0), 150, 99, True, False)],
)  # fmt: skip
def test_traits_are_read_from_the_device(
    capability: tuple[int, int],
    multiprocessors: int,
    shared_kib: int,
    dependent: bool,
    hopper: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(
        multi_processor_count=multiprocessors,
        memory_clock_rate=3_125_000,  # kHz
        memory_bus_width=6144,
        L2_cache_size=60 << 20,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = traits_of(CUDA)
    assert (found.capability, found.multiprocessors, found.shared_bytes) == (
        capability,
        multiprocessors,
        shared_kib << 10,
    )
    assert (found.dependent_launch, found.hopper) == (dependent, hopper)
    assert (found == H200) == (capability == (9, 0))


def test_what_the_driver_does_not_tell_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    found = traits_of(CUDA)
    assert (found.memory_rate, found.l2_bytes) == (0.0, H200.l2_bytes)
    assert not found.like(H200)


def test_products_of_an_h200_are_those_that_were_measured() -> None:
    """Recorded when 132 multiprocessors stood in the code; a change of any candidate or of their order shows."""
    said = "\n".join(f"{s.key}: {default_choice(s, H200)} {candidates_for(s, H200)}" for s in SHAPES)
    assert digest(said) == "a09eeae45baecae0"
    assert default_choice(LinearShape(1, 6144, 4096, torch.bfloat16), H200) == Gemv(4, 1024, 4)
    assert first_wave(H200) == 1056


def test_expert_tiles_of_an_h200_are_those_that_were_measured() -> None:
    assert digest("\n".join(str(long_list_tiles(*given, H200)) for given in LISTS)) == "b2316cfdc2c238fd"
    tiles = long_list_tiles(200.0, 8, 4096, 14336, H200)
    assert tiles is not None
    assert (tiles.programs, tiles.split) == (132, 2)


WINDOWS = ((8, 64), (64, 64), (128, 64), (256, 64), (32, 16), (128, 16), (256, 16), (8, 128))  # pairs, query rows


def test_tall_tiles_have_no_more_warps_than_have_registers() -> None:
    """ptxas refuses more for sm_90: (query heads a key head, head size) of the shapes in models/shapes, trees of 32."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.attention import decode_choice

    shared = H200.shared_bytes - decode_choice._SHARED_RESERVE
    for heads, head_dim, warps in ((8, 128, 16), (16, 128, 8), (6, 256, 8), (8, 256, 8)):
        query_rows = 1 << (32 * heads - 1).bit_length()
        for pairs, every_split in ((8, True), (64, False), (2048, False)):
            blocks = decode_choice._attention_blocks(pairs, query_rows, 2 * head_dim, shared, every_split=every_split)
            assert blocks[2] == warps, (heads, head_dim)
    for heads, kv_heads, head_dim, most in ((32, 8, 128, 128), (32, 4, 128, 64), (24, 4, 256, 42), (16, 2, 256, 32)):
        assert decode_choice.longest_window(heads, keys_and_values(kv_heads, head_dim, torch.bfloat16)) == most


def test_attention_blocks_of_an_h200_are_those_that_were_measured() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.attention import decode_choice
    from models.kernels.attention.prefill import TiledPrefill

    shared = H200.shared_bytes - decode_choice._SHARED_RESERVE
    blocks = [
        decode_choice._attention_blocks(pairs, query_rows, row_bytes, shared)
        for pairs in (1, 256, 1024)
        for query_rows in (1, 8, 16, 64, 128)
        for row_bytes in (128, 256, 512, 1024)
    ]
    assert digest(blocks) == "58170d4063845875"
    of_splits = [decode_choice._attention_blocks(pairs, 16, 256, shared, every_split=True) for pairs in (8, 64, 128)]
    assert of_splits == [(64, 5, 4), (64, 5, 4), (64, 3, 4)]
    of_many = [decode_choice._attention_blocks(128, rows, 256, shared, every_split=True) for rows in (8, 16, 32, 64)]
    assert of_many == [(32, 5, 2), (64, 3, 4), (32, 5, 4), (32, 5, 4)]
    of_windows = [decode_choice._attention_blocks(8, rows, 256, shared, every_split=True) for rows in (16, 64, 128)]
    assert of_windows == [(64, 5, 4), (64, 5, 4), (32, 5, 4)]
    assert [decode_choice._merged_apart(pairs, rows, 128) for pairs, rows in ((8, 16), (8, 32), (16, 64))] == [
        False,
        True,
        False,
    ]
    assert [decode_choice._most_of_window(pairs, False) for pairs in (4, 8, 16)] == [32, 16, 8]
    over_a_list = [decode_choice._window_launch(*given, 132, absent=False) for given in WINDOWS]
    assert [one[:6] for one in over_a_list] == [
        (True, 4, 4, 1, 4, 1536),
        (True, 4, 4, 1, 2, 2048),
        (True, 4, 4, 1, 1, 2048),
        (True, 3, 4, 2, 1, 2048),
        (True, 5, 4, 1, 4, 2048),
        (True, 5, 4, 1, 1, 2048),
        (True, 4, 4, 2, 1, 2048),
        (False, 5, 8, 1, 8, 1024),
    ]
    beside_chunks = [decode_choice._window_launch(*given, 132, absent=True) for given in WINDOWS[1:4:2]]
    assert [one[:6] for one in beside_chunks] == [(True, 3, 4, 2, 2, 1024)] * 2
    assert decode_choice.window_programs(over_a_list[1].programs, 8, 132) == 128, "as many of each key head"
    assert decode_choice.window_programs(over_a_list[3].programs, 8, 132) == 264
    of_tokens = [decode_choice._attention_blocks(pairs, 8, 256, shared, every_split=True) for pairs in (1, 4, 8, 9, 17)]
    assert of_tokens == [(64, 5, 4), (64, 3, 4), (64, 3, 4), (32, 5, 2), (64, 5, 4)]
    assert [decode_choice._fewest_splits(pairs, 8, 132) for pairs in (4, 8, 9, 16)] == [64, 64, 16, 16]
    assert TiledPrefill(torch.device("cpu"), H200)._programs == 528


def test_programs_of_few_tokens_experts_follow_the_multiprocessors() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.experts.streamed import full_programs

    assert [full_programs(number) for number in (132, 114, 66)] == [512, 256, 256]


def test_a_gpu_of_half_the_size_gets_launches_of_half_the_size() -> None:
    tiles = long_list_tiles(200.0, 8, 4096, 14336, HALF)
    assert tiles is not None
    assert tiles.programs == 66
    assert first_wave(HALF) == 528
    shape = LinearShape(128, 24576, 4096, torch.bfloat16)
    assert wide_candidates(shape, HALF) != wide_candidates(shape, H200)
    small_l2 = dataclasses.replace(H200, l2_bytes=H200.l2_bytes // 2)
    assert prefetch_columns(4096, 4096, small_l2) == 1024 == prefetch_columns(4096, 4096, H200) // 2


def test_less_shared_memory_means_smaller_blocks() -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from models.kernels.attention import decode_choice

    assert (
        decode_choice._attention_blocks(1, 16, 512, 200 << 10)[0]
        > decode_choice._attention_blocks(1, 16, 512, 72 << 10)[0]
    )
