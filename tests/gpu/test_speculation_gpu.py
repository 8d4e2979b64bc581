"""Speculation on a GPU: the tokens of single steps, in float32; rounds captured, chained, without a sync or a copy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.engine import Engine
from runtime.execute.launch_spec import LaunchSpec
from runtime.execute.proposer import MakeProposer, Observed, Proposed, ProposerParts
from runtime.execute.sampling.inputs import SamplingVariant
from runtime.execute.slot_state import SlotColumns
from runtime.schedule.config import MixedSteps
from runtime.schedule.plan import StepKind
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.gpu.steady_steps import count_steady_steps
from tests.gpu.test_engine_gpu import gpu_rig
from tests.gpu.test_gdn_gpu import shape as gated_delta
from tests.gpu.test_mamba_gpu import HYBRID as MAMBA
from tests.runtime.engine.rig import request, run
from tests.runtime.engine.test_depths import mixture, outcome

pytestmark = pytest.mark.gpu

LIMITS: dict[str, Any] = {"prefill": "triton", "dtype": torch.float32, "blocks": 400}


def ngram(width: int, mixed_percent: int = 0) -> dict[str, Any]:
    keys = {"num_speculative_tokens": width - 1, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    return {
        "proposer": proposer_for(speculative_config({"method": "ngram", **keys})),
        "speculation": Speculation(width, mixed_percent=mixed_percent),
    }


@pytest.mark.parametrize("width", [2, 5, 16])
@pytest.mark.parametrize("buckets", [(16, 32, 48, 64), ()], ids=["graphs", "kernels"])
def test_lookup_gives_the_tokens_of_single_steps(width: int, buckets: tuple[int, ...]) -> None:
    few: dict[str, Any] = {"max_tokens": 50, "allowed_token_ids": (5, 6, 7), "temperature": 0.5}
    requests = [*mixture(3), *(request(50 + i, (9 + i, 5, 6, 7, 5, 6, 7), stops=(), **few) for i in range(3))]
    with gpu_rig(depth=0, prefill_buckets=buckets, **LIMITS) as engine:
        alone = outcome(run(engine, requests))
    for depth in (0, 2):
        with gpu_rig(depth=depth, prefill_buckets=buckets, **LIMITS, **ngram(width)) as engine:
            assert outcome(run(engine, requests)) == alone
            assert engine.counters["spec_num_accepted_tokens"] > 30


SHAPES = {"attention": None, "gated delta": gated_delta("qwen3.5"), "mamba": MAMBA}


@pytest.mark.parametrize(("width", "layers"), [(2, "attention"), (5, "attention"), (5, "gated delta"), (4, "mamba")])
def test_windows_beside_chunks_give_the_tokens_of_single_steps(width: int, layers: str) -> None:
    """From captured steps of every size, at any depth; nothing is captured or allocated for them later."""
    few: dict[str, Any] = {"max_tokens": 90, "allowed_token_ids": (5, 6, 7), "temperature": 0.5}
    requests = [request(50 + i, (9 + i, 5, 6, 7, 5, 6, 7), stops=(), **few) for i in range(3)]
    later = {2 + 2 * i: request(i, range(i, 50 + 9 * i), max_tokens=6, stops=()) for i in range(6)}

    buckets = (16, 32, 48, 64, 80)

    def lived(depth: int, **more: Any) -> tuple[Any, dict[str, int | float], Counter[int]]:
        found: Counter[int] = Counter()
        kinds = SamplingVariant(), SamplingVariant.covering([one.sampling for one in (*requests, *later.values())])
        how = LIMITS | more | {"variants": kinds} | ({"shape": SHAPES[layers]} if SHAPES[layers] else {})
        with gpu_rig(depth=depth, prefill_buckets=buckets, mixed=MixedSteps(buckets), **how) as engine:
            launch = engine.executor.launch

            def counted(spec: LaunchSpec) -> None:
                found[spec.shape.width] += spec.plan.kind is StepKind.MIXED
                launch(spec)

            def arrive(engine: Engine, turn: int) -> None:
                if turn in later:
                    engine.add(later[turn])

            engine.executor.launch = counted  # type: ignore[method-assign]
            return outcome(run(engine, requests, arrive)), dict(engine.counters), found

    alone, _, _ = lived(0)
    for depth in (0, 2):
        answers, counters, widths = lived(depth, **ngram(width, 100))
        assert answers == alone
        assert widths[width] > 5
        assert not [name for name in counters if name.startswith("fallbacks{eager_prefill")]  # which may allocate
        assert counters["spec_num_accepted_tokens"] > 10
        assert counters["graph_captures_after_warmup"] == 0
        assert counters["device_allocs_after_warmup"] == 0


class Reader:
    """Reads all it is shown into a table by slot, and proposes from it: the sum tells that every replay wrote."""

    name = "reader"
    reads_hidden = True

    def __init__(self, parts: ProposerParts) -> None:
        self.layers = (0, len(parts.model.layers) - 1)
        self._vocab = parts.model.config.vocab_size
        self.shown_S = parts.device.zeros(parts.tables.slots, dtype=torch.int64)
        self.bad_1 = parts.device.zeros(1, dtype=torch.int64)

    def propose(self, rows_B: Tensor, columns: SlotColumns, count: int) -> Proposed:
        return Proposed((columns.last_token[:, None] + self.shown_S[rows_B][:, None]).expand(-1, count) % self._vocab)

    def observe(self, observed: Observed) -> None:
        assert observed.hidden_TN is not None
        assert observed.features_TF is not None
        self.shown_S.index_add_(0, observed.slots_T, observed.kept_T.to(torch.int64))
        finite = observed.hidden_TN.isfinite().all(1) & observed.features_TF.isfinite().all(1)
        self.bad_1.add_((observed.kept_T & ~finite).sum())


def test_every_token_is_shown_once_from_captured_steps() -> None:
    made: list[Reader] = []

    def make(parts: ProposerParts) -> Reader:
        made.append(Reader(parts))
        return made[-1]

    maker: MakeProposer = make
    requests = [request(i, range(3 + i, 30 + 5 * i), max_tokens=25, stops=()) for i in range(6)]
    with gpu_rig(depth=0, **LIMITS) as engine:
        alone = outcome(run(engine, requests))
    more: dict[str, Any] = {"proposer": maker, "speculation": Speculation(4), "prefix_caching": False}
    with gpu_rig(depth=2, **LIMITS, **more) as engine:
        before = made[-1].shown_S.clone()
        assert outcome(run(engine, requests)) == alone
        shown = int((made[-1].shown_S - before).sum())
        assert int(made[-1].bad_1) == 0
    assert shown == sum(len(one.prompt_token_ids) + 25 - 1 for one in requests), "all but each answer's last token"


def test_a_steady_round_is_one_launch_without_a_sync() -> None:
    requests = [request(i, range(3 + i, 20 + i), max_tokens=80, stops=()) for i in range(8)]
    buckets = (16, 32, 48, 64, 80)
    how: dict[str, Any] = {"prefill_buckets": buckets, "mixed": MixedSteps(buckets), "block_size": 64}
    with gpu_rig(depth=2, **how, **LIMITS, **ngram(4)) as engine:
        count_steady_steps(engine, requests)
        assert engine.counters["chain_breaks{start}"] == 1
