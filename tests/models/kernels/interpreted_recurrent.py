"""The kernels over slot state through Triton's interpreter, on a CPU: ``TRITON_INTERPRET=1 python -m ...``.

Each against the torch reference: sequences cut into pieces of any length, rows without tokens, padding, and slots of
nobody full of NaN. Exits with an error where one differs.

Knows: shapes that reach every branch of the kernels. Does not know: GPUs (tests/gpu/test_gdn_gpu.py), where the same
kernels run compiled, in bfloat16 and with programmatic dependent launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.recurrent import delta_step, gates
from tests.models.kernels.nvidia_kernels import nvidia_kernels_on_cpu
from tests.models.kernels.quick_interpreter import ALL
from tests.models.kernels.recurrent.chunk_cases import AT_EDGES, both
from tests.models.kernels.recurrent.delta_cases import DeltaCase, run_pieces
from tests.models.kernels.recurrent.ragged_sequences import steps
from tests.models.kernels.recurrent.tree_cases import FORKED, STAR, grown, padded, path, positions, state_tree
from tests.plant import reference_kernels

REFERENCE = reference_kernels()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}


def close(found: Tensor, expected: Tensor, what: str) -> None:
    bound = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), atol=bound, rtol=bound, msg=lambda m: f"{what}: {m}")


def convolutions() -> None:
    kernels = nvidia_kernels_on_cpu()
    for taps, channels, bias in ((4, 130, False), (3, 7, True)):
        torch.manual_seed(taps)
        lengths = [40, 1, 5, 17]
        sequences = [torch.randn(length, channels) for length in lengths]
        weight_CJ, bias_C = torch.randn(channels, taps), torch.randn(channels) if bias else None
        windows = [torch.zeros(7, taps, channels) for _ in range(2)]
        for window in windows:
            window[[0, 6]] = float("nan")
        for step in steps(lengths, seed=taps, most=19):
            x_TX = torch.cat((step.tokens(sequences), torch.zeros(len(step.positions_T), 3)), 1)
            outs = [
                k.causal_conv(x_TX[:, :channels], weight_CJ, bias_C, window, step.rows, step.positions_T)
                for k, window in zip((REFERENCE, kernels), windows, strict=True)
            ]
            real = len(step.positions_T) - step.padding
            close(outs[1][:real], outs[0][:real], "convolution")
        assert torch.equal(windows[0][1:6], windows[1][1:6])
        even = StateRows(torch.tensor([2, 5]))  # three tokens a row
        x_TC, positions_T = torch.randn(6, channels), torch.tensor([30, 31, 32, 4, 5, 6])
        a, b = (
            k.causal_conv(x_TC, weight_CJ, bias_C, window, even, positions_T)
            for k, window in zip((REFERENCE, kernels), windows, strict=True)
        )
        close(b, a, "convolution of equal rows")
        assert torch.equal(windows[0][1:6], windows[1][1:6])


def recurrences() -> None:
    for case, most in (
        (DeltaCase(k_heads=2, v_heads=4, k_dim=16, v_dim=32, lengths=(70, 3, 20, 16, 17)), 100),
        (DeltaCase(k_heads=1, v_heads=2, k_dim=12, v_dim=20, lengths=(40, 70, 1)), 30),
        (DeltaCase(k_heads=1, v_heads=2, k_dim=12, v_dim=40, lengths=(17, 9, 1)), 4),
        (DeltaCase(k_heads=1, v_heads=1, k_dim=16, v_dim=16, lengths=(70, 20), repeats=True), 140),
    ):
        expected, states = run_pieces(REFERENCE, case, most=most)
        found, found_states = run_pieces(nvidia_kernels_on_cpu(), case, most=most)
        for a, b in zip(expected, found, strict=True):
            close(b, a, f"{case}, pieces of up to {most}")
        close(found_states, states, "states")
    half = DeltaCase(k_heads=1, v_heads=1, k_dim=16, v_dim=16, lengths=(70, 5), dtype=torch.float16)
    for a, b in zip(run_pieces(REFERENCE, half, 80)[0], run_pieces(nvidia_kernels_on_cpu(), half, 80)[0], strict=True):
        close(b, a, "float16")


def chunks() -> None:
    """Rows that end anywhere in a chunk, heads that share keys or do not, and rows too short for chunks."""
    few = (3, 64, 1, 2), 0
    for (k_heads, v_heads, k_dim, v_dim), dtype, cases in (
        ((1, 1, 16, 16), torch.float32, ((AT_EDGES, 32), few)),
        ((1, 3, 12, 20), torch.float16, ((AT_EDGES, 32), few) if ALL else (few,)),
        ((1, 2, 16, 80), torch.float16, (few, ((65, 65), 16), ((40, 40), 40))),
    ):
        for lengths, most in cases:
            case = DeltaCase(k_heads, v_heads, k_dim, v_dim, lengths, dtype)
            found, expected = both(case, most, False)
            close(found[0], expected[0], f"chunks of {case}")
            torch.testing.assert_close(found[1], expected[1], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def decode_steps() -> None:
    """One token a row, the convolution in the same launch, beside unused rows: states whole, then in four slices."""
    check_decode(tokens=9)
    with patch.object(delta_step, "_FEW_PROGRAMS", 0), patch.object(delta_step, "_STREAMED", 64):
        check_decode(tokens=3)


def check_decode(tokens: int) -> None:
    case = DeltaCase(k_heads=2, v_heads=4, k_dim=12, v_dim=16, lengths=(tokens,) * 3)
    outs, states = [], []
    for kernels in (REFERENCE, nvidia_kernels_on_cpu()):
        made = case.made()
        for position in range(tokens):
            slots_B = torch.tensor([3, 0, 1, 0, 2])
            x, nobody_X = made.projected, torch.full_like(made.projected[0][0], float("nan"))
            projected_TX = torch.stack([x[2][position], nobody_X, x[0][position], nobody_X, x[1][position]])
            positions_T = torch.tensor([position, 0, position, 0, position])
            banks = made.window_SJC, made.rule, made.state_SHVK
            out = kernels.conv_gated_delta(projected_TX, made.weight_CJ, *banks, StateRows(slots_B), positions_T)
            outs.append(out[[0, 2, 4]])
        states.append((made.window_SJC[1:4], made.state_SHVK[1:4]))
        assert bool(made.state_SHVK[4:].isnan().all())
    for a, b in zip(outs[:tokens], outs[tokens:], strict=True):
        close(b, a, "decode")
    assert torch.equal(states[0][0], states[1][0])
    close(states[1][1], states[0][1], "decode states")


def windows() -> None:
    few = (5, (5, 0, 2)), (3, (1, 3, 1)), (7, (2, 6, 7)), (18, (4, 18, 9))
    check_windows(DeltaCase(k_heads=1, v_heads=2, k_dim=12, v_dim=20, lengths=(30, 30, 30)), few)
    most = (32, (5, 32, 0)), (33, (33, 1, 17))
    check_windows(DeltaCase(k_heads=1, v_heads=1, k_dim=12, v_dim=20, lengths=(65, 65, 65)), most)


def check_windows(case: DeltaCase, sizes: Sequence[tuple[int, tuple[int, int, int]]]) -> None:
    """State as it was while a window is looked at; then only the tokens that are kept are taken in, in the same bits
    where the others are NaN."""
    kernels = nvidia_kernels_on_cpu()
    made = [case.made(), case.made()]
    at = [0, 0, 0]
    for width, kept in sizes:
        slots_B, kept_B = torch.tensor([1, 2, 0, 3]), torch.tensor([*kept[:2], 0, kept[2]], dtype=torch.int32)
        starts = [at[0], at[1], 0, at[2]]
        of_row = zip((0, 1, 0, 2), starts, strict=True)
        projected_TX = torch.cat([made[0].projected[sequence][start : start + width] for sequence, start in of_row])
        projected_TX[2 * width : 3 * width] = float("nan")  # nobody's
        refused_T = (torch.arange(width) >= kept_B[:, None]).flatten()
        positions_T = torch.cat([torch.arange(start, start + width) for start in starts])
        found = []
        for k, m in zip((REFERENCE, kernels), made, strict=True):
            banks = (m.window_SJC, m.state_SHVK)
            before = [bank[1:4].clone() for bank in banks]
            its = m.weight_CJ, banks[0], m.rule, banks[1]
            out = k.conv_gated_delta(projected_TX, *its, StateRows(slots_B, frozen=True), positions_T)
            found.append(out.view(4, width, -1)[[0, 1, 3]])
            assert torch.equal(banks[0][1:4], before[0])
            assert torch.equal(banks[1][1:4], before[1])
            real = [bank.clone() for bank in banks]
            rows = StateRows(slots_B, kept_B=kept_B)
            with patch.object(gates, "gated_norm_", None):  # nobody reads a result now: none is normed
                k.conv_gated_delta(projected_TX, m.weight_CJ, real[0], m.rule, real[1], rows, positions_T)
                poisoned_TX = projected_TX.masked_fill(refused_T[:, None], float("nan"))
                k.conv_gated_delta(poisoned_TX, *its, rows, positions_T)
            for bank, expected in zip(banks, real, strict=True):
                assert bool(bank[1:4].isfinite().all())
                assert torch.equal(bank[1:4], expected[1:4])
        close(found[1], found[0], "a window")
        at = [start + count for start, count in zip(at, kept, strict=True)]
        assert torch.equal(made[0].window_SJC[1:4], made[1].window_SJC[1:4])
        close(made[1].state_SHVK[1:4], made[0].state_SHVK[1:4], "what is kept of a window")
    whole = case.made()
    for sequence, count in enumerate(at):
        given = (whole.projected[sequence][:count], whole.weight_CJ, whole.window_SJC, whole.rule, whole.state_SHVK)
        rows = StateRows(torch.tensor([sequence + 1]), torch.tensor([count]))
        REFERENCE.conv_gated_delta(*given, rows, torch.arange(count))
    close(made[1].state_SHVK[1:4], whole.state_SHVK[1:4], "windows against the tokens that they kept")
    assert torch.equal(made[1].window_SJC[1:4], whole.window_SJC[1:4])


def windows_beside_chunks() -> None:
    """Rows that are undecided leave state as it is, whatever the step's others take in."""
    for width, chunk in ((4, 9), (18, 40)):  # rows of more than 16 tokens are taken by chunks, unless they are windows
        case = DeltaCase(k_heads=1, v_heads=2, k_dim=12, v_dim=20, lengths=(30, 30, 60))
        slots_B, ends_B = torch.tensor([1, 2, 0, 3]), torch.tensor([width, 2 * width, 3 * width, 3 * width + chunk])
        for kernels in (REFERENCE, nvidia_kernels_on_cpu()):
            made, apart = case.made(), case.made()
            for m in (made, apart):
                for sequence in range(3):
                    given = (m.projected[sequence][:8], m.weight_CJ, m.window_SJC, m.rule, m.state_SHVK)
                    REFERENCE.conv_gated_delta(*given, StateRows(torch.tensor([sequence + 1])), torch.arange(8))
            lengths = (width, width, width, chunk)
            of_row = [made.projected[sequence][8 : 8 + n] for sequence, n in zip((0, 1, 0, 2), lengths, strict=True)]
            projected_TX, positions_T = torch.cat(of_row), torch.cat([torch.arange(8, 8 + n) for n in lengths])
            of_windows = 3 * width
            rows = StateRows(slots_B, ends_B, writes_B=torch.tensor([0, 0, 0, 3]), window=width)
            outs, split = [], (slice(of_windows), slice(of_windows, None))
            for m, tokens, its in (
                (made, slice(None), rows),
                (apart, split[0], StateRows(slots_B[:3], frozen=True)),
                (apart, split[1], StateRows(slots_B[3:])),
            ):
                given = (projected_TX[tokens], m.weight_CJ, m.window_SJC, m.rule, m.state_SHVK)
                outs.append(kernels.conv_gated_delta(*given, its, positions_T[tokens]))
            expected = torch.cat(outs[1:])
            real_T = torch.arange(len(positions_T)) // width != 2
            close(outs[0][real_T], expected[real_T], f"windows of {width} beside a chunk")
            assert torch.equal(made.window_SJC[1:4], apart.window_SJC[1:4])
            close(made.state_SHVK[1:4], apart.state_SHVK[1:4], "state behind windows beside a chunk")
            assert torch.equal(made.state_SHVK[1:3], apart.state_SHVK[1:3])


