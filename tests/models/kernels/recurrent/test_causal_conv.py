"""The convolution over slot state: any cut of a sequence gives what torch's convolution gives of the whole of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.inputs import StateRows
from tests.models.kernels.recurrent.ragged_sequences import steps
from tests.plant import Kernels, invariant_kernels, reference_kernels

LENGTHS = [13, 1, 4, 7, 2, 22]
CHANNELS = 10


def whole(x_TC: Tensor, weight_CJ: Tensor, bias_C: Tensor | None) -> Tensor:
    taps = weight_CJ.shape[1]
    padded_1CT = F.pad(x_TC.T, (taps - 1, 0)).unsqueeze(0)
    return F.silu(F.conv1d(padded_1CT, weight_CJ.unsqueeze(1), bias_C, groups=len(weight_CJ)))[0].T


@pytest.mark.parametrize("kernels", [reference_kernels(), invariant_kernels()])
@pytest.mark.parametrize(("taps", "bias", "most"), [(4, False, 3), (4, True, 9), (2, False, 2), (5, True, 30)])
def test_any_cut_equals_the_whole(kernels: Kernels, taps: int, bias: bool, most: int) -> None:
    torch.manual_seed(taps)
    sequences = [torch.randn(length, CHANNELS) for length in LENGTHS]
    weight_CJ, bias_C = torch.randn(CHANNELS, taps), torch.randn(CHANNELS) if bias else None
    window_SJC = torch.zeros(len(LENGTHS) + 3, taps, CHANNELS)
    window_SJC[0] = window_SJC[-2:] = float("nan")  # nobody's
    found: list[list[Tensor]] = [[] for _ in LENGTHS]
    for step in steps(LENGTHS, seed=taps, most=most):
        wide_TX = torch.cat((step.tokens(sequences), step.tokens(sequences)), 1)
        out_TC = kernels.causal_conv(wide_TX[:, :CHANNELS], weight_CJ, bias_C, window_SJC, step.rows, step.positions_T)
        first = 0
        for piece in step.pieces:
            found[piece.sequence].append(out_TC[first : first + piece.count])
            first += piece.count
    for parts, x_TC in zip(found, sequences, strict=True):
        torch.testing.assert_close(torch.cat(parts), whole(x_TC, weight_CJ, bias_C), atol=1e-5, rtol=0)
    assert bool(window_SJC[-2:].isnan().all())  # free slots stay as they were
    for sequence, x_TC in enumerate(sequences):
        for position in range(max(0, len(x_TC) - taps), len(x_TC)):
            assert torch.equal(window_SJC[sequence + 1, position % taps], x_TC[position])


def test_a_step_of_one_token_a_row() -> None:
    torch.manual_seed(0)
    x_LBC, weight_CJ = torch.randn(6, 3, CHANNELS), torch.randn(CHANNELS, 4)
    window_SJC = torch.zeros(5, 4, CHANNELS)
    slots_B = torch.tensor([4, 0, 2])
    outs = [
        reference_kernels().causal_conv(
            x_BC, weight_CJ, None, window_SJC, StateRows(slots_B), torch.tensor([position, 0, position])
        )
        for position, x_BC in enumerate(x_LBC)
    ]
    for row in (0, 2):
        expected = whole(x_LBC[:, row], weight_CJ, None)
        torch.testing.assert_close(torch.stack(outs)[:, row], expected, atol=1e-5, rtol=0)
    assert not window_SJC[[1, 3]].any()
