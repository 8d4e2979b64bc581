"""What the text of answers costs the leader for each token: streamed, watched for stop strings, or neither.

python -m tests.runtime.frontend.bench
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from runtime.frontend.output_processor import OutputProcessor
from runtime.frontend.tokenizer import Tokenizer
from runtime.schedule.plan import StepOutput
from runtime.schedule.request import SamplingParams

ROOT = Path(__file__).parents[3]
STOPS = ("\n\nHuman:", "</answer>")


def microseconds_a_token(stop: tuple[str, ...], *, stream: bool, rows: int = 256, steps: int = 60) -> float:
    """Of the quickest step, so that other processes do not count."""
    tokenizer = Tokenizer.from_folder(ROOT / "models" / "demo")
    ids = tokenizer.encode((ROOT / "docs" / "scheduling.md").read_text(), add_special_tokens=False)
    outputs, draw = OutputProcessor(tokenizer), random.Random(1)
    sampling = SamplingParams(max_tokens=1000, seed=1, stop=stop)
    rows_of = [outputs.open(key, (5, 6, 7), sampling, stream=stream).request_id for key in range(rows)]
    begins = [draw.randrange(len(ids) - steps) for _ in range(rows)]
    took = []
    for step in range(steps):
        output = StepOutput(step, rows_of, [ids[begin + step] for begin in begins], [1] * rows)
        began = time.thread_time()
        outputs.route(output, 0.0)
        took.append(time.thread_time() - began)
    return 1e6 * min(took) / rows


def main() -> None:
    for stop in ((), STOPS):
        for stream in (False, True):
            print(f"stop {len(stop)}, stream {stream}: {microseconds_a_token(stop, stream=stream):.2f} us a token")


if __name__ == "__main__":
    main()
