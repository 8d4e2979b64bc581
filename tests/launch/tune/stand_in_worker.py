"""A compile worker without a GPU: what it does of a candidate is written in the candidate's ``block_o``.

Run as a process by test_compile.py: python -m tests.launch.tune.stand_in_worker [never-ready]
"""

from __future__ import annotations

import json
import os
import sys
import time

READY = "ready\n"  # as compile.py has it, which would import torch
RUNS, REFUSED, DIES, SLEEPS = 1, 2, 3, 4


def main() -> None:
    if sys.argv[1:] == ["never-ready"]:
        sys.exit(1)
    print(READY, end="", flush=True)
    for line in sys.stdin:
        _, (_, values) = json.loads(line)
        what = values["block_o"]
        if what == DIES:
            os.kill(os.getpid(), 9)
        if what == SLEEPS:
            time.sleep(600)
        print(json.dumps("too large" if what == REFUSED else None), flush=True)


if __name__ == "__main__":
    main()
