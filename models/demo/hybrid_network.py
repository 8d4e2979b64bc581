"""The tiny hybrid as training-time modules, in plain torch: Qwen3.5's gated delta nets and gated attention, and its MTP
layer.

Knows: the architecture (transformers' Qwen3_5ForCausalLM, tensor names included), a batch of documents that all begin
at position 0, and one token at a time. Shape letters: B documents, L their padded length, N hidden size, H query or
value heads, D head_dim, K and V the dims of a delta net's keys and values, C channels of its convolution, J taps, S
tokens of a chunk.
Does not know: tokens' meaning, optimisers, inference engines (models/families/qwen3_5.py is the one that serves).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.demo.draft_networks import MTP, spread
from models.demo.network import MLP, RMSNorm, Shape, rotate

CHUNK = 64  # tokens whose updates of a delta net's state are solved for at once
L2_EPS = 1e-6  # of the norms of queries and keys


@dataclass(frozen=True, slots=True)
class HybridShape(Shape):
    """The sizes of config.json, under its key names."""

    vocab_size: int = 4096
    hidden_size: int = 160
    intermediate_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    partial_rotary_factor: float = 0.5

    def is_linear(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval != 0

    @property
    def keys(self) -> int:
        """Channels of a delta net's keys, and of its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def values(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


