"""What rows with a grammar cost other rows, and themselves: `python -m tests.bench.grammar_rows MODEL [--rows 64]`.

Prints milliseconds a token of free rows and of rows with a grammar, in turns: none, one and all of ``--rows`` have one,
by a table, by tables near their limits, or by the host (a recursive one, which has no table); rows that start together,
and a mixed load, in which a request follows another; what a mask costs, and the time until a tool's schema of 20
properties has its first mask and its table.
"""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from time import perf_counter

from lockstride import EngineClient, EngineConfig, PromptRequest, SamplingParams, open_engine, structured

TOKENS = 200
TURNS = 4  # the first one warms up
HARD = 16  # tables: as many as there are places
MIXED = 192  # requests
TREE = {  # recursive: it has no table; and longer than an answer
    "type": "array",
    "items": {"$ref": "#/$defs/node"},
    "minItems": 2000,
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"enum": ["main.py", "tests", "docs"]},  # any string would be one without an end
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


def strings(longest: int) -> str:
    """About 19 states a character; 850 characters are 16,151 of 16,384 states."""
    return structured(regex=f'("[^"]{{0,{longest}}}", )*')


def together(rows: int) -> Iterator[tuple[list[int], int]]:
    """(prompt, tokens) of each request."""
    return (([100 + row] * 64, TOKENS) for row in range(rows))


def mixed() -> Iterator[tuple[list[int], int]]:
    draw = random.Random(62)
    return (([100 + i] * draw.randint(64, 1024), draw.randint(TOKENS // 4, TOKENS)) for i in range(MIXED))


class Load:
    def __init__(self, client: EngineClient, rows: int) -> None:
        self._client, self._rows = client, rows

    @property
    def _counters(self) -> Mapping[str, float]:
        return self._client.engine.counters

    def run(self, what: str, requests: Iterator[tuple[list[int], int]], grammars: Sequence[str]) -> None:
        """Keeps ``rows`` requests at work. ``grammars``: of each of them, and of those that follow it; "": none."""
        before, at = {**self._counters}, defaultdict[int, list[float]](list)
        submitted = 0
        while True:
            while self._client.live < self._rows and (request := next(requests, None)) is not None:
                prompt, tokens = request
                own = grammars[submitted % self._rows]
                sampling = SamplingParams(
                    max_tokens=tokens, temperature=1.0, ignore_eos=True, seed=submitted, grammar=own
                )
                self._client.submit(PromptRequest(prompt, sampling, key=submitted, stream=True))
                submitted += 1
            if not self._client.live:
                break
            turn = self._client.turn()
            for delta in turn.deltas:
                at[int(str(delta.key))].append(turn.at)
        of = {"free": list[float](), "grammar": list[float]()}
        for key, times in sorted(at.items()):
            kind = "grammar" if grammars[key % self._rows] else "free"
            of[kind].append(1e3 * (times[-1] - times[0]) / len(times[1:]))
        shown = [f"{name} {median(ms):.3f}, mean {mean(ms):.3f} ms" for name, ms in of.items() if ms]
        gained = {name: now - before[name] for name, now in self._counters.items() if name.startswith("grammar_")}
        mask = 1e6 * gained["grammar_mask_seconds"] / (gained["grammar_masks"] or 1)
        with_one = sum(map(bool, grammars))
        print(
            f"{with_one} of {self._rows} rows have a grammar, {what}: {'; '.join(shown)} a token, "
            f"{mask:.0f} us a mask, {gained['grammar_tabled']} tables",
            flush=True,
        )

    def until_tabled(self, grammars: Sequence[str]) -> float:
        """Seconds."""
        began = perf_counter()
        for grammar in grammars:
            before = self._counters["grammar_tabled"]
            while self._counters["grammar_tabled"] == before and perf_counter() - began < 60:
                sampling = SamplingParams(max_tokens=20, ignore_eos=True, grammar=grammar)
                self._client.submit(PromptRequest([100] * 64, sampling))
                while self._client.live:
                    self._client.turn()
        return perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--load-format", default="safetensors", help="dummy: the folder has config.json, tokenizer.json"
    )
    parser.add_argument("--speculative-config", help="with windows forced tokens are draft tokens")
    asked = parser.parse_args()
    rows: int = asked.rows
    config = EngineConfig(
        model=asked.model,
        load_format=asked.load_format,
        device=asked.device,
        max_num_seqs=rows,
        max_model_len=2048,
        decode_buckets=(rows,),
        prefill_attention="triton",
        speculative_config=asked.speculative_config,
        warm=("greedy", "random"),  # "constrained" filters, too: what these rows need is captured as they come
    )
    with open_engine(config) as engine:
        client = EngineClient(engine)
        load = Load(client, rows)
        small, tree, hard = strings(30), structured(json=TREE), [strings(850 - i) for i in range(HARD)]
        print(f"a table was there within {load.until_tabled([small]):.2f} s, tokenizer included", flush=True)

        for what, grammar in (("table", small), ("recursive, by the host", tree)):
            for _ in range(TURNS):
                for constrained in (0, 1, rows):
                    load.run(what, together(rows), [grammar] * constrained + [""] * (rows - constrained))
            for _ in range(TURNS):
                for constrained in (0, 1, rows):
                    load.run(f"{what}, mixed load", mixed(), [grammar] * constrained + [""] * (rows - constrained))
        took = load.until_tabled(hard)
        print(f"{HARD} tables of up to 16,151 states were there within {took:.2f} s", flush=True)
        for _ in range(TURNS):
            load.run("none", together(rows), [""] * rows)
            load.run(f"{HARD} tables near their limits", together(rows), [hard[row % HARD] for row in range(rows)])
        began, before = perf_counter(), engine.counters["grammar_wait_seconds"]
        client.submit(PromptRequest([5], SamplingParams(max_tokens=1, grammar=structured(json=schema(20)))))
        while client.live:
            client.turn()
        answered, waited = perf_counter(), engine.counters["grammar_wait_seconds"] - before
        print(
            f"20 properties: first token after {1e3 * (answered - began):.1f} ms, of which {1e3 * waited:.1f} ms "
            "passed until all ranks held the grammar",
            flush=True,
        )
        print(f"their table was there within {load.until_tabled([structured(json=schema(20))]):.2f} s")
        client.close()


if __name__ == "__main__":
    main()
