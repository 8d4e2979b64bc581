"""The floor of a decode step or of a round of speculation: the time its bytes and its arithmetic need on a device, and
nothing else.

Knows: how many weights and KV bytes a model and a drafter read a step, by their config.json, and how they divide over
ranks. Does not know: engines, kernels, communication (all-reduce is not counted), or how fast anything really is.

Every weight is read once a step, the embedding left out and the language-model head in. Each group of GEMMs takes the
larger of its byte time and its arithmetic time, and so does attention, which reads the KV of every row at the average
length. Layers with state in slots read and write that of every row.

A round verifies several tokens a row: weights and KV are read once for all of them, experts as all of them choose, and
state once more, to be left alone in verification and to apply what was kept. A drafter comes on top: passes to draft,
and one to be shown what the target made of a row's window. Left out everywhere: activations, KV that is written, a
window's own KV, the arithmetic of recurrences and samplers; of drafters also norms, biases and gates of shared experts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import comb
from pathlib import Path

import torch

from models.attention_spec import AttentionSpec
from models.config import ModelConfig
from models.drafters.draft_config import DFlashConfig, Eagle3Config, MTPConfig
from models.drafters.draft_vocabulary import chosen_ids
from models.four_bit_load import dummy_four_bits
from models.fp8_load import AT_LOAD
from models.kv_group import KvGroup, keys_and_values
from models.quantization import FourBitScheme, Quantization
from models.registry import config_from_folder
from parallel.layers.weight import fp8
from runtime.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Values of a whole model. ``dense``: weights that every token meets; ``expert``: those of one expert, over all
    layers; ``kv``: what a token leaves in the layers that attend, over all ranks.
    ``query_values``: of one token, over all layers that attend. ``more``: both again, of layers with a window or
    another shape; ``kv`` is of the others then. ``coded_bytes``: of a weight that is stored as an FP8
    code, its scale included; 0 without. ``kept``: of ``dense``, those that are not: head and routers. ``state_bytes``:
    what a row's recurrent state takes (float32), ``window_values``: values of its convolutions that a step reads or
    writes; both over all layers."""

    dense: int
    expert: int
    experts: int
    experts_per_token: int
    kv: KvGroup
    state_bytes: int = 0
    window_values: int = 0
    query_values: int = 0
    kept: int = 0
    coded_bytes: float = 0.0
    more: tuple[tuple[KvGroup, int], ...] = ()

    @classmethod
    def from_folder(
        cls, folder: Path, kv_dtype: torch.dtype = torch.bfloat16, quantization: str | None = None
    ) -> Shape:
        """Of a model folder's config.json; ``quantization``: as EngineConfig has it."""
        return cls.of(config_from_folder(folder), kv_dtype, quantization)

    @classmethod
    def of(cls, sizes: ModelConfig, kv_dtype: torch.dtype = torch.bfloat16, quantization: str | None = None) -> Shape:
        delta, mamba, experts = sizes.delta, sizes.mamba, sizes.experts
        recurrent = 0 if (mixers := delta or mamba) is None else len(mixers.layers)
        others = set(mixers.layers) if mixers else set()
        others |= {number for number, kind in enumerate(sizes.blocks) if kind != "attention"}
        specs = [sizes.attention_of(number) for number in range(sizes.layers) if number not in others]
        groups = Counter((spec.kv_heads, spec.head_dim, spec.window) for spec in specs) or {(1, 1, None): 0}
        first, *more = (
            (_entries(heads, dim, kv_dtype, layers, window), layers * sizes.heads * dim)
            for (heads, dim, window), layers in groups.items()
        )
        sparse = 0 if experts is None else len(experts.layers)
        alone = 0 if experts is None or experts.beside_mlp else sparse  # layers without a dense MLP
        hidden, matrices = sizes.hidden_size, 2 if sizes.blocks else 3  # of an MLP
        dense = sum(_attention(sizes, hidden, spec, gates=int(delta is not None)) for spec in specs)
        dense += sizes.vocab_size * hidden
        mlps = sizes.blocks.count("mlp") if sizes.blocks else sizes.layers - alone
        dense += matrices * hidden * sizes.intermediate_size * mlps
        kept, latent, state, window = sizes.vocab_size * hidden, 0, 0, 0
        if experts is not None:
            kept += sparse * experts.count * hidden
            latent = experts.latent_size
            dense += sparse * 2 * hidden * latent
            dense += sparse * hidden * (experts.count + matrices * experts.shared_size)
        if delta is not None:
            dense += recurrent * hidden * (2 * delta.keys + 3 * delta.values + 2 * delta.v_heads)
            state, window = delta.values * delta.k_dim, (2 * delta.keys + delta.values) * delta.taps
        if mamba is not None:  # in: z, xBC, dt; out
            dense += recurrent * hidden * (2 * mamba.inner + mamba.conv_channels + mamba.heads)
            state, window = mamba.inner * mamba.state_size, mamba.taps * mamba.conv_channels
        stored = sizes.quantization or (AT_LOAD if quantization == "fp8" else None)
        return cls(
            dense=dense,
            expert=0 if experts is None else sparse * matrices * (latent or hidden) * experts.intermediate_size,
            experts=0 if experts is None else experts.count,
            experts_per_token=0 if experts is None else experts.per_token,
            kv=first[0],
            query_values=first[1],
            more=tuple(more),
            kept=kept,
            coded_bytes=0.0 if stored is None else _coded_bytes(stored, hidden),
            state_bytes=4 * recurrent * state,
            window_values=recurrent * window,
        )

    def weight_bytes(self, value_bytes: int) -> tuple[float, float]:
        """Bytes of ``dense`` and of ``expert``, the others with ``value_bytes`` each."""
        coded = self.coded_bytes or value_bytes
        return self.kept * value_bytes + (self.dense - self.kept) * coded, self.expert * coded


