"""The scores that the determinism bench compares are those by which the sampler decides."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.determinism import LISTED, gaps, requests_of, scores_of
from tests.runtime.engine.rig import rig
from tests.runtime.engine.same_bits import answers


def test_the_token_drawn_has_the_greatest_score() -> None:
    requests = [
        replace(one, prompt_token_ids=one.prompt_token_ids[:40], sampling=replace(one.sampling, top_p=1.0, top_k=0))
        for one in requests_of(8, 12, 64)
    ]
    with rig(rows=4) as engine:
        found = answers(engine, requests, top=LISTED)
    seen = 0
    for one in requests:
        for place, token in enumerate(found.tokens[one.request_id]):
            scores = scores_of(one, place, found.bits[one.request_id][place])
            assert len(scores) == LISTED
            if token in scores:
                seen += 1
                assert scores[token] == max(scores.values())
    assert seen > 60
    assert gaps(requests, found, found)["sampled"]["tokens"] == 0
