"""The Triton kernels as a GPU would get them: compiled for Hopper in bfloat16, at the sizes of real models.

Knows: what is too much (registers, shared memory), and what a kernel may read while its predecessor still runs.
Does not know: whether a kernel computes the right thing (test_interpreted_kernels.py, tests/gpu).
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from models.kernels.matmul.candidates import skinny_candidates
from models.kernels.matmul.choice_table import LinearShape, Skinny
from tests.models.kernels.compiling_driver import MULTIPROCESSORS
from tests.models.kernels.launch_order import launch_order
from tests.torchrun import python

ROOT = Path(__file__).parents[3]
LONG = pytest.mark.long  # further sizes of the same kernels
MOST_SHARED = 232448  # bytes: 227 KiB, what one program of an H200 may have

# Arguments that the launch right before never wrote: weights, what a step says about its rows, and what an earlier step
# left.
STEADY = {
    *("weight_ptr", "scale_ptr", "zero_ptr", "norm_ptr", "q_norm_ptr", "k_norm_ptr", "cos_sin_ptr"),
    *("lengths_ptr", "page_table_ptr", "positions_ptr", "slots_ptr", "units_ptr"),
    *("ends_ptr", "decay_log_ptr", "decay_bias_ptr", "gate_ptr", "state_ptr", "kept_ptr", "path_ptr"),
    *("a_log_ptr", "window_ptr", "bias_ptr", "sinks_ptr"),
    *("routed_ptr", "routed_share_ptr"),  # by the launch before the last
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where Triton keeps what it compiled, by all that it was made of: sources, options and compilers. Its own, unless
    LOCKSTRIDE_TEST_CACHE names a folder that outlives a run: then a kernel that did not change is only looked at.
    """
    kept = os.environ.get("LOCKSTRIDE_TEST_CACHE")
    return Path(kept) / "triton" if kept else tmp_path_factory.mktemp("triton")


