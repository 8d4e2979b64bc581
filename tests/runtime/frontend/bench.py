"""What the text of answers costs the leader for each token: streamed, watched for stop strings, or neither; and whether
a thread of its own would take that off the engine's.

    python -m tests.runtime.frontend.bench
    python -m tests.runtime.frontend.bench --threads [--rows 256 1024] [--step-ms 10]
"""

from __future__ import annotations

import argparse
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import SamplingParams

ROOT = Path(__file__).parents[3]
STOPS = ("\n\nHuman:", "</answer>")
_HOST_US_A_ROW = 0.5  # of a turn's plan, launch and land


def opened(stop: tuple[str, ...], rows: int, steps: int, *, stream: bool) -> tuple[OutputProcessor, list[StepOutput]]:
    """A processor with so many answers, and what the steps bring them: real text."""
    tokenizer = Tokenizer.from_folder(ROOT / "models" / "demo")
    ids = tokenizer.encode((ROOT / "docs" / "scheduling.md").read_text(), add_special_tokens=False)
    outputs, draw = OutputProcessor(tokenizer), random.Random(1)
    sampling = SamplingParams(max_tokens=1000, seed=1, stop=stop)
    rows_of = [outputs.open(key, (5, 6, 7), sampling, stream=stream).request_id for key in range(rows)]
    begins = [draw.randrange(len(ids) - steps) for _ in range(rows)]
    return outputs, [
        StepOutput(step, rows_of, [ids[begin + step] for begin in begins], [1] * rows) for step in range(steps)
    ]


def microseconds_a_token(stop: tuple[str, ...], *, stream: bool, rows: int = 256, steps: int = 60) -> float:
    """Of the quickest step, so that other processes do not count."""
    outputs, told = opened(stop, rows, steps, stream=stream)
    took = []
    for output in told:
        began = time.thread_time()
        outputs.route(output, 0.0)
        took.append(time.thread_time() - began)
    return 1e6 * min(took) / rows


def _work(seconds: float) -> None:
    """Python that does not let go of the interpreter by itself, for so much processor time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(50))


def _turns(
    rows: int, told: list[StepOutput], hand_over: Callable[[StepOutput], object], step_s: float
) -> Iterator[float]:
    """Turns of an engine at depth 1 whose device takes ``step_s`` a step: how late, in seconds, each turn is through
    after the step that it waited for ended. The device is idle where that is more than a step."""
    ended = time.perf_counter()
    for output in told:
        ended = max(ended + step_s, time.perf_counter())
        time.sleep(max(0.0, ended - time.perf_counter()))  # lets go of the interpreter, as waiting for an event does
        _work(1e-6 * _HOST_US_A_ROW * rows)
        hand_over(output)
        yield time.perf_counter() - ended


def lateness(rows: int, step_ms: float, *, worker: bool, steps: int = 200) -> list[float]:
    """Milliseconds of each turn, with texts in the engine's thread or behind a bounded queue in another one."""
    outputs, told = opened(STOPS, rows, steps, stream=True)
    if not worker:
        return [1e3 * late for late in _turns(rows, told, lambda output: outputs.route(output, 0.0), step_ms / 1e3)]
    waiting: queue.Queue[StepOutput | None] = queue.Queue(maxsize=8)

    def run() -> None:
        while (output := waiting.get()) is not None:
            outputs.route(output, 0.0)

    thread = threading.Thread(target=run)
    thread.start()
    took = [1e3 * late for late in _turns(rows, told, waiting.put, step_ms / 1e3)]
    waiting.put(None)
    thread.join()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 1024])
    parser.add_argument("--step-ms", type=float, nargs="*", default=[3.0, 10.0])
    options = parser.parse_args()
    if not options.threads:
        for stop in ((), STOPS):
            for stream in (False, True):
                print(f"stop {len(stop)}, stream {stream}: {microseconds_a_token(stop, stream=stream):.2f} us a token")
        return
    print("a turn's end after its step's, in ms: rows, ms a step, texts in, p10, p50, p90")
    for rows in options.rows:
        for step_ms in options.step_ms:
            for worker in (False, True, False, True):
                took = sorted(lateness(rows, step_ms, worker=worker))
                p10, p50, p90 = (took[int(len(took) * part)] for part in (0.1, 0.5, 0.9))
                where = "a worker" if worker else "the engine's thread"
                print(f"{rows:5} {step_ms:5.1f}  {where:<20} {p10:7.2f} {p50:7.2f} {p90:7.2f}")


if __name__ == "__main__":
    main()
