"""A process that compiles candidates: it runs each once, so that Triton's cache on disk holds it.

    python -m launch.tune.compile_worker      (started by compile.py, never by hand)

Knows: a line that says it is ready; then one line of JSON in, [key of a product, choice], and one out, null or why it
does not run. Does not know: which candidates there are. A kernel that breaks its process takes nothing else along.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

import torch

from launch.tune.compile import READY
from models.kernels.matmul.autotune import reason_of, stored
from models.kernels.matmul.choice_table import Choice, LinearShape, choice_from_json
from models.kernels.traits import traits_of
from models.ops.tuned import TunedProducts

_MOST_OUTPUTS = 4096  # of a weight here: how many there are is no constant of a kernel


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    device = torch.device("cuda", torch.cuda.current_device())
    matmul = TunedProducts(device, traits_of(device))
    print(READY, end="", file=answers, flush=True)
    for line in sys.stdin:
        key, entry = json.loads(line)
        why = run_once(matmul, LinearShape.from_key(key), choice_from_json(entry))
        print(json.dumps(why), file=answers, flush=True)


def run_once(matmul: TunedProducts, shape: LinearShape, choice: Choice) -> str | None:
    """None, or why ``choice`` does not run. What leaves the GPU unusable ends the process."""
    x = torch.zeros(shape.rows, shape.inner, dtype=shape.dtype, device=matmul.device)
    outputs = min(shape.outputs, _MOST_OUTPUTS)
    shape = replace(shape, outputs=outputs)
    try:
        weight = stored(torch.zeros(outputs, shape.inner, dtype=shape.dtype, device=matmul.device), shape)
        matmul.runner(shape)(x, weight, choice)
        torch.cuda.synchronize(matmul.device)
    except Exception as error:  # the compiler's and the launcher's have no common class
        torch.cuda.synchronize(matmul.device)
        return reason_of(error)
    return None


if __name__ == "__main__":
    main()
