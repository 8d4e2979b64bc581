"""The points of a `bench serve`: which requests each sends, and when.

Knows: rates, concurrencies, and what one run may leave in a prefix cache for the next. Does not know: how a load is
generated (generator.py) or measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from launch.bench.load.datasets import LoadSet, arrival_offsets, load_set, stretched
from launch.bench.serve_options import ServeOptions
from launch.bench.session import Session
from launch.errors import UsageError
from runtime.frontend.client import PromptRequest


@dataclass(frozen=True, slots=True)
class Load:
    """One point: what is sent, and when. ``first_turn``: how many runs came before its first one."""

    label: str
    rate: float
    concurrency: int | None
    dataset: LoadSet
    offsets: Sequence[float]
    first_turn: int

    @property
    def count(self) -> int:
        return len(self.offsets)

    def run(self, number: int) -> Sequence[PromptRequest]:
        """The requests of a run. Where they are drawn, those of every run have other token ids, so that none is
        in a prefix cache because of an earlier run; the first run of all has the dataset's."""
        return self.dataset.with_other_ids(self.first_turn + number) if self.dataset.drawn else self.dataset.requests

    def warm_up(self, count: int) -> Sequence[PromptRequest]:
        """The lengths of the first ``count``, and token ids that no run has."""
        return self.dataset.with_other_ids(-1 - self.first_turn)[:count]


def loads_of(session: Session, options: ServeOptions, *, cached: bool) -> list[Load]:
    """Every point that the command line asks for. ``cached``: prompts of a run stay in a prefix cache that the next one
    finds. Raises UsageError, also for points that cannot be measured one after the other, TokenizerError, BenchError.
    """
    model = session.served_model
    seed, found, sets = session.config.seed, list[Load](), dict[tuple[int, float], LoadSet]()
    for number, (rate, concurrency) in enumerate(options.points):
        count = options.requests_of(concurrency)
        key = (count, rate if options.dataset_name == "burst" else 0.0)
        if key not in sets:
            sets[key] = load_set(options, count, model, session.folder, seed, rate)
        requests = sets[key]
        offsets = requests.offsets
        count = len(requests.requests)
        if offsets is None:
            offsets = arrival_offsets(count, rate, options.burstiness, seed)
        elif options.dataset_name == "trace" and math.isfinite(rate):
            if count > 1 and not offsets[-1] > 0:
                raise UsageError(
                    f"{options.dataset_path}: all requests arrive at one moment, which --request-rate {rate:g} cannot "
                    "stretch: leave it out, or take the times out of the file"
                )
            offsets = stretched(offsets, count / rate)
        found.append(Load(_label(rate, concurrency), rate, concurrency, requests, offsets, number * options.num_iters))
    runs = len(found) * options.num_iters
    if cached:
        refuse_cached(options.dataset_name, found[0].dataset, runs, "measure one point a command")
    return found


def refuse_cached(name: str, dataset: LoadSet, runs: int, otherwise: str) -> None:
    """Raises UsageError where a run would find the prompts of an earlier one in the prefix cache."""
    if runs > 1 and not dataset.drawn:
        raise UsageError(
            f"--dataset-name {name} has prompts of its own, so the prefix cache would have those of the {runs} runs "
            f"from the second on: type --no-prefix-caching, or {otherwise}"
        )


def _label(rate: float, concurrency: int | None) -> str:
    words = [] if concurrency is None else [f"c{concurrency}"]
    if math.isfinite(rate):
        short = f"{rate:g}"
        words.append(f"r{short if float(short) == rate else rate}")  # names files, so no two rates have one
    return "".join(words) or "all"
