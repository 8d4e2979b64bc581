"""Time to the first token of a short suffix behind a long cached prompt, keys split between programs or not, in turns.

    python3 -m tests.bench.suffix_ttft [--model models/shapes/qwen3-8b] [--prefix 1000 4000 36000] [--suffix 20]

One request of each prefix fills the cache; then requests of the same prefix and a new suffix come one at a time.
Knows: EngineClient. Does not know: how a launch is chosen (runtime/execute/launch_spec.py), whose bound it moves.
"""

from __future__ import annotations

import argparse
import statistics
import time

from lockstride import EngineClient, EngineConfig, PromptRequest, SamplingParams, open_engine
from runtime.execute import launch_spec

ONE = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
NEVER = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/shapes/qwen3-8b")
    parser.add_argument("--prefix", type=int, nargs="+", default=[1000, 2000, 4000, 12000, 36000])
    parser.add_argument("--suffix", type=int, default=20)
    parser.add_argument("--requests", type=int, default=12, help="of each prefix and way")
    given = parser.parse_args()
    longest = max(given.prefix) + given.suffix + 8
    config = EngineConfig(
        model=given.model, load_format="dummy", max_model_len=longest, max_num_seqs=8, decode_buckets=(1, 8)
    )
    with open_engine(config) as engine:
        client = EngineClient(engine, text=False)

        def first_token_ms(prompt: tuple[int, ...]) -> float:
            began = time.perf_counter()
            client.submit(PromptRequest(prompt, ONE))
            while client.live:
                client.turn()
            return (time.perf_counter() - began) * 1000

        usual, fresh = launch_spec.LONG_PREFIX, iter(range(1, 1 << 30))
        print("prefix suffix  whole ms  split ms  (medians)")
        for length in given.prefix:
            prefix = tuple(7 + i % 1000 for i in range(length))
            first_token_ms(prefix)
            times: dict[int, list[float]] = {NEVER: [], 0: []}
            for turn in range(2 * given.requests):
                launch_spec.LONG_PREFIX = NEVER if turn % 2 else 0
                suffix = tuple(2000 + (next(fresh) * 37 + i) % 5000 for i in range(given.suffix))
                times[launch_spec.LONG_PREFIX].append(first_token_ms(prefix + suffix))
            whole, split = (statistics.median(times[way][2:]) for way in (NEVER, 0))
            print(f"{length:6} {given.suffix:6} {whole:9.2f} {split:9.2f}", flush=True)
        launch_spec.LONG_PREFIX = usual
        client.close()


if __name__ == "__main__":
    main()