class CentredNorm(RMSNorm):
    """RMSNorm whose weight is stored less 1."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, (1.0 + self.weight).to(x.dtype), self.eps)


# ---- gated attention ----


class GatedAttention(nn.Module):
    """Grouped-query attention, norms on queries and keys, a part of each head rotated, a sigmoid gate on the output."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, queries = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        pairs = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(hidden, 2 * queries, bias=False)  # of each head: its query, then its gate
        self.k_proj = nn.Linear(hidden, pairs, bias=False)
        self.v_proj = nn.Linear(hidden, pairs, bias=False)
        self.o_proj = nn.Linear(queries, hidden, bias=False)
        self.q_norm = CentredNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = CentredNorm(shape.head_dim, shape.rms_norm_eps)

    def heads(self, x_BLN: Tensor, place_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, L, H, D], keys and values [B, L, K, D]."""
        q = self.q_norm(self._queries_and_gates(x_BLN)[0])
        heads = (*x_BLN.shape[:2], -1, self.shape.head_dim)
        k = self.k_norm(self.k_proj(x_BLN).view(heads))
        return self._rotated(q, place_L), self._rotated(k, place_L), self.v_proj(x_BLN).view(heads)

    def out(self, x_BLN: Tensor, mixed_BLHD: Tensor) -> Tensor:
        gated = mixed_BLHD * torch.sigmoid(self._queries_and_gates(x_BLN)[1])
        out: Tensor = self.o_proj(gated.flatten(2))
        return out

    def forward(self, x_BLN: Tensor) -> Tensor:
        place_L = torch.arange(x_BLN.shape[1], device=x_BLN.device)
        q, k, v = (x.transpose(1, 2) for x in self.heads(x_BLN, place_L))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(x_BLN, mixed.transpose(1, 2))

    def _queries_and_gates(self, x_BLN: Tensor) -> tuple[Tensor, Tensor]:
        both = self.q_proj(x_BLN).view(*x_BLN.shape[:2], -1, 2 * self.shape.head_dim)
        q, gate = both.chunk(2, -1)
        return q, gate

    def _rotated(self, x_BLHD: Tensor, place_L: Tensor) -> Tensor:
        rotary = int(self.shape.head_dim * self.shape.partial_rotary_factor)
        exponents = torch.arange(0, rotary, 2, device=place_L.device, dtype=torch.float32) / rotary
        angles = place_L.to(torch.float32)[:, None] * (self.shape.rope_theta**-exponents)[None, :]
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        turned, rest = x_BLHD[..., :rotary], x_BLHD[..., rotary:]
        return torch.cat((rotate(turned, angles.cos(), angles.sin()), rest), -1)


# ---- gated delta nets ----


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay_BLH: Tensor, beta_BLH: Tensor) -> Tensor:
    """o_t = S_t q_t, where S_t = S_{t-1} e^decay (I - beta k k^T) + beta v k^T, from S = 0; [B, L, H, V], in float32.

    q, k [B, L, H, K] normed and scaled, v [B, L, H, V]; L is a multiple of CHUNK. Within a chunk the updates follow
    from one triangular system (Yang et al. 2024, arXiv 2412.06464, section 3.3); between chunks the state is carried.
    """
    batch, length, heads, v_dim = v.shape
    chunks = length // CHUNK

    def cut(x: Tensor) -> Tensor:  # [B, chunks, H, S, *]
        return x.float().view(batch, chunks, CHUNK, heads, -1).transpose(2, 3)

    q, k, v, beta, decay = cut(q), cut(k), cut(v), cut(beta_BLH), cut(decay_BLH).cumsum(3)
    past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay - decay.transpose(3, 4)).masked_fill(~past, -math.inf).exp()  # [.., i, j]: from j to i
    system = (beta * k) @ k.transpose(3, 4) * between
    right = torch.cat((beta * v, beta * k * decay.exp()), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, stale = solved[..., :v_dim], solved[..., v_dim:]
    inside = q @ k.transpose(3, 4) * between
    read, write = q * decay.exp(), k * (decay[..., -1:, :] - decay).exp()
    whole = decay[..., -1:, :].exp()
    state, out = v.new_zeros(batch, heads, k.shape[-1], v_dim), []
    for chunk in range(chunks):
        new = fresh[:, chunk] - stale[:, chunk] @ state
        out.append(read[:, chunk] @ state + inside[:, chunk] @ new)
        state = state * whole[:, chunk] + write[:, chunk].transpose(2, 3) @ new
    return torch.stack(out, 1).transpose(2, 3).reshape(batch, length, heads, v_dim)


class DeltaNet(nn.Module):
    """Gated delta net: projections, a causal convolution over q, k and v, the recurrence, a gated norm."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, heads, taps = shape.hidden_size, shape.linear_num_value_heads, shape.linear_conv_kernel_dim
        channels = 2 * shape.keys + shape.values
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, shape.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, padding=taps - 1, bias=False)
        self.A_log = nn.Parameter(torch.linspace(1.0, 8.0, heads).log())
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, -1.0, heads))  # decays of long and of short memory
        self.norm = RMSNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(shape.values, hidden, bias=False)

    def forward(self, x_BLN: Tensor) -> Tensor:
        mixed_BCL = self.conv1d(self.in_proj_qkv(x_BLN).transpose(1, 2))[..., : x_BLN.shape[1]]
        q, k, v = self._heads(F.silu(mixed_BCL).transpose(1, 2))
        return self._out(x_BLN, delta_rule(q, k, v, *self._gates(x_BLN)))

    def step(self, x_B1N: Tensor, window_BCJ: Tensor, state_BHKV: Tensor) -> Tensor:
        """One token; ``window``, the latest inputs of the convolution, and ``state`` are advanced in place."""
        window_BCJ.copy_(torch.cat((window_BCJ[..., 1:], self.in_proj_qkv(x_B1N).transpose(1, 2)), -1))
        mixed_B1C = F.silu((window_BCJ * self.conv1d.weight[:, 0]).sum(-1))[:, None]
        q, k, v = (x.float()[:, 0, :, :, None] for x in self._heads(mixed_B1C))
        decay, beta = (x[:, 0, :, None, None].float() for x in self._gates(x_B1N))
        state_BHKV.mul_(decay.exp())
        missing = beta * (v - state_BHKV.transpose(2, 3) @ k)
        state_BHKV.add_(k @ missing.transpose(2, 3))
        return self._out(x_B1N, (state_BHKV.transpose(2, 3) @ q)[:, None, ..., 0])

    def _heads(self, mixed_BLC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k, each key head repeated for its value heads, and v: [B, L, H, K or V]."""
        shape = self.shape
        q, k, v = torch.split(mixed_BLC, [shape.keys, shape.keys, shape.values], -1)
        rows, group = mixed_BLC.shape[:2], shape.linear_num_value_heads // shape.linear_num_key_heads
        q, k = (x.reshape(*rows, -1, shape.linear_key_head_dim).float() for x in (q, k))
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        q, k = (x.repeat_interleave(group, 2) for x in (q * shape.linear_key_head_dim**-0.5, k))
        return q, k, v.reshape(*rows, -1, shape.linear_value_head_dim)

    def _gates(self, x_BLN: Tensor) -> tuple[Tensor, Tensor]:
        """(log of the decay, beta), [B, L, H] each."""
        rate = F.softplus(self.in_proj_a(x_BLN).float() + self.dt_bias.float())
        return -self.A_log.float().exp() * rate, self.in_proj_b(x_BLN).float().sigmoid()

    def _out(self, x_BLN: Tensor, o_BLHV: Tensor) -> Tensor:
        z = self.in_proj_z(x_BLN)
        normed = self.norm(o_BLHV).to(z.dtype) * F.silu(z.float()).to(z.dtype).view(o_BLHV.shape)
        out: Tensor = self.out_proj(normed.flatten(2))
        return out


# ---- the model, and its MTP layer ----


class HybridLayer(nn.Module):
    """One mixer and one MLP, each behind a norm and added to the residual stream."""

    def __init__(self, shape: HybridShape, number: int) -> None:
        super().__init__()
        self.input_layernorm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        if shape.is_linear(number):
            self.linear_attn = DeltaNet(shape)
        else:
            self.self_attn = GatedAttention(shape)
        self.post_attention_layernorm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    @property
    def mixer(self) -> DeltaNet | GatedAttention:
        return self.linear_attn if hasattr(self, "linear_attn") else self.self_attn

    def forward(self, x_BLN: Tensor) -> Tensor:
        return self.finish(x_BLN, self.mixer(self.input_layernorm(x_BLN)))

    def finish(self, x_BLN: Tensor, mixed_BLN: Tensor) -> Tensor:
        x_BLN = x_BLN + mixed_BLN
        out: Tensor = x_BLN + self.mlp(self.post_attention_layernorm(x_BLN))
        return out


class HybridStack(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(HybridLayer(shape, number) for number in range(shape.num_hidden_layers))
        self.norm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)


class Hybrid(nn.Module):
    """Qwen3_5ForCausalLM with tied embeddings: ``state_dict()`` has exactly the names of its checkpoint."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = HybridStack(shape)
        spread(shape, self)

    def hidden(self, ids_BL: Tensor) -> Tensor:
        """Final-norm output [B, L, N]; L is a multiple of CHUNK, and padding stands behind."""
        x_BLN: Tensor = self.model.embed_tokens(ids_BL)
        for layer in self.model.layers:
            x_BLN = layer(x_BLN)
        out: Tensor = self.model.norm(x_BLN)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight)

    def loss(self, ids_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross entropy over the targets that are not -100, nats a token."""
        logits_XV = self.logits(self.hidden(ids_BL)).flatten(0, 1).float()
        return F.cross_entropy(logits_XV, targets_BL.flatten())


class GuessingLayer(nn.Module):
    """The decoder layer of the MTP: gated attention, which is called in pieces, and zero-centred norms."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.input_layernorm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = GatedAttention(shape)
        self.post_attention_layernorm = CentredNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def heads(self, x_BLN: Tensor, place_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.heads(self.input_layernorm(x_BLN), place_L)

    def finish(self, x_BLN: Tensor, mixed_BLHD: Tensor) -> Tensor:
        x_BLN = x_BLN + self.self_attn.out(self.input_layernorm(x_BLN), mixed_BLHD)
        out: Tensor = x_BLN + self.mlp(self.post_attention_layernorm(x_BLN))
        return out


def hybrid_mtp(shape: HybridShape) -> MTP:
    """The MTP layer; names as in the checkpoint without ``mtp.``."""
    return MTP(shape, GuessingLayer(shape), CentredNorm)
