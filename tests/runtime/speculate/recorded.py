"""A proposer's guesses, written down as rounds ask for them, and what a serial oracle would have guessed there.

Knows: drafters of random weights for the rig's engines, over a vocabulary so small that some guesses are right.
Does not know: how a proposer keeps what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.drafters.draft_config import DFlashConfig, MTPConfig
from models.drafters.draft_head import DraftHead
from models.drafters.load import load_dflash, load_mtp
from models.inputs import PrefillAttention, StateRows, StepInputs
from models.layers.decoder import Decoder
from models.layers.layer_tap import LayerTap
from models.registry import config_from_dict
from runtime.execute.proposer import Observed, Proposed, Proposer, ProposerParts
from runtime.execute.slot_state import SlotColumns
from runtime.speculate.dflash import DFlashProposer
from runtime.speculate.methods import proposer_for
from runtime.speculate.mtp import MTPProposer
from runtime.speculate.tree import TreeProposer
from runtime.speculative_config import speculative_config
from tests.models.drafters import serial_oracle
from tests.models.drafters.tiny_drafters import (
    blocks_tensors,
    dflash_config,
    dflash_tensors,
    less_one,
    mtp_config,
    mtp_tensors,
    own_mtp_config,
    write,
)
from tests.models.kv_layers import caches_of
from tests.models.tiny_checkpoint import full_tensors
from tests.runtime.engine.rig import TINY

VOCABULARY = 9  # one random guess of nine is right
SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
FOUR_HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # of target and drafter, for four ranks
SIZES = {key: {**TINY, **SHAPE}[key] for key in (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings",
)}  # fmt: skip
DFLASH = dflash_config(
    **SIZES,
    layer_types=["sliding_attention", "full_attention"],
    sliding_window=9,
    block_size=8,
    dflash_config={"target_layer_ids": [0, 1], "mask_token_id": VOCABULARY - 1},
)
MTP = mtp_config(**SIZES)

Rounds = dict[tuple[int, int], tuple[int, ...]]  # (request, tokens known) -> guesses


class Recorder:
    """Another proposer, with its guesses in ``rounds``; a request is known by its seed. ``model``: the target."""

    def __init__(self, inner: Proposer, model: Decoder, places: int | None = None) -> None:
        self.inner, self.model = inner, model
        self._places = places  # of a tree the first nodes are the likeliest path
        self.rounds: Rounds = {}

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def layers(self) -> tuple[int, ...]:
        return self.inner.layers

    @property
    def reads_hidden(self) -> bool:
        return self.inner.reads_hidden

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        proposed = self.inner.propose(rows_B, columns, count)
        for row, live in enumerate((columns.finished == 0).tolist()):
            if live:
                key = int(columns.seed[row]), int(columns.length[row])
                self.rounds[key] = tuple(proposed.tokens_BQ[row, : self._places].tolist())
        return proposed

    def observe(self, observed: Observed) -> None:
        self.inner.observe(observed)


class Drafter:
    """A drafter's folder, and engines' proposers over it. ``recorder``: of the latest engine, of its first rank.
    ``top_k``: they grow trees, of so many tokens a place. ``target_layers``: how many the target has. ``changes``: keys
    of the config."""

    ids: Sequence[int] | None = None  # that it guesses among; None: all
    _top_k = 0

    def __init__(
        self,
        kind: str,
        folder: Path,
        proposer: Callable[..., Proposer] | None = None,
        ids: Sequence[int] | None = None,
        top_k: int = 0,
        target_layers: int = 2,
        **changes: Any,
    ) -> None:
        self.kind, self.folder, self.ids, self._top_k = kind, folder, ids, top_k
        self.config = (MTP if kind == "mtp" else DFLASH) | {"num_target_layers": target_layers} | changes
        self.tensors = mtp_tensors(self.config) if kind == "mtp" else dflash_tensors(self.config)
        write(folder, self.config, self.tensors)
        self._class = proposer or (MTPProposer if kind == "mtp" else DFlashProposer)
        self.recorder: Recorder | None = None

    def __call__(self, parts: ProposerParts) -> Recorder:
        """As MakeProposer."""
        model: Any
        if self.kind == "mtp":
            model = load_mtp(parts.model, MTPConfig.from_folder(self.folder), self.folder)
        else:
            model = load_dflash(parts.model, DFlashConfig.from_folder(self.folder), self.folder)
        head = None if self.ids is None else DraftHead.rows_of(parts.model, self.ids)
        inner: Any = self._class(parts, model, head)
        if self._top_k:
            inner = TreeProposer(parts, inner, self._top_k)
        recorder = Recorder(inner, parts.model, parts.limits.width - 1)
        if parts.model.collectives.rank == 0:
            self.recorder = recorder
        return recorder

    @property
    def rounds(self) -> Rounds:
        assert self.recorder is not None
        return self.recorder.rounds

    def expected(self, tokens: Sequence[int], count: int, hidden_LN: Tensor, features_LF: Tensor) -> tuple[int, ...]:
        """What the serial oracle guesses behind ``tokens``, given the target's states of all but the last."""
        assert self.recorder is not None
        target = self.recorder.model
        weights = as_wide(self.tensors, target.dtype)
        embedding, head = target.embedding.weight.data, target.lm_head.weight.data
        if self.kind == "mtp":
            states = tokens, hidden_LN, count, self.ids
            return tuple(serial_oracle.mtp_guesses(weights, self.config, embedding, head, *states))
        mask = self.config["dflash_config"]["mask_token_id"]
        embedded_WN = embedding[torch.tensor([tokens[-1], *[mask] * count])]
        out_WN = serial_oracle.dflash_block(weights, self.config, features_LF, embedded_WN)
        return tuple(serial_oracle.likeliest(out_N, head, self.ids) for out_N in out_WN[1:])