def compiled(cache: Path, *arguments: str) -> list[dict[str, Any]]:
    """What tests.models.kernels.compiled_kernels found: dictionaries of compiling_driver.Compiled."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    without: dict[str, str | None] = {key: None for key in os.environ if key.startswith("TRITON_")}
    ran = python(
        "tests.models.kernels.compiled_kernels", "--json", *arguments, **without | {"TRITON_CACHE_DIR": str(cache)}
    )
    assert ran.returncode == 0, ran.errors[-3000:]
    return [json.loads(line) for line in ran.output.splitlines()]


SPILLED = {("_prefill_attention_kernel", 512): 32}  # words a thread, by heads' dims: see prefill.blocks_for


def complaints(found: list[dict[str, Any]]) -> list[str]:
    """Whatever keeps a kernel from running, or from running well and safely, one line each."""
    told = []
    for one in found:
        name = f"{one['kernel']} ({one['where']}; {one['constants']}; {one['warps']} warps)"
        if one["spills"] > SPILLED.get((one["kernel"], one["constants"].get("D")), 0):
            told.append(f"{name} spills {one['spills']} words a thread")
        if one["shared"] > MOST_SHARED:
            told.append(f"{name} asks for {one['shared']} bytes of shared memory")
        elif one["programs"] < 1:
            told.append(f"{name} has more registers than a multiprocessor")
        if one["lost"]:
            told.append(f"{name} gives {one['lost']} values of a loop's first round to all rounds")
        if (order := one["order"]) is None:
            continue
        if not order["waits"]:
            told.append(f"{name} does not wait, or lets its successor go before it has waited")
        if early := set(order["early_reads"]) - STEADY:
            told.append(f"{name} reads {', '.join(sorted(early))} before it waits")
        # Fewer before the wait than in PTX are reads of what is steady, done later or two at once.
        if order["early_writes"] or order["moved"] > 0:
            told.append(f"{name} writes before it waits, or was reordered: {order}")
    return told


BEFORE = """
scf.for %i = %0 to %rounds step %1 iter_args(%row = %a, %keys = %b) -> (i64, i32)  : i32 {
  %end = arith.muli %row, %keys : i32 loc("a {")
  %sum = scf.for %j = %0 to %end step %1 iter_args(%acc = %c) -> (f32)  : i32 {
    scf.yield %acc : f32
  }
  scf.yield %row, %more : i64, i32
}
scf.for %i = %0 to %n step %1 iter_args(%x = %a, %y = %b) -> (i64, i32)  : i32 {
}
"""


def test_a_value_that_an_outer_loop_no_longer_carries_is_found() -> None:
    """And neither more values within, which pipelining adds, nor fewer of a loop without another in it."""
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from tests.models.kernels.compiling_driver import lost_carries

    assert lost_carries(BEFORE, BEFORE) == 0
    assert lost_carries(BEFORE, BEFORE.replace("(%row = %a, %keys = %b) -> (i64, i32)", "(%row = %a) -> (i64)")) == 1
    assert lost_carries(BEFORE, BEFORE.replace("(%acc = %c)", "(%acc = %c, %next = %d)")) == 0
    assert lost_carries(BEFORE, BEFORE.replace("(%x = %a, %y = %b)", "(%x = %a)")) == 0
    assert lost_carries(BEFORE, "") == 2, "a loop that is gone"


def kernels_of(files: list[Path]) -> set[str]:
    return {name for file in files for name in re.findall(r"^def (_\w+_kernel)\(", file.read_text(), re.MULTILINE)}


FOLDERS = ("models/kernels", "runtime/execute")
FILES = [f for folder in FOLDERS for f in sorted((ROOT / folder).rglob("*.py")) if "@triton.jit" in f.read_text()]


PART_OF_FOLDER = {"experts": "experts", "recurrent": "slot-state"}  # of all others: dense


@pytest.mark.parametrize("most_demanding", [True, pytest.param(False, marks=LONG)])
@pytest.mark.parametrize("part", ["dense", "experts", "slot-state"])
def test_every_kernel_compiles_for_hopper_and_fits(part: str, most_demanding: bool, cache: Path) -> None:
    """One launch of each kernel and its 8-bit types, that with the largest tiles, or all launches."""
    found = compiled(cache, "--part", part, *(["--most-demanding"] if most_demanding else []))
    assert complaints(found) == []
    wanted = kernels_of([file for file in FILES if PART_OF_FOLDER.get(file.parent.name, "dense") == part])
    assert wanted, "no kernel was found in the sources"
    assert wanted <= {one["kernel"] for one in found}
    assert {one["element"] for one in found} >= {"bf16"}


@LONG
def test_every_kind_of_attention_compiles_and_fits(cache: Path) -> None:
    found = compiled(cache, "--part", "kinds")
    assert complaints(found) == []
    assert {one["constants"]["WINDOW"] for one in found if "WINDOW" in one["constants"]} >= {128, 512, 1024}


def test_a_push_is_as_many_stores_as_the_result_has_and_as_wide(cache: Path) -> None:
    """Addresses of other ranks are integers, of whose alignment Triton knows what it was told."""
    found = compiled(cache, "--part", "push")
    assert complaints(found) == []
    assert len(found) == 9
    for alone, to_one, to_seven in zip(found[::3], found[1::3], found[2::3], strict=True):
        assert [one["where"] for one in (alone, to_one, to_seven)] == ["1", "2", "8"]
        assert [one["constants"]["PUSH"] for one in (alone, to_one, to_seven)] == [False, True, True]
        first, all_seven = (Counter(one["stores"]) - Counter(alone["stores"]) for one in (to_one, to_seven))
        assert set(first) == {"b16" if alone["kernel"] == "_gemv_kernel" else "v4.b32"}, to_one
        assert all_seven == Counter({form: 7 * count for form, count in first.items()})
        assert to_one["programs"] >= min(2, alone["programs"])


@pytest.mark.parametrize(("part", "launches"), [("all-reduce", 12), pytest.param("more-all-reduce", 18, marks=LONG)])
def test_all_reduces_send_and_empty_as_wide_as_they_can(part: str, launches: int, cache: Path) -> None:
    """A thread has sixteen bytes or more of each part, which it stores that wide."""
    found = compiled(cache, "--part", part)
    assert complaints(found) == []
    assert len(found) == launches
    for one in found:
        way, ranks = re.findall(r"(.*), (\d+) ranks", one["where"])[0]
        others, results = int(ranks) - 1, 2 if one["constants"]["NORM"] else 1
        a_row = {"bf16": 2, "fp32": 4}[one["element"]]  # of its stores
        moved = {"pushed": others, "one-shot": 2 * others, "two-shot": 3 * others + 1}[way]
        assert one["stores"] == {"v4.b32": a_row * (moved + results), "b32": 1}, one  # and the count of exchanges


@pytest.mark.parametrize(
    ("part", "sizes"),
    [
        ("all-reduces-of-prompts", [2, 4]),
        ("exchanges-of-prompts", [2, 2, 4, 4]),
        pytest.param("more-all-reduces-of-prompts", [2, 2, 4, 4], marks=LONG),
        pytest.param("more-exchanges-of-prompts", [2] * 4 + [4] * 4, marks=LONG),
    ],
)
def test_all_programs_that_have_several_rows_run_at_once(part: str, sizes: list[int], cache: Path) -> None:
    """One that waited behind others might never start, while a peer polls for its rows."""
    found = compiled(cache, "--part", part)
    assert complaints(found) == []
    assert [one["constants"]["MANY"] for one in found] == [True] * len(sizes)
    assert [one["constants"]["WORLD"] for one in found] == sizes
    for one in found:
        assert one["grid"][0] <= one["programs"] * MULTIPROCESSORS, one


@pytest.mark.parametrize(("part", "sizes"), [("exchanges", 1), pytest.param("more-exchanges", 3, marks=LONG)])
def test_exchanges_move_rows_as_wide_as_they_can(part: str, sizes: int, cache: Path) -> None:
    """Hidden states in sixteen bytes; a weight and an id of each choice are one number a thread."""
    found = compiled(cache, "--part", part)
    assert complaints(found) == []
    assert len(found) == sizes * 3 * 2
    for one in found:
        others = int(one["where"].split()[0]) - 1
        if one["kernel"] == "_all_reduce_kernel":
            a_row = {"bf16": 2, "fp32": 4}[one["element"]] * (2 if one["constants"]["N"] == 6144 and others > 3 else 1)
            assert one["stores"] == {"v4.b32": a_row * (2 * others + 1), "b32": 1}, one  # and the count of exchanges
            continue
        at_once = 1 << (others - 1).bit_length()  # of the others' rows, with room for as many as make a power of two
        a_row = one["constants"]["BLOCK_H"] // (4 * 32 * one["warps"])
        rows = {"hidden": others + 1 + 2 * at_once, "choices": 2 * (others + 1 + 2), "count": 1}
        assert one["stores"] == {"v4.b32": a_row * rows["hidden"], "b32": rows["choices"] + rows["count"]}, one
        assert one["shared"] <= 64, "nothing changes threads"


def test_a_late_product_lets_the_next_launch_start_behind_its_last_weights(cache: Path) -> None:
    found = compiled(cache, "--part", "late-products")
    assert complaints(found) == []
    assert len(found) == 6
    assert [one["order"]["late"] for one in found] == [one["constants"]["LATE"] for one in found] == [False, True] * 3


@pytest.mark.parametrize("part", ["prefill", pytest.param("more-prefill", marks=LONG)])
def test_prefill_attention_of_every_dtype_fits(part: str, cache: Path) -> None:
    found = compiled(cache, "--part", part)
    assert complaints(found) == []
    assert len(found) == 7
    assert all(one["order"]["waits"] for one in found)


@pytest.mark.parametrize("most_demanding", [True, pytest.param(False, marks=LONG)])
def test_kernels_over_a_float8_cache_fit(most_demanding: bool, cache: Path) -> None:
    """By pointers and by TMA."""
    found = compiled(cache, "--part", "float8-cache", *(["--most-demanding"] if most_demanding else []))
    assert complaints(found) == []
    kernels = {one["kernel"] for one in found}
    assert {"_decode_attention_kernel", "_attend_list_kernel", "_prefill_attention_kernel"} <= kernels
    assert {"_invariant_decode_kernel", "_invariant_prefill_kernel"} <= kernels
    assert "_attend_window_kernel" in kernels
    assert any(one["constants"].get("TMA") for one in found)


def test_a_kernel_that_does_not_fit_is_found(cache: Path) -> None:
    told = complaints(compiled(cache, "--part", "too-much"))
    assert len(told) == 2
    assert re.search(r"_gemv_kernel .* spills \d+ words", told[0])
    assert re.search(r"_skinny_kernel .* asks for \d+ bytes of shared memory", told[1])


def test_launches_of_gpus_with_less_shared_memory_fit(cache: Path) -> None:
    """In an L40S or RTX 4090 a program may have 99 KiB. Few registers spill there, which costs time only."""
    found = compiled(cache, "--part", "small-gpus")
    assert {one["where"].split(",")[0] for one in found if one["shared"] > 64 << 10} == {
        *("experts of 30B-A3B", "prefill attention", "gated delta net"),
        "deterministic product of 24576 columns",
    }
    assert [one for one in found if one["shared"] > 99 << 10] == []
    assert {one["kernel"] for one in found if one["where"].startswith(("FP8", "float8"))} >= {
        *("_gemv_kernel", "_skinny_kernel", "_streamed_down_kernel", "_grouped_kernel"),
        *("_decode_attention_kernel", "_attend_list_kernel", "_prefill_attention_kernel"),
    }


@pytest.mark.slow
def test_codes_compile_for_gpus_without_an_instruction_for_them(cache: Path) -> None:
    """An A100: bytes of FP8 weights, and of NVFP4's scales, become numbers by integers."""
    found = compiled(cache, "--part", "ampere")
    assert [one for one in found if one["shared"] > 163 << 10] == []
    of_codes = {one["kernel"] for one in found if one["element"] != "fp8e4nv"}
    assert of_codes >= {
        *("_gemv_kernel", "_skinny_kernel", "_decode_kernel", "_streamed_down_kernel", "_grouped_kernel"),
        *("_fragments_kernel", "_four_bits_kernel", "_decode_four_bits_kernel"),
    }


