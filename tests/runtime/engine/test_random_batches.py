"""Random batches through the whole front end: the same rows as line by line over the plainest engine there is.

The long form is `make test-all PART=batches`. Here: a handful, and every seed that has found something.
"""

from __future__ import annotations

import pytest
import torch

from tests.runtime.engine.conftest import long
from tests.runtime.engine.random_batches import check_seed, random_batch

FOUND = {
    142: "half a character at the end of a cancelled answer was taken for a stop string",
    188: "a request that paused at the end of its prompt let one row too many into the step",
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*map(long, (1, 9, 23, 54)), *FOUND])
def test_a_batch_gets_the_rows_that_its_lines_get_alone(seed: int) -> None:
    torch.set_num_threads(1)
    check_seed(seed)


@pytest.mark.slow
def test_everything_is_drawn() -> None:
    """Of 200 batches, without playing them."""
    requests, verbs = [], set()
    batches = [random_batch(seed) for seed in range(200)]
    for batch in batches:
        requests += batch.requests
        verbs |= {verb for listed in batch.events.values() for verb, _, _ in listed}
    assert verbs == {"pause", "resume", "cancel"}
    assert {one.form.value for one in requests} == {"simple", "/v1/completions", "/v1/chat/completions"}
    asked = [one.sampling for one in requests]
    for name in ("stop", "stop_token_ids", "top_k", "min_p", "min_tokens", "ignore_eos", "presence_penalty"):
        assert len({getattr(sampling, name) for sampling in asked}) > 1, name
    assert {sampling.logprobs for sampling in asked} >= {None, 0, 20}
    assert {sampling.prompt_logprobs for sampling in asked} >= {None, 0, 20}
    assert {sampling.n for sampling in asked} == {1, 2, 3}
    assert any(one.echo and one.sampling.prompt_logprobs is not None for one in requests)
    assert {one.priority for one in requests} == {-1, 0, 1}
    limits = [batch.limits for batch in batches[:40]]
    assert {each["ranks"] for each in limits} == {1, 2}
    assert {each["depth"] for each in limits} == {0, 1, 2, 3, 4}
    captured = [batch.limits["mixed"] for batch in batches if batch.limits.get("prefill_buckets")]
    assert {0 if mixed is None else mixed.stride for mixed in captured} == {0, 1, 2, 3}