class OwnLayer(Drafter):
    """A target of ``shape`` whose checkpoint holds an MTP layer: all tensors in one folder. ``top_k``: as Drafter's."""

    def __init__(self, shape: Mapping[str, object], folder: Path, top_k: int = 0) -> None:
        self.kind, self.folder, self._top_k = "mtp", folder, top_k
        self.config = {**TINY, **SHAPE, **shape}
        if shape.get("hybrid_override_pattern"):
            self.config |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
            self.tensors = stored = blocks_tensors(self.config)
        else:
            self.config = own_mtp_config(self.config)
            self.tensors = mtp_tensors(self.config)
            stored = less_one(self.tensors)
        write(folder, self.config, full_tensors(config_from_dict(self.config)) | stored)
        self.recorder: Recorder | None = None

    def __call__(self, parts: ProposerParts) -> Recorder:
        keys: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": max(1, parts.limits.width - 1)}
        if self._top_k:
            keys |= {"tree_size": parts.limits.tree, "tree_top_k": self._top_k}
        inner = proposer_for(speculative_config(keys), target_folder=self.folder)(parts)
        recorder = Recorder(inner, parts.model, parts.limits.width - 1)
        if parts.model.collectives.rank == 0:
            self.recorder = recorder
        return recorder


def as_wide(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
    """Those of floats in ``dtype``; of the latest tensors asked for they are made once."""
    if _wide[0] is not tensors or _wide[1] is not dtype:
        _wide[:] = tensors, dtype, {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    found: Mapping[str, Tensor] = _wide[2]
    return found


_wide: list[Any] = [None, None, {}]


def target_states(target: Decoder, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(final-normed hidden states, features) of all tokens, computed at once over a cache of their own."""
    length = len(tokens)
    caches = caches_of(target.cache_layout, 2, length)
    place = torch.arange(length)
    attention = PrefillAttention(torch.ones(1, 1, dtype=torch.int32), (length,), (length,))
    tap = LayerTap((0, 1))
    state = StateRows(torch.tensor([1]), torch.tensor([length]))
    inputs = StepInputs(torch.tensor(tokens), place, length + place, attention, state=state)
    hidden = target.forward(inputs, caches, tap)
    return hidden, tap.features_TF


@torch.inference_mode()
def check_rounds(drafter: Drafter, sequences: Mapping[int, Sequence[int]], every: int = 1) -> int:
    """Every ``every``-th recorded round guessed what the oracle does; returns how many were looked at.

    The target's states of a sequence are computed once: those of a round's tokens are the first of them.
    """
    assert drafter.recorder is not None
    chosen = sorted(drafter.rounds)[::every]
    longest = dict(chosen)  # in order, so the last of a request stays
    states = {
        request: target_states(drafter.recorder.model, sequences[request][: known - 1])
        for request, known in longest.items()
    }
    for request, known in chosen:
        guesses = drafter.rounds[request, known]
        before = [states_L[: known - 1] for states_L in states[request]]
        assert guesses == drafter.expected(sequences[request][:known], len(guesses), *before), (
            f"request {request}, {known} tokens known"
        )
    return len(chosen)