def test_no_candidate_gives_one_warp_64_rows() -> None:
    """Such a tile has more sums and operands than a thread has registers."""
    shapes = [
        LinearShape(rows, outputs, inner, torch.bfloat16)
        for rows in (1, 8, 32, 64, 128, 256)
        for outputs, inner in ((2048, 1024), (4096, 4096), (151936, 1024))
    ]
    tiles = [choice for shape in shapes for choice in skinny_candidates(shape) if isinstance(choice, Skinny)]
    assert tiles
    assert not [tile for tile in tiles if tile.block_m > 32 * tile.warps]


@pytest.mark.long
def test_every_form_of_the_rotation_fits_and_needs_no_shared_memory(cache: Path) -> None:
    found = compiled(cache, "--part", "rotation")
    assert complaints(found) == []
    many = [one for one in found if one["kernel"] == "_rope_and_cache_many_kernel"]
    assert {one["warps"] for one in many} >= {1, 2, 4}
    assert {one["shared"] for one in many if one["element"] == "bf16"} == {0}


@pytest.mark.long
@pytest.mark.parametrize("part", ["more-dense", "more-experts", "more-slot-state", "same-bits"])
def test_kernels_at_further_sizes_fit(part: str, cache: Path) -> None:
    """``same-bits``: the deterministic mode of other shapes."""
    assert complaints(compiled(cache, "--part", part)) == []


