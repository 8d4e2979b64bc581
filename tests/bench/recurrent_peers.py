"""Recurrences of hybrid models beside those of FLA and FlashInfer, where these are installed.

Run on one GPU:  python3 -m tests.bench.recurrent_peers --out FOLDER [--without flashinfer-prefill]
Gated delta nets of Qwen3-Next (16 key and 32 value heads of 128): a token a row, and prompts. Mamba-2 of
Nemotron-3-Nano (64 heads of 64, states of 128): a token a row. Prints microseconds of a layer; FOLDER gets
recurrent-peers.json. What a peer lacks, or cannot compile, is named with its reason.

Peers are favoured: theirs is the recurrence alone; that of gated delta nets is over states that lie in the order of the
rows. Ours reads states by slot and has the gated norm with it, "whole" the convolution in front, too. Before a peer is
timed, the state that it leaves is compared with ours.

Knows: how each library wants its operands. Does not know: which of our kernels an engine runs (nvidia.py).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.inputs import StateRows
from models.kernels.interface import Kernels
from models.kernels.matmul import autotune
from models.kernels.nvidia import NvidiaKernels
from models.kernels.recurrent.mamba2 import Mamba2Weights
from tests.bench.gated_delta import BF16, DEVICE, DIM, LAYERS, Layer
from tests.bench.mamba import MambaBench
from tests.models.kernels.recurrent.mamba_cases import width

ROWS = (1, 8, 32, 128, 256)
TOKENS = (512, 2048, 8192)
K_HEADS, V_HEADS = 16, 32
_MOST_OFF = 2e-2  # of the norm of a state, in bfloat16 inputs

Launch = Callable[[int], object]  # of layer i


def us_of(launch: Launch) -> float:
    """Microseconds of a layer."""

    def layers() -> None:
        for number in range(LAYERS):
            launch(number)

    return autotune.median_graph_us(layers, DEVICE, 20) / LAYERS


class DeltaCase:
    """``rows`` rows of ``tokens`` new tokens each over random states, as each library takes them."""

    def __init__(self, kernels: NvidiaKernels, rows: int, tokens: int) -> None:
        self.kernels, self.rows, self.tokens = kernels, rows, tokens
        total = rows * tokens
        self.layers = [Layer(K_HEADS, V_HEADS, rows) for _ in range(LAYERS)]
        self.rule = self.layers[0].rule
        self.states = [torch.randn(rows, V_HEADS, DIM, DIM, device=DEVICE) * 0.1 for _ in range(LAYERS)]
        self.projected = torch.randn(total, sum(self.rule.widths), dtype=BF16, device=DEVICE)
        self.qkv, self.z, self.b, self.a = torch.split(self.projected, list(self.rule.widths), 1)
        keys = K_HEADS * DIM
        q, k, v = torch.split(self.qkv, [keys, keys, V_HEADS * DIM], 1)
        shape = (1, total) if tokens > 1 else (rows, 1)
        self.q, self.k = (x.contiguous().view(*shape, K_HEADS, DIM) for x in (q, k))
        self.v = v.contiguous().view(*shape, V_HEADS, DIM)
        self.gate, self.beta = (x.contiguous().view(*shape, V_HEADS) for x in (self.a, self.b))
        ends = torch.arange(1, rows + 1, device=DEVICE) * tokens
        self.starts = torch.cat([ends.new_zeros(1), ends])
        self.positions = torch.arange(tokens, device=DEVICE).repeat(rows) + 100
        self.slots = StateRows(torch.arange(1, rows + 1, device=DEVICE), None if tokens == 1 else ends)
        self.reset()

    def reset(self) -> None:
        for layer, state in zip(self.layers, self.states, strict=True):
            layer.state[1:] = state

    def ours(self, number: int) -> Tensor:
        rule, state = self.rule, self.layers[number].state
        return self.kernels.gated_delta(self.qkv, self.z, self.b, self.a, rule, state, self.slots)

    def whole(self, number: int) -> None:
        self.layers[number].run(self.kernels, self.projected, self.slots, self.positions)

    def fla(self) -> Callable[[int], Any]:
        """The state behind the tokens."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

        run = fused_recurrent_gated_delta_rule if self.tokens == 1 else chunk_gated_delta_rule
        options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
        options |= {"use_gate_in_kernel": True, "A_log": self.rule.decay_log_H, "dt_bias": self.rule.decay_bias_H}
        options |= {"state_v_first": True, "use_beta_sigmoid_in_kernel": True}
        if self.tokens > 1:
            options |= {"cu_seqlens": self.starts}

        def launch(number: int) -> Any:
            with torch.inference_mode():
                state = self.states[number]
                return run(self.q, self.k, self.v, g=self.gate, beta=self.beta, initial_state=state, **options)[1]

        return launch

    def flashinfer(self) -> Callable[[int], Any]:
        if self.tokens > 1:
            return self._flashinfer_prefill()
        # Its kernel is CuTe's: `cutlass` comes with nvidia-cutlass-dsl-libs-base (not with nvidia-cutlass-dsl), whose
        # .pth file adds nvidia_cutlass_dsl/python_packages, and `cuda.bindings` with cuda-python. Where one is missing
        # gdn_decode calls None; this import says which.
        import_module("flashinfer.gdn_kernels.gdn_decode_pretranspose")
        from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

        rule = self.rule
        held = [state.clone() for state in self.states]

        def launch(number: int) -> Any:
            gated_delta_rule_decode_pretranspose(
                self.q, self.k, self.v, held[number], rule.decay_log_H, self.gate, rule.decay_bias_H, self.beta
            )
            return held[number]

        return launch

    def _flashinfer_prefill(self) -> Callable[[int], Any]:
        """Its gates are given as numbers and its q and k normed: what makes them is not timed."""
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        rule = self.rule
        decay = -rule.decay_log_H.exp() * torch.nn.functional.softplus(self.gate[0].float() + rule.decay_bias_H)
        alpha, beta = decay.exp().contiguous(), self.beta[0].float().sigmoid().contiguous()
        q, k = (torch.nn.functional.normalize(x[0].float(), dim=-1).to(BF16).contiguous() for x in (self.q, self.k))
        v = self.v[0].contiguous()

        def launch(number: int) -> Any:
            state = self.states[number]
            return chunk_gated_delta_rule(
                q, k, v, alpha, beta, initial_state=state, output_final_state=True, cu_seqlens=self.starts
            )[1]

        return launch

    def left_by_ours(self) -> Tensor:
        self.reset()
        self.ours(0)
        return self.layers[0].state[1:].clone()


