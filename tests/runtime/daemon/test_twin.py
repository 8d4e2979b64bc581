"""The desk over engines on the twin: what a probe finds, that it changes nothing, and stop strings within windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.daemon.desk import Desk
from runtime.daemon.frames import Frame, Kind
from runtime.engine import Engine
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.request import FinishReason, SamplingParams
from runtime.schedule.speculation import Speculation
from runtime.speculate.methods import proposer_for
from runtime.speculative_config import speculative_config
from tests.plant import Kernels, Op, invariant_kernels, kernels_with
from tests.runtime.daemon.listener import Listener
from tests.runtime.engine.conftest import over_model
from tests.runtime.engine.exact_kernels import exact_kernels
from tests.runtime.engine.rig import rig

STARTS = (
    "REQ 1 START [9,8,7,6,5,4,3,9,9,9,10,11,12,13] 12 3 keep=1 ignore_eos=1 temperature=0 logprobs=2",
    "REQ 2 START [40,41,42] 12 4 keep=1 ignore_eos=1 temperature=1 seed=7 repetition_penalty=1.3 logprobs=0",
    "REQ 3 START [50,51,52,53,54,55,56,57,58] 12 1 keep=1 ignore_eos=1 temperature=1.2 top_k=20 seed=9",
)
SESSIONS = (1, 2, 3)


def told(client: Listener[Engine]) -> dict[int, list[tuple[Kind, int, bytes]]]:
    """Tokens, log-probabilities and ends of each session, in order."""
    kinds = (Kind.TOKEN, Kind.LOGPROBS, Kind.QUANTUM_DONE, Kind.DONE)
    return {request: [(f.kind, f.epoch, f.payload) for f in client.of(request, *kinds)] for request in SESSIONS}


def talk(probes: int, **limits: Any) -> tuple[Listener[Engine], list[Frame]]:
    """Three sessions to the end of a second turn, with ``probes`` before each further quantum; what these said."""
    said: list[Frame] = []
    with rig(max_sessions=9, depth=2, **limits) as engine:
        client = Listener(engine)
        for line in STARTS:
            client.ask(line)
        client.run_until_idle()
        for further in ("CONTINUE 2", "CONTINUE 3", "CONTINUE 99", "EXTEND [60,61,62] 5 2", "CONTINUE 9"):
            for _ in range(probes):
                before = client.ask("LIST_REQUESTS")
                if client.ask("SCHED_PEEK")["requests"]:
                    client.say("SCHED_PROBE")
                    client.run_until_idle()
                    said.append(client.frames[-1])
                assert client.ask("LIST_REQUESTS") == before
                assert len(engine.scheduler.ledger.sessions) == len(SESSIONS), "its forks are gone"
            for request in SESSIONS:
                client.ask(f"REQ {request} {further}")
            client.run_until_idle()
        client.desk.disconnect(client.connection)
        client.run_until_idle()
    return client, said


@pytest.mark.parametrize("model", ["attention", "hybrid"])
def test_who_was_probed_goes_on_as_who_was_not(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later tokens, the bits of their log-probabilities, and ends: KV, recurrent state and sampler are untouched."""
    over_model(model, monkeypatch)
    exact: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64}
    plain, nothing = talk(0, **exact)
    probed, answers = talk(2, **exact)
    assert told(probed) == told(plain)
    assert {len(probed.tokens(request)) for request in SESSIONS} == {17}
    assert (len(nothing), len(answers)) == (0, 8)
    for answer in answers:
        assert answer.answer == {
            "verb": "SCHED_PROBE", "sessions": 3, "tokens": 6, "mismatches": 0, "logprob_difference": 0.0
        }  # fmt: skip


@pytest.mark.parametrize("kernels", [None, invariant_kernels()], ids=["float32", "deterministic"])
def test_a_batch_is_its_rows_alone(kernels: Kernels | None) -> None:
    _, answers = talk(1, kernels=kernels)
    for answer in answers:
        assert (answer.answer["mismatches"], answer.answer["tokens"]) == (0, 6)
        difference = answer.answer["logprob_difference"]
        assert difference < 1e-4 if kernels is None else difference == 0.0


def depends_on_rows(linear: Op, x_TN: torch.Tensor, *given: Any) -> Any:
    """A mutant: a product's last bits know how many rows there are."""
    return linear(x_TN, *given) * (1 + 1e-3 * x_TN.shape[0])


def test_mutant_a_product_that_knows_its_rows_is_found() -> None:
    """Buckets of one and of four rows, and products that differ between them."""
    kernels = kernels_with(exact_kernels(), linear=depends_on_rows)
    _, answers = talk(1, kernels=kernels, dtype=torch.float64, rows=4, buckets=(1, 4))
    assert max(answer.answer["logprob_difference"] or 0.0 for answer in answers) > 0.0


@pytest.mark.parametrize("depth", [0, 2])
def test_a_stop_string_within_a_window_ends_the_turn_there(depth: int) -> None:
    """Steps gain several tokens; those behind the string are in the same output, and nobody is told of them."""
    digits = tuple(range(20, 24))  # so few that answers repeat themselves, and proposals are kept
    keys = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    proposer = proposer_for(speculative_config(keys))
    speculating: dict[str, Any] = {"proposer": proposer, "speculation": Speculation(6), "blocks": 400}
    prompt, options = [50, *digits, *digits], "keep=1 text=1 temperature=0.6 seed=7 logprobs=1"
    exact: dict[str, Any] = {"kernels": exact_kernels(), "dtype": torch.float64}
    with rig(depth=depth, max_sessions=4, **speculating, **exact) as engine:
        defaults = SamplingParams(allowed_token_ids=digits)
        tokenizer = Tokenizer.from_folder("models/demo")
        client = Listener(engine, Desk(engine, tokenizer, defaults))
        client.ask(f"REQ 1 START {prompt} 30 30 {options}")
        client.run_until_idle()
        windows = [frame.tokens for frame in client.of(1, Kind.TOKEN)]
        before = next(at for at, window in enumerate(windows) if len(window) > 2)
        cut = sum(map(len, windows[:before])) + 2
        shown = client.tokens(1)[:cut]
        stop = tokenizer.decode(shown, ())
        assert len(stop) == cut, "digits"
        client.ask(f'REQ 2 START {prompt} 30 30 {options} stop="{stop}"')
        client.run_until_idle()
        assert client.tokens(2) == shown
        assert [frame.done for frame in client.of(2, Kind.DONE)] == [(FinishReason.STOP, cut)]
        assert not client.of(2, Kind.TEXT)
        scored = [entry.token_id for frame in client.of(2, Kind.LOGPROBS) for entry in frame.logprobs]
        assert scored == shown
        client.ask("REQ 2 EXTEND [20, 21] 9 9")
        client.ask(f'REQ 3 START {[*prompt, *shown, 20, 21]} 9 9 {options} stop="{stop}"')
        client.run_until_idle()
        assert client.tokens(2, 2) == client.tokens(3)
        client.desk.disconnect(client.connection)
        client.run_until_idle()