@pytest.mark.long
def test_every_product_of_the_shipped_table_fits(cache: Path) -> None:
    assert complaints(compiled(cache, "--part", "table")) == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "size", "options"),
    [
        *((shape, size, ()) for shape in ("0.6b", "8b", "32b") for size in (1, 2, 4, 8)),
        *(("30b-a3b", size, ("--ep",)) for size in (2, 8)),
        *(("30b-a3b", size, ()) for size in (1, 4)),
        *(("8b", size, ("--dtype", dtype)) for size, dtype in ((1, "float16"), (1, "float32"), (8, "float32"))),
        ("30b-a3b", 2, ("--ep", "--dtype", "float32")),
    ],
)
def test_every_launch_of_a_rank_fits(shape: str, size: int, options: tuple[str, ...], cache: Path) -> None:
    assert complaints(compiled(cache, "--shape", shape, "--tp", str(size), *options)) == []


@pytest.mark.parametrize(
    "options",
    [
        ("--shape", "8b"),
        ("--shape", "30b-a3b", "--tp", "2", "--ep"),
        ("--shape", "8b", "--same-bits"),
        ("--shape", "30b-a3b", "--same-bits"),
        *(("--shape", "0.6b", "--drafts", drafts) for drafts in ("sampled", "tree")),
    ],
    ids=" ".join,
)
def test_nothing_is_compiled_after_start_up(options: tuple[str, ...], cache: Path) -> None:
    """Steps of any number of tokens and of any kind of sampling run code that is there."""
    assert compiled(cache, "--late", *options) == []