def _coded_bytes(stored: Quantization, hidden: int) -> float:
    """Bytes of a quantised weight and its part of a scale, by the scheme of most."""
    scheme = stored.groups[-1][1]
    if isinstance(scheme, FourBitScheme):
        return dummy_four_bits(scheme, (hidden, hidden)).form.nbytes(hidden, hidden) / hidden**2
    rows, columns = scheme.block or (1, hidden)
    return fp8(rows, columns).nbytes(rows, columns) / (rows * columns)


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Values of a drafter. A pass meets ``dense``, of which each rank has a share, and ``expert`` as in Shape, within a
    group of ranks; then the ``head`` for what it drafts: one token a row or, where it is a ``block``, all of them at
    once. To be shown a row's tokens costs ``shown``, of which each rank has a share, and ``shown_whole`` on each.
    ``views``: of each layer that attends, how many tokens it sees at most; None: all. ``query_values``: of one token in
    one layer, as is ``kv``, over all ranks."""

    dense: int
    head: int
    shown: int
    kv: KvGroup
    query_values: int = 0
    shown_whole: int = 0
    views: tuple[int | None, ...] = (None,)
    block: bool = False
    expert: int = 0
    experts: int = 0
    experts_per_token: int = 0


def drafter_shape(
    config: SpeculativeConfig, target: ModelConfig, kv_dtype: torch.dtype = torch.bfloat16
) -> DrafterShape | None:
    """Of the drafter for ``target``; None for methods without weights. Raises ModelConfigError and ValueError."""
    draft: MTPConfig | DFlashConfig | Eagle3Config
    if config.method == "mtp":
        draft = MTPConfig.of_target(target) if config.model is None else MTPConfig.from_folder(config.model)
    elif config.method == "dflash" and config.model is not None:
        draft = DFlashConfig.from_folder(config.model)
    elif config.method == "eagle3" and config.model is not None:
        draft = Eagle3Config.from_folder(config.model)
    else:
        return None
    ids = target.vocab_size
    if config.token_map is not None:
        ids = len(chosen_ids(config.token_map, target.vocab_size))
    return shape_of(draft, draft.draft_vocab_size or ids, kv_dtype)


def shape_of(
    draft: MTPConfig | DFlashConfig | Eagle3Config, ids: int, kv_dtype: torch.dtype = torch.bfloat16
) -> DrafterShape:
    """``ids``: those that it drafts from."""
    if isinstance(draft, DFlashConfig):
        return _of_dflash(draft, ids, kv_dtype)
    return _of_eagle3(draft, ids, kv_dtype) if isinstance(draft, Eagle3Config) else _of_mtp(draft, ids, kv_dtype)


def _of_mtp(draft: MTPConfig, ids: int, kv_dtype: torch.dtype) -> DrafterShape:
    sizes = draft.model
    hidden, experts = sizes.hidden_size, sizes.experts
    kinds = draft.blocks[1:] if draft.blocks else ("mlp" if experts is None else "moe",)
    gated = 2 if draft.blocks else 3  # matrices of an MLP: of blocks it has no gate
    fc = 2 * hidden * hidden
    dense = fc + _attention(sizes, hidden, gates=int(draft.output_gate))
    dense += kinds.count("mlp") * gated * hidden * sizes.intermediate_size
    expert = 0
    sparse = kinds.count("moe")
    if sparse:
        assert experts is not None
        gated = 2 if experts.activation == "relu2" else 3
        dense += sparse * hidden * (experts.count + gated * experts.shared_size)
        expert = sparse * gated * hidden * experts.intermediate_size
    return DrafterShape(
        dense=dense,
        head=ids * hidden,
        shown=fc + hidden * _entry(sizes),
        kv=_entries(sizes.kv_heads, sizes.head_dim, kv_dtype),
        query_values=sizes.heads * sizes.head_dim,
        expert=expert,
        experts=experts.count if experts is not None and sparse else 0,
        experts_per_token=experts.per_token if experts is not None and sparse else 0,
    )


def _of_dflash(draft: DFlashConfig, ids: int, kv_dtype: torch.dtype) -> DrafterShape:
    sizes = draft.model
    hidden = sizes.hidden_size
    return DrafterShape(
        dense=sizes.layers * (_attention(sizes, hidden) + 3 * hidden * sizes.intermediate_size),
        head=ids * hidden,
        shown=hidden * (len(draft.target_layer_ids) * hidden + sizes.layers * _entry(sizes)),
        kv=_entries(sizes.kv_heads, sizes.head_dim, kv_dtype),
        query_values=sizes.heads * sizes.head_dim,
        views=tuple(view.window for view in draft.views),
        block=True,
    )


def _of_eagle3(draft: Eagle3Config, ids: int, kv_dtype: torch.dtype) -> DrafterShape:
    """Attention reads an embedding and a state side by side."""
    sizes = draft.model
    hidden = sizes.hidden_size
    return DrafterShape(
        dense=_attention(sizes, 2 * hidden) + 3 * hidden * sizes.intermediate_size,
        head=ids * hidden,
        shown=2 * hidden * _entry(sizes),
        kv=_entries(sizes.kv_heads, sizes.head_dim, kv_dtype),
        query_values=sizes.heads * sizes.head_dim,
        shown_whole=draft.features * hidden * hidden,
    )


def _attention(sizes: ModelConfig, inputs: int, spec: AttentionSpec | None = None, gates: int = 0) -> int:
    """Weights of a layer's projections, by default of the first; ``gates``: a gate a query value."""
    spec = spec or sizes.attention_of(0)
    queries, entries = sizes.heads * spec.head_dim, (2 - spec.values_are_keys) * spec.kv_heads * spec.head_dim
    return inputs * ((1 + gates) * queries + entries) + queries * sizes.hidden_size