def peer_us(make: Callable[[], Callable[[int], Any]], expected: Tensor) -> float | str:
    """Microseconds of a layer, or why there are none."""
    try:
        launch = make()
        found = launch(0)
        off = float((found.float() - expected).norm() / expected.norm())
        if not off < _MOST_OFF:
            return f"its state differs from ours by {off:.2e} of the norm"
        return us_of(launch)
    except Exception as error:  # a library that is not there, a compiler that fails: no common class
        return f"{type(error).__name__}: {str(error)[:160]}".replace("\n", " ")


def delta(kernels: NvidiaKernels, rows: int, tokens: int, leave_out: set[str]) -> dict[str, object]:
    case = DeltaCase(kernels, rows, tokens)
    expected = case.left_by_ours()
    found: dict[str, object] = {"rows": rows, "tokens": tokens}
    for name, make in (("fla", case.fla), ("flashinfer", case.flashinfer)):
        wanted = name if tokens == 1 else f"{name}-prefill"
        if wanted not in leave_out:
            found[name] = peer_us(make, expected)
    return found | {"ours": us_of(case.ours), "whole": us_of(case.whole)}


def of_heads(weights: Mamba2Weights, dt_BH: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dt, A, D and the bias of dt as selective_state_update wants them: a number a head, whose views over the head's
    channels and state have strides of 0. A is float32, the others have one dtype. A minus in front of the whole
    expression would make A a dense tensor, which is refused.
    """
    dim, size = weights.head_dim, weights.state_size
    dt = dt_BH.contiguous()[:, :, None].expand(-1, -1, dim)
    decay = (-weights.a_log_H.float().exp())[:, None, None].expand(-1, dim, size)
    skip, bias = (x.to(dt_BH.dtype)[:, None].expand(-1, dim) for x in (weights.d_H, weights.dt_bias_H))
    return dt, decay, skip, bias


class MambaCase:
    """A token of each of ``rows`` rows over random ``banks``, a (window, state) a layer, which both sides write."""

    def __init__(
        self, kernels: Kernels, weights: Mamba2Weights, banks: Sequence[tuple[Tensor, Tensor]], rows: int
    ) -> None:
        d_H, bias_H = (x.to(BF16).float() for x in (weights.d_H, weights.dt_bias_H))  # FlashInfer has them in bfloat16
        self.kernels, self.weights, self.banks = kernels, replace(weights, d_H=d_H, dt_bias_H=bias_H), banks
        device = weights.d_H.device
        for window, state in banks:
            window.normal_()
            state.normal_()
        self.projected = torch.randn(rows, width(weights), device=device).to(BF16)
        self.rows = StateRows(torch.arange(1, rows + 1, device=device))
        self.positions = torch.full((rows,), 100, device=device)
        self._begun = self._state.clone()

    @property
    def _state(self) -> Tensor:
        """Of the rows, in the first layer."""
        return self.banks[0][1][1 : 1 + len(self.projected)]

    def whole(self, number: int) -> None:
        window, state = self.banks[number % len(self.banks)]
        self.kernels.mamba2(self.projected, self.weights, window, state, self.rows, self.positions)

    def left_by_ours(self) -> Tensor:
        self._state.copy_(self._begun)
        self.whole(0)
        return self._state.clone()

    def flashinfer(self) -> Callable[[int], Any]:
        """Its x, B and C are what our convolution makes for the first layer: that is not timed."""
        from flashinfer.mamba import selective_state_update

        weights, rows = self.weights, len(self.projected)
        _, xbc, dt_BH = weights.split(self.projected)
        given = xbc, weights.conv_CJ, weights.conv_bias_C, self.banks[0][0].clone(), self.rows, self.positions
        shared = weights.groups * weights.state_size
        parts = torch.split(self.kernels.causal_conv(*given), [weights.inner, shared, shared], 1)
        x, b, c = (
            part.contiguous().view(rows, count, -1)
            for part, count in zip(parts, (weights.heads, weights.groups, weights.groups), strict=True)
        )
        dt, decay, skip, bias = of_heads(weights, dt_BH)
        where = self.rows.slots_B.int()
        self._state.copy_(self._begun)

        def launch(number: int) -> Any:
            state = self.banks[number % len(self.banks)][1]
            selective_state_update(
                state, x, dt, decay, b, c, skip, dt_bias=bias, dt_softplus=True, state_batch_indices=where
            )
            return state[1 : 1 + rows]

        return launch


def mamba(case: MambaCase) -> dict[str, object]:
    """Steps. Ours has the convolution and the gated norm with it."""
    expected = case.left_by_ours()
    found: dict[str, object] = {"mamba rows": len(case.projected)}
    return found | {"flashinfer": peer_us(case.flashinfer, expected), "whole": us_of(case.whole)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--without", nargs="*", default=[], help="fla, fla-prefill, flashinfer, flashinfer-prefill")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    kernels, found = NvidiaKernels(DEVICE), list[dict[str, object]]()

    def tell(one: dict[str, object]) -> None:
        found.append(one)
        rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in one.items()}
        print(json.dumps(rounded), flush=True)
        (options.out / "recurrent-peers.json").write_text(json.dumps(found, indent=1))

    for rows in ROWS:
        tell(delta(kernels, rows, 1, set(options.without)))
    for tokens in TOKENS:
        tell(delta(kernels, 1, tokens, set(options.without)))
    bench = MambaBench(1, max(ROWS))
    for rows in ROWS:
        tell(mamba(MambaCase(bench.kernels, bench.weights, bench.banks, rows)))


if __name__ == "__main__":
    main()
