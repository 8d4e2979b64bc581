"""The Mamba-2 kernels through Triton's interpreter, against the recurrence: ``TRITON_INTERPRET=1 python -m ...``.

Exits with an error where one differs, or where NaN of nobody's reaches somebody. Knows: shapes that reach every branch.
Does not know: GPUs (tests/gpu).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.recurrent import mamba2_tree, mamba2_triton
from models.kernels.recurrent.mamba2 import Mamba2Weights
from models.kernels.recurrent.ragged import token_rows
from tests.models.kernels.quick_interpreter import ALL
from tests.models.kernels.recurrent.mamba_cases import SLOTS, banks, check, random_weights, width
from tests.models.kernels.recurrent.ragged_sequences import steps
from tests.models.kernels.recurrent.tree_cases import grown, padded, path, positions, state_tree
from tests.plant import reference_kernels

REFERENCE = reference_kernels()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}  # the interpreter's dot does not know bfloat16


def check_step(weights: Mamba2Weights, dtype: torch.dtype, block_p: int) -> None:
    """Rows of several slots, ghosts among them, over a few steps."""
    slots = torch.tensor([3, 0, 7, 1, 0])
    live = slots != 0
    window, state = banks(weights, dtype)
    mine, theirs = (window.clone(), state.clone()), (window.clone(), state.clone())
    for at in range(5):
        projected = torch.randn(len(slots), width(weights)).to(dtype)
        projected[~live] = math.nan
        positions = torch.tensor([at, 0, 17 + at, 5 + at, 0])
        rows = StateRows(slots)
        found = mamba2_triton.step(projected, weights, *mine, rows, positions, False, block_p)
        expected = REFERENCE.mamba2(projected, weights, *theirs, rows, positions)
        what = (weights.heads, weights.head_dim, weights.groups, weights.state_size, dtype, block_p, at)
        check(found[live], expected[live], TOLERANCE[dtype], ("step", *what))
        check(mine[1][1:-1], theirs[1][1:-1], TOLERANCE[dtype], ("state", *what))
        assert torch.equal(mine[0][1:-1], theirs[0][1:-1]), ("window", *what)
    for bank, before in zip(mine, (window, state), strict=True):
        untouched = [slot for slot in range(SLOTS - 1) if slot not in slots.tolist()]
        assert torch.equal(bank[untouched], before[untouched])
        assert bank[[0, -1]].isnan().all()


def check_scan(
    weights: Mamba2Weights, dtype: torch.dtype, most: int, chunk: int, block_p: int, one_by_one: int = 3
) -> None:
    """Sequences cut anywhere, rows without tokens and of nobody, padding."""
    lengths = [5, 1, 2 * chunk + 3, 3, chunk, 9]
    sequences = [torch.randn(length, width(weights)).to(dtype) for length in lengths]
    window, state = banks(weights, dtype, slots=len(lengths) + 2)
    window[1:-1], state[1:-1] = 0, 0
    mine, theirs = (window.clone(), state.clone()), (window.clone(), state.clone())
    what = (weights.heads, weights.head_dim, weights.groups, weights.state_size, dtype, most, chunk, block_p)
    for step in steps(lengths, seed=most, most=most):
        projected, rows = step.tokens(sequences), step.rows
        assert rows.ends_B is not None
        _, xbc, _ = weights.split(projected)
        xbc = REFERENCE.causal_conv(xbc, weights.conv_CJ, weights.conv_bias_C, mine[0], rows, step.positions_T)
        given = (projected, xbc, weights, mine[1], rows, False)
        found = mamba2_triton.scan(*given, block_p=block_p, chunk=chunk, one_by_one=one_by_one)
        expected = REFERENCE.mamba2(projected, weights, *theirs, rows, step.positions_T)
        real = ~token_rows(rows, len(projected)).padding_T
        check(found[real], expected[real], TOLERANCE[dtype], ("scan", *what))
        check(mine[1][1:-1], theirs[1][1:-1], TOLERANCE[dtype], ("state", *what))
        assert mine[1][[0, -1]].isnan().all()


def check_ghosts() -> None:
    """A row of the null slot with tokens, as a request has that ended while its step was in flight."""
    weights = random_weights(2, 16, 1, 16, 4, torch.float32)
    _, state = banks(weights, torch.float32)
    projected, before = torch.randn(7, width(weights)), state.clone()
    projected[1:5] = math.nan
    slots, ends = torch.tensor([2, 0, 4]), torch.tensor([1, 5, 7])
    xbc = weights.split(projected)[1].contiguous()
    mamba2_triton.scan(projected, xbc, weights, state, StateRows(slots, ends), False)
    assert state[[2, 4]].isfinite().all()
    assert not torch.equal(state[2], before[2])
    others = [1, 3, 5, 6, 7]
    assert torch.equal(state[others], before[others])


def check_windows(weights: Mamba2Weights, sizes: Sequence[tuple[int, tuple[int, int, int]]]) -> None:
    """State as it was while a window is looked at; then only the tokens that are kept are taken in, in the same bits
    where the others are NaN."""
    window, state = banks(weights, torch.float32)
    window[1:4], state[1:4] = 0, 0
    mine, theirs = (window.clone(), state.clone()), (window.clone(), state.clone())
    alone = window.clone(), state.clone()
    sequences, at = torch.randn(3, 65, width(weights)), [0, 0, 0]
    for size, kept in sizes:
        slots, counts = torch.tensor([1, 2, 0, 3]), torch.tensor([*kept[:2], 0, kept[2]], dtype=torch.int32)
        places = [(0, at[0]), (1, at[1]), (0, 0), (2, at[2])]
        projected = torch.cat([sequences[number][start : start + size] for number, start in places])
        projected[2 * size : 3 * size] = math.nan
        refused = (torch.arange(size) >= counts[:, None]).view(-1, 1)
        positions = torch.cat([torch.arange(start, start + size) for _, start in places])
        found = []
        for run, (windows, states) in ((REFERENCE.mamba2, theirs), (triton_variant, mine)):
            before = windows.clone(), states.clone()
            out = run(projected, weights, windows, states, StateRows(slots, frozen=True), positions)
            found.append(out.view(4, size, -1)[[0, 1, 3]])
            assert torch.equal(windows[1:4], before[0][1:4])
            assert torch.equal(states[1:4], before[1][1:4])
            real, rows = (windows.clone(), states.clone()), StateRows(slots, kept_B=counts)
            run(projected, weights, *real, rows, positions)
            run(projected.masked_fill(refused, math.nan), weights, windows, states, rows, positions)
            for bank, expected in zip((windows, states), real, strict=True):
                assert bank[1:4].isfinite().all()
                assert torch.equal(bank[1:4], expected[1:4])
        check(found[1], found[0], 1e-5, "a window")
        by_kernel, by_token = list[Tensor](), list[Tensor]()
        for number, (start, count) in enumerate(zip(at, kept, strict=True)):
            for position in range(start, start + count):
                one, row = sequences[number][position : position + 1], StateRows(torch.tensor([number + 1]))
                by_token.append(REFERENCE.mamba2(one, weights, *alone, row, torch.tensor([position]))[0])
                by_kernel.append(found[1][number][position - start])
        if by_token:  # together: for one token float32 itself is 1.1e-5 from float64
            check(torch.stack(by_kernel), torch.stack(by_token), 1e-5, "tokens of a window")
        at = [start + count for start, count in zip(at, kept, strict=True)]
        for variant in (mine, theirs):
            check(variant[1][1:4], alone[1][1:4], 1e-5, "what is kept of a window")
            assert torch.equal(variant[0][1:4], alone[0][1:4])


def check_windows_beside_chunks(weights: Mamba2Weights) -> None:
    """Rows that are undecided leave state as it is, whatever the step's others take in."""
    dtype = weights.norm_X.dtype
    bound = TOLERANCE[dtype]
    for size, chunk in ((4, 9), (18, 40)):
        window, state = banks(weights, dtype)
        window[1:4], state[1:4] = 0.5, 0.25
        slots, ends = torch.tensor([1, 2, 0, 3]), torch.tensor([size, 2 * size, 3 * size, 3 * size + chunk])
        lengths, windows = (size, size, size, chunk), 3 * size
        projected = torch.randn(windows + chunk, width(weights), dtype=dtype)
        projected[2 * size : windows] = math.nan
        positions = torch.cat([torch.arange(8, 8 + length) for length in lengths])
        rows = StateRows(slots, ends, writes_B=torch.tensor([0, 0, 0, 3]), window=size)
        for run in (REFERENCE.mamba2, triton_variant):
            mixed, apart = (window.clone(), state.clone()), (window.clone(), state.clone())
            out = run(projected, weights, *mixed, rows, positions)
            looked_at, chunks = StateRows(slots[:3], frozen=True), StateRows(slots[3:])
            of_windows = run(projected[:windows], weights, *apart, looked_at, positions[:windows])
            of_chunk = run(projected[windows:], weights, *apart, chunks, positions[windows:])
            check(out[: 2 * size], of_windows[: 2 * size], bound, "windows beside a chunk")
            check(out[windows:], of_chunk, bound, "a chunk beside windows")
            assert torch.equal(mixed[0][1:4], apart[0][1:4])
            check(mixed[1][1:4], apart[1][1:4], bound, "state behind windows beside a chunk")
            assert torch.equal(mixed[1][1:3], state[1:3])


