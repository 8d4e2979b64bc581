"""One rank of a job on two hosts, as `launch` would run it, and slow enough to be watched where that is asked.

    torchrun ... tests/network/rank.py PACE FOLDER generate --model ...    (or daemon)

With PACE "slow" rank 1 notes in FOLDER when it has come to decoding (NOTE), and takes its time from there on.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

import launch.__main__
from tests.faults.cases import Phase
from tests.faults.rank import PASS_BY, inject


def main(pace: str, folder: str, *arguments: str) -> int:
    torch.set_num_threads(1)
    if pace == "slow" and os.environ["RANK"] == "1":
        inject(PASS_BY, Phase.DECODE, Path(folder))
    try:
        return launch.__main__.main(arguments)
    except Exception:  # a forked rank's launcher would keep it to itself
        traceback.print_exc()
        raise


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
