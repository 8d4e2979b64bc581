"""The state that a drafter keeps by slot, brought up to date with a row's newest token.

Knows: that rows which gained nothing keep what they have. Does not know: what a state is, who reads it. Graph-safe; one
launch on CUDA.
"""

from __future__ import annotations

import torch
from torch import Tensor

from runtime.execute.proposer import Advanced
from runtime.speculate.draft_kernels import kernels_for


def keep_newest(bank_SN: Tensor, state_TN: Tensor, advanced: Advanced) -> None:
    """Slot rows_B[i] of ``bank_SN`` gets row last_B[i] of ``state_TN`` where gained_B[i]; both of one dtype."""
    if (kernels := kernels_for(bank_SN)) is None:
        keep_newest_in_torch(bank_SN, state_TN, advanced)
    else:
        kernels.keep(bank_SN, state_TN, advanced.rows_B, advanced.last_B, advanced.gained_B)


def keep_newest_in_torch(bank_SN: Tensor, state_TN: Tensor, advanced: Advanced) -> None:
    """The reference of ``keep_newest``."""
    old_BN = bank_SN.index_select(0, advanced.rows_B)
    new_BN = state_TN.index_select(0, advanced.last_B)
    bank_SN.index_copy_(0, advanced.rows_B, torch.where(advanced.gained_B[:, None], new_BN, old_BN))
