"""Sampling that nobody warmed up, where the KV cache has taken nearly all memory: served or refused, never fatal.

    python3 -m tests.bench.tight_memory [--model models/shapes/qwen3-8b] [--rows 1024] [--memory-fraction 0.97]

Fills every row with greedy requests, then adds 64 with top-p, a presence penalty and 20 log-probabilities.
Knows: EngineClient. Does not know: whether there is memory (runtime/execute/executor.py finds out at start-up).
"""

from __future__ import annotations

import argparse

from lockstride import EngineClient, EngineConfig, PromptRequest, RequestError, SamplingParams, open_engine

WIDE = SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, logprobs=20, max_tokens=16, ignore_eos=True)
PLAIN = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/shapes/qwen3-8b")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--memory-fraction", type=float, default=0.97)
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model,
        load_format="dummy",
        max_model_len=4096,
        max_num_seqs=given.rows,
        memory_fraction=given.memory_fraction,
        decode_buckets=tuple(sorted({1, given.rows // 4, given.rows // 2, given.rows} - {0})),
        prefill_attention="triton",
    )
    with open_engine(config) as engine:
        client = EngineClient(engine, text=False)
        refused, finished = [], 0
        for sampling in [PLAIN] * given.rows + [WIDE] * 64:
            try:
                client.submit(PromptRequest((5, 7, 9), sampling))
            except RequestError as error:
                refused.append(str(error))
        while client.live:
            finished += len(client.turn().finished)
        print(f"finished {finished}, refused {len(refused)}", *refused[:1])
        shown = ("graph_captures", "device_allocs", "late_captures", "fallbacks")
        print({name: count for name, count in engine.counters.items() if name.startswith(shown)})
        client.close()


if __name__ == "__main__":
    main()