def check_trees(weights: Mamba2Weights, nodes: int, width_of_path: int) -> None:
    """Every node, state as it was; then the tokens of a path; NaN in a node, off the path and in a row of nobody."""
    parents, starts = [grown(nodes, seed) for seed in range(4)], [5, 0, 0, 2]  # the third row is nobody's
    tree, slots, at = state_tree(parents), torch.tensor([1, 2, 0, 3]), positions(parents, starts)
    window, state = banks(weights, torch.float32)
    mine, theirs = (window.clone(), state.clone()), (window.clone(), state.clone())
    projected = torch.randn(4 * nodes, width(weights))
    projected[2 * nodes : 3 * nodes] = math.nan
    paths = [path(of_row, nodes - 1 - row)[:width_of_path] for row, of_row in enumerate(parents)]
    counts = [len(paths[0]), min(2, len(paths[1])), 0, len(paths[3]) // 2]
    kept = [nodes * row + node for row in range(4) for node in paths[row][: counts[row]]]
    on_path = torch.isin(torch.arange(4 * nodes), torch.tensor(kept))[:, None]
    outs = []
    for run, (windows, states) in ((REFERENCE.mamba2, theirs), (triton_variant, mine)):
        for poisoned in (False, True):
            given = projected.clone()
            if poisoned:
                given[1] = math.nan  # node 1 of the first row, which has children
            rows = StateRows(slots, frozen=True, tree=tree)
            out = run(given, weights, windows, states, rows, at).view(4, nodes, -1)[[0, 1, 3]]
            if poisoned:
                below = [node for node in range(nodes) if 1 in path(parents[0], node)]
                assert out[0, below].isnan().all()
                out[0, below] = 0.0
            outs.append(out)
        assert torch.equal(windows[1:-1], window[1:-1])
        assert torch.equal(states[1:-1], state[1:-1])
        taken = StateRows(slots, kept_B=torch.tensor(counts).int(), tree=tree, path_BW=padded(paths, width_of_path))
        run(projected.where(on_path, math.nan), weights, windows, states, taken, at)
    for found, expected in zip(outs[2:], outs[:2], strict=True):
        check(found, expected, 1e-5, ("a tree", nodes))
    check(mine[1][1:-1], theirs[1][1:-1], 1e-5, "what is kept of a tree")
    assert torch.equal(mine[0][1:-1], theirs[0][1:-1])
    assert not torch.equal(mine[1][1], state[1])


def triton_variant(
    projected: Tensor, weights: Mamba2Weights, window: Tensor, state: Tensor, rows: StateRows, positions: Tensor
) -> Tensor:
    xbc = weights.split(projected)[1]
    xbc = REFERENCE.causal_conv(xbc, weights.conv_CJ, weights.conv_bias_C, window, rows, positions)
    if rows.tree is not None and rows.frozen:
        return mamba2_tree.scan_tree(projected, xbc, weights, state, rows, False)
    return mamba2_triton.scan(projected, xbc, weights, state, rows, False)


def main() -> None:
    torch.manual_seed(0)
    for dtype in TOLERANCE:
        made = partial(random_weights, dtype=dtype)
        half = dtype == torch.float16
        if ALL or not half:
            check_step(made(4, 12, 2, 10, 4), dtype, 8 if half else 32)
            check_scan(made(4, 12, 2, 10, 4), dtype, 9, 16, 16)
        if ALL or half:
            check_step(made(2, 16, 1, 16, 2, bias=False), dtype, 32 if half else 8)
            check_scan(made(2, 40, 2, 24, 3, bias=False), dtype, 60, 16, 32)
        if half:  # pieces of one token, which no product of a dtype takes
            check_scan(made(2, 16, 1, 16, 4), dtype, 1, 16, 16)
        else:  # and short ones by chunks
            check_scan(made(2, 16, 1, 16, 4), dtype, 5, 16, 16, one_by_one=0)
    alone = replace(random_weights(4, 12, 1, 10, 4, torch.float32), norm_groups=0)
    check_step(alone, torch.float32, 32)
    check_scan(alone, torch.float32, 30, 16, 16)
    check_ghosts()
    few = (5, (5, 0, 2)), (3, (1, 3, 1)), (2, (1, 2, 0)), (7, (2, 6, 7))
    check_windows(random_weights(4, 12, 2, 10, 4, torch.float32), few)
    check_windows(random_weights(1, 12, 1, 10, 4, torch.float32), ((32, (5, 32, 0)), (33, (33, 1, 17))))
    for dtype in TOLERANCE if ALL else (torch.float16,):
        check_windows_beside_chunks(random_weights(4, 12, 2, 10, 4, dtype))
    for nodes, width_of_path in ((33, 9), (7, 4), (2, 2)):
        check_trees(random_weights(4, 12, 2, 10, 4, torch.float32), nodes, width_of_path)
    check_trees(replace(random_weights(2, 40, 1, 24, 3, torch.float32, bias=False), norm_groups=0), 12, 5)


if __name__ == "__main__":
    main()