# -- the instruments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("warps", "registers", "shared", "programs"),
    [
        (4, 128, 0, 4),
        (4, 129, 0, 3),  # registers come in eights: 136
        (4, 255, 0, 2),
        (1, 32, 0, 32),
        (8, 32, 0, 8),
        (4, 32, 100 << 10, 2),
        (4, 32, MOST_SHARED, 1),
        (4, 32, MOST_SHARED + 16, 0),
        (16, 255, 0, 0),
    ],
)
def test_programs_of_a_multiprocessor(warps: int, registers: int, shared: int, programs: int) -> None:
    pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or from pip")
    from tests.models.kernels.compiling_driver import programs_at_once

    assert programs_at_once(warps, registers, shared) == programs


PTX = """
	ld.param.b64 	%rd1, [_some_kernel_param_0];
	ld.param.b64 	%rd2, [_some_kernel_param_1];
	mov.u32 	%r1, %tid.x;
	mad.wide.u32 	%rd3, %r1, 4, %rd2;
	// begin inline asm
	@%p1 ld.global.L1::evict_first.b32 { %r2 }, [ %rd3 + 0 ];
	// end inline asm
	{early}
	griddepcontrol.wait;
	{release}
	mad.wide.u32 	%rd4, %r2, 4, %rd1;
	ld.global.b32 	%r3, [%rd4];
	st.global.b32 	[%rd4], %r3;
"""
SASS = """
        /*0010*/                   LDG.E R2, [R2.64] ;
        {early}
        /*0030*/                   ACQBULK ;
        /*0040*/                   PREEXIT ;
        /*0050*/              @!P0 LDG.E R3, [R4.64] ;
        /*0060*/                   STG.E [R4.64], R3 ;
"""
RELEASE = "griddepcontrol.launch_dependents;"


@pytest.mark.parametrize(
    ("early", "release", "sass", "expected"),
    [
        ("", RELEASE, "", (True, ("weight_ptr",), 0, 0)),
        ("", "", "", (False, ("weight_ptr",), 0, 0)),
        (RELEASE, RELEASE, "", (False, ("weight_ptr",), 0, 0)),
        (
            "add.s64 %rd5, %rd1, 8;\n\tld.global.b32 %r9, [%rd5+4];",
            RELEASE,
            "/*0020*/ LDG.E R9, [R8.64] ;",
            (True, ("x_ptr", "weight_ptr"), 0, 0),
        ),
        ("st.global.b32 [%rd1], %r2;", RELEASE, "/*0020*/ @P1 STG.E [R8.64], R2 ;", (True, ("weight_ptr",), 1, 0)),
        ("", RELEASE, "/*0020*/ @!P1 LDG.E.128 R4, [R8.64] ;", (True, ("weight_ptr",), 0, 1)),
        ("", RELEASE, "/*0020*/ CCTL.E.PF2 [R2] ;", (True, ("weight_ptr",), 0, 0)),
    ],
    ids=[
        "keeps the rules",
        "never releases",
        "releases early",
        "reads early",
        "writes early",
        "was moved",
        "prefetches",
    ],
)
def test_what_comes_before_the_wait_is_found(
    early: str, release: str, sass: str, expected: tuple[bool, tuple[str, ...], int, int]
) -> None:
    ptx = PTX.replace("{early}", early).replace("{release}", release)
    found = launch_order(ptx, SASS.replace("{early}", sass), ("x_ptr", "weight_ptr"))
    assert (found.waits, found.early_reads, found.early_writes, found.moved) == expected
