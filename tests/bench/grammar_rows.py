"""What rows with a grammar cost other rows, and themselves: `python -m tests.bench.grammar_rows MODEL [--rows 64]`.

Prints milliseconds a token of free rows and of rows with a grammar: none, one and all of ``--rows`` have one.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median

from lockstride import EngineClient, EngineConfig, PromptRequest, SamplingParams, open_engine, structured

TOKENS = 200


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    grammar = structured(json={"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 500})
    with open_engine(EngineConfig(model=asked.model, device=asked.device, max_num_seqs=asked.rows)) as engine:
        client = EngineClient(engine)
        for constrained in (0, 0, 1, asked.rows):  # the first of them warms up
            at: dict[int, list[float]] = defaultdict(list)
            for row in range(asked.rows):
                own = grammar if row < constrained else ""
                sampling = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=row, grammar=own)
                client.submit(PromptRequest([100 + row] * 64, sampling, key=row, stream=True))
            while client.live:
                turn = client.turn()
                for delta in turn.deltas:
                    at[int(str(delta.key))].append(turn.at)
            each = [1e3 * (times[-1] - times[0]) / (TOKENS - 1) for _, times in sorted(at.items())]
            free, others = each[constrained:], each[:constrained]
            shown = [f"{name} {median(ms):.3f} ms" for name, ms in (("free", free), ("grammar", others)) if ms]
            print(f"{constrained} of {asked.rows} rows have a grammar: {', '.join(shown)} a token", flush=True)
        client.close()


if __name__ == "__main__":
    main()
