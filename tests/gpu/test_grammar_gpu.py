"""Answers that are texts of a grammar, on a GPU: at every depth the same, and in draft windows texts all the same."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.build import warm_variants
from runtime.execute.device.cuda import CudaDevice
from runtime.execute.proposer import ProposerParts
from runtime.grammar import Grammars
from runtime.schedule.speculation import Speculation
from runtime.speculate.guesses import ProbabilisticProposer
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.gpu.test_engine_gpu import SHAPE, gpu_rig
from tests.runtime.engine import test_grammar as on_cpu
from tests.runtime.engine.rig import rig, run
from tests.runtime.engine.table_rigs import small_grammars, with_tables
from tests.runtime.engine.test_depths import outcome
from tests.runtime.engine.test_forced_drafts import runs_change_no_bit
from tests.runtime.engine.test_grammar_masks import grammars_change_no_bit
from tests.runtime.speculate.recorded import Drafter

pytestmark = pytest.mark.gpu

if torch.cuda.is_available():
    from tests.models.kernels.nvidia_kernels import invariant_nvidia_kernels

OVER = SHAPE | on_cpu.SHAPE


@pytest.fixture
def tabled() -> Iterator[Grammars]:
    grammars = with_tables(small_grammars(on_cpu.VOCABULARY, on_cpu.EOS), (on_cpu.EOS,))
    yield grammars
    grammars.close()


def test_depths_agree_and_answers_are_texts() -> None:
    requests = on_cpu.mixture()
    with gpu_rig("triton", depth=0, dtype=torch.float32, shape=OVER, grammars=on_cpu.GRAMMARS) as engine:
        serial = run(engine, requests)
    on_cpu.check(requests, serial)
    for depth in (1, 3):
        with gpu_rig("triton", depth=depth, dtype=torch.float32, shape=OVER, grammars=on_cpu.GRAMMARS) as engine:
            assert outcome(run(engine, requests)) == outcome(serial)


def test_in_draft_windows_they_are_texts() -> None:
    """What a draft window costs in last bits may change a token, but not what is allowed."""
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    requests = on_cpu.mixture()
    rule = Speculation(4, mixed_percent=0)
    lookup = proposer_for(speculative_config(keys))
    how: dict[str, Any] = {"proposer": lookup, "speculation": rule}
    with gpu_rig("triton", depth=2, shape=OVER, grammars=on_cpu.GRAMMARS, **how) as engine:
        on_cpu.check(requests, run(engine, requests))
        assert engine.counters["spec_num_accepted_tokens"] > 0


def test_in_the_deterministic_mode_they_are_their_own_in_every_bit() -> None:
    device, kernels = CudaDevice(torch.device("cuda:0")), invariant_nvidia_kernels("cuda")
    grammars_change_no_bit(
        partial(rig, device=device, kernels=kernels, shape=OVER, dtype=torch.bfloat16, block_size=16)
    )


@pytest.mark.parametrize("kind", ["ngram", "mtp", "tree"])
def test_forced_runs_change_no_bit_in_the_deterministic_mode(kind: str, tmp_path: Path) -> None:
    """Recursive schemas: the bits of one request after the other, without draft tokens."""
    device, kernels = CudaDevice(torch.device("cuda:0")), invariant_nvidia_kernels("cuda")
    over = partial(rig, device=device, kernels=kernels, shape=OVER, dtype=torch.bfloat16, block_size=16)
    runs_change_no_bit(kind, tmp_path, over, OVER)


def test_a_warm_grammar_captures_nothing_late() -> None:
    requests = on_cpu.mixture(logprobs=None)
    variants = warm_variants(("greedy", "constrained"), 1)
    with gpu_rig("triton", depth=2, shape=OVER, grammars=on_cpu.GRAMMARS, variants=variants) as engine:
        on_cpu.check(requests, run(engine, requests))
        assert engine.counters["graph_captures_after_warmup"] == 0


def test_tables_give_the_tokens_of_the_host() -> None:
    requests = on_cpu.mixture(18)
    with gpu_rig("triton", depth=0, dtype=torch.float32, shape=OVER, grammars=on_cpu.GRAMMARS) as engine:
        by_host = run(engine, requests)
    for depth in (0, 3):
        tabled = with_tables(small_grammars(on_cpu.VOCABULARY, on_cpu.EOS), (on_cpu.EOS,))
        with gpu_rig("triton", depth=depth, dtype=torch.float32, shape=OVER, grammars=tabled) as engine:
            assert outcome(run(engine, requests)) == outcome(by_host)
            assert engine.counters["grammar_tabled"] >= 6


def test_tables_in_draft_windows(tabled: Grammars) -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    requests = on_cpu.mixture(18)
    rule, lookup = Speculation(4, mixed_percent=0), proposer_for(speculative_config(keys))
    with gpu_rig("triton", depth=2, shape=OVER, grammars=tabled, proposer=lookup, speculation=rule) as engine:
        on_cpu.check(requests, run(engine, requests))
        assert engine.counters["grammar_tabled"] >= 6


def test_tables_in_the_deterministic_mode_change_no_bit(tabled: Grammars) -> None:
    device, kernels = CudaDevice(torch.device("cuda:0")), invariant_nvidia_kernels("cuda")
    over = partial(rig, device=device, kernels=kernels, shape=OVER, dtype=torch.bfloat16, block_size=16)
    grammars_change_no_bit(over, tabled)


def test_a_warm_table_captures_nothing_late(tabled: Grammars) -> None:
    requests = on_cpu.mixture(18, logprobs=None)
    variants = warm_variants(("greedy", "constrained"), 1)
    with gpu_rig("triton", depth=2, shape=OVER, grammars=tabled, variants=variants) as engine:
        on_cpu.check(requests, run(engine, requests))
        assert engine.counters["graph_captures_after_warmup"] == 0


@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_masked_drafts_are_kept_more_often(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps of windows alone and beside chunks; the drafters' weights are random."""
    sizes: dict[str, Any] = {**SHAPE, "vocab_size": on_cpu.VOCABULARY}
    drafter, requests = Drafter(kind, tmp_path, **sizes), on_cpu.mixture(18)

    def kept() -> float:
        grammars = with_tables(small_grammars(on_cpu.VOCABULARY, on_cpu.EOS), (on_cpu.EOS,))
        how: dict[str, Any] = {"proposer": lambda parts: drafter(parts).inner, "grammars": grammars}
        rule = Speculation(4, mixed_percent=100)
        with gpu_rig("triton", depth=2, dtype=torch.float32, shape=OVER, speculation=rule, **how) as engine:
            on_cpu.check(requests, run(engine, requests))
            assert engine.counters["grammar_tabled"] >= 6
            return engine.counters["spec_num_accepted_tokens"]

    masked = kept()
    monkeypatch.setattr("runtime.execute.proposer.masks", lambda *asked: False)
    assert masked > 2 * kept()


