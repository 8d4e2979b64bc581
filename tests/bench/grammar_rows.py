"""What rows with a grammar cost other rows, and themselves: `python -m tests.bench.grammar_rows MODEL [--rows 64]`.

Prints milliseconds a token of free rows and of rows with a grammar: none, one and all of ``--rows`` have one, from the
host or from a table; all of them a recursive one, which has no table; what a mask costs, and the time until a tool's
schema of 20 properties has its first mask.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from statistics import median
from time import perf_counter

from lockstride import EngineClient, EngineConfig, PromptRequest, SamplingParams, open_engine, structured

TOKENS = 200
TREE = {  # recursive: it has no table; and longer than an answer
    "type": "array",
    "items": {"$ref": "#/$defs/node"},
    "minItems": 2000,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "size": {"type": "integer"},
                "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["name", "size"],
            "additionalProperties": False,
        }
    },
}


def schema(properties: int) -> dict[str, object]:
    kinds = (
        {"type": "string"},
        {"type": "integer"},
        {"enum": ["a", "b"]},
        {"type": "array", "items": {"type": "number"}},
    )
    named = {f"property_{i}": kinds[i % 4] for i in range(properties)}
    return {"type": "object", "properties": named, "required": [*named], "additionalProperties": False}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--load-format", default="safetensors", help="dummy: the folder has config.json, tokenizer.json"
    )
    asked = parser.parse_args()
    strings, tree = structured(regex='("[^"]{0,30}", )*'), structured(json=TREE)
    config = EngineConfig(
        model=asked.model,
        load_format=asked.load_format,
        device=asked.device,
        max_num_seqs=asked.rows,
        max_model_len=1024,
        decode_buckets=(asked.rows,),
        warm=("greedy", "random"),  # "constrained" filters, too: what these rows need is captured as they come
    )
    with open_engine(config) as engine:
        client, grammars = EngineClient(engine), engine.executor.grammars
        assert grammars is not None
        maker, grammars.maker = grammars.maker, None

        def run(what: str, constrained: int, grammar: str = strings) -> None:
            before, at = dict(engine.counters), defaultdict[int, list[float]](list)
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
            gained = {name: engine.counters[name] - before[name] for name in before if name.startswith("grammar_")}
            mask = 1e6 * gained["grammar_mask_seconds"] / (gained["grammar_masks"] or 1)
            print(
                f"{constrained} of {asked.rows} rows have a grammar, {what}: {', '.join(shown)} a token, "
                f"{mask:.0f} us a mask, {gained['grammar_tabled']} tables",
                flush=True,
            )

        def until_tabled(grammar: str) -> float:
            """Seconds."""
            before, began = engine.counters["grammar_tabled"], perf_counter()
            while engine.counters["grammar_tabled"] == before and perf_counter() - began < 60:
                sampling = SamplingParams(max_tokens=20, ignore_eos=True, grammar=grammar)
                client.submit(PromptRequest([100] * 64, sampling))
                while client.live:
                    client.turn()
            return perf_counter() - began

        for constrained in (0, 1, 0, 1, asked.rows):  # the first two warm up
            run("masks from the host", constrained)
        run("of trees, masks from the host", asked.rows, tree)  # a first one, to compile it
        run("of trees, masks from the host", asked.rows, tree)
        grammars.maker = maker
        print(f"its table was there within {until_tabled(strings):.2f} s, tokenizer included", flush=True)
        for constrained in (0, 1, asked.rows) * 3:
            run("masks from a table", constrained)
        began = perf_counter()
        client.submit(PromptRequest([5], SamplingParams(max_tokens=1, grammar=structured(json=schema(20)))))
        compiled = perf_counter()  # the client waits for its own compiler, then the engine's thread for the rank's
        while client.live:
            client.turn()
        waited = engine.counters["grammar_wait_seconds"]
        print(f"20 properties: {1e3 * (compiled - began):.1f} ms to compile, all waits of steps {1e3 * waited:.1f} ms")
        print(f"their table was there within {until_tabled(structured(json=schema(20))):.2f} s")
        client.close()


if __name__ == "__main__":
    main()
