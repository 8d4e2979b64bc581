"""The demo model's two drafters as training-time modules, in plain torch: an MTP layer and a DFlash block drafter.

Knows: their architectures (checkpoint names included) and how a batch of rollouts becomes what each would be asked when
serving. Shape letters: B rollouts, L their length, N hidden size, H query heads, K key/value heads, D head_dim, V
vocabulary, A anchors (places of a rollout at which a block begins), W tokens of a block, F width of the features.
Does not know: where rollouts come from (draft_rollouts.py), optimisers, the runtime (models/drafters serves them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.demo.network import MLP, Attention, RMSNorm, Shape, rotary_table, rotate


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What a drafter has besides the sizes that it shares with its target (``target``, under config.json's keys)."""

    target: Shape
    layers: int = 1
    block_size: int = 8
    mask_token_id: int = 1  # <|pad|>, which no text contains
    target_layer_ids: tuple[int, ...] = ()


def spread(shape: Shape, module: nn.Module) -> None:
    """Weights as GPT-2 begins, norms at 1."""
    residual_std = 0.02 / math.sqrt(2 * shape.num_hidden_layers)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(
                parameter, std=residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            )


def heads_of(attention: Attention, x_BLN: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries [B, L, H, D], keys and values [B, L, K, D]."""
    heads = (*x_BLN.shape[:2], -1, attention.shape.head_dim)
    q = rotate(attention.q_norm(attention.q_proj(x_BLN).view(heads)), *angles)
    return q, *keys_of(attention, x_BLN, angles)


def keys_of(attention: Attention, x_BLN: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    heads = (*x_BLN.shape[:2], -1, attention.shape.head_dim)
    return rotate(attention.k_norm(attention.k_proj(x_BLN).view(heads)), *angles), attention.v_proj(x_BLN).view(heads)


class DraftLayer(nn.Module):
    """The target's decoder layer; its attention is called in pieces."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def heads(self, x_BLN: Tensor, place_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return heads_of(self.self_attn, self.input_layernorm(x_BLN), rotary_table(place_L, self.self_attn.shape))

    def finish(self, x_BLN: Tensor, mixed_BLHD: Tensor) -> Tensor:
        x_BLN = x_BLN + self.self_attn.o_proj(mixed_BLHD.flatten(2))
        out: Tensor = x_BLN + self.mlp(self.post_attention_layernorm(x_BLN))
        return out


class GuessLayer(Protocol):
    """The decoder layer of an MTP, in pieces."""

    def heads(self, x_BLN: Tensor, place_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of the stream ``x`` at positions ``place``: queries [B, L, H, D], keys and values [B, L, K, D]."""
        ...

    def finish(self, x_BLN: Tensor, mixed_BLHD: Tensor) -> Tensor:
        """The stream behind the layer, where attention gave ``mixed``."""
        ...


class MTP(nn.Module):
    """One layer that reads a token and the target's final hidden state of the token before it, and guesses the next.

    Names as in Qwen3-Next checkpoints without their ``mtp.``; norms are plain unless ``norm`` says otherwise, and
    ``layer`` is the decoder layer, a GuessLayer (a DraftLayer where it is left out). DeepSeek-V3 (2024), section 2.2.
    """

    def __init__(self, shape: Shape, layer: nn.Module | None = None, norm: type[RMSNorm] = RMSNorm) -> None:
        super().__init__()
        self.shape = shape
        self.pre_fc_norm_embedding = norm(shape.hidden_size, shape.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(shape.hidden_size, shape.rms_norm_eps)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([layer or DraftLayer(shape)])
        self.norm = norm(shape.hidden_size, shape.rms_norm_eps)
        spread(shape, self)

    def passes(self, embedded_BLN: Tensor, hidden_BLN: Tensor, count: int) -> list[Tensor]:
        """Normed outputs of ``count`` passes, each [B, L, N]; place q of pass j follows j - 1 tokens that were drafted.

        hidden_BLN: the target's final hidden states. Pass j reads what pass j - 1 gave one place before it in place of
        the target's, and of the keys only those that would be there: of the target's states up to the last true one,
        of each later pass its own place.
        """
        length = embedded_BLN.shape[1]
        layer = cast(GuessLayer, self.layers[0])
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        place_L = torch.arange(length, device=embedded_BLN.device)
        before_BLN = shifted(hidden_BLN)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for number in range(count):
            both = torch.cat((self.pre_fc_norm_embedding(embedded_BLN), self.pre_fc_norm_hidden(before_BLN)), -1)
            x_BLN = self.fc(both)
            q, k, v = layer.heads(x_BLN, place_L)
            keys.append(k.repeat_interleave(group, 2))
            values.append(v.repeat_interleave(group, 2))
            scale = self.shape.head_dim**-0.5
            scores_BHLL = torch.einsum("blhd,bmhd->bhlm", q, keys[0]).float() * scale
            # Place 0 has no hidden state before it, and so no entry when serving.
            hidden_LL = (place_L[None, :] > place_L[:, None] - number) | (place_L[None, :] == 0)
            scores = [scores_BHLL.masked_fill(hidden_LL, -1e30)]
            drafted = [(shifted(keys[i], number - i), shifted(values[i], number - i)) for i in range(1, number + 1)]
            scores += [((q * k).sum(-1).float() * scale).transpose(1, 2)[..., None] for k, _ in drafted]
            weights = torch.cat(scores, -1).softmax(-1).to(q.dtype)
            mixed = torch.einsum("bhlm,bmhd->blhd", weights[..., :length], values[0])
            for index, (_, value) in enumerate(drafted):
                mixed = mixed + weights[..., length + index].transpose(1, 2)[..., None] * value
            outputs.append(self.norm(layer.finish(x_BLN, mixed)))
            before_BLN = shifted(outputs[-1])
        return outputs


class DFlash(nn.Module):
    """Guesses a block at once from the target's features of everything before it (block diffusion in one step).

    Names as in published DFlash checkpoints.
    """

    def __init__(self, draft: DraftShape) -> None:
        super().__init__()
        shape = draft.target
        self.draft = draft
        self.shape = shape
        self.fc = nn.Linear(len(draft.target_layer_ids) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(draft.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        spread(shape, self)

    def block(self, features_BLF: Tensor, embedded_BAWN: Tensor, anchors_BA: Tensor) -> Tensor:
        """Normed outputs [B, A, W, N]. Block a of a rollout begins at position anchors[a]: it sees features of the
        positions before that and all of itself. embedded: of its first token, then of the mask token.
        """
        rows, anchors, width = embedded_BAWN.shape[:3]
        length, group = features_BLF.shape[1], self.shape.num_attention_heads // self.shape.num_key_value_heads
        context_BLN = self.hidden_norm(self.fc(features_BLF))
        place_L = torch.arange(length, device=features_BLF.device)
        place_BAW = anchors_BA[..., None] + torch.arange(width, device=anchors_BA.device)
        angles = rotary_table(place_L, self.shape)
        block_angles = tuple(
            a.view(rows, anchors * width, 1, -1) for a in rotary_table(place_BAW.flatten(), self.shape)
        )
        block_T = torch.arange(anchors, device=anchors_BA.device).repeat_interleave(width)
        seen_BTL = place_L < anchors_BA[:, block_T, None]
        own_BTT = (block_T[:, None] == block_T).expand(rows, -1, -1)
        visible_B1TX = torch.cat((seen_BTL, own_BTT), -1)[:, None]
        x_BTN = embedded_BAWN.flatten(1, 2)
        for layer in self.layers:
            assert isinstance(layer, DraftLayer)
            q, k, v = heads_of(layer.self_attn, layer.input_layernorm(x_BTN), (block_angles[0], block_angles[1]))
            context_k, context_v = keys_of(layer.self_attn, context_BLN, angles)
            k, v = torch.cat((context_k, k), 1), torch.cat((context_v, v), 1)
            k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k, v))
            mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=visible_B1TX)
            x_BTN = layer.finish(x_BTN, mixed.transpose(1, 2))
        out: Tensor = self.norm(x_BTN)
        return out.view(rows, anchors, width, -1)


def shifted(x_BL: Tensor, places: int = 1) -> Tensor:
    """x of so many places before, zeros at the beginning."""
    if not places:
        return x_BL
    return torch.cat((torch.zeros_like(x_BL[:, :places]), x_BL[:, :-places]), 1)