@pytest.mark.parametrize("kind", ["mtp", "dflash", "sampled"])
def test_with_a_drafter_no_kernel_of_sampling_is_compiled_after_start_up(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tabled: Grammars
) -> None:
    """Rows with tables, biases and penalties, some at random. As test_compiled_kernels.py, which needs no GPU."""
    sizes: dict[str, Any] = {**SHAPE, "vocab_size": on_cpu.VOCABULARY}
    drafter, late = Drafter("mtp" if kind == "mtp" else "dflash", tmp_path, **sizes), list[str]()

    def proposer(parts: ProposerParts) -> Any:
        inner: Any = drafter(parts).inner
        return ProbabilisticProposer(parts.device, inner) if kind == "sampled" else inner

    def asked(*, fn: Any, **rest: object) -> None:
        if fn.module.startswith("runtime."):
            late.append(fn.name)

    requests = on_cpu.mixture(18, logprobs=None, frequency_penalty=0.1)
    rule = Speculation(4, mixed_percent=100)
    with gpu_rig("triton", depth=2, shape=OVER, speculation=rule, proposer=proposer, grammars=tabled) as engine:
        monkeypatch.setattr(importlib.import_module("triton").knobs.runtime, "jit_cache_hook", asked)
        on_cpu.check(requests, run(engine, requests))
        assert engine.counters["grammar_tabled"] >= 6
    assert late == []
