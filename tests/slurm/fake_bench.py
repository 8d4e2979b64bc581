"""In a job's place of Python: `launch bench` becomes the fake point of tests/launch, everything else is Python itself.

Reads --batch-size and --result-dir; FAKE_JOURNAL and FAKE_POINT_SECONDS come from the job's environment.
"""

import os
import sys
from pathlib import Path

POINT = Path(__file__).parents[1] / "launch" / "sweep" / "fake_point.py"

if __name__ == "__main__":
    arguments = sys.argv[1:]
    results = Path(arguments[arguments.index("--result-dir") + 1])
    batch = arguments[arguments.index("--batch-size") + 1]
    key = results.parent.name.partition("-")[0]
    journal, seconds = os.environ["FAKE_JOURNAL"], os.environ["FAKE_POINT_SECONDS"]
    command = [sys.executable, "-SE", str(POINT), str(results.parent), key, batch, journal, seconds]
    os.execv(sys.executable, command)
