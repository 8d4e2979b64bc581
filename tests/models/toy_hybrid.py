"""A decoder whose layers keep different things of a sequence: a running sum in the slot's row, and attention's pages.

The sum stands for what recurrent mixers have in common (gated delta nets, Mamba): a state that every token adds to, and
a window of the latest inputs. What it mixes depends on the order of tokens and on every one of them, so that a token
that is missed, counted twice or another row's shows in the answer.

Knows: the contract of Mixer and of SlotState. Does not know: speed (it compares every token with every other).
Shape letters as in models/inputs.py.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from models.cache_layout import SlotState, StateBanks
from models.config import ModelConfig
from models.families.llama import Llama
from models.inputs import StepInputs
from models.layers.attention import Attention
from models.layers.context import ModelContext
from models.layers.decoder import Decoder, DecoderLayer
from models.layers.mixer import Mixer
from models.layers.mlp import GatedMLP
from models.layers.norm import RMSNorm
from models.layers.rope import cos_sin_cache
from parallel.comm.collectives import PendingAllReduce
from parallel.layers.embedding import LMHead, VocabParallelEmbedding
from parallel.layers.linear import ColumnParallel, RowParallel

ARCHITECTURE = "ToyHybridForCausalLM"
HYBRID = {"architectures": [ARCHITECTURE], "num_hidden_layers": 3}  # what its config changes in another's


class RunningSum(Mixer[StateBanks]):
    """out(the mean over all tokens so far of y_t + y_{t-1} / 2), where y = in(norm(x)).

    Its state is in float32, or in float64 where activations are: the sum, and the latest y.
    """

    def __init__(self, config: ModelConfig, context: ModelContext, norm: RMSNorm) -> None:
        super().__init__()
        hidden, self._dtype = config.hidden_size, torch.promote_types(context.dtype, torch.float32)
        self.norm = norm
        self.inflow = ColumnParallel(hidden, hidden, context)
        self.outflow = RowParallel(hidden, hidden, context)

    @property
    def cache(self) -> SlotState:
        each = (self.inflow.weight.outputs,), self._dtype
        return SlotState({"sum": each, "latest": each})

    def forward(
        self,
        x_TN: Tensor | PendingAllReduce,
        residual_TN: Tensor | None,
        inputs: StepInputs,
        cache: StateBanks,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor | PendingAllReduce, Tensor]:
        assert inputs.state is not None
        sums_SN, latest_SN = cache["sum"], cache["latest"]
        hidden_TN, residual_TN = self.norm.add(x_TN, residual_TN)
        y_TN = self.inflow(hidden_TN).to(sums_SN.dtype)
        tokens, slots_B = len(y_TN), inputs.state.slots_B
        rows = len(slots_B)
        ends_B = inputs.state.ends_B
        if ends_B is None:
            ends_B = torch.arange(1, rows + 1, device=y_TN.device) * (tokens // rows)
        starts_B = torch.cat((ends_B.new_zeros(1), ends_B[:-1]))
        token_T = torch.arange(tokens, device=y_TN.device)
        row_T = torch.searchsorted(ends_B, token_T, right=True)  # B for padding behind the last row
        padding_T1 = (row_T == rows).unsqueeze(1)
        row_T = row_T.clamp(max=rows - 1)

        first_T1 = (token_T == starts_B[row_T]).unsqueeze(1)
        before_TN = torch.where(first_T1, latest_SN[slots_B][row_T], y_TN.roll(1, 0))
        added_TN = y_TN + before_TN / 2
        same_TT = (row_T.unsqueeze(1) == row_T) & (token_T.unsqueeze(1) >= token_T)
        # A sum of what is chosen, not a product with zeros: another row's NaN must stay there.
        sum_TN = sums_SN[slots_B][row_T] + added_TN.unsqueeze(0).where(same_TT.unsqueeze(2), 0).sum(1)

        empty_B1 = (ends_B == starts_B).unsqueeze(1)
        last_B = (ends_B - 1).clamp(min=0)
        sums_SN.index_copy_(0, slots_B, sums_SN[slots_B].where(empty_B1, sum_TN[last_B]))
        latest_SN.index_copy_(0, slots_B, latest_SN[slots_B].where(empty_B1, y_TN[last_B]))

        mean_TN = sum_TN / (inputs.positions_T + 1).unsqueeze(1)
        mean_TN = mean_TN.masked_fill(padding_T1, float("nan")).to(hidden_TN.dtype)  # whoever reads it shall notice
        if wanted_R is not None:
            mean_TN, residual_TN = mean_TN.index_select(0, wanted_R), residual_TN.index_select(0, wanted_R)
        return self.outflow(mean_TN), residual_TN


class ToyHybrid(Decoder):
    """Attention in every other layer; the first and the last are running sums."""

    checkpoint_names: ClassVar = {
        **Llama.checkpoint_names,
        "layers.{}.mixer.inflow": "model.layers.{}.sum.in_proj",
        "layers.{}.mixer.outflow": "model.layers.{}.sum.out_proj",
    }

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__(config, context)
        hidden = config.hidden_size
        norm = partial(RMSNorm, eps=config.rms_norm_eps, context=context)
        self.cos_sin_LR = cos_sin_cache(config.rope, config.rotary_dim, config.max_length)
        self.embedding = VocabParallelEmbedding(config.vocab_size, hidden, context)
        self.layers = nn.ModuleList(
            DecoderLayer(
                Attention(config, context, self.cos_sin_LR, norm(hidden))
                if number % 2
                else RunningSum(config, context, norm(hidden)),
                GatedMLP(config, context, norm(hidden)),
            )
            for number in range(config.layers)
        )
        self.final_norm = norm(hidden)
        self.lm_head = LMHead(config.vocab_size, hidden, context, self.embedding if config.tied_embeddings else None)