def trees() -> None:
    """Nodes of trees of every size, and then the tokens of a path; NaN in a node, off the path, and in another row."""
    kernels = nvidia_kernels_on_cpu()
    for nodes, width, (k_heads, v_heads, k_dim, v_dim) in (
        (33, 9, (1, 2, 12, 20)),
        (7, 5, (2, 2, 24, 40)),
        (2, 2, (1, 2, 12, 20)),
    ):
        case = DeltaCase(k_heads=k_heads, v_heads=v_heads, k_dim=k_dim, v_dim=v_dim, lengths=(40, 40, 40))
        parents = [grown(nodes, seed) for seed in range(4)]
        if nodes == 7:
            parents[:2] = [FORKED, STAR]
        tree, starts = state_tree(parents), [5, 0, 0, 2]  # the third row is nobody's
        slots_B, positions_T = torch.tensor([1, 2, 0, 3]), positions(parents, starts)
        made = [case.made(), case.made()]
        x = made[0].projected
        before = StateRows(torch.tensor([1, 3]), torch.tensor([5, 7]))
        tokens_TX = torch.cat([x[0][:nodes], x[1][:nodes], x[0][:nodes] * float("nan"), x[2][:nodes]])
        outs = []
        for k, m in zip((REFERENCE, kernels), made, strict=True):
            banks = (m.weight_CJ, m.window_SJC, m.rule, m.state_SHVK)
            begun = torch.cat((x[0][-5:], x[2][-2:]))
            REFERENCE.conv_gated_delta(begun, *banks, before, torch.tensor([0, 1, 2, 3, 4, 0, 1]))
            held = [bank[1:4].clone() for bank in (m.window_SJC, m.state_SHVK)]
            for poisoned in (False, True):
                given_TX = tokens_TX.clone()
                if poisoned:
                    given_TX[1] = float("nan")  # node 1 of the first row, which has children
                rows = StateRows(slots_B, frozen=True, tree=tree)
                out = k.conv_gated_delta(given_TX, *banks, rows, positions_T).view(4, nodes, -1)
                if poisoned:
                    below = [node for node in range(nodes) if 1 in path(parents[0], node)]
                    assert bool(out[0, below].isnan().all())
                    out[0, below] = 0.0
                outs.append(out[[0, 1, 3]])
            assert torch.equal(m.window_SJC[1:4], held[0])
            assert torch.equal(m.state_SHVK[1:4], held[1])
            paths = [path(of_row, nodes - 1 - row)[:width] for row, of_row in enumerate(parents)]
            counts = [len(paths[0]), min(2, len(paths[1])), 0, len(paths[3]) // 2]
            kept = [nodes * row + node for row in range(4) for node in paths[row][: counts[row]]]
            off_path_T = ~torch.isin(torch.arange(4 * nodes), torch.tensor(kept))
            given_TX = tokens_TX.masked_fill(off_path_T[:, None], float("nan"))
            kept_B = torch.tensor(counts, dtype=torch.int32)
            rows = StateRows(slots_B, kept_B=kept_B, tree=tree, path_BW=padded(paths, width))
            k.conv_gated_delta(given_TX, *banks, rows, positions_T)
        for a, b in zip(outs[:2], outs[2:], strict=True):
            close(b, a, f"trees of {nodes}")
        assert torch.equal(made[0].window_SJC[1:4], made[1].window_SJC[1:4])
        close(made[1].state_SHVK[1:4], made[0].state_SHVK[1:4], "what is kept of a tree")
        assert not torch.equal(made[1].state_SHVK[1], held[1][0])


def ends() -> None:
    kernels = nvidia_kernels_on_cpu()
    x, y, hidden, gate = torch.randn(5, 70), torch.randn(5, 70), torch.randn(5, 70), torch.randn(70)
    close(kernels.sigmoid_mul(x, y), REFERENCE.sigmoid_mul(x, y), "sigmoid_mul")
    close(kernels.gated_add(x, y, hidden, gate), REFERENCE.gated_add(x, y, hidden, gate), "gated_add")


def main() -> None:
    began = time.perf_counter()
    for part in (convolutions, recurrences, chunks, decode_steps, windows, windows_beside_chunks, trees, ends):
        part()
        print(f"{part.__name__}: {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
