"""What drafters learn from: the demo model's own continuations, with the hidden states that it had on the way.

Knows: how to continue many prompts at once with a key/value cache, and how to run a batch of sequences for its hidden
states. Shape letters as in draft_networks.py. Does not know: drafters, the runtime.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.demo.network import DecoderLayer, Qwen3, rotary_table, rotate
from models.demo.tokens import TokenStore


@dataclass(frozen=True, slots=True)
class Rollouts:
    """tokens_BL int64: prompts of ``prompt`` tokens and what followed. ``real_BL`` bool: up to the first end."""

    tokens_BL: Tensor
    real_BL: Tensor
    prompt: int


class Continues(Protocol):
    """A model as drafters see it: what ``Target`` says of its methods."""

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def states(self, tokens_BL: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]: ...


class Target:
    """The demo model as the drafters see it; never trained."""

    def __init__(self, network: Qwen3, ends: tuple[int, ...]) -> None:
        self.network = network.requires_grad_(False).eval()
        self.shape = network.shape
        self.ends = torch.tensor(ends, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.network.model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.network.model.embed_tokens.weight.dtype

    def embed(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.network.model.embed_tokens(tokens)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return self.network.logits(hidden)

    @torch.no_grad()
    def states(self, tokens_BL: Tensor, layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """(final-normed hidden [B, L, N], residual streams behind layers ``layer_ids``, concatenated, [B, L, F])."""
        angles = rotary_table(torch.arange(tokens_BL.shape[1], device=self.device), self.shape)
        x_BLN = self.embed(tokens_BL)
        streams = []
        for layer in self._layers:
            q, k, v = self._heads(layer, layer.input_layernorm(x_BLN), angles)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x_BLN = x_BLN + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
            x_BLN = x_BLN + layer.mlp(layer.post_attention_layernorm(x_BLN))
            streams.append(x_BLN)
        wanted = [streams[number] for number in layer_ids]
        hidden_BLN: Tensor = self.network.model.norm(x_BLN)
        return hidden_BLN, torch.cat(wanted, -1) if wanted else x_BLN[..., :0]

    @torch.no_grad()
    def continue_all(self, prompts_BP: Tensor, length: int, temperature: float) -> Rollouts:
        """To ``length`` tokens, greedily where ``temperature`` is 0."""
        rows, prompt = prompts_BP.shape
        shape, device = self.shape, self.device
        cache = torch.zeros(
            shape.num_hidden_layers,
            2,
            rows,
            shape.num_key_value_heads,
            length,
            shape.head_dim,
            device=device,
            dtype=self.dtype,
        )
        tokens_BL = torch.zeros(rows, length, dtype=torch.int64, device=device)
        tokens_BL[:, :prompt] = prompts_BP
        begin = 0
        for end in range(prompt, length):
            angles = rotary_table(torch.arange(begin, end, device=device), shape)
            x_BLN = self.embed(tokens_BL[:, begin:end])
            for number, layer in enumerate(self._layers):
                q, k, v = self._heads(layer, layer.input_layernorm(x_BLN), angles)
                cache[number, 0, :, :, begin:end], cache[number, 1, :, :, begin:end] = k, v
                keys, values = cache[number, :, :, :, :end]
                mixed = F.scaled_dot_product_attention(q, keys, values, is_causal=begin == 0, enable_gqa=True)
                x_BLN = x_BLN + layer.self_attn.o_proj(mixed.transpose(1, 2).flatten(2))
                x_BLN = x_BLN + layer.mlp(layer.post_attention_layernorm(x_BLN))
            logits_BV = self.logits(self.network.model.norm(x_BLN[:, -1])).float()
            tokens_BL[:, end] = drawn(logits_BV, temperature)
            begin = end
        return up_to_the_end(tokens_BL, prompt, self.ends)

    @property
    def _layers(self) -> list[DecoderLayer]:
        return [cast(DecoderLayer, layer) for layer in self.network.model.layers]

    def _heads(self, layer: DecoderLayer, x_BLN: Tensor, angles: tuple[Tensor, Tensor]) -> list[Tensor]:
        attention = layer.self_attn
        heads = (*x_BLN.shape[:2], -1, self.shape.head_dim)
        q = rotate(attention.q_norm(attention.q_proj(x_BLN).view(heads)), *angles)
        k = rotate(attention.k_norm(attention.k_proj(x_BLN).view(heads)), *angles)
        return [x.transpose(1, 2) for x in (q, k, attention.v_proj(x_BLN).view(heads))]


def drawn(logits_BV: Tensor, temperature: float) -> Tensor:
    """Tokens [B]; the likeliest where ``temperature`` is 0."""
    if not temperature:
        return logits_BV.argmax(-1)
    return torch.multinomial((logits_BV / temperature).softmax(-1), 1)[:, 0]


def up_to_the_end(tokens_BL: Tensor, prompt: int, ends: Tensor) -> Rollouts:
    """Real up to the first of ``ends`` behind the prompt."""
    ended_BL = torch.isin(tokens_BL, ends).to(torch.int64)
    ended_BL[:, :prompt] = 0
    return Rollouts(tokens_BL, ended_BL.cumsum(1) - ended_BL == 0, prompt)


def prompts(store: TokenStore, rows: int, lengths: tuple[int, ...], seed: int) -> Iterator[np.ndarray]:
    """Endless batches [rows, P] of the first P tokens of documents, P one of ``lengths`` by turns."""
    random = np.random.default_rng(seed)
    sizes = np.diff(store.starts)
    fitting = {length: np.flatnonzero(sizes >= length + 1) for length in lengths}
    while True:
        for length in lengths:
            chosen = random.choice(fitting[length], rows, replace=len(fitting[length]) < rows)
            yield store.ids[store.starts[chosen][:, None] + np.arange(length)].astype(np.int64)