def _entries(kv_heads: int, head_dim: int, dtype: torch.dtype, layers: int = 1, window: int | None = None) -> KvGroup:
    """What a token leaves in ``layers``."""
    return KvGroup(tuple(range(layers)), keys_and_values(kv_heads, head_dim, dtype, window), page_size=1)


def _entry(sizes: ModelConfig) -> int:
    """Values of one token's keys and values in one layer."""
    return 2 * sizes.kv_heads * sizes.head_dim


@dataclass(frozen=True, slots=True)
class Floor:
    """Of one decode step or round, or a part of it, on one rank."""

    weight_bytes: float
    kv_bytes: float
    seconds: float
    state_bytes: float = 0.0
    flop: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.state_bytes

    def __add__(self, other: Floor) -> Floor:
        """Of both, one after the other."""
        return Floor(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.seconds + other.seconds,
            self.state_bytes + other.state_bytes,
            self.flop + other.flop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """``ranks`` in ``groups`` that have separate rows, the bytes of a weight, and a device's rates. ``share``:
    ranks of a group; ``rows``: those of a batch that the fullest group has."""

    ranks: int
    value_bytes: int
    bytes_per_s: float
    flop_per_s: float
    groups: int = 1

    @property
    def share(self) -> int:
        return self.ranks // self.groups

    def rows(self, batch: int) -> int:
        return -(-batch // self.groups)

    def products(self, values: float, flop: float, coded_bytes: float = 0.0) -> Floor:
        """GEMMs with so many weights. ``coded_bytes``: of each, where they are FP8: tensor cores take twice as many."""
        read = (coded_bytes or self.value_bytes) * values
        return Floor(read, 0.0, self._seconds(read, flop / (2 if coded_bytes else 1)), flop=flop)

    def attention(self, kv: KvGroup, attended: float, flop: float) -> Floor:
        """Over the entries of ``attended`` tokens; heads that are fewer than a group's ranks lie on several."""
        of_token = sum(plane.bytes_per_token * max(1 / self.share, 1 / plane.heads) for plane in kv.planes)
        read = attended * len(kv.layers) * of_token
        return Floor(0.0, read, self._seconds(read, flop), flop=flop)

    def state(self, moved: float) -> Floor:
        """Bytes of state, read and written."""
        return Floor(0.0, 0.0, moved / self.bytes_per_s, moved)

    def _seconds(self, moved: float, flop: float) -> float:
        return max(moved / self.bytes_per_s, flop / self.flop_per_s)


def decode_floor(
    shape: Shape,
    *,
    batch: int,
    length: float,
    ranks: int,
    value_bytes: int,
    bytes_per_s: float,
    flop_per_s: float,
    groups: int = 1,
) -> Floor:
    """``length``: average tokens of KV a row. ``ranks`` share the experts whole, and each of ``groups`` of them every
    other weight matrix, for separate rows: the fullest group counts."""
    device = Ceilings(
        ranks=ranks, value_bytes=value_bytes, bytes_per_s=bytes_per_s, flop_per_s=flop_per_s, groups=groups
    )
    return target_floor(shape, device, batch=batch, length=length)


def target_floor(shape: Shape, device: Ceilings, *, batch: int, length: float, tokens: int = 1) -> Floor:
    """Of a step of one token a row, or of the verification of ``tokens`` a row, with the state update of those that are
    accepted."""
    rows, share = device.rows(batch), device.share
    kept = shape.kept if shape.coded_bytes else shape.dense
    floor = device.products(kept / share, 2 * kept * rows * tokens / share)
    if coded := shape.dense - kept:
        floor += device.products(coded / share, 2 * coded * rows * tokens / share, shape.coded_bytes)
    if shape.experts:
        active = _experts_of_the_fullest_rank(shape, batch * tokens, device.ranks)
        flop = 2 * shape.expert * shape.experts_per_token * batch * tokens / device.ranks
        floor += device.products(shape.expert * active, flop, shape.coded_bytes)
    for kv, values in ((shape.kv, shape.query_values), *shape.more):
        attended = rows * (length if kv.window is None else min(length, kv.window + tokens - 1))
        floor += device.attention(kv, attended, 4 * attended * tokens * values / share)
    passes = 1 if tokens == 1 else 2  # over the recurrence; the last of them writes
    moved = (passes + 1) * shape.state_bytes + passes * device.value_bytes * shape.window_values
    return floor + device.state(rows * moved / share)


def drafter_floor(drafter: DrafterShape, device: Ceilings, *, batch: int, length: float, guesses: int) -> Floor:
    """Of ``guesses`` places after every row, and of being shown a window of one token more."""
    rows, share = device.rows(batch), device.share
    passes, tokens, guessed = (1, guesses + 1, guesses) if drafter.block else (guesses, 1, 1)
    shown = drafter.shown_whole + drafter.shown / share
    floor = device.products(shown, 2 * shown * rows * (guesses + 1))
    layers = drafter.dense / share
    attended = rows * sum(length if view is None else min(length, view) for view in drafter.views)
    for _ in range(passes):
        floor += device.products(layers, 2 * layers * rows * tokens)
        floor += device.products(drafter.head / share, 2 * drafter.head * rows * guessed / share)
        if drafter.experts:
            active = _experts_of_the_fullest_rank(drafter, rows * tokens, share)
            flop = 2 * drafter.expert * drafter.experts_per_token * rows * tokens / share
            floor += device.products(drafter.expert * active, flop)
        floor += device.attention(drafter.kv, attended, 4 * attended * tokens * drafter.query_values / share)
    return floor


def round_floor(
    shape: Shape,
    drafter: DrafterShape | None,
    device: Ceilings,
    *,
    batch: int,
    length: float,
    guesses: int,
    tree: int | None = None,
) -> Floor:
    """Of a round with ``guesses`` places, of which a ``tree`` has so many tokens, root included. ``drafter`` None:
    drafts cost nothing, as n-gram lookup."""
    verified = target_floor(shape, device, batch=batch, length=length, tokens=tree or guesses + 1)
    if drafter is None:
        return verified
    return verified + drafter_floor(drafter, device, batch=batch, length=length, guesses=guesses)


def _experts_of_the_fullest_rank(shape: Shape | DrafterShape, tokens: int, ranks: int) -> float:
    """Experts that at least one of ``tokens`` asks for, on the rank with most of them, expected under uniform routing:
    the largest of ``ranks`` binomial counts."""
    here = shape.experts // ranks
    asked = 1 - (1 - shape.experts_per_token / shape.experts) ** tokens
    at_most = expected = 0.0
    for count in range(here):
        at_most += comb(here, count) * asked**count * (1 - asked) ** (here - count)
        expected += 1 - at_most**ranks
    return expected
